"""Baselines with a memory, and EVPO: values worked by hand, what the memory holds, and what it does to the mean."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import (
    DiscountOptions,
    EstimatorInputs,
    KalmanOptions,
    LengthOptions,
    RegressionOptions,
    Tallies,
    estimate,
    options_from_dict,
)
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.trees import TreeSpec, random_tree
from tests.enumerated_batches import batch_means

SPEC = TreeSpec(vocabulary=2, horizon=2, shared=3, end_token=True)


def paid(*returns, group=None, prompt=None, state=None):
    """Rollouts of one token each."""
    reward = np.array(returns, float)[:, None]
    label = np.zeros(len(returns), int) if group is None else np.array(group)
    prompt = None if prompt is None else np.array(prompt)
    return EstimatorInputs(reward, np.ones(reward.shape, bool), label, prompt=prompt, state=state)


def test_power_of_lengths_lies_between_group_mean_and_opo(worked):
    # lengths 2 4 4 2, R = 1 0 0 1: α = ½: 2√2/(2√2 + 4) = √2/(√2 + 2); without the first √2/(√2 + 4)
    root = np.sqrt(2)
    np.testing.assert_allclose(estimate("length_power", worked).baseline[:, 0], root / (root + 2))
    np.testing.assert_allclose(estimate("length_power_loo", worked).baseline[0, 0], root / (root + 4))
    for exponent, name in ((0.0, "group_mean"), (1.0, "opo")):
        got = estimate("length_power", worked, LengthOptions(exponent))
        np.testing.assert_allclose(got.baseline, estimate(name, worked).baseline, rtol=1e-14)


def test_krpo_filters_the_rollouts_in_their_order():
    # Q = 0, R = 1: P = 1, K = ½, then P = ½, K = ⅓, then P = ⅓: x = ½, ⅓ and A = ½/√½, −⅓/√⅓
    options = KalmanOptions(process=0.0, noise=1.0)
    got = estimate("krpo", paid(1, 0), options)
    np.testing.assert_allclose(got.baseline[:, 0], [1 / 2, 1 / 3])
    np.testing.assert_allclose(got.advantage[:, 0], [np.sqrt(1 / 2), -np.sqrt(1 / 3)], rtol=1e-7)
    # the other order; a second group begins anew
    got = estimate("krpo", paid(0, 1, 1, 0, group=[0, 4, 0, 4]), options)
    np.testing.assert_allclose(got.baseline[:, 0], [0, 1 / 2, 1 / 3, 1 / 3])


@pytest.mark.parametrize("n", [2, 3])
def test_krpo_keeps_the_direction_of_the_gradient(n):
    tree, p, factors = random_tree(SPEC, np.random.default_rng(3)), 1.0, []
    for _ in range(n):
        gain = (p + 1e-5) / (p + 1e-5 + 1e-2)
        p = (1 - gain) * (p + 1e-5)
        factors.append((1 - gain) / (np.sqrt(p) + 1e-8))
    np.testing.assert_allclose(group_moments("krpo", tree, n).mean, np.mean(factors) * tree.gradient, rtol=1e-12)


def test_ebpo_shrinks_to_all_rollouts_and_whitens():
    # returns 1 0 1 1: μ = ¾, σ² = ¼; means ½ and 1: τ² = ⅛; S = ⅛/(⅛ + ⅛) = ½: V = ⅝ and ⅞
    # R − V = ⅜ −⅝ ⅛ ⅛, mean 0, variance (9 + 25 + 1 + 1)/64/3 = 3/16
    got = estimate("ebpo", paid(1, 0, 1, 1, group=[0, 0, 1, 1]))
    np.testing.assert_allclose(got.baseline[:, 0], [5 / 8, 5 / 8, 7 / 8, 7 / 8])
    np.testing.assert_allclose(got.advantage[:, 0], np.array([3, -5, 1, 1]) / 8 / np.sqrt(3 / 16), rtol=1e-7)
    np.testing.assert_allclose(got.state.sums, [[4, 3 / 4, 3 / 4], [2, 3 / 4, 1 / 8]])


def test_ebpo_gives_failed_groups_a_gradient_once_something_was_solved():
    state = estimate("ebpo", paid(1, 0, 1, 1, group=[0, 0, 1, 1])).state
    got = estimate("ebpo", paid(0, 0, 1, 0, group=[0, 0, 1, 1], state=state))
    assert (got.baseline[:2, 0] > 0).all()
    assert not estimate("ebpo", paid(0, 0)).advantage.any()


def test_ebpo_without_the_batch_uses_earlier_steps_alone():
    # μ = ¾, σ² = ¼, τ² = ⅛ of the step before; n − 1 = 2: S = ½; the others' means are 0 and ½
    state = estimate("ebpo_loo", paid(1, 0, 1, 1, group=[0, 0, 1, 1])).state
    got = estimate("ebpo_loo", paid(1, 0, 0, state=state))
    np.testing.assert_allclose(got.baseline[:, 0], [3 / 8, 5 / 8, 5 / 8])
    first = estimate("ebpo_loo", paid(1, 0, 0))
    np.testing.assert_array_equal(first.baseline, estimate("rloo", paid(1, 0, 0)).baseline)


@pytest.mark.parametrize("name", ["ebpo", "ebpo_loo"])
def test_ebpo_remembers_as_if_all_steps_had_been_one(name):
    returns, group = np.random.default_rng(0).normal(size=12), np.repeat(np.arange(4), 3)
    state = None
    for rows in (slice(0, 3), slice(3, 9), slice(9, 12)):
        state = estimate(name, paid(*returns[rows], group=group[rows], state=state)).state
    np.testing.assert_allclose(state.sums, estimate(name, paid(*returns, group=group)).state.sums, rtol=1e-12)


def test_dbb_discounts_what_a_prompt_earned_in_earlier_epochs():
    # λ = ½: α = ½ + 2, β = ½ + 1: p̂ = ⅝, √(15/64); then λα + 0 = 5/4, λβ + 1 = 7/4: p̂ = 5/12
    options = DiscountOptions(0.5)
    first = estimate("dbb", paid(1, 1, 0, prompt=[7, 7, 7]), options)
    np.testing.assert_allclose(first.baseline[:, 0], 5 / 8)
    np.testing.assert_allclose(first.advantage[:, 0], np.array([3, 3, -5]) / np.sqrt(15))
    again = estimate("dbb", paid(0, 1, group=[0, 1], prompt=[7, 3], state=first.state), options)
    np.testing.assert_allclose(again.baseline[:, 0], [5 / 12, 3 / 4])
    assert again.state.key.tolist() == [3, 7]
    np.testing.assert_allclose(again.state.sums, [[3 / 2, 1 / 2], [5 / 4, 7 / 4]])
    # two groups of one prompt know the past and themselves, and are remembered together
    twice = estimate("dbb", paid(1, 0, group=[0, 1], prompt=[7, 7]), options)
    np.testing.assert_allclose(twice.baseline[:, 0], [3 / 4, 1 / 4])
    np.testing.assert_allclose(twice.state.sums, [[3 / 2, 3 / 2]])
    # a prompt that is not sampled keeps its counts
    kept = estimate("dbb", paid(1, prompt=[3], state=again.state), options).state
    np.testing.assert_allclose(kept.sums[1], [5 / 4, 7 / 4])


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_dbb_remembers_a_prompt_by_its_number_where_an_answer_has_no_tokens(empty):
    whole = paid(1, 0, 1, 1, group=[0, 0, 0, 1], prompt=[7, 7, 7, 9])
    mask, reward = whole.mask.copy(), whole.reward.copy()
    mask[empty], reward[empty] = False, 0.0
    got = estimate("dbb_loo", replace(whole, mask=mask, reward=reward))
    assert got.state.key.tolist() == [7, 9]


def test_dbb_without_the_rollout_is_a_mean_with_the_past_as_further_rollouts():
    # α = 5/2, β = 3/2 as above; without a success 3/2 of 3, without the failure 5/2 of 3
    got = estimate("dbb_loo", paid(1, 1, 0, prompt=[7, 7, 7]), DiscountOptions(0.5))
    np.testing.assert_allclose(got.baseline[:, 0], [1 / 2, 1 / 2, 5 / 6])
    # nothing is remembered without a name of the prompt, and λ = 0 is `rloo`
    assert estimate("dbb_loo", paid(1, 1, 0)).state is None
    bare = estimate("dbb_loo", paid(1, 1, 0), DiscountOptions(0.0))
    np.testing.assert_allclose(bare.baseline, estimate("rloo", paid(1, 1, 0)).baseline)


def test_evpo_takes_the_critic_where_it_explains_the_returns_and_the_batch_mean_elsewhere():
    # errors ±.2 against ±.5, and ±.8 against ±.5
    for value, expected in (([0.8, 0.2], [0.8, 0.2]), ([0.2, 0.8], [0.5, 0.5])):
        inputs = replace(paid(1, 0), value=np.array(value)[:, None])
        np.testing.assert_allclose(estimate("evpo", inputs).baseline[:, 0], expected)


def policies(seed, count=3):
    rng = np.random.default_rng([seed, 8])
    return [random_tree(SPEC, rng) for _ in range(count)]


EARLIER = {
    "ebpo": Tallies(np.arange(2), np.array([[24.0, 0.4, 5.0], [6.0, 0.4, 0.3]])),
    "dbb": Tallies(np.array([0, 2, 9]), np.array([[3.0, 1.0], [1.0, 4.0], [5.0, 5.0]])),
}


def off(name, trees, state):
    means = batch_means(name, trees, 2, None, state)
    return max(np.linalg.norm(m - t.gradient) / np.linalg.norm(t.gradient) for m, t in zip(means, trees, strict=True))


@pytest.mark.parametrize("name", ["ebpo", "dbb"])
@pytest.mark.parametrize("seed", range(2))
def test_memory_of_earlier_steps_leaves_the_form_without_the_batch_unbiased(name, seed):
    assert off(f"{name}_loo", policies(seed), EARLIER[name]) < 1e-12
    assert off(name, policies(seed), EARLIER[name]) > 0.05


@pytest.mark.parametrize("name", ["ebpo_loo", "dbb_loo"])
def test_remembering_the_batch_itself_would_bias_it(name):
    def selfish(of, inputs, options):
        return estimate(of, replace(inputs, state=estimate(of, inputs, options).state), options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.enumerated_batches.estimate", selfish)
        assert off(name, policies(2), None) > 0.01


def test_switch_of_evpo_biases_a_critic_that_has_not_seen_the_batch():
    def with_critic(name, inputs, options):
        value = 0.2 + 0.2 * inputs.group[:, None] + 0.1 * np.arange(inputs.mask.shape[1])
        return estimate(name, replace(inputs, value=value), options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.enumerated_batches.estimate", with_critic)
        assert off("value", policies(4), None) < 1e-12
        assert off("evpo", policies(4), None) > 0.01


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: estimate("ebpo", paid(1, 0, state=EARLIER["dbb"])), "state is not that of this estimator"),
        (lambda: estimate("dbb", paid(1, prompt=[0], state=EARLIER["ebpo"])), "state is not that of this estimator"),
        (
            lambda: estimate("ebpo", paid(1, state=Tallies(np.arange(2), np.full((2, 3), np.nan)))),
            "state is not that of this estimator",
        ),
        (lambda: estimate("dbb", replace(paid(1, 0), prompt=np.zeros(3, int))), r"prompt has shape \(3,\)"),
        (lambda: options_from_dict("dbb", {"discount": "2"}), r"discount is 2.0 but must lie in \[0, 1\]"),
        (lambda: options_from_dict("krpo", {"noise": "0"}), "noise=0.0.* is no filter"),
        (
            lambda: estimate(
                "energy_regression",
                replace(paid(1, 0), energy=np.ones((2, 1)), entropy=np.ones((2, 1)), state=EARLIER["dbb"]),
                RegressionOptions(memory=0.5),
            ),
            "state is a Tallies",
        ),
    ],
)
def test_bad_input_gets_a_sentence(call, words):
    with pytest.raises(InputError, match=words):
        call()
