"""Filters of sampling, enumerated: what each makes of the mean of an update."""

import numpy as np
import pytest

from otb_analysis.estimators import TailOptions
from otb_analysis.objectives.shaping import ProfiledOptions, RejectionOptions
from studies.lib.enumeration.facts import GROUP
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.objectives import batch_cosine, conditional_gradient, filtered, profiled
from studies.lib.enumeration.trees import random_tree

LAZY = RejectionOptions(budget=4, low=0.0, high=0.75)
TREES = [random_tree(GROUP, np.random.default_rng(seed)) for seed in range(4)]


def test_without_a_filter_nothing_changes():
    found, plain = filtered(TREES[0], 3, "none", "otb_loo"), group_moments("otb_loo", TREES[0], 3)
    np.testing.assert_allclose(found.moments.mean, plain.mean, atol=1e-12)
    assert found.moments.variance == pytest.approx(plain.variance) and found.kept == pytest.approx(1)


@pytest.mark.parametrize("tree", TREES)
def test_dynamic_sampling_keeps_the_direction_of_rloo_and_divides_its_length(tree):
    # Groups of equal rewards have no gradient under rloo: dropping them divides the mean by the share that stays.
    found = filtered(tree, 3, "dynamic", "rloo")
    p = tree.objective
    assert found.kept == pytest.approx(1 - p**3 - (1 - p) ** 3)
    assert found.off_target < 1e-10 and found.cosine == pytest.approx(1)
    assert found.moments.projection == pytest.approx(1 / found.kept)


@pytest.mark.parametrize("tree", TREES)
def test_dynamic_sampling_turns_estimators_that_move_in_equal_groups(tree):
    # 0/1 rewards without a baseline: E[R_1 S_1; not all right] = (1 − p²)·∇J, along ∇J but of another length
    none, p = filtered(tree, 3, "dynamic", "none"), tree.objective
    assert none.cosine == pytest.approx(1) and none.moments.projection == pytest.approx((1 - p**2) / none.kept)
    assert filtered(tree, 3, "dynamic", "otb_loo").cosine < 1 - 1e-9  # alone at its length a rollout keeps G
    tail = filtered(tree, 3, "dynamic", "otb_loo", estimator_options=TailOptions(tail="group"))
    assert tail.cosine == pytest.approx(1) and tail.off_target < 1e-10


@pytest.mark.parametrize("tree", TREES)
def test_rejection_makes_rloo_follow_the_reward_of_kept_rollouts(tree):
    found = filtered(tree, 3, "prs", "rloo", LAZY)
    assert found.off_target < 1e-10 and found.moments.relative_bias > 1e-3
    assert filtered(tree, 3, "prs", "none", LAZY).off_target > 1e-3


def test_conditional_gradient_is_that_of_the_kept_mean_reward():
    # Tabular: one parameter per prefix and token, so a logit can be moved by hand. Finite differences of E[Rk]/E[k].
    tree = TREES[0]
    stays = np.linspace(0.2, 1, len(tree.prob))
    got = conditional_gradient(tree, stays)

    def value(shift):  # to first order log p moves by S·shift
        weight = tree.prob * np.exp(tree.score.sum(axis=1) @ shift) * stays
        return weight @ tree.total / weight.sum()

    unit = np.eye(len(got)) * 1e-6
    np.testing.assert_allclose(got, [(value(u) - value(-u)) / 2e-6 for u in unit], atol=1e-8)


def test_fresh_prompts_keep_the_direction_of_a_batch_and_the_same_prompt_again_turns_it():
    parts = [filtered(tree, 3, "dynamic", "rloo") for tree in TREES]
    assert batch_cosine(parts, fresh=True) == pytest.approx(1)
    assert batch_cosine(parts, fresh=False) < 1 - 1e-6
    bare = [filtered(tree, 3, "dynamic", "none") for tree in TREES]
    assert batch_cosine(bare, fresh=True) < 1 - 1e-6  # each prompt's step is (1 − p²) times as long


def test_profiled_rewards_have_their_own_gradient_and_pay_wrong_answers_nothing():
    tree = TREES[1]
    paid = profiled(tree, ProfiledOptions(budget=4, weight=0.5))
    length = tree.mask.sum(axis=1)
    np.testing.assert_allclose(paid.total, tree.total + 0.5 * tree.total * (1 - length / 4))
    assert group_moments("rloo", paid, 3).relative_bias < 1e-10  # unbiased for the reward it is given
