"""Runs made of somebody else's rollouts: every page opens them, and says what is missing."""

import json

import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.audit import audit_run
from otb_analysis.config import AuditConfig, ImportConfig, MeasureConfig, Schedule, ScoreConfig
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.report.audit import write_audit
from otb_analysis.store import RunStore
from tests.app.test_pages import open_page

PAGES = ("triage", "run", "rollouts", "tokens", "estimators", "compare", "studies")


@pytest.fixture(scope="module")
def recorded_root(tmp_path_factory, checkpoint):
    """A root with rollouts that were imported as texts and with log-probabilities, scored, measured and audited."""
    folder = tmp_path_factory.mktemp("recorded")
    rows = [
        {"prompt": f"{g}+{g}=", "completion": f"{g}{k}#{'1' * k}", "reward": float(k % 2)}
        for g in range(8)
        for k in range(4)
    ]
    tokens = [row | {"ids": [4, 5, 6], "logprobs": [-1.0, -0.5, -0.25]} for row in rows]
    for name, written in (("texts", rows), ("tokens", tokens)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in written))
        import_rollouts(folder / f"{name}.jsonl", ImportConfig(root=folder / "runs", prompts=4))
    common = {"rollouts": folder / "texts.jsonl", "model": str(checkpoint), "root": folder / "runs", "prompts": 4}
    score(ScoreConfig(**common, run="texts-scored"))
    score(ScoreConfig(**common, run="texts-measured", measure=MeasureConfig(exact=Schedule(every=1))))
    audited = RunAnswers(RunStore(score(AuditConfig(**common, run="texts-audited"))))
    write_audit(audited, audit_run(audited), audited.store.path, "otb audit")
    return folder / "runs"


def said(app):
    shown = [*app.info, *app.warning, *app.caption, *app.markdown]
    return " ".join(element.value for element in shown).replace("\\", "")


@pytest.mark.parametrize(
    "run", ["texts-imported", "tokens-imported", "texts-scored", "texts-measured", "texts-audited"]
)
@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_a_run_of_recorded_rollouts(page, run, recorded_root, monkeypatch):
    app = open_page(recorded_root, page, monkeypatch, run=run)
    assert not app.exception
    assert not app.error
    assert app.title[0].value == page.capitalize()


MISSING = {
    "estimators": (
        "Nothing is known of its baselines: no step measured every estimator's gradient.",
        "otb audit --model DIR --rollouts FILE",
    ),
    "run": ("No step of this run says which tokens held its gradient.", "`otb audit` those of recorded rollouts"),
    "tokens": ("no step whose tokens and rollouts are both stored", "`otb score --model DIR --rollouts FILE` stores"),
}


@pytest.mark.parametrize("page", MISSING)
def test_a_run_without_a_model_says_what_is_missing_and_which_command_adds_it(page, recorded_root, monkeypatch):
    shown = said(open_page(recorded_root, page, monkeypatch, run="texts-imported"))
    assert all(words in shown for words in MISSING[page])


@pytest.mark.parametrize("page", MISSING)
def test_an_audited_run_lacks_nothing_and_draws(page, recorded_root, monkeypatch):
    app = open_page(recorded_root, page, monkeypatch, run="texts-audited")
    assert MISSING[page][0] not in said(app)
    assert app.get("plotly_chart")


def test_a_scored_run_shows_its_tokens_but_no_gradients(recorded_root, monkeypatch):
    assert MISSING["estimators"][0] in said(open_page(recorded_root, "estimators", monkeypatch, run="texts-scored"))
    assert MISSING["tokens"][0] not in said(open_page(recorded_root, "tokens", monkeypatch, run="texts-scored"))
