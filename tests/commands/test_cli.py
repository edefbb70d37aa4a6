"""`otb`: exit codes, one sentence on stderr, TOML under the command line."""

import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

import otb_analysis
from otb_analysis.commands import cli, serve
from otb_analysis.commands.cli import from_toml, main
from otb_analysis.config import TrainConfig
from otb_analysis.errors import Interrupted
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.estimators.spec import TRAINABLE_NEEDS
from otb_analysis.objectives.aggregation import AGGREGATIONS
from otb_analysis.objectives.ratios import RATIOS
from otb_analysis.objectives.shaping import FILTERS, SHAPINGS
from otb_analysis.tasks import TASKS


def sentence(capsys, words, code=2):
    """Run a command that must fail and return its one line on stderr."""
    assert main(words) == code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert "Traceback" not in out + err
    assert len(lines) == 1
    return lines[0]


def toml(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_command_the_usage_is_shown(capsys):
    assert main([]) == 2
    assert main(["--help"]) == main(["-h"]) == main(["help"]) == 0
    shown = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"otb {command} " in shown


def test_unknown_command_is_answered_with_the_nearest(capsys):
    line = sentence(capsys, ["tarin"])
    assert line.startswith("otb: command 'tarin' does not exist; did you mean 'train'? Known: demo, train,")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_explains_its_fields(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"otb {command}" in shown
    assert "--root" in shown or command in ("bench", "study", "model", "licences")


def printed_help(capsys, flag):
    with pytest.raises(SystemExit) as left:
        main(["train", flag])
    assert left.value.code == 0
    return capsys.readouterr().out


def options(text):
    """The options of a help, one a line at most."""
    return re.findall(r"^. (--\w[\w.-]*)", text, re.MULTILINE)


def test_help_of_train_shows_the_options_that_people_use_and_says_how_many_there_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # so that panels stand one below the other
    short, whole = printed_help(capsys, "--help"), printed_help(capsys, "--help-all")
    assert f"These are the {len(options(short))} options that people use" in short
    assert f"--help-all shows all {len(options(whole))}." in short and "--help-all" not in whole
    assert len(options(short)) == 21 and set(options(short)) < set(options(whole))
    assert short == printed_help(capsys, "-h")


def test_an_option_that_the_short_help_leaves_out_is_taken(monkeypatch, otb_run):
    assert trained_with(monkeypatch, ["--optimize.betas", ".8", ".9"], otb_run).optimize.betas == (0.8, 0.9)


def test_whole_help_of_a_command_with_few_options_is_its_help(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help-all"])
    assert "--top" in capsys.readouterr().out


def explained(capsys, option):
    """The words of one option's help in `otb train --help-all`, without what follows the next option."""
    lines = [line.strip("│ ") for line in printed_help(capsys, "--help-all").splitlines()]
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == [f"--{option}"])
    text = itertools.takewhile(lambda line: not line.startswith(("--", "╰")), lines[start + 1 :])
    return set(re.findall(r"[\w-]+", " ".join(text)))


TRAINABLE = [name for name, entry in ESTIMATORS.items() if set(entry.needs) <= TRAINABLE_NEEDS]


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("task", tuple(TASKS)),  # not the ones that other tests add
        ("estimator.name", TRAINABLE),
        ("objective.ratio", RATIOS),
        ("objective.aggregation", AGGREGATIONS),
        ("objective.shaping", SHAPINGS),
        ("sample.filter", FILTERS),
    ],
)
def test_help_of_a_choice_lists_every_name(option, names, capsys):
    assert set(names) - explained(capsys, option) == set()


@pytest.mark.parametrize(
    ("option", "registry"),
    [
        ("estimator.options", ESTIMATORS),
        ("objective.ratio-options", RATIOS),
        ("objective.aggregation-options", AGGREGATIONS),
        ("objective.shaping-options", SHAPINGS),
        ("sample.filter-options", FILTERS),
    ],
)
def test_help_of_options_lists_every_one_and_whose_it_is(option, registry, capsys):
    owned = {name: [field.name for field in fields(entry.options)] for name, entry in registry.items()}
    asked = {word for name, own in owned.items() if own for word in (name.removesuffix("_loo"), *own)}
    assert asked - explained(capsys, option) == set()


@pytest.mark.parametrize(
    ("option", "registry", "like"),
    [
        ("estimator.name", ESTIMATORS, "energy_ema"),
        ("estimator.options", ESTIMATORS, "energy_ema"),
        ("objective.ratio", RATIOS, "ppo"),
        ("objective.ratio-options", RATIOS, "ppo"),
        ("objective.aggregation", AGGREGATIONS, "constant"),
        ("objective.shaping-options", SHAPINGS, "overlong"),
        ("task", TASKS, "counting"),
    ],
)
def test_help_lists_a_new_row_of_a_registry_by_itself(option, registry, like, capsys, monkeypatch):
    monkeypatch.setitem(registry, "newest", registry[like])
    assert "newest" in explained(capsys, option)


def test_help_leaves_out_an_estimator_that_cannot_train(capsys):
    assert "position_optimal" not in explained(capsys, "estimator.name")


def test_help_names_no_object_of_the_source(capsys):
    shown = printed_help(capsys, "--help-all")
    assert [name for name in ("ESTIMATORS", "RATIOS", "AGGREGATIONS", "SHAPINGS", "TASKS") if name in shown] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--estimator.name", "otbb"], "estimator 'otbb' does not exist; did you mean 'otb'?"),
        (["--task", "chain_sun"], "task 'chain_sun' does not exist; did you mean 'chain_sum'?"),
        (
            ["--model", "Some/Model-1.5B"],
            "model Some/Model-1.5B is no directory here, and nothing is downloaded from a hub",
        ),
        (["--model", "no/such/dir"], "model directory no/such/dir does not exist; pass a directory written by"),
        (["--estimator.options", "tale", "zero"], "option 'tale' does not exist for otb; did you mean 'tail'?"),
        (["--sample.prompts", "0"], "sample.prompts is 0; choose a finite number above 0."),
        (["--measure.sketch.prompts=-1"], "measure.sketch.prompts is -1; choose a finite number of at least 0."),
        (["--measure.attribution.every=-1"], "measure.attribution.every is -1; choose a finite number of at least 0."),
        (["--run", "../escape"], "run name '../escape' cannot be a directory name"),
        (["--small-model.width", "30"], "small_model.width is 30"),
        (["--config", "no.toml"], "no.toml cannot be read (No such file or directory); pass an existing TOML file."),
        (["--config"], "--config needs a file"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_code_2(words, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in sentence(capsys, ["train", *words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("estimater = {name = 'otb'}", "run.toml has no field 'estimater'; did you mean 'estimator'?"),
        ("[sample]\nprompt = 3", "run.toml: sample has no field 'prompt'; did you mean 'prompts'?"),
        ("[sample]\nprompts = 'many'", "run.toml: sample: prompts is 'many'; it must be of type int."),
        ("[sample]\nprompts = 2.5", "prompts is 2.5; it must be of type int."),
        ("[sample]\nprompts = true", "prompts is True; it must be of type int."),
        ("sample = 3", "sample is 3; it must be a table."),
        ("[critic]\nenabled = 1", "enabled is 1; it must be of type bool."),
        ("seed = [1]", "seed is [1]; it must be of type int."),
        ("[estimator]\nenergy = 'exakt'", "energy is 'exakt'; did you mean 'exact'? Known: proxy, exact."),
        ("if_exists = 'overwrite'", "if_exists is 'overwrite'; known: error, replace, resume."),
        ("trackers = ['wandbb']", "trackers is 'wandbb'; did you mean 'wandb'?"),
        ("trackers = 'wandb'", "trackers is 'wandb'; it must be a list."),
        ("[optimize]\nbetas = [0.9]", "betas is [0.9]; it must be a list of 2."),
        ("[measure.further]\n'mine:Level' = 'often'", "further: mine:Level is 'often'; it must be of type int."),
        ("seed = ", "is not valid TOML: "),
    ],
)
def test_toml_that_does_not_fit_is_one_sentence_naming_file_and_field(text, expected, capsys, tmp_path):
    assert expected in sentence(capsys, ["train", "--config", str(toml(tmp_path, text))])


def test_file_that_is_no_text_is_one_sentence(capsys, tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    assert "run.toml is not valid TOML" in sentence(capsys, ["train", "--config", str(tmp_path / "run.toml")])


FULL = """
run = "mine"
root = "elsewhere"
seed = 7
[sample]
prompts = 3
temperature = 1
[estimator]
name = "energy_ema"
energy = "exact"
options = {decay = 0.5, tail = "group"}
[measure.exact]
every = 5
"""


def test_toml_fills_nested_fields_and_leaves_the_rest(tmp_path):
    config = from_toml(TrainConfig, toml(tmp_path, FULL))
    default = TrainConfig()
    assert (config.run, config.root, config.seed) == ("mine", Path("elsewhere"), 7)
    assert (config.sample.prompts, config.sample.group_size) == (3, default.sample.group_size)
    assert isinstance(config.sample.temperature, float)
    assert config.estimator.options == {"decay": "0.5", "tail": "group"}
    assert (config.measure.exact.every, config.measure.exact.prompts) == (5, default.measure.exact.prompts)
    assert config.optimize == default.optimize


def test_a_list_of_features_is_an_option_as_any_other(tmp_path):
    text = '[estimator]\nname = "energy_regression"\noptions = {features = ["1", "m*f"], memory = 0.9}'
    config = from_toml(TrainConfig, toml(tmp_path, text))
    assert config.estimator.options == {"features": "1,m*f", "memory": "0.9"}


def test_numbers_in_a_table_of_numbers_stay_numbers(tmp_path):
    text = "[measure.further]\n'mine:Level' = 5\n[optimize]\nbetas = [0, 0.99]"
    config = from_toml(TrainConfig, toml(tmp_path, text))
    assert config.measure.further == {"mine:Level": 5}
    assert (config.optimize.betas, type(config.optimize.betas[0])) == ((0.0, 0.99), float)


def trained_with(monkeypatch, words, run):
    """The configuration that `otb train` would train; `run` is what it is told came of it."""
    seen = []

    def train(config, bar):
        seen.append(config)
        return run

    monkeypatch.setattr("otb_analysis.training.loop.train", train)
    assert main(["train", *words]) == 0
    return seen[0]


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_command_line_overrides_the_file_and_the_file_the_defaults(form, tmp_path, monkeypatch, capsys, otb_run):
    file = str(toml(tmp_path, FULL))
    words = [word.format(file) for word in form]
    config = trained_with(monkeypatch, ["--seed", "9", *words, "--sample.group-size", "2"], otb_run)
    assert (config.seed, config.run, config.sample.prompts, config.sample.group_size) == (9, "mine", 3, 2)
    assert config.measure.exact.every == 5
    out = capsys.readouterr().out
    assert "otb compare otb" in out
    assert "what they learned" in out  # the learning of the run that was just made


def test_every_default_can_be_written_in_toml_and_comes_back(tmp_path):
    # The reader is given each default by its own spelling.
    from otb_analysis.config import plain_config

    def lines(table, prefix=""):
        own = [
            f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}"
            for k, v in table.items()
            if not isinstance(v, dict)
        ]
        yield from [f"[{prefix}]", *own] if prefix else own
        for name, value in table.items():
            if isinstance(value, dict):
                yield from lines(value, f"{prefix}.{name}" if prefix else name)

    file = toml(tmp_path, "\n".join(lines(plain_config(TrainConfig()))))
    assert from_toml(TrainConfig, file) == TrainConfig()


def test_existing_run_is_one_sentence(otb_run, checkpoint, capsys):
    words = ["train", "--root", str(otb_run.parent), "--run", otb_run.name, "--model", str(checkpoint)]
    said = sentence(capsys, words)
    assert f"otb: run '{otb_run.name}' already exists in" in said
    assert said.endswith("; pass another --run, --if-exists resume or --if-exists replace.")


def test_interrupt_ends_with_130_and_a_sentence(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "train", interrupted)
    assert sentence(capsys, ["train"], code=130) == "otb: stopped."


def test_interrupt_says_what_was_kept_where_something_was(monkeypatch, capsys):
    def interrupted(words):
        raise Interrupted("stopped after step 3; 4 steps can be read in runs/x.")

    monkeypatch.setitem(cli.COMMANDS, "train", interrupted)
    assert sentence(capsys, ["train"], code=130) == "otb: stopped after step 3; 4 steps can be read in runs/x."


def test_bug_keeps_its_traceback(monkeypatch):
    def broken(words):
        raise ZeroDivisionError

    monkeypatch.setitem(cli.COMMANDS, "train", broken)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_compare_on_a_root_without_runs_says_how_to_make_some(tmp_path, capsys):
    for root in (tmp_path, tmp_path / "missing"):
        line = sentence(capsys, ["compare", "--root", str(root)])
        assert line == f"otb: {root} holds no complete run; make some with make demo or otb train."


def test_compare_with_a_name_that_is_no_run_is_one_sentence(tmp_path, capsys):
    assert "nothing" in sentence(capsys, ["compare", "nothing", "--root", str(tmp_path)])


def test_run_is_found_by_its_path_as_by_its_name(otb_run, capsys, monkeypatch):
    monkeypatch.chdir(otb_run.parent.parent)
    printed = []
    for words in ([otb_run.name, "--root", otb_run.parent.name], [f"{otb_run.parent.name}/{otb_run.name}"]):
        assert main(["compare", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and otb_run.name in printed[0]
    missing = sentence(capsys, ["compare", f"{otb_run.parent.name}/nothing"])
    assert missing.startswith(f"otb: there is no run 'nothing' in {otb_run.parent.name}; ")


def test_compare_with_top_prints_that_many_estimators(otb_run, capsys):
    assert main(["compare", otb_run.name, "--root", str(otb_run.parent), "--top", "3"]) == 0
    assert "3 of" in capsys.readouterr().out
    words = ["compare", otb_run.name, "--root", str(otb_run.parent), "--top", "-1"]
    assert sentence(capsys, words) == "otb: --top is -1; pass a number of rows, or 0 for all."


def test_compare_prints_every_complete_run_and_leaves_broken_ones_out(otb_run, tmp_path, capsys):
    shutil.copytree(otb_run, tmp_path / "good")
    half = shutil.copytree(otb_run, tmp_path / "half")
    info = json.loads((half / "run.json").read_text()) | {"status": "running"}
    (half / "run.json").write_text(json.dumps({k: v for k, v in info.items() if k != "checksum"}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert main(["compare", "--root", str(tmp_path)]) == 0
    shown, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"otb: broken is left out: {tmp_path / 'broken' / 'run.json'} cannot be read (")
    assert "good" in shown
    assert not [line for line in shown.splitlines() if line.split()[:1] == ["unfinished"]]
    for name in ("rloo", "otb_loo", "realized energy W_t"):
        assert name in shown


def test_compare_leaves_out_a_run_with_a_broken_part_and_says_why(otb_run, tmp_path, capsys):
    for name in ("good", "torn"):
        shutil.copytree(otb_run, tmp_path / name)
    part = tmp_path / "torn" / "tokens.parquet"
    part.write_bytes(b"not a table")
    assert main(["compare", "--root", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "good" in out
    assert "torn" not in out
    assert err.startswith("otb: torn is left out: ")
    assert part.name in err
    assert part.name in sentence(capsys, ["compare", "good", "torn", "--root", str(tmp_path)])


def test_compare_names_a_run_that_began_where_none_is_complete(otb_run, tmp_path, capsys):
    file = shutil.copytree(otb_run, tmp_path / "half") / "run.json"
    info = json.loads(file.read_text()) | {"status": "failed"}
    file.write_text(json.dumps({k: v for k, v in info.items() if k != "checksum"}))
    assert f"half is failed; compare it by its name: otb compare half --root {tmp_path}." in sentence(
        capsys, ["compare", "--root", str(tmp_path)]
    )


def test_studies_are_listed_in_a_clone_and_need_one(capsys, monkeypatch, tmp_path):
    assert sentence(capsys, ["study"]).startswith("otb: otb study needs the name of a study; those there are: 00_")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(otb_analysis, "__file__", str(tmp_path / "site-packages" / "otb_analysis" / "__init__.py"))
    for words in (["study"], ["study", "0", "--quick"], ["bench", "alarms"]):
        assert f"otb {words[0]} works in a clone" in sentence(capsys, words)


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"otb-analysis {version('otb-analysis')}\n"


@pytest.mark.parametrize("command", ["demo", "train", "compare", "dashboard", "bench", "study"])
def test_help_does_not_load_what_only_the_work_needs(command):
    code = "import sys; from otb_analysis.commands.cli import main\n"
    code += f"try: main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'duckdb'} & set(sys.modules)), file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "[]"


def test_dashboard_is_served_on_loopback_and_says_how_it_ended(tmp_path, monkeypatch, capsys):
    seen = []

    def supervised(command, environment):
        seen.append(command)
        return 1

    app = tmp_path / "app"
    app.mkdir()
    (app / "streamlit_app.py").write_text("")
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(otb_analysis, "__file__", str(tmp_path / "package" / "__init__.py"))
    monkeypatch.setattr(serve, "supervised", supervised)
    assert main(["dashboard", "--port", "8777", "--root", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "http://127.0.0.1:8777" in out
    assert "the dashboard ended with code 1" in err
    (command,) = seen
    assert command[0] == sys.executable
    assert command[command.index("--server.address") + 1] == "127.0.0.1"
    assert command[command.index("--server.port") + 1] == "8777"
    assert command[-2:] == ["--root", str(tmp_path.resolve())]


def test_interrupted_dashboard_is_stopped_and_says_so(tmp_path, monkeypatch, capsys):
    def interrupted(*asked):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "supervised", interrupted)
    assert main(["dashboard", "--root", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "otb: the dashboard is stopped.\n"


def test_dashboard_says_that_a_port_is_taken_and_that_a_folder_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "supervised", lambda command, environment: 0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["dashboard", "--port", str(port), "--root", str(tmp_path / "none")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Dashboard: {port} is taken; http://127.0.0.1:")
    assert err == f"otb: {tmp_path / 'none'} is no folder of runs; the pages are empty until runs are written there.\n"
    assert main(["dashboard", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("what", ["estimators", "logits", "engine", "sampling-check", "train"])
def test_help_of_a_benchmark_explains_its_fields(what, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", what, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"otb bench {what}" in shown and "--out" in shown and "--repeats" in shown


def test_benchmark_prints_its_table_and_writes_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.logits.in_fresh_process", lambda call, *args: None)
    monkeypatch.setenv("COLUMNS", "160")
    sizes = ["--vocabularies", "500", "900", "--rows", "12", "--width", "8", "--threads", "1", "--repeats", "1"]
    assert main(["bench", "logits", *sizes, "--out", str(tmp_path)]) == 0
    assert "logit_stats, from hidden states" in capsys.readouterr().out
    page = (tmp_path / "logits.md").read_text()
    assert page.startswith("# `otb bench logits --vocabularies 500 900 --rows 12 ")
    assert str(tmp_path) not in page + (tmp_path / "logits.json").read_text()


def test_benchmark_with_a_size_of_zero_is_one_sentence(capsys):
    assert "--rows is 0; pass at least 1." in sentence(capsys, ["bench", "estimators", "--rows", "0"])


def test_licences_are_those_that_the_packages_state(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["licences"]) == 0
    lines = capsys.readouterr().out.splitlines()
    stated = dict(line.split(": ", 1) for line in lines)
    # An expression, a classifier, the field of older packages.
    assert stated[f"numpy {version('numpy')}"].startswith("BSD")
    assert stated[f"tyro {version('tyro')}"] == "MIT License"
    assert "Apache" in stated[f"transformers {version('transformers')}"]
    assert lines == sorted(lines, key=str.lower) and all(stated.values())
