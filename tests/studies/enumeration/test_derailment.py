"""The derailment process: exact population values, and groups of N by sampling, in standard errors."""

import numpy as np
import pytest

from studies.lib.enumeration.derailment import Derailment, derailment_samples
from studies.lib.enumeration.population import population_moments
from studies.lib.enumeration.trees import Tree


@pytest.mark.parametrize(("mistake", "success"), [(0.2, 0.76), (0.7, 0.50), (2.0, 0.20)])
def test_success_rate_follows_the_mistakes(mistake, success):
    assert abs(Derailment(mistake=mistake / 64).success - success) < 0.005


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("none", 1.13),
        ("group_mean", 3.23),
        ("value", 1.34),
        ("sequence_optimal", 1.028),
        ("otb", 1.0275),
        ("token_optimal", 1.0),
        ("prefix", 1.0),
    ],
)
def test_population_variance_relative_to_the_optimum(name, ratio):
    process = Derailment()
    best = process.variance(process.baseline("token_optimal"))
    assert abs(process.variance(process.baseline(name)) / best - ratio) < 0.005


def as_tree(process):
    """Every completion of a short process, enumerated without dynamic programming; two rows each, paid or not."""
    t = process.horizon
    token = np.stack(np.unravel_index(np.arange(4**t), (4,) * t), axis=1)
    state, now = np.zeros_like(token), np.zeros(len(token), np.int64)
    for k in range(t):
        state[:, k] = now
        now = process.follows[now, token[:, k]]
    score = np.zeros((len(token), t, t, 2, 4))
    for k in range(t):
        score[np.arange(len(token)), k, k, state[:, k]] = process.score[state[:, k], token[:, k]]
    reward = np.zeros((len(token), t))
    reward[:, -1] = process.pay * (now == 0)  # its expectation: enough for means, not for variances
    logprob = np.log(process.policy[state, token])
    mask = np.ones(token.shape, bool)
    energy = process.energy[state, token]
    flat = score.reshape(len(token), t, -1)
    return Tree(logprob, mask, np.zeros_like(token), reward, flat, energy, logprob, token), state


def test_dynamic_programming_equals_enumeration():
    process = Derailment(horizon=5, mistake=0.2, recovery=0.1, pay=1.0)  # pay 1 makes R a function of the tokens
    tree, state = as_tree(process)
    np.testing.assert_allclose(tree.gradient, process.gradient, atol=1e-14)
    for name in ("none", "group_mean", "value", "sequence_optimal", "otb", "token_optimal", "prefix"):
        by_state = process.baseline(name)
        exact = population_moments(tree, by_state[np.arange(5), state]).variance
        assert abs(exact - process.variance(by_state)) < 1e-12


def test_sampled_gradients_have_the_exact_mean_and_variance():
    process, rng = Derailment(), np.random.default_rng(0)
    state, token, reward = process.sample(8000, rng)
    assert abs(reward.mean() - process.success) < 4 * 0.5 / 8000**0.5
    advantage = np.repeat(reward[:, None], 64, axis=1)
    power = (process.group_gradients(state, token, advantage, 1) ** 2).sum(axis=1)
    exact = process.variance(process.baseline("none")) + process.gradient @ process.gradient
    assert abs(power.mean() - exact) < 4 * power.std(ddof=1) / 8000**0.5


@pytest.fixture(scope="module")
def measured():
    """Per chunk of independent groups: N·V and N·SF of every estimator on the same rollouts, relative to B*."""
    return derailment_samples(Derailment(), ((4, 12, 400), (32, 6, 100)))


def lower(a, b, column):
    """True when a is below b by four standard errors of the paired difference."""
    gap = b[:, column] - a[:, column]
    return gap.mean() > 4 * gap.std(ddof=1) / len(gap) ** 0.5


VARIANCE, SF = 0, 1


def test_energy_weights_beat_rloo_in_small_groups(measured):
    for name in ("otb_loo", "sequence_optimal_loo"):
        assert lower(measured[name, 4], measured["rloo", 4], VARIANCE)


def test_group_mean_is_worse_than_no_baseline(measured):
    assert lower(measured["none", 4], measured["group_mean", 4], SF)
    assert lower(measured["none", 32], measured["group_mean", 32], SF)


def test_self_inclusive_sequence_optimal_beats_every_unbiased_constant(measured):
    sf = measured["sequence_optimal", 4][:, SF]
    assert sf.mean() < 1 - 2 * sf.std(ddof=1) / len(sf) ** 0.5


def test_raw_variance_flatters_small_self_inclusive_groups(measured):
    # OTB at N = 4 against the group mean at N = 32: about equal per update in V, three times worse in V/c²
    small, large = measured["otb", 4].mean(axis=0) / 4, measured["group_mean", 32].mean(axis=0) / 32
    assert small[VARIANCE] / large[VARIANCE] < 1.7
    assert small[SF] / large[SF] > 2.2


def test_raw_order_reverses_at_equal_progress(measured):
    assert lower(measured["otb", 4], measured["none", 4], VARIANCE)
    assert lower(measured["none", 4], measured["otb", 4], SF)


def test_energies_go_with_failures_within_a_prompt():
    process = Derailment()
    state, token, reward = process.sample(4000, np.random.default_rng(2))
    final = process.energy[state, token].sum(axis=1)
    assert np.corrcoef(final, reward)[0, 1] < -0.6
