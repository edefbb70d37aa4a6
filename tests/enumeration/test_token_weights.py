"""Token weights on enumerated policies: what keeps the mean and what does not."""

import numpy as np
import pytest

from otb_analysis.enumeration.groups import group_moments
from otb_analysis.enumeration.token_weights import PEAKED, WEIGHT_CASES, weighed_moments
from otb_analysis.enumeration.trees import random_tree
from otb_analysis.objectives.token_weights import TOKEN_WEIGHTS, DelightOptions, StapoOptions

TREES = [random_tree(PEAKED, np.random.default_rng(seed)) for seed in range(6)]


def test_every_token_weight_is_enumerated():
    assert {name for name, _ in WEIGHT_CASES.values()} == set(TOKEN_WEIGHTS)


def test_no_weight_is_rloo():
    for tree in TREES:
        plain, share = weighed_moments(tree, "none", 3)
        assert plain.variance == pytest.approx(group_moments("rloo", tree, 3).variance, rel=1e-12)
        assert plain.relative_bias < 1e-12 and share == 0


@pytest.mark.parametrize("case", [case for case in WEIGHT_CASES.values() if case[0] != "none"], ids=str)
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
