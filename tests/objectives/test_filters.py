"""Filters of sampling: worked numbers."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.objectives.shaping import (
    FilterInputs,
    ProfiledOptions,
    RejectionOptions,
    ShapingInputs,
    keep_chance,
    shape_rewards,
)

INPUTS = FilterInputs(
    total=np.array([1.0, 0, 1, 1, 0, 0]),
    tokens=np.array([10.0, 10, 20, 30, 40, 1]),
    calls=np.array([0.0, 0, 1, 0, 0, 0]),
    group=np.array([7, 7, 2, 2, 5, 5]),
)


def test_dynamic_keeps_groups_whose_rewards_differ():
    assert keep_chance("dynamic", INPUTS).tolist() == [1, 1, 0, 0, 0, 0]


def test_rejection_looks_at_right_rollouts_only():
    # budget 40, a call 10 tokens: q = .75, –, 1 − 30/40 = .25, .25; (q − .05)/(.45 − .05) = 1 (cut), –, .5, .5
    options = RejectionOptions(budget=40, call=10.0, low=0.05, high=0.45)
    np.testing.assert_allclose(keep_chance("prs", INPUTS, options), [1, 1, 0.5, 0.5, 1, 1])


def test_none_keeps_everything():
    assert keep_chance("none", INPUTS).all()


def test_profiled_pays_right_rollouts_by_what_they_left_of_the_budget():
    # L = 2 and 3, calls 1 and 0 of 2 tokens each: q = 1 − 4/8 = .5 and 1 − 3/8 = .625; a wrong one gains nothing
    mask = np.array([[1, 0, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
    reward = np.array([[0, 9, 1, 9], [0, 0, 1, np.nan], [0, np.nan, 9, 9]])
    inputs = ShapingInputs(reward, mask, np.zeros(3, np.int64), np.array([[0, 0, 1, 9], [0, 0, 0, 9], [0, 9, 9, 9]]))
    got = shape_rewards("profiled", inputs, ProfiledOptions(budget=8, call=2.0, weight=2.0))
    np.testing.assert_allclose(got.reward, [[0, 0, 2, 0], [0, 0, 2.25, 0], [0, 0, 0, 0]])
    assert got.keep.all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keep_chance("dapo", INPUTS), "known: none, dynamic, prs"),
        (lambda: RejectionOptions(low=0.5, high=0.5), "low < high"),
        (lambda: ProfiledOptions(budget=0), "budget > 0"),
        (lambda: keep_chance("prs", INPUTS, ProfiledOptions()), "must be RejectionOptions"),
    ],
)
def test_bad_input_is_one_sentence(make, words):
    with pytest.raises(InputError, match=words):
        make()
