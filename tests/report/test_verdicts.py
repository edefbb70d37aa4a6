"""`otb diagnose` and `otb attribution`: what they print, and what they answer where something was not measured."""

import pytest

from otb_analysis.commands.cli import main
from otb_analysis.config import AttributionSchedule, MeasureConfig, Schedule


@pytest.fixture(scope="module")
def attributed(trained):
    measure = MeasureConfig(exact=Schedule(every=1, prompts=0), attribution=AttributionSchedule(every=2))
    return trained("attributed_too", measure=measure)


def said(capsys, *words):
    assert main(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_diagnosis_has_every_detector_and_advice(attributed, capsys):
    text = said(capsys, "diagnose", attributed.name, "--root", str(attributed.parent))
    assert "gradient_surge" in text and "grad_norm was recorded at 3 steps, 25 are needed" in text
    assert "sampling_certificate" in text and "Change points: none" in text
    assert "Advice." in text


def test_a_run_without_gram_matrices_gets_no_advice_but_the_command_that_measures(trained, capsys):
    bare = trained("bare", measure=MeasureConfig(exact=Schedule(every=0)))
    assert "otb train --measure.exact.every 10" in said(capsys, "diagnose", "bare", "--root", str(bare.parent))


def test_attribution_prints_three_tables_and_that_the_shares_add_up(attributed, capsys):
    text = said(capsys, "attribution", attributed.name, "--root", str(attributed.parent), "--top", "3")
    assert "The 3 prompts with the largest |share| of 4" in text and "The 3 tokens" in text
    assert "hold half of all |shares|" in text and "The shares add up to ‖ḡ‖²" in text


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--step", "1"], "step 1 of attributed_too has no attribution, steps 0, 2 have"),
        (["--top", "0"], "--top is 0; pass at least 1."),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(attributed, words, answer, capsys):
    assert main(["attribution", attributed.name, "--root", str(attributed.parent), *words]) == 2
    assert answer in capsys.readouterr().err


def test_attribution_without_a_run_asks_for_one(capsys):
    assert main(["attribution"]) == 2
    assert "needs a run" in capsys.readouterr().err
