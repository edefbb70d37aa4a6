"""What the documents say can be done: links lead somewhere, commands exist, quoted output and snippets are real."""

import re
import shlex
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from otb_analysis.bench.config import EngineConfig, EstimatorsConfig, LogitsConfig, TrainBenchConfig
from otb_analysis.bench.quote import TABLES, quoted
from otb_analysis.cli import COMMANDS, StudyConfig, from_toml
from otb_analysis.config import DemoConfig, TrainConfig
from otb_analysis.reading import AttributionConfig, CompareConfig, DiagnoseConfig, ReportConfig
from otb_analysis.serve import DashboardConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGS = {
    "train": TrainConfig(),
    "demo": DemoConfig(),
    "compare": CompareConfig(),
    "diagnose": DiagnoseConfig(),
    "report": ReportConfig(),
    "attribution": AttributionConfig(),
    "dashboard": DashboardConfig(),
    "study": StudyConfig("00_training"),
    "bench estimators": EstimatorsConfig(),
    "bench logits": LogitsConfig(),
    "bench engine": EngineConfig(),
    "bench train": TrainBenchConfig(),
}
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "studies").rglob("*.md")])


def blocks(language=""):
    """The README's fenced blocks of one language, without their fences."""
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S) if kind == language]


def commands(program):
    """Every call of a program that the README names, without comments: its words after the program's name."""
    written = [*blocks(), *re.findall(r"`([^`\n]+)`", README)]
    lines = [line.split("#")[0].strip() for text in written for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"{program} ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files(document):
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    local = [target.split("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if target and not (document.parent / target).exists()] == []


def test_quoted_output_is_that_of_the_demo_line_by_line():
    printed = (ROOT / "docs" / "results" / "demo.txt").read_text(encoding="utf-8").splitlines()
    (quoted,) = blocks("text")
    lines = [line for line in quoted.splitlines() if line.strip() != "…"]
    assert len(lines) > 20
    assert [line for line in lines if line not in printed] == []


def test_quoted_output_shows_where_lines_are_left_out():
    text = (ROOT / "docs" / "results" / "demo.txt").read_text(encoding="utf-8")
    printed = [line for line in text.splitlines() if line]
    quoted = [line for line in blocks("text")[0].splitlines() if line]
    following, left_out = printed.index(quoted[0]), False
    for line in quoted:
        if line.strip() == "…":
            left_out = True
            continue
        at = printed.index(line, following)
        assert (at > following) == left_out, line
        following, left_out = at + 1, False


def test_numbers_of_the_benchmark_are_those_of_its_table():
    rows = (ROOT / "docs" / "results" / "estimators.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line.strip("| ").split(" | ") for line in rows if line.startswith("| otb |")]
    seconds, loop, through = row[1:]
    said = f"`otb` takes {float(loop):.2f} of the torch loop's time and {float(through):.0f} × the pass, "
    assert f"{said}{float(seconds):.2f} s" in " ".join(README.split())


def test_quoted_rows_are_those_of_the_result_files():
    assert quoted(README, ROOT / "docs" / "results") == README
    for name in TABLES:
        page = (ROOT / "docs" / "results" / name).read_text(encoding="utf-8").splitlines()
        rows = [line for line in README.splitlines() if line.startswith("| ") and line in page]
        assert len(rows) > 3, name


def test_measured_rows_of_the_readme_are_all_in_a_result_file():
    pages = [(ROOT / "docs" / "results" / name).read_text(encoding="utf-8").splitlines() for name in TABLES]
    (section,) = re.findall(r"^## What it costs\n(.*?)^## ", README, re.M | re.S)
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert [row for row in rows if not any(row in page for page in pages)] == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {word for call in commands("make") for word in call if "=" not in word}
    assert {"demo", "test"} <= named <= targets


def test_commands_and_their_options_exist():
    calls = commands("otb")
    assert {"train", "compare", "dashboard", "bench"} <= {call[0] for call in calls} <= set(COMMANDS)
    for name, *words in calls:
        if name == "bench":
            name = f"bench {words[0]}"
        for word in words:
            if word.startswith("--") and word not in ("--config", "--help"):
                assert has_field(CONFIGS[name], word.removeprefix("--").replace("-", "_")), (name, word)


def has_field(config, dotted):
    """Whether a configuration has a field of this dotted name."""
    name, _, rest = dotted.partition(".")
    if name not in {field.name for field in fields(config)}:
        return False
    inner = getattr(config, name)
    return has_field(inner, rest) if rest else not is_dataclass(inner)


def test_streamlit_is_pointed_at_the_app():
    assert (ROOT / "app" / "streamlit_app.py").is_file()
    assert "streamlit run app" in README


def test_toml_example_is_a_configuration(tmp_path):
    (text,) = blocks("toml")
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    config = from_toml(TrainConfig, tmp_path / "run.toml")
    assert (config.run, config.measure.exact.every) == ("mine", 10)


def test_each_python_example_runs_as_it_is_pasted(otb_run, checkpoint, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(otb_run, tmp_path / "runs" / "demo-otb-s0")
    shutil.copytree(checkpoint, run / "model", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = [{} for _ in blocks("python")]
    for code, own in zip(blocks("python"), names, strict=True):
        exec(code, own)
        assert capsys.readouterr().out, code
    tokens, statistics, norms, estimators = names
    assert tokens["tokens"]["grad_norm_sq"].notna().all() and len(tokens["tokens"])
    assert statistics["found"].variance > 0
    assert ((norms["norms"].norm_sq > 0) == norms["mask"].numpy()).all()
    assert estimators["advantage"].shape == (4, 3)
