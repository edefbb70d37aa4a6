"""Masked and grouped reductions against written-out values."""

import numpy as np

from otb_analysis.arrays import (
    Groups,
    group_sum,
    has_gaps,
    masked,
    policy_position,
    returns_to_go,
    squeeze,
    squeezed_mask,
    unsqueeze,
)

NAN = np.nan
MASK = np.array([[True, False, True, True], [False, True, False, False], [False] * 4])


def test_group_sum_is_copied_back_to_every_member():
    np.testing.assert_array_equal(group_sum([1, 2, 4, 8], [7, -1, 7, 3]), [5, 2, 5, 8])
    np.testing.assert_array_equal(group_sum([[1, 10], [2, 20], [4, 40]], [0, 1, 0]), [[5, 50], [2, 20], [5, 50]])


def test_groups_number_labels_in_ascending_order():
    groups = Groups.from_labels([7, -1, 7])
    assert groups.labels.tolist() == [-1, 7]
    assert groups.index.tolist() == [1, 0, 1]
    assert groups.count.tolist() == [1, 2]
    assert groups.order.tolist() == [1, 0, 2]


def test_nan_of_one_group_stays_in_it():
    np.testing.assert_array_equal(group_sum([1.0, NAN, 2.0], [0, 1, 0]), [3, NAN, 3])


def test_no_rollouts_sum_to_nothing():
    assert group_sum(np.zeros((0, 3)), np.zeros(0, np.int64)).shape == (0, 3)


def test_masked_does_not_read_outside_and_promotes():
    x = np.array([[1, NAN], [np.inf, 2]], np.float32)
    got = masked(x, np.array([[True, False], [False, True]]))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [[1, 0], [0, 2]])


def test_returns_to_go_skip_what_is_not_policy():
    # policy rewards 1, 3, 4 at columns 0, 2, 3: 8, then 7, then 4
    reward = np.array([[1, NAN, 3, 4], [NAN, 5, NAN, NAN], [NAN] * 4])
    np.testing.assert_array_equal(returns_to_go(reward, MASK), [[8, 0, 7, 4], [0, 5, 0, 0], [0] * 4])


def test_policy_position_skips_tool_tokens():
    np.testing.assert_array_equal(policy_position(MASK), [[0, -1, 1, 2], [-1, 0, -1, -1], [-1] * 4])


def test_squeeze_packs_left_and_unsqueeze_undoes_it():
    x = np.array([[1, NAN, 3, 4], [NAN, 5, NAN, NAN], [NAN] * 4])
    packed = squeeze(x, MASK)
    np.testing.assert_array_equal(packed, [[1, 3, 4], [5, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(squeezed_mask(MASK), [[True] * 3, [True, False, False], [False] * 3])
    np.testing.assert_array_equal(unsqueeze(packed, MASK), [[1, 0, 3, 4], [0, 5, 0, 0], [0] * 4])


def test_gaps_are_a_late_start_or_a_hole():
    assert has_gaps(np.array([[True, False, True]]))
    assert has_gaps(np.array([[False, True, True]]))
    assert not has_gaps(np.array([[True, True, False], [False, False, False]]))
    assert not has_gaps(np.zeros((2, 0), bool))
