"""Held-out prompts: what is stored of them, and that training does not notice."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.pairs import learning_notes
from otb_analysis.config import EvaluateConfig, MeasureConfig, OptimizeConfig, Schedule
from otb_analysis.rollouts.sampling import sample
from otb_analysis.store import RunStore
from otb_analysis.training import loop as evaluation
from otb_analysis.training.loop import evaluate, heldout_columns

QUIET = {"measure": MeasureConfig(exact=Schedule(0, 0))}


def test_columns_of_a_hand_worked_evaluation():
    # 16 prompts of 2 answers: half pay (1.5, 0.25), half (0, 0.75); successes at ≥ 0.75: one of two everywhere
    found = heldout_columns(np.array([[1.5, 0.25], [0.0, 0.75]] * 8), threshold=0.75)
    assert found["heldout_reward"] == pytest.approx((1.75 + 0.75) / 4)
    assert (found["heldout_samples"], found["heldout_pass_k"]) == (2, 2)
    assert (found["heldout_success"], found["heldout_pass_at_1"]) == (0.5, 0.5)
    assert (found["heldout_pass_at_2"], found["heldout_pass_at_k"]) == (1, 1)
    assert found["heldout_reward_low"] < found["heldout_reward"] < found["heldout_reward_high"]
    assert found["heldout_pass_at_k_high"] == 1 and found["heldout_pass_at_k_low"] == pytest.approx(0.025 ** (1 / 16))


def test_reward_just_below_the_threshold_is_no_success():
    assert heldout_columns(np.full((2, 1), np.nextafter(0.5, 0)), 0.5)["heldout_success"] == 0
    assert heldout_columns(np.full((2, 1), 0.5), 0.5)["heldout_success"] == 1


def test_equal_rewards_have_no_interval_but_success_has_the_exact_one():
    found = heldout_columns(np.zeros((16, 2)), 0.5)
    assert found["heldout_reward_low"] is None and found["heldout_reward_high"] is None
    assert found["heldout_success_high"] == pytest.approx(1 - 0.025 ** (1 / 16))


@pytest.mark.parametrize("samples", [1, 4])
def test_evaluation_leaves_the_random_state_alone_and_repeats_itself(trainer, samples):
    trainer.config = replace(trainer.config, evaluate=EvaluateConfig(every=1, prompts=16, samples=samples))
    before = torch.get_rng_state()
    first = evaluate(trainer, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert evaluate(trainer, 1) == first
    assert first["heldout_samples"] == samples


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_answers_are_sampled_in_the_arithmetic_of_the_run(made, monkeypatch, precision):
    trainer, seen = made(optimize=OptimizeConfig(precision=precision), evaluate=EvaluateConfig(prompts=2)), []

    def watched(*given):
        seen.append(torch.is_autocast_enabled("cpu"))
        return sample(*given)

    monkeypatch.setattr(evaluation, "sample", watched)
    evaluate(trainer, 0)
    assert seen == [precision == "bfloat16"]


def test_several_answers_are_stored_and_change_nothing_in_training(trained):
    one = trained("one", evaluate=EvaluateConfig(every=2, prompts=16), **QUIET)
    four = trained("four", evaluate=EvaluateConfig(every=2, prompts=16, samples=4), **QUIET)
    for table in ("tokens", "rollouts"):
        frames = [RunStore(path).sql(f"select * from {table} order by all") for path in (one, four)]
        pd.testing.assert_frame_equal(*frames, check_exact=True)
    steps = RunStore(four).steps_df()
    names = [c for c in steps if c.startswith("heldout_")]
    assert {"heldout_pass_at_1", "heldout_pass_at_2", "heldout_pass_at_4"} < set(names)
    assert steps[names].notna().all(axis=1).tolist() == [True, False, True]
    assert steps[names].notna().any(axis=1).tolist() == [True, False, True]
    at = steps[[f"heldout_pass_at_{k}" for k in (1, 2, 4)]].dropna().to_numpy()
    assert (np.diff(at, axis=1) >= 0).all()
    assert steps["heldout_pass_at_k"].dropna().tolist() == at[:, 2].tolist()


def test_comparison_says_the_last_evaluation_with_its_intervals(trained):
    run = RunAnswers(RunStore(trained("four", evaluate=EvaluateConfig(every=2, prompts=16, samples=4), **QUIET)))
    last, (line,) = run.steps.iloc[-1], learning_notes(run)
    assert line.startswith(f"held-out prompts at step 2: reward {last['heldout_reward']:.3f} [")
    assert f"avg@4 {last['heldout_success']:.3f} [{last['heldout_success_low']:.3f}, " in line
    assert f"pass@4 {last['heldout_pass_at_k']:.3f} [" in line


def test_comparison_says_nothing_without_an_interval(otb_run):
    assert learning_notes(RunAnswers(RunStore(otb_run))) == []
