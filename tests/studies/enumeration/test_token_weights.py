"""Token weights on enumerated policies: what keeps the mean and what does not."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.objectives.aggregation import TOKEN_WEIGHTS, DelightOptions, StapoOptions
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.objectives import PEAKED, WEIGHT_CASES, exact_contrast, weighed_moments
from studies.lib.enumeration.trees import random_tree

TREES = [random_tree(PEAKED, np.random.default_rng(seed)) for seed in range(6)]


def test_every_token_weight_is_enumerated():
    assert {name for name, _ in WEIGHT_CASES.values()} == set(TOKEN_WEIGHTS)


def test_no_weight_is_rloo():
    for tree in TREES:
        plain, share = weighed_moments(tree, "none", 3)
        assert plain.variance == pytest.approx(group_moments("rloo", tree, 3).variance, rel=1e-12)
        assert plain.relative_bias < 1e-12 and share == 0


@pytest.mark.parametrize("case", [case for case in WEIGHT_CASES.values() if case[0] not in ("none", "kl_cov")], ids=str)
def test_weights_that_look_at_the_token_move_the_mean(case):
    name, options = case
    assert np.median([weighed_moments(tree, name, 3, options)[0].relative_bias for tree in TREES]) > 1e-3


def test_weights_that_do_nothing_leave_rloo_as_it_is():
    # nothing is less likely than 0; a gate of infinite temperature is ½ everywhere
    for tree in TREES:
        assert weighed_moments(tree, "stapo", 3, StapoOptions(probability=0.0))[0].relative_bias < 1e-12
        assert weighed_moments(tree, "delightful", 3, DelightOptions(1e12))[0].projection == pytest.approx(
            0.5, rel=1e-9
        )


def test_exact_contrast_is_that_of_the_policies_given_right_and_wrong():
    """Bayes, the slow way: both conditional policies by summing over completions."""
    for tree in TREES:
        found, right, prob = exact_contrast(tree), tree.total == 1, tree.prob
        size = int(tree.token.max()) + 1
        for h in np.unique(tree.prefix[tree.mask]):
            rows, t = np.nonzero(tree.prefix == h)
            mass = np.zeros((2, size))
            for row, at in zip(rows, t, strict=True):
                mass[int(right[row]), tree.token[row, at]] += prob[row]
            wrong_p, right_p = (m / m.sum() if m.sum() else np.zeros(size) for m in mass)
            if (wrong_p == 0)[right_p > 0].any() or not right_p.sum():
                continue
            odds = np.divide(right_p**2, wrong_p, out=np.zeros(size), where=wrong_p > 0)
            np.testing.assert_allclose(found[rows, t], (odds / odds.sum())[tree.token[rows, t]], rtol=1e-9)
        assert ((found[tree.mask] >= 0) & (found[tree.mask] <= 1)).all() and (found[~tree.mask] == 0).all()


def test_exact_contrast_refuses_rewards_that_are_neither_right_nor_wrong():
    with pytest.raises(InputError, match="not 0 or 1"):
        exact_contrast(random_tree(replace(PEAKED, dense=True), np.random.default_rng(0)))


def test_drift_penalty_leaves_an_on_policy_update_as_it_is():
    for tree in TREES:
        moments, share = weighed_moments(tree, "kl_cov", 3)
        assert moments.relative_bias < 1e-12 and share == 0
