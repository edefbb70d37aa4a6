"""Filters that fill a batch: what stays, what is drawn anew, what could not be filled, and what a run says of it."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.config import SampleConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators.proved import unproved_because
from otb_analysis.objectives.profiled import CALL, ProfiledOptions, quality
from otb_analysis.objectives.shaping import ShapingInputs, shape_rewards
from otb_analysis.rollouts.filters import dynamic, live_groups, profiled
from otb_analysis.rollouts.sampling import Rollouts, Turn
from otb_analysis.store import RunStore
from otb_analysis.tasks import Prompt
from otb_analysis.training.check import check
from otb_analysis.training.filtering import broken_condition
from otb_analysis.training.loop import train


def made(prompts, group, rewards, lengths):
    """Rollouts with given rewards and policy tokens after a prompt of one token."""
    group, lengths = np.asarray(group), np.asarray(lengths)
    width, n = 1 + int(lengths.max(initial=1)), len(group)
    present = np.arange(width) < 1 + lengths[:, None]
    mask = present & (np.arange(width) >= 1)
    reward = np.zeros((n, width))
    reward[np.arange(n), lengths] = rewards
    turn = np.where(mask, 0, -1)
    return Rollouts(
        input_ids=np.ones((n, width), np.int64), mask=mask, attention_mask=present, turn=turn,
        behavior_logprob=np.zeros((n, width)), group=group, prompts=tuple(prompts),
        prompt_length=np.ones(n, np.int64), turns=tuple((Turn("a", True),) for _ in range(n)),
        finish_reason=("stop",) * n, reward=reward,
    )  # fmt: skip


def named(*names):
    return [Prompt(name, name, "") for name in names]


def by_name(rewards):
    """Draws whose rewards are given by the prompt's name, each of one token."""

    def draw(prompts, group):
        paid = [rewards[prompts[g].id][int((group[:n] == g).sum())] for n, g in enumerate(group)]
        return made(prompts, group, paid, np.ones(len(group), int))

    return draw


def test_dynamic_sampling_takes_other_prompts_in_place_of_dead_groups():
    rewards = {"dead": [0.0, 0.0], "live": [1.0, 0.0], "right": [1.0, 1.0], "new": [0.0, 1.0]}
    config = SampleConfig(prompts=2, group_size=2, filter="dynamic")
    asked = []

    def more(turn):
        asked.append(turn)
        return named("right", "new")

    found = dynamic(config, named("dead", "live"), more, by_name(rewards))
    assert [prompt.id for prompt in found.rollouts.prompts] == ["live", "new"] and asked == [1]
    assert found.rollouts.group.tolist() == [0, 0, 1, 1] and found.drawn == 8 and found.failed == 0
    assert found.rollouts.reward.sum(axis=1).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_batch_that_no_round_fills_is_full_all_the_same_and_says_what_was_seen():
    rewards = {"dead": [0.0, 0.0], "live": [1.0, 0.0], "right": [1.0, 1.0]}
    config = SampleConfig(prompts=3, group_size=2, filter="dynamic", filter_rounds=2)
    found = dynamic(
        config, named("dead", "live", "right"), lambda turn: named("dead", "dead", "dead"), by_name(rewards)
    )
    assert [prompt.id for prompt in found.rollouts.prompts] == ["live", "dead", "right"]
    assert (found.drawn, found.failed) == (12, 2)
    assert found.seen == "6 groups: 1 with unequal rewards, 1 all right, 4 all wrong"


def test_groups_are_live_where_rewards_differ_by_more_than_rounding():
    reward = np.array([0.1 + 0.2, 0.3, 1.0, 0.0])
    assert live_groups(reward, np.array([0, 0, 1, 1])).tolist() == [False, False, True, True]


def test_lazy_right_answers_are_drawn_anew_and_wrong_ones_stay():
    config = SampleConfig(prompts=1, group_size=4, filter="profiled", filter_floor=0.0, filter_most_tokens=4)
    rounds = iter([([1.0, 1.0, 0.0, 0.0], [4, 4, 4, 1]), ([1.0, 0.0], [4, 4]), ([0.0], [2])])

    def draw(prompts, group):
        rewards, lengths = next(rounds)
        assert len(group) == len(rewards)
        return made(prompts, group, rewards, lengths)

    found = profiled(config, named("a"), np.random.default_rng(0), draw)  # quality 0 at 4 tokens: always rejected
    assert sorted(found.rollouts.reward.sum(axis=1).tolist()) == [0.0] * 4
    assert (found.drawn, found.failed, found.seen) == (7, 0, "7 rollouts: 3 right, 3 of them rejected")


def test_what_no_round_replaces_fills_its_group():
    config = SampleConfig(
        prompts=1, group_size=2, filter="profiled", filter_floor=0.0, filter_most_tokens=1, filter_rounds=2
    )
    found = profiled(
        config, named("a"), np.random.default_rng(0), lambda prompts, group: made(prompts, group, 1.0, [1] * len(group))
    )
    assert len(found.rollouts.group) == 2 and (found.drawn, found.failed) == (4, 1)


def test_right_answers_stay_with_the_probability_of_their_quality():
    config = SampleConfig(prompts=1, group_size=20_000, filter="profiled", filter_floor=0.2, filter_most_tokens=4)
    found = profiled(
        replace(config, filter_rounds=1), named("a"), np.random.default_rng(1),
        lambda prompts, group: made(prompts, group, 1.0, np.full(len(group), 2)),
    )  # fmt: skip
    rejected = int(found.seen.split()[-4].replace(",", ""))
    assert rejected / 20_000 == pytest.approx(1 - (0.2 + 0.8 * 0.5), abs=0.02)


def test_quality_and_the_reward_made_of_it():
    assert quality([0, 16, 32, 64], [0, 0, 1, 9], 64).tolist() == [1.0, 0.75, 1 - (32 + CALL) / 64, 0.0]
    mask = np.array([[True, True], [True, False], [True, False]])
    reward = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    shaped = shape_rewards("profiled", ShapingInputs(reward, mask, np.zeros(3, int)), ProfiledOptions(0.5, 4))
    assert shaped.reward.sum(axis=1).tolist() == [1 + 0.5 * 0.5, 1 + 0.5 * 0.75, 0.0] and shaped.keep.all()
    with pytest.raises(InputError, match="bonus"):
        ProfiledOptions(bonus=-1)


@pytest.mark.parametrize("kind", ["dynamic", "profiled"])
def test_a_run_with_a_filter_trains_counts_and_proves_nothing(tiny_config, kind, tmp_path):
    sampled = replace(tiny_config.sample, filter=kind, filter_rounds=2)
    path = train(replace(tiny_config, root=tmp_path, sample=sampled))
    store = RunStore(path)
    steps = store.steps_df()
    batch = sampled.prompts * sampled.group_size
    assert (steps["n_rollouts"] == batch).all() and (steps["n_drawn"] >= batch).all()
    assert (steps["n_drawn"] <= 2 * batch).all() and (steps["n_unfilled"] <= sampled.prompts).all()
    assert unproved_because(store.info["config"]) == f"its sampler filters by the outcome ({kind})"


def test_a_run_without_one_has_no_such_columns_and_one_of_before_is_believed(tiny_config, tmp_path):
    store = RunStore(train(replace(tiny_config, root=tmp_path)))
    assert store.steps_df()["n_drawn"].isna().all()
    config = dict(store.info["config"])
    assert unproved_because(config) == ""
    assert unproved_because(config | {"sample": {k: v for k, v in config["sample"].items() if "filter" not in k}}) == ""


def test_an_estimator_whose_condition_breaks_is_named():
    assert broken_condition("rloo", "dynamic").startswith("rloo is unbiased (up to a factor) for rollouts drawn")
    assert broken_condition("grpo", "dynamic") == ""


@pytest.mark.parametrize(
    "change, words",
    [
        ({"filter": "dynamic", "group_size": 1}, "drops every group of one"),
        ({"filter": "profiled", "filter_floor": 1.5}, "a probability from 0 to 1"),
        ({"filter": "dynamic", "filter_rounds": 0}, "sample.filter_rounds is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(tiny_config, change, words):
    config = replace(tiny_config, run="new", sample=replace(tiny_config.sample, **change))
    with pytest.raises(InputError, match=words):
        check(replace(config, estimator=replace(config.estimator, name="none")))
    if "group_size" not in change:
        return
    with pytest.raises(InputError, match="fills the batch of one process"):
        check(replace(config, run="new", sample=replace(config.sample, group_size=4)), processes=2)
