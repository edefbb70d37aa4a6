"""`otb diagnose` and `otb attribution`: what they print, and what they answer where something was not measured."""

import json

import pytest

from otb_analysis.answers import opened
from otb_analysis.commands.cli import main
from otb_analysis.config import AttributionSchedule, MeasureConfig, Schedule
from tests.answers.test_holders import unattributed


@pytest.fixture(scope="module")
def attributed(trained):
    measure = MeasureConfig(exact=Schedule(every=1, prompts=0), attribution=AttributionSchedule(every=2))
    return trained("attributed_too", measure=measure)


def said(capsys, *words):
    assert main(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_diagnosis_has_every_detector_and_the_lines_of_the_run(attributed, capsys):
    text = said(capsys, "diagnose", attributed.name, "--root", str(attributed.parent))
    assert "Gradient-norm surge" in text and "grad_norm was recorded at 3 steps, 25 are needed" in text
    assert "Sampler is not the policy" in text and "Change points: none" in text
    lines = opened([attributed])[attributed.name].lines
    assert "".join("".join(lines).split()) in "".join(text.split())


def test_a_run_without_measured_steps_is_told_what_measures_them_and_what_it_costs(trained, capsys):
    bare = trained("bare", measure=MeasureConfig(exact=Schedule(every=0)))
    text = said(capsys, "diagnose", "bare", "--root", str(bare.parent))
    assert "--measure.gradients.every 10" in text and "a quarter of the run's time" in text


def test_attribution_prints_three_tables_and_that_the_shares_add_up(attributed, capsys):
    text = said(capsys, "attribution", attributed.name, "--root", str(attributed.parent), "--top", "3")
    assert "The 3 prompts with the largest |share| of 4" in text and "The 3 tokens" in text
    assert "hold half of the gradient" in text and "The shares add up to ‖ḡ‖²" in text


def test_a_step_without_attribution_has_its_tokens_by_size_in_the_terminal_and_as_json(attributed, capsys):
    words = ["attribution", attributed.name, "--root", str(attributed.parent), "--step", "1", "--top", "3"]
    text, found = said(capsys, *words), opened([attributed])[attributed.name].sizes(1)
    assert found.says in text and "The 3 tokens with the largest size of" in text
    assert "Step 1 has no attribution; the last step before it that has is 0." in text
    record = json.loads(said(capsys, *words, "--json"))
    assert record["attribution"]["nearest"] == 0 and record["sizes"]["says"] == found.says
    assert len(record["sizes"]["tokens"]) == 3


@pytest.mark.parametrize(
    ("words", "answer"),
    [([], "No step of this run says which tokens"), (["--top", "0"], "--top is 0; pass at least 1.")],
)
def test_what_cannot_be_shown_is_one_sentence(words, answer, tmp_path, capsys):
    run = unattributed(tmp_path).path
    assert main(["attribution", run.name, "--root", str(run.parent), *words]) == 2
    assert answer in capsys.readouterr().err


def test_attribution_without_a_run_asks_for_one(capsys):
    assert main(["attribution"]) == 2
    assert "needs a run" in capsys.readouterr().err
