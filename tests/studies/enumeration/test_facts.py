import numpy as np
import pytest

from studies.lib.enumeration.facts import (
    COMPARED,
    energy_reward_corr,
    first_token_error,
    group_row,
    population_row,
    prompt_parts,
    ratio_row,
    regret_error,
    score_overlap,
    self_inclusion_error,
    sideways,
    two_prompt_variance,
)
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.trees import GroupMoments, Tree

PROMPTS = {"horizon": 3, "shared": 5, "end_token": True}


def hand_made(score, reward):
    """Two completions of two tokens with probabilities .25 and .75."""
    score = np.asarray(score, float)
    paid = np.zeros((2, 2))
    paid[:, -1] = reward
    logprob = np.array([[np.log(0.25), 0.0], [np.log(0.75), 0.0]])
    index = np.zeros((2, 2), np.int64)
    return Tree(logprob, np.ones((2, 2), bool), index, paid, score, np.ones((2, 2)), logprob, index)


def test_overlap_is_the_largest_product_of_scores_at_two_positions_over_their_power():
    # E s_1·s_2 = .25·(3·1) + .75·(−1·1) = 0 for the first; with s_2 = (1, 3) it is .25·3 + .75·(−3) = −1.5, E s_1² = 3,
    # E s_2² = .25·1 + .75·9 = 7
    assert score_overlap(hand_made([[[3.0], [1.0]], [[-1.0], [1.0]]], [1, 0])) == 0
    assert abs(score_overlap(hand_made([[[3.0], [1.0]], [[-1.0], [3.0]]], [1, 0])) - 1.5 / 7) < 1e-15


def test_correlation_of_energy_and_reward_is_that_of_two_points():
    # two outcomes lie on a line: W_T = 10 and 2, so the correlation is the sign of the reward's difference
    assert abs(energy_reward_corr(hand_made([[[3.0], [1.0]], [[-1.0], [1.0]]], [1, 0])) - 1) < 1e-12
    assert abs(energy_reward_corr(hand_made([[[3.0], [1.0]], [[-1.0], [1.0]]], [0, 1])) + 1) < 1e-12
    assert np.isnan(energy_reward_corr(hand_made([[[3.0], [1.0]], [[-1.0], [1.0]]], [1, 1])))


def test_identities_hold_on_policies_and_break_on_scores_that_are_none(tree):
    assert score_overlap(tree) < 1e-12
    assert regret_error(tree, np.linspace(-1, 2, tree.mask.shape[1])) < 1e-12
    # s_2 = 2 or −1 where s_1 = 1 has not mean 0 given the first token: regret leaves cross variance out
    broken = hand_made([[[1.0], [2.0]], [[1.0], [-1.0]]], [1, 0])
    assert regret_error(broken, np.array([1.0, -1.0])) > 1e-3


def test_first_baseline_of_otb_is_the_best_one_only_without_shared_parameters(draw):
    assert first_token_error(draw(3)) < 1e-12
    assert first_token_error(draw(3, shared=6)) > 1e-4


def test_sideways_is_what_is_left_of_the_bias_across_the_gradient():
    # m = (3, 1), ∇J = (4, 0): c = .75, m − c∇J = (0, 1)
    assert sideways(GroupMoments(np.array([3.0, 1.0]), 2.0, np.array([4.0, 0.0]), 4)) == 0.25


def test_self_inclusion_shrinks_by_the_own_share_of_the_weight(draw):
    for shared in (None, 5):
        assert self_inclusion_error(draw(1, horizon=3, shared=shared, end_token=True), 3) < 1e-12


@pytest.mark.parametrize("name", ["rloo", "otb"])
def test_two_prompts_have_half_of_within_and_between(name, draw):
    trees = [draw(seed, **PROMPTS) for seed in (1, 2)]
    within, between = prompt_parts(name, trees, 2)
    assert abs(two_prompt_variance(name, trees, 2) - (within + between) / 2) < 1e-12 * within
    assert abs(within - np.mean([group_moments(name, tree, 2).variance for tree in trees])) < 1e-12 * within
    means = [group_moments(name, tree, 2).mean for tree in trees]
    assert abs(between - ((means[0] - means[1]) ** 2).sum() / 4) < 1e-12 * within


def test_rows_hold_every_figure_once_and_relative_to_rloo():
    row = group_row("ragged", 0)
    assert [row[f"{what} rloo"] for what in ("v", "sf", "e1", "e1000")] == [1, 1, 1, 1]
    assert {f"v {name}" for name in COMPARED} <= row.keys()
    # groups of four: the mean's variance is (3/4)² of rloo's, at equal progress they are the same
    assert abs(row["v group_mean"] - 9 / 16) < 1e-12 and abs(row["sf group_mean"] - 1) < 1e-12
    assert row["loo_bias"] < 1e-12 < row["zero_tail_bias"]
    assert population_row("tabular, dense", 0)["prefix"] < 1
    assert ratio_row("tabular, terminal", 0)["`token`"] < 1e-12 < ratio_row("tabular, terminal", 0)["`ppo`"]
