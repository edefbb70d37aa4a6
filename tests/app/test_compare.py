"""The page Compare: two runs, groups of runs paired by seed, two estimators of a run; and what is missing for each."""

import json
import re
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from otb_analysis.commands.cli import main
from otb_analysis.figures.styles import BLUE, ORANGE
from otb_analysis.store import RunWriter, StepTables
from tests.app.test_pages import APP, open_page


def texts(app: AppTest) -> str:
    """Everything the page says, with the escapes of Markdown taken out."""
    return " ".join(one.value for one in (*app.info, *app.warning, *app.caption, *app.markdown)).replace("\\", "")


def noisy_runs(root, estimator: str, seed: int, gain: float, steps: int = 40) -> None:
    config = {"seed": seed, "estimator": {"name": estimator}, "task": "sum", "root": str(seed)}
    writer = RunWriter.create(root, f"{estimator}-{seed}", config)
    random = np.random.default_rng([seed, len(estimator)])
    for step in range(steps):
        columns = {"reward_mean": 0.5 + gain + 0.02 * random.normal(), "grad_norm": random.lognormal()}
        writer.write_step(step, StepTables(steps=columns))
    writer.finish()


@pytest.fixture
def sweep(tmp_path):
    """Two estimators with three seeds each, one of them .2 ahead."""
    for seed in range(3):
        noisy_runs(tmp_path, "rloo", seed, 0.0)
        noisy_runs(tmp_path, "value", seed, 0.2)
    return tmp_path


NAMES = [f"{name}-{seed}" for name in ("rloo", "value") for seed in range(3)]


def test_groups_of_seeds_are_compared_first_and_the_planted_difference_is_found(sweep, monkeypatch):
    app = open_page(sweep, "compare", monkeypatch, run=NAMES)
    said = texts(app)
    assert not app.exception and not app.warning
    assert "Paired by seed: 3 pairs, Student's 95 % intervals over seeds." in said
    assert re.search(r"Training reward: B − A is [+−]0\.(2|19)\d* \(.*\), over 3 seeds\.", said)
    settings = app.table[-1].value.map(lambda text: text.replace("\\", ""))
    assert list(settings) == ["run", r"estimator\.name", "seed", "root"] and sorted(settings["run"]) == NAMES
    assert app.button_group(key="compare").value == "groups" and app.selectbox(key="setting").value == "estimator.name"


def test_the_address_chooses_what_is_compared(sweep, monkeypatch):
    asked = {"run": NAMES, "compare": "Two runs", "a": "rloo-1", "b": "rloo-2"}
    app = open_page(sweep, "compare", monkeypatch, **asked)
    assert [box.value for box in app.selectbox if box.label in "AB"] == ["rloo-1", "rloo-2"]
    assert "not told from 0, over blocks of steps; other seeds may differ" in texts(app)
    back = open_page(sweep, "compare", monkeypatch, **asked | {"a": "rloo-1", "b": "value-1"})
    assert re.search(r"Training reward: B − A is \+0\.(2|19)", texts(back))
    assert not back.exception


def test_runs_that_measured_the_same_prompts_have_their_noise_compared(store_root, monkeypatch):
    runs = ["chain-group_mean-s0", "chain-otb-s0"]  # which of them is older is a matter of milliseconds
    app = open_page(store_root, "compare", monkeypatch, run=runs, a=runs[0], b=runs[1])
    table = app.table[0].value
    assert table.iloc[0, 0].replace("\\", "") == "each run's own rollouts: updates as trained"
    assert table.iloc[1, 0].replace("\\", "") == "the rollouts of all these runs: otb ÷ group_mean"
    assert "times A's efficiency" in texts(app)


def test_one_run_alone_compares_its_estimators(store_root, monkeypatch):
    app = open_page(store_root, "compare", monkeypatch, run="chain-otb-s0")
    assert app.button_group(key="compare").value == "estimators" and app.selectbox(key="a").value == "otb · proxy"
    assert app.selectbox(key="b").value == "otb · exact"  # what trained, and what Estimators recommends
    assert "times A's" in texts(app) and len(app.get("plotly_chart")) == 1
    alone = open_page(store_root, "compare", monkeypatch, run="chain-otb-s0", compare="Two runs")
    assert "Only one run is chosen." in texts(alone) and not alone.exception
    apart = open_page(store_root, "compare", monkeypatch, run="chain-otb-s0", compare="Groups of runs")
    assert "These runs form no groups" in texts(apart)


def test_a_and_b_stand_as_otb_compare_has_them_and_a_run_has_the_colour_of_its_estimator(tmp_path, monkeypatch, capsys):
    for name in ("otb", "group_mean"):  # the later one stands first
        noisy_runs(tmp_path, name, 0, 0.0)
    app = open_page(tmp_path, "compare", monkeypatch)
    assert [box.value for box in app.selectbox if box.label in "AB"] == ["group_mean-0", "otb-0"]
    assert (
        not main(["compare", "--root", str(tmp_path)]) and "A is group_mean-0, B is otb-0." in capsys.readouterr().out
    )
    traces = json.loads(app.get("plotly_chart")[0].proto.spec)["data"]
    colors = {trace.get("name"): trace["line"]["color"] for trace in traces if "line" in trace}
    assert (colors["A: group_mean-0"], colors["B: otb-0"]) == (BLUE, ORANGE)


def test_a_run_without_measurements_is_told_how_to_get_them(sweep, monkeypatch):
    app = open_page(sweep, "compare", monkeypatch, run="rloo-0")
    assert "Nothing is known of its baselines" in texts(app) and not app.exception


def test_the_same_on_both_sides_is_said(sweep, monkeypatch):
    app = open_page(sweep, "compare", monkeypatch, run=NAMES, compare="Two runs", a="rloo-1", b="rloo-1")
    assert "A and B are the same" in texts(app) and not app.exception


def test_a_broken_part_gets_a_sentence_that_names_the_file(store_root, monkeypatch, tmp_path):
    for name in ("chain-otb-s0", "chain-group_mean-s0"):
        shutil.copytree(store_root / name, tmp_path / name)
    part = tmp_path / "chain-otb-s0" / "run.sqlite"
    (part.parent / "gradients.parquet").unlink()  # else the rows are read from it
    with closing(sqlite3.connect(part)) as db:
        db.execute("DELETE FROM gradients")
        db.commit()
    app = open_page(tmp_path, "compare", monkeypatch)
    assert not app.exception
    assert part.name in texts(app)


REAL = APP.parents[1] / "docs" / "examples" / "smollm2" / "runs"


@pytest.mark.skipif(not REAL.is_dir(), reason="installed without its repository")
@pytest.mark.parametrize("page", ["triage", "run", "rollouts", "tokens", "estimators", "proxy", "compare"])
def test_every_page_opens_the_committed_run_of_a_real_model(page, monkeypatch):
    assert sum(path.stat().st_size for path in REAL.rglob("*") if path.is_file()) < 2e6
    asked = {"part": "Proxy"} if page == "proxy" else {}
    app = open_page(REAL, "estimators" if asked else page, monkeypatch, **asked)
    assert page != "compare" or "times A's variance at equal progress" in texts(app)
    assert not app.exception and not app.warning
    assert page != "proxy" or app.metric[0].label == "OTB's gain lost by the proxy"
    assert len(app.get("plotly_chart")) >= 1
