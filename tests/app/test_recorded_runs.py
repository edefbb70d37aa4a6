"""Runs made of somebody else's rollouts: every page opens them, with tokens and without."""

import json
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from otb_analysis.audit.importing import import_rollouts
from otb_analysis.audit.score import score
from otb_analysis.config import ImportConfig, MeasureConfig, Schedule, ScoreConfig

APP = Path(__file__).parents[2] / "app" / "streamlit_app.py"
PAGES = ("triage", "run", "rollouts", "tokens", "variance", "fidelity")


@pytest.fixture(scope="module")
def recorded_root(tmp_path_factory, checkpoint):
    """A root with rollouts that were scored under a model, imported as texts, and imported with log-probabilities."""
    folder = tmp_path_factory.mktemp("recorded")
    rows = [
        {"prompt": f"{g}+{g}=", "completion": f"{g}{k}#{'1' * k}", "reward": float(k % 2)}
        for g in range(8)
        for k in range(3)
    ]
    tokens = [row | {"ids": [4, 5, 6], "logprobs": [-1.0, -0.5, -0.25]} for row in rows]
    for name, written in (("texts", rows), ("tokens", tokens)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in written))
        import_rollouts(folder / f"{name}.jsonl", ImportConfig(root=folder / "runs", prompts=4))
    measure = MeasureConfig(exact=Schedule(every=1))
    score(ScoreConfig(rollouts=folder / "texts.jsonl", model=str(checkpoint), root=folder / "runs", measure=measure))
    return folder / "runs"


@pytest.mark.parametrize("run", ["texts-imported", "tokens-imported", "texts-scored"])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_a_run_of_recorded_rollouts(page, run, recorded_root, monkeypatch):
    monkeypatch.setenv("OTB_RUNS", str(recorded_root))
    app = AppTest.from_file(APP, default_timeout=60)
    app.query_params["run"] = run
    app.run()
    if page != "triage":
        app.switch_page(f"views/{page}.py").run()
    assert not app.exception
    assert not app.error
    assert app.title[0].value == page.capitalize()
