"""Every door says the same of a run: terminal, JSON, CSV, LaTeX, Markdown, HTML, the audit and the pages."""

import html
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers import RunAnswers, compare
from otb_analysis.answers.runs import triaged
from otb_analysis.commands.cli import main
from otb_analysis.config import EstimatorConfig, MeasureConfig, SampleConfig, TrainConfig, plain_config
from otb_analysis.figures.comparison import planner_table
from otb_analysis.figures.curves import curves_table
from otb_analysis.figures.pairs import over_training
from otb_analysis.statistics import REFERENCE, gradient_statistics, pooled_statistics
from otb_analysis.store import RunStore, RunWriter, StepTables, gram_rows
from otb_analysis.types import Gram
from tests.app.test_pages import open_page

LABELS = (
    ("rloo", "none"), ("otb", "proxy"), ("none", "none"), ("energy_regression", "proxy"), ("sequence_optimal", "proxy"),
    ("grpo", "none"), ("trloo", "none"), ("group_mean", "none"), ("energy_regression", "exact"),
)  # fmt: skip
LENGTH = {"otb": 0.85, "sequence_optimal": 0.8, "grpo": 1.7, "group_mean": 0.75}
NOISE = {"otb": 0.62, "none": 0.9, "energy_regression": 0.75, "sequence_optimal": 0.75, "grpo": 1.9, "group_mean": 0.75}
SIZE = 4
SOURCE = {"made_by": "otb audit", "path": "rollouts.jsonl", "format": "plain", "about": "plain records"}


def planted_gram(random, n_prompts, first, signal=1.5):
    """Group gradients with a shared direction and mostly shared noise, of known lengths."""
    noise, own = random.normal(size=(n_prompts, 30)), random.normal(size=(len(LABELS), n_prompts, 30))
    truth = signal * np.eye(30)[0]
    made = []
    for row, (name, source) in enumerate(LABELS):
        spread = NOISE.get(name, 1.0) * (noise + 0.15 * own[row] * (name in NOISE) * (name != "group_mean"))
        made.append(LENGTH.get(name, 1.0) * truth + (spread if source != "exact" else 1.02 * spread))
    g = np.stack(made)
    prompt = tuple(f"p{first + k}" for k in range(n_prompts))
    return Gram(np.einsum("mpd,nqd->mnpq", g, g), LABELS, n_prompts * SIZE, prompt, np.arange(n_prompts))


def sampling_rows():
    """The sampling check of 128 rollouts drawn at temperature 1 and audited as .5: a step of a real audit."""
    frame = pd.read_csv(Path(__file__).with_name("sampling.csv"))
    return {name: np.ma.array(frame[name], mask=frame[name].isna()) for name in frame}


def write(root, name, config, *, prompts=16, steps=6, alarm=False, signal=1.5):
    writer = RunWriter.create(root, name, config)
    random = np.random.default_rng(3)
    for step in range(steps):
        gram = planted_gram(random, prompts, step * prompts, signal)
        rows = [found.as_row() for found in gradient_statistics(gram.inner, gram.labels, gram.n_rollouts)]
        n = prompts * SIZE
        rewards = random.integers(0, 2, n).astype(float)
        rollouts = {
            "group": np.repeat(np.arange(prompts), SIZE), "rollout": np.arange(n), "reward": rewards,
            "prompt_id": np.repeat(gram.prompt, SIZE), "prompt": ["1+1="] * n, "completion": ["2"] * n,
            "length": [3] * n, "finish_reason": ["stop"] * n,
        }  # fmt: skip
        scalars = {
            "reward_mean": rewards.mean(), "grad_norm": 1.0, "clipped": False, "n_prompts": prompts, "n_rollouts": n,
            "n_tokens": 3 * n, "n_zero_variance_groups": 0, "n_truncated": 0, "n_measured_prompts": prompts,
            "heldout_reward": 0.5, "heldout_reward_low": 0.4, "heldout_reward_high": 0.6, "n_updates": 1,
        }  # fmt: skip
        gradients = {column: [row[column] for row in rows] for column in rows[0]}
        sampling = sampling_rows() if alarm else None
        writer.write_step(
            step,
            StepTables(
                rollouts=rollouts, steps=scalars, gradients=gradients, grams=gram_rows(step, gram), sampling=sampling
            ),
        )
    writer.finish()
    return root / name


@pytest.fixture(scope="session")
def three_runs(tmp_path_factory):
    """The runs by name: as the demo's, with an alarm, of few prompts, and one that a real model made."""
    root = tmp_path_factory.mktemp("doors")
    trained = TrainConfig(
        model="demo", estimator=EstimatorConfig(name="otb"), sample=SampleConfig(prompts=16, group_size=SIZE),
        measure=MeasureConfig(),
    )  # fmt: skip
    config = plain_config(trained)
    recorded = {name: config[name] for name in ("estimator", "model", "task")} | {
        "source": SOURCE,
        "plain_sampling": True,
    }
    return {
        "demo": write(root, "demo", config),
        "alarm": write(root, "alarm", recorded | {"rollouts": "rollouts.jsonl"}, alarm=True),
        "few": write(root, "few", config, prompts=5, steps=2),
        "real": Path(shutil.copytree(REAL, root / "real")),
    }


REAL = Path(__file__).parents[2] / "docs/examples/smollm2/runs/letter-counting"
RUNS = ("demo", "alarm", "few", "real")


def otb(capsys, *words):
    """What a command prints."""
    capsys.readouterr()
    assert main([str(word) for word in words]) in (0, None)
    return capsys.readouterr().out


def plain(text):
    """Text without markup, line breaks and what a table of LaTeX or Markdown escapes."""
    text = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.S)
    text = html.unescape(re.sub(r"<[^>]+>", " ", text)).replace("\\", "")
    return " ".join(re.sub(r"[*>%•]", " ", text).split())


def has(text, line):
    return plain(line) in plain(text)


@pytest.fixture
def answers(three_runs):
    return {name: RunAnswers(RunStore(path)) for name, path in three_runs.items()}


@pytest.fixture
def page(monkeypatch):
    """Open a page of the dashboard on one run."""

    def opened(path, name, **query):
        app = open_page(path.parent, name, monkeypatch, run=path.name, **query)
        assert not app.exception
        return app

    return opened


@pytest.fixture(scope="module")
def asked():
    """What the doors said of each run that was asked about."""
    return {}


@pytest.fixture
def doors(asked, capsys, tmp_path):
    """Return what every command prints or writes about a run, by the name of the door; a run is asked about once."""
    return lambda path: asked.get(path) or asked.setdefault(path, opened_doors(capsys, path, tmp_path))


def opened_doors(capsys, path, tmp_path):
    root = path.parent
    texts = {
        "compare": otb(capsys, "compare", path.name, "--root", root),
        "latex": otb(capsys, "compare", path.name, "--root", root, "--format", "latex"),
        "markdown": otb(capsys, "compare", path.name, "--root", root, "--format", "markdown"),
        "diagnose": otb(capsys, "diagnose", path.name, "--root", root),
        "audit": otb(capsys, "audit", "--run", path.name, "--root", root),
    }
    for ending in ("html", "md"):
        otb(capsys, "report", path.name, "--root", root, "--out", tmp_path / f"r.{ending}")
        texts[f"report.{ending}"] = (tmp_path / f"r.{ending}").read_text()
    texts["audit.html"] = (path / "audit.html").read_text()
    return texts


@pytest.mark.parametrize("name", RUNS)
def test_every_command_says_what_the_run_says_in_the_same_sentences(name, three_runs, answers, doors):
    lines = answers[name].lines
    for door, text in doors(three_runs[name]).items():
        assert [line for line in lines if not has(text, line)] == [], door


@pytest.mark.parametrize("name", RUNS)
def test_json_has_the_same_recommendation_and_reservations(name, three_runs, answers, capsys):
    path, measured = three_runs[name], answers[name].measured
    (design,) = json.loads(otb(capsys, "compare", name, "--root", path.parent, "--json"))["estimators"]
    (diagnosis,) = json.loads(otb(capsys, "diagnose", name, "--root", path.parent, "--json"))
    otb(capsys, "audit", "--run", name, "--root", path.parent)
    audit = json.loads((path / "audit.json").read_text())
    assert design["conclusion"] == list(measured.lines)
    assert design["alarm"] == diagnosis["alarm"] == answers[name].alarm
    assert diagnosis["conclusion"] == list(answers[name].lines) == audit["verdict"][: len(answers[name].lines)]
    best = None if measured.decision.best is None else list(measured.decision.best.label)
    assert (design["recommended"] and design["recommended"]["label"]) == best
    rows = {(row["estimator"], row["energy_source"]): row for row in design["rows"]}
    assert {(row["estimator"], row["energy_source"]): row for row in audit["estimators"]} == rows


@pytest.mark.parametrize("name", RUNS)
def test_numbers_of_csv_python_and_the_page_are_those_of_json(name, three_runs, capsys, page):
    path = three_runs[name]
    (design,) = json.loads(otb(capsys, "compare", name, "--root", path.parent, "--json"))["estimators"]
    frame = pd.DataFrame(design["rows"]).set_index(["estimator", "energy_source"])
    csv = pd.read_csv(
        io.StringIO(otb(capsys, "compare", name, "--root", path.parent, "--format", "csv")),
        keep_default_na=False,
        na_values=[""],
    )
    python = compare(path).to_dataframe()
    numbers = [column for column in frame if column not in ("decides", "told", "c_known")]
    for other in (csv, python):
        other = other.set_index(["estimator", "energy_source"]).loc[frame.index]
        told = other[numbers].astype(float).replace(np.inf, np.nan)  # JSON has no infinity
        pd.testing.assert_frame_equal(told, frame[numbers].astype(float), rtol=1e-9, check_names=False)


@pytest.mark.parametrize("name", ["demo", "few"])
def test_the_table_on_the_page_has_the_cells_of_the_terminal(name, three_runs, capsys, page):
    path, rows = three_runs[name], {}
    for line in otb(capsys, "compare", name, "--root", path.parent, "--top", 0, "--format", "markdown").splitlines():
        cells = [cell.strip().replace("\\", "") for cell in line.strip("| ").split("|")]
        if line.startswith("| estimator"):
            titles = cells
        elif line.startswith("|") and not set(line) <= set("|-: "):
            rows[tuple(cells[:2])] = dict(zip(titles, cells, strict=True))
    app = page(path, "estimators")
    app.session_state["numbers"] = True  # drawn once it is asked for
    shown = next(frame.value for frame in app.run().dataframe if "estimator" in frame.value)
    both = [title for title in titles[2:] if title in shown]
    assert len(both) >= (1 if name == "few" else 2), titles
    for _, row in shown.iterrows():
        assert {of: str(row[of]) for of in both} == {of: rows[row["estimator"], row["energy"]][of] for of in both}


def missing(app, lines):
    """What a page does not say of some sentences; a command stands below its sentence, to be copied."""
    kinds = ("markdown", "warning", "caption", "code")
    said = " ".join(one.value for kind in kinds for one in app.get(kind)).lower()
    parts = [part.lower() for line in lines for part in re.split(r"(?<=: )(?=otb )|; ", line)]
    return [part for part in parts if not has(said, part.strip())]


@pytest.mark.parametrize("name", RUNS)
def test_pages_say_the_same_sentences(name, three_runs, answers, page):
    path, lines = three_runs[name], answers[name].lines
    for view in ("estimators", "run"):
        app = page(path, view)
        if view == "run":
            app.toggle(key="advise").set_value(True).run()
        assert missing(app, lines) == [], view


def test_the_page_says_of_chosen_runs_together_what_they_say_pooled(three_runs, monkeypatch):
    path, other = three_runs["demo"], three_runs["few"]
    app = open_page(path.parent, "estimators", monkeypatch, run=["demo", "few"])
    assert not app.exception and missing(app, compare(path, other).lines) == []


@pytest.mark.parametrize("names", [("demo", "few"), ("demo", "alarm")])
def test_a_pair_is_told_alike_by_every_door(names, three_runs, capsys, monkeypatch, tmp_path):
    root = three_runs["demo"].parent
    pair = json.loads(otb(capsys, "compare", *names, "--root", root, "--json"))["pair"]
    asked = {"run": list(names), "compare": "Two runs", "a": pair["a"], "b": pair["b"]}
    app = open_page(root, "compare", monkeypatch, **asked)
    assert not app.exception
    texts = {"page": " ".join(one.value for kind in ("markdown", "caption") for one in app.get(kind))}
    texts["terminal"] = otb(capsys, "compare", *names, "--root", root)
    texts["markdown"] = otb(capsys, "compare", *names, "--root", root, "--format", "markdown")
    otb(capsys, "report", *names, "--root", root, "--out", tmp_path / "pair.html")
    texts["report"] = (tmp_path / "pair.html").read_text()
    for line in (pair["verdict"], *pair["notes"]):
        assert [door for door, text in texts.items() if not has(text, line)] == [], line


def test_a_report_with_figures_says_of_each_run_what_the_run_says_and_draws_it(three_runs, answers, capsys, tmp_path):
    root, out = three_runs["demo"].parent, tmp_path / "r.md"
    otb(capsys, "report", *RUNS, "--root", root, "--out", out, "--figures", tmp_path / "figures")
    text = out.read_text()
    assert [line for name in RUNS for line in answers[name].lines if not has(text, line)] == []
    assert {".pdf", ".svg"} <= {path.suffix for path in (tmp_path / "figures").iterdir()}


def test_an_alarm_stands_in_the_first_lines_of_every_door_and_nothing_is_proved(three_runs, answers, doors):
    alarm = answers["alarm"].alarm
    assert "were not drawn by the stated sampler" in alarm
    assert not answers["alarm"].proved.projection and answers["alarm"].measured.decision.best is None
    for door, text in doors(three_runs["alarm"]).items():
        body = plain(text)
        assert body.index(plain(alarm)) < 800, door
        assert "1 proved" not in body, door
        if door in ("latex", "markdown"):
            assert "rloo" not in body, door
    frame = compare(three_runs["alarm"]).to_dataframe()
    assert not frame["c_known"].any() and (frame["told"] == "").all()


def test_the_list_of_runs_and_every_page_of_one_say_that_another_sampler_drew_its_tokens(
    three_runs, answers, page, capsys
):
    path, alarm = three_runs["alarm"], answers["alarm"].alarm
    states = {one.run: (one.state, one.sentence) for one in triaged(path.parent)}
    assert states["alarm"][0] == "alarm" and states["alarm"][1].startswith("another sampler drew the tokens")
    assert "another sampler" not in states["demo"][1] and answers["alarm"].triage.state == "alarm"
    for view, query in (("run", {}), ("rollouts", {}), ("tokens", {}), ("estimators", {"part": "Proxy"})):
        assert any(has(one.value, alarm) for one in page(path, view, **query).warning), view


def test_a_demo_keeps_what_trained_and_names_the_best_against_rloo(answers):
    measured = answers["demo"].measured
    assert measured.decision.against == ("otb", "proxy") and measured.against_rloo.best.label == (
        "energy_regression",
        "proxy",
    )
    assert measured.against_rloo.best.by == "variance" and {one.by for one in measured.decision.comparisons} == {
        "efficiency"
    }
    assert measured.lines[0].startswith("Keep otb") and measured.decision.best is None


def test_too_few_prompts_get_no_recommendation_but_the_command(answers):
    measured = answers["few"].measured
    assert measured.decision.cause == "few prompts" and measured.decision.best is None
    assert "otb train --config" in " ".join(measured.lines)


POSITIVE = ("sf", "efficiency", "variance", "rollout_equivalents", "noise_scale", "projection", "cost")
"""How the names of positive measures begin, in every table of numbers."""
PAIR = re.compile(r"(?<![\w.])[\d.,]+ ?(?:\[|\()(-?[\d.,]+)(?:, |–| to )([\d.,∞]+)(?:\]|\))")


def wide(low, high):
    """Whether ends are a factor of 100 apart, or the lower one is 0."""
    return low <= 0 or high >= 100 * low


def over_training_rows(run):
    """The ratios of every estimator to rloo by block of steps, named as those of the other doors."""
    labels = [label for gram in run.grams.values() for label in gram.labels]
    rows = curves_table(over_training(run.grams, REFERENCE, list(dict.fromkeys(labels)), run.proved))
    return rows.rename(columns={"low": "sf_ratio_low", "high": "sf_ratio_high"})


def wide_columns(frame):
    """The intervals of a table's positive measures that are too wide; an open noise scale is no interval."""
    found = []
    for name in (of.removesuffix("_low") for of in frame if of.endswith("_low") and of.startswith(POSITIVE)):
        ends = frame[[f"{name}_low", f"{name}_high"]].astype(float).dropna()
        ends = ends[np.isfinite(ends[f"{name}_high"])] if name == "noise_scale" else ends
        found += [(name, low, high) for low, high in ends.itertuples(index=False) if wide(low, high)]
    return found


@pytest.fixture(scope="session")
def faint(tmp_path_factory):
    """A run whose ∇J is told from noise and whose efficiencies by themselves are not."""
    config = plain_config(TrainConfig(model="demo", estimator=EstimatorConfig(name="otb")))
    return write(tmp_path_factory.mktemp("faint"), "faint", config, signal=0.55)


@pytest.mark.slow
def test_no_door_shows_an_interval_whose_ends_are_a_hundred_apart(three_runs, faint, capsys, doors, page):
    assert any(
        (one := row.intervals["efficiency"]) is not None and one.low is not None and wide(one.low, one.high)
        for row in pooled_statistics(RunAnswers(RunStore(faint)).measured.grams)
    )  # there is something to hide
    for name, path in {**three_runs, "faint": faint}.items():
        root = path.parent
        (design,) = json.loads(otb(capsys, "compare", path, "--json", "--root", root))["estimators"]
        csv = io.StringIO(otb(capsys, "compare", path, "--format", "csv", "--root", root))
        otb(capsys, "audit", "--run", path, "--root", root)
        audit = json.loads((path / "audit.json").read_text())
        run, app = RunAnswers(RunStore(path)), page(path, "estimators")
        tables = {
            "json": pd.DataFrame(design["rows"]), "csv": pd.read_csv(csv), "python": compare(path).to_dataframe(),
            "audit": pd.DataFrame(audit["estimators"]), "planner": planner_table(run.planner),
            "over training": over_training_rows(run),
        }  # fmt: skip
        assert {door: found for door, of in tables.items() if (found := wide_columns(of))} == {}, name
        texts = {**doors(path), "page": " ".join(str(of.value) for of in app.dataframe)}
        texts["page"] += " ".join(element.value for kind in ("markdown", "caption") for element in app.get(kind))
        for door, text in texts.items():
            pairs = [
                [float(end.replace(",", "").replace("∞", "inf")) for end in of] for of in PAIR.findall(plain(text))
            ]
            assert [pair for pair in pairs if wide(*pair)] == [], (name, door)
