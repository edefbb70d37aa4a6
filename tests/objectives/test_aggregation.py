"""Aggregation weights: worked numbers, and what lengths and signs do to them."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.objectives.aggregation import AGGREGATIONS, AggregationInputs, ConstantOptions, aggregation_weights

LENGTH = np.array([10, 2, 2, 2])
ADVANTAGE = np.array([1, -1 / 3, -1 / 3, -1 / 3])


def inputs_of(length, advantage, group=None, width=None):
    length = np.asarray(length)
    mask = np.arange(width or length.max()) < length[:, None]
    a = np.where(mask, np.asarray(advantage, float)[:, None], np.nan)
    return AggregationInputs(mask, np.zeros(len(length), np.int64) if group is None else np.asarray(group), a)


def total(name, inputs):
    """Σ a A: what a score that is the same everywhere would be multiplied by."""
    return float((aggregation_weights(name, inputs) * inputs.advantage).sum())


def random_batch(seed):
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat([7, -2, 4], [1, 4, 6]))
    return inputs_of(rng.integers(0, 9, 11), rng.normal(size=11), group, 9), rng


def test_balanced_aggregation_undoes_the_sign_length_coupling():
    # token mean: (10·1 − 6·⅓)/16 = +.5; balanced: ¼·1 + ¾·(−⅓) = 0; Σ A/4 and the mean of token means are 0 too
    worked = inputs_of(LENGTH, ADVANTAGE)
    assert abs(total("token_mean", worked) - 0.5) < 1e-15
    assert abs(total("dapo", worked) - 0.5) < 1e-15
    assert abs(total("balanced", worked)) < 1e-15
    assert abs(total("sequence_mean", worked)) < 1e-15
    assert abs(total("sequence_sum", worked) - 8 / 4) < 1e-15


def test_weights_of_every_entry_by_hand():
    # lengths 10 2 2 2, one group: 1/4 · 1/16 · 1/(4L) · 1/(4·16) · 1/16 · ¼/10 and ¾/6
    worked = inputs_of(LENGTH, ADVANTAGE)
    expected = {
        "sequence_sum": [1 / 4] * 4,
        "token_mean": [1 / 16] * 4,
        "sequence_mean": [1 / 40, 1 / 8, 1 / 8, 1 / 8],
        "dapo": [1 / 16] * 4,
        "balanced": [1 / 40, 1 / 8, 1 / 8, 1 / 8],
    }
    for name, column in expected.items():
        np.testing.assert_allclose(aggregation_weights(name, worked)[:, 0], column, rtol=1e-14, err_msg=name)
    got = aggregation_weights("constant", worked, ConstantOptions(length=16))
    np.testing.assert_allclose(got[:, 0], [1 / 64] * 4)


def test_dapo_averages_prompts_that_token_mean_weighs_by_length():
    # tokens 8 | 2: token mean 1/10 everywhere; per prompt 1/(2·8) and 1/(2·2)
    worked = inputs_of([5, 3, 1, 1], np.ones(4), [0, 0, 1, 1])
    np.testing.assert_allclose(aggregation_weights("token_mean", worked)[:, 0], 1 / 10)
    np.testing.assert_allclose(aggregation_weights("dapo", worked)[:, 0], [1 / 16, 1 / 16, 1 / 4, 1 / 4])


def test_balanced_parts_are_made_within_the_prompt():
    # prompt 0: + 5 tokens, − 3; prompt 1: both +, 2 tokens → ½·½/5, ½·½/3, ½·(2/2)/2
    worked = inputs_of([5, 3, 1, 1], [1, -1, 1, 2], [0, 0, 1, 1])
    np.testing.assert_allclose(aggregation_weights("balanced", worked)[:, 0], [1 / 20, 1 / 12, 1 / 4, 1 / 4])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_are_zero_outside_the_mask_and_positive_inside(name):
    worked, _ = random_batch(0)
    weights = aggregation_weights(name, worked)
    assert (weights[~worked.mask] == 0).all() and (weights[worked.mask] > 0).all()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_permuting_rollouts_permutes_the_weights(name):
    worked, rng = random_batch(1)
    order = rng.permutation(11)
    shuffled = AggregationInputs(worked.mask[order], worked.group[order], worked.advantage[order])
    np.testing.assert_allclose(aggregation_weights(name, shuffled), aggregation_weights(name, worked)[order])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_padding_and_empty_rollouts_change_nothing(name):
    worked = inputs_of([3, 2, 4], [1, -1, 1])
    wide = inputs_of([3, 2, 0, 4], [1, -1, 5, 1], width=9)
    got = aggregation_weights(name, wide)[[0, 1, 3], :4]
    np.testing.assert_allclose(got, aggregation_weights(name, worked))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "dapo", "balanced"])
def test_means_weigh_a_batch_as_one(name):
    worked, _ = random_batch(2)
    assert abs(aggregation_weights(name, worked).sum() - 1) < 1e-14


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "dapo", "balanced", "constant"])
def test_equal_lengths_leave_the_sum_over_the_length(name):
    worked = inputs_of([5] * 6, [1, -1, 2, -1, 0.5, 0], [0, 0, 0, 1, 1, 1])
    options = ConstantOptions(length=5) if name == "constant" else None
    np.testing.assert_allclose(
        aggregation_weights(name, worked, options), aggregation_weights("sequence_sum", worked) / 5
    )


def test_tool_tokens_are_no_length():
    gapped = AggregationInputs(np.array([[True, False, True], [True, True, True]]), np.zeros(2, np.int64))
    np.testing.assert_allclose(aggregation_weights("sequence_mean", gapped), [[1 / 4, 0, 1 / 4], [1 / 6] * 3])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: aggregation_weights("balanced", AggregationInputs(np.ones((1, 2), bool), np.zeros(1, np.int64))),
            "balanced needs advantage, which is None",
        ),
        (lambda: aggregation_weights("mean", inputs_of([1], [1])), "aggregation 'mean' does not exist"),
        (lambda: ConstantOptions(length=0), "length is 0 but must be at least 1"),
        (lambda: AggregationInputs(np.ones((2, 2), bool), np.zeros(3, np.int64)), r"group has shape \(3,\)"),
        (lambda: inputs_of([2], [np.inf]), "advantage is inf at rollout 0, token 0"),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()
