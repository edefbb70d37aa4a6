"""Reward shaping: worked numbers, ties, and what must not change."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.objectives.shaping import SHAPINGS, LambdaOptions, OverlongOptions, ShapingInputs, shape_rewards


def inputs_of(length, total, group=None, width=None):
    """Terminal rewards; NaN after the end."""
    length, n = np.asarray(length), len(length)
    mask = np.arange(width or max(length.max(initial=0), 1)) < length[:, None]
    reward = np.where(mask, 0.0, np.nan)
    rows = np.flatnonzero(length)
    reward[rows, length[rows] - 1] = np.asarray(total, float)[rows]
    return ShapingInputs(reward, mask, np.zeros(n, np.int64) if group is None else np.asarray(group))


def totals(name, inputs, options=None):
    return shape_rewards(name, inputs, options).reward.sum(axis=1)


def test_grpo_lambda_pays_short_answers_more():
    # L = 100 200 300 all correct: mean 200, std √(20000/3) = 81.65, z = ∓1.2247, σ = .2271 .5 .7729; R = 1 − .6 σ
    got = totals("grpo_lambda", inputs_of([100, 200, 300], [1, 1, 1]))
    np.testing.assert_allclose(got, [0.864, 0.700, 0.536], atol=5e-4)


def test_grpo_lambda_touches_only_the_best_solved_groups():
    # accuracies 1, ½, ½, 0, 0: ⌈.2·5⌉ = 1 group; the others are paid 0 or 1, whatever they were paid before
    group = np.repeat(np.arange(5), 2)
    worked = inputs_of([2, 4] * 5, [1, 1, 1, 0, 3, 0, 0, 0, 0, 0], group)
    low, high = 1 - 0.6 / (1 + np.exp(1)), 1 - 0.6 / (1 + np.exp(-1))
    np.testing.assert_allclose(totals("grpo_lambda", worked), [low, high, 1, 0, 1, 0, 0, 0, 0, 0])


def test_groups_that_tie_for_the_last_place_are_all_chosen():
    worked = inputs_of([2, 4] * 3, [1, 1] * 3, np.repeat([5, 1, 3], 2))
    got = totals("grpo_lambda", worked, LambdaOptions(share=0.2)).reshape(3, 2)
    assert (got == got[0]).all() and got[0, 0] > got[0, 1]


def test_no_correct_rollout_no_reward():
    assert not totals("grpo_lambda", inputs_of([2, 4], [0, 0.4])).any()


def test_lengths_of_wrong_rollouts_do_not_count():
    # one correct rollout: its length is the mean and has no spread, so σ(0) = ½ and R = 1 − α/2
    np.testing.assert_allclose(totals("grpo_lambda", inputs_of([9, 2, 1], [0, 1, 0])), [0, 0.7, 0])


def test_share_of_groups_is_not_rounded_up_by_float_noise():
    # .2 · 35 = 7.000000000000001; accuracies all different
    group = np.repeat(np.arange(35), 34)
    total = (np.tile(np.arange(34), 35) < group).astype(float)
    changed = totals("grpo_lambda", inputs_of(np.full(35 * 34, 3), total, group)) != total
    assert len(np.unique(group[changed])) == 7


def test_overlong_penalty_grows_over_the_buffer():
    # limit 10, buffer 4: free up to 6, then ¼ a token, 1 from 10 on
    worked = inputs_of([5, 6, 7, 9, 10, 12], [1, 1, 1, 1, 0, 0])
    got = totals("overlong", worked, OverlongOptions(limit=10, buffer=4))
    np.testing.assert_allclose(got, [1, 1, 0.75, 0.25, -1, -1])


def test_shaping_changes_the_last_policy_token_only():
    reward, mask = np.array([[0.5, 0.25, 0.0, 9.0]]), np.array([[True, True, True, False]])
    got = shape_rewards("overlong", ShapingInputs(reward, mask, np.zeros(1, np.int64)), OverlongOptions(3, 3))
    np.testing.assert_allclose(got.reward, [[0.5, 0.25, -1.0, 0.0]])


def test_groups_paid_alike_are_dropped():
    worked = inputs_of([1, 2, 3, 1, 2, 3], [1, 1, 0.1 + 0.2, 0, 1, 0.3], [0, 0, 4, 1, 1, 4])
    assert shape_rewards("drop_equal", worked).keep.tolist() == [False, False, False, True, True, False]


@pytest.mark.parametrize("name", SHAPINGS)
def test_permuting_rollouts_permutes_the_answer(name):
    rng = np.random.default_rng(0)
    length, total, group = rng.integers(0, 6, 12), rng.integers(0, 2, 12), np.repeat([3, 1, 2], 4)
    order = rng.permutation(12)
    options = OverlongOptions(5, 3) if name == "overlong" else None
    whole = shape_rewards(name, inputs_of(length, total, group, 6), options)
    got = shape_rewards(name, inputs_of(length[order], total[order], group[order], 6), options)
    np.testing.assert_allclose(got.reward, whole.reward[order], atol=1e-15)
    np.testing.assert_array_equal(got.keep, whole.keep[order])


@pytest.mark.parametrize("name", SHAPINGS)
def test_nothing_gives_nothing(name):
    got = shape_rewards(name, ShapingInputs(np.zeros((0, 3)), np.zeros((0, 3), bool), np.zeros(0, np.int64)))
    assert got.reward.shape == (0, 3) and got.keep.shape == (0,)
    empty = shape_rewards(name, ShapingInputs(np.zeros((2, 0)), np.zeros((2, 0), bool), np.zeros(2, np.int64)))
    assert empty.reward.shape == (2, 0)


def test_none_returns_the_rewards():
    worked = inputs_of([2, 3], [1, 0])
    got = shape_rewards("none", worked)
    np.testing.assert_array_equal(got.reward, worked.reward)
    assert got.keep.all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: shape_rewards("grpo-lambda", inputs_of([1], [1])), "did you mean 'grpo_lambda'"),
        (lambda: LambdaOptions(alpha=2), "alpha=2.* is out of range"),
        (lambda: OverlongOptions(limit=3, buffer=4), "buffer is 4 and limit is 3"),
        (lambda: inputs_of([2], [np.nan]), "reward is nan at rollout 0, token 1"),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()
