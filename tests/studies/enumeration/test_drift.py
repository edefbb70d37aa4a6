from dataclasses import replace

import numpy as np
import pytest
from scipy.special import log_softmax

from otb_analysis.errors import InputError
from otb_analysis.statistics import Moments
from studies.lib.enumeration.off_policy import (
    CASES,
    case_moments,
    divergence,
    effective_share,
    mean_gradient,
    moved_logprob,
    sampled_at,
)
from studies.lib.enumeration.trees import TreeSpec, random_tree

SHARED = TreeSpec(shared=6, end_token=True)


def tree(seed=0, spec=SHARED):
    return random_tree(spec, np.random.default_rng(seed))


def test_tabular_policy_moves_by_adding_to_its_logits():
    one = tree(3, TreeSpec(vocabulary=3, horizon=1))
    move = np.array([0.5, -1.0, 0.25])
    expected = log_softmax(one.logprob[:, 0] + move)  # one prefix, one completion per token, in the order of tokens
    np.testing.assert_allclose(moved_logprob(one, move)[:, 0], expected, atol=1e-14)


@pytest.mark.parametrize("spec", [SHARED, TreeSpec(shared=None)])
def test_probabilities_still_sum_to_one_after_a_move(spec):
    one = tree(1, spec)
    moved = moved_logprob(one, np.random.default_rng(0).normal(size=one.score.shape[2]))
    assert np.exp(moved.sum(axis=1)).sum() == pytest.approx(1.0, abs=1e-12)


def test_small_moves_follow_the_scores():
    # d/dα log π_{θ+αδ}(y) at α = 0 is s·δ.
    one, delta = tree(2), np.random.default_rng(1).normal(size=6)
    slope = (moved_logprob(one, 1e-5 * delta) - moved_logprob(one, -1e-5 * delta)) / 2e-5
    np.testing.assert_allclose(slope[one.mask], (one.score @ delta)[one.mask], atol=1e-8)


@pytest.mark.parametrize("distance", [0.001, 0.1, 1.0])
def test_sampler_is_as_far_away_as_was_asked(distance):
    one = tree(4)
    assert divergence(sampled_at(one, -one.gradient, distance)) == pytest.approx(distance, rel=1e-6)


def test_sampler_behind_along_the_gradient_earns_less():
    one = tree(5)
    behind = sampled_at(one, -one.gradient, 0.1)
    assert behind.expect(behind.total) < one.objective


def test_direction_in_which_nothing_moves_is_refused():
    one = tree(6)
    with pytest.raises(InputError, match=r"0\.1 nats away"):
        sampled_at(one, np.zeros(6), 0.1)
    with pytest.raises(InputError, match="one entry a parameter"):
        moved_logprob(one, np.zeros(5))


def test_effective_share_is_one_on_policy_and_falls_with_distance():
    one = tree(7)
    shares = [effective_share(sampled_at(one, -one.gradient, kl)) for kl in (0.01, 0.1, 0.5)]
    assert effective_share(one) == pytest.approx(1.0)
    assert 1 > shares[0] > shares[1] > shares[2] > 0


def test_effective_share_of_two_outcomes_by_hand():
    # μ = (1/2, 1/2), π = (3/4, 1/4): E_μ ρ² = (9/4 + 1/4)/2 = 5/4.
    one = tree(0, TreeSpec(vocabulary=2, horizon=1))
    logs = np.log([[0.75], [0.25]])
    off = replace(one, logprob=logs, behavior_logprob=np.log([[0.5], [0.5]]))
    assert effective_share(off) == pytest.approx(0.8)


def test_effective_share_of_what_is_never_sampled_is_zero():
    one = tree(7)
    never = np.where(np.arange(len(one.mask))[:, None] == 0, -800.0, one.logprob) * one.mask
    assert effective_share(replace(one, behavior_logprob=never)) == 0.0


@pytest.mark.parametrize("name", list(CASES))
def test_moments_have_the_mean_that_the_catalogue_enumerates(name):
    one = tree(8)
    off = sampled_at(one, -one.gradient, 0.1)
    found = case_moments(off, CASES[name])
    np.testing.assert_allclose(found.mean, mean_gradient(off, CASES[name], off.objective), atol=1e-12)
    error = np.linalg.norm(mean_gradient(off, CASES[name], off.objective) - off.gradient)
    assert found.relative_bias == pytest.approx(error / np.linalg.norm(off.gradient))


def test_whole_sequence_ratio_has_no_bias_and_pays_in_variance():
    one = tree(9)
    on, off = case_moments(one, CASES["`none`"]), sampled_at(one, -one.gradient, 0.3)
    found = case_moments(off, CASES["`sequence`"])
    assert found.relative_bias < 1e-10
    assert found.variance > on.variance
    assert isinstance(found.measured(on), Moments)
