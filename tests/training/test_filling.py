"""Filters of sampling in the trainer: the batch is full of what passed, and one that never fills stops the run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.config import EstimatorConfig, SampleConfig
from otb_analysis.errors import InputError
from otb_analysis.phases import NOTES
from otb_analysis.store import RunStore
from otb_analysis.training.check import check
from otb_analysis.training.loop import broken_condition, draw_batch

SAMPLE = SampleConfig(prompts=4, group_size=3, max_new_tokens=6)


def drawn(made, step=0, **changes):
    torch.manual_seed(0)
    return draw_batch(made(sample=replace(SAMPLE, **changes)), step)


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(made):
    rollouts, seen = drawn(made, filter="dynamic", filter_rounds=60)
    total = rollouts.reward.sum(axis=1).reshape(4, 3)
    assert rollouts.group.tolist() == np.repeat(np.arange(4), 3).tolist() and len(rollouts.prompts) == 4
    assert (total.min(axis=1) < total.max(axis=1)).all()
    assert seen["filter_rounds"] > 1 and seen["filter_kept_share"] == 12 / (12 * seen["filter_rounds"])
    for n, g in enumerate(rollouts.group):  # each rollout answers the prompt that its group has
        text = rollouts.prompts[g].text
        start = rollouts.input_ids[n, : rollouts.prompt_length[n]]
        assert made().tokenizer.decode(start) == text


def test_rejection_draws_again_for_the_same_prompts(made):
    options = {"budget": "6", "low": "0", "high": "1"}
    rollouts, seen = drawn(made, filter="prs", filter_options=options, filter_rounds=60)
    plain, nothing = drawn(made)
    assert rollouts.group.tolist() == plain.group.tolist() and rollouts.prompts == plain.prompts
    assert nothing == {} and seen["filter_kept_share"] < 1
    right = rollouts.reward.sum(axis=1) == 1
    assert (rollouts.mask.sum(axis=1)[right] < 6).all()  # q = 0 at 6 tokens: such right answers never stay


def test_filter_that_never_fills_its_batch_stops_and_says_what_it_saw(made):
    options = {"budget": "1", "correct": "0"}  # nothing is ever good enough
    with pytest.raises(InputError, match="filled 0 of 12 rollouts in 3 rounds; it drew 36"):
        drawn(made, step=5, filter="prs", filter_options=options, filter_rounds=3)


def test_run_with_a_filter_records_what_it_saw_and_warns(trained):
    sample = replace(SAMPLE, filter="dynamic", filter_rounds=60)
    store = RunStore(trained("dynamic", sample=sample, estimator=EstimatorConfig(name="rloo")))
    steps = store.steps_df()
    assert (steps["n_zero_variance_groups"] == 0).all() and (steps["filter_rounds"] >= 1).all()
    assert (steps["filter_kept_share"] <= 1).all() and steps["filter_reward_mean"].between(0, 1).all()
    assert any("sample.filter 'dynamic' breaks a condition of rloo" in note for note in NOTES)


def test_warning_is_for_estimators_that_the_filter_breaks(tiny_config):
    def warning(filter, name):
        return broken_condition(
            replace(tiny_config, sample=replace(SAMPLE, filter=filter), estimator=EstimatorConfig(name=name))
        )

    assert "length" not in warning("none", "rloo") == ""
    assert "direction of ∇J" in warning("dynamic", "rloo") and "kept rollouts" in warning("prs", "otb_loo")
    assert warning("dynamic", "otb") == ""  # never unbiased


@pytest.mark.parametrize(
    ("changes", "processes", "words"),
    [
        ({"filter": "dapo"}, 1, "known: none, dynamic, prs"),
        ({"filter": "prs", "filter_options": {"height": "1"}}, 1, "height"),
        ({"filter": "prs"}, 2, "one process"),
        ({"filter_rounds": 0}, 1, "filter_rounds"),
        ({"filter": "dynamic", "group_size": 1}, 1, "keeps no group"),
    ],
)
def test_filters_that_cannot_work_are_refused(tiny_config, changes, processes, words):
    with pytest.raises(InputError, match=words):
        check(
            replace(tiny_config, sample=replace(SAMPLE, **changes), estimator=EstimatorConfig(name="none")), processes
        )
