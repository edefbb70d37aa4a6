"""Importance ratios: which keep the mean, which move it, and where the optimum goes."""

import numpy as np
import pytest

from otb_analysis.enumeration import TreeSpec, population_moments, position_optimum, regret
from otb_analysis.enumeration.off_policy import KNOWN, MOVING, drifted, mean_gradient, mean_shift, whole_sequence

SHARED = TreeSpec(shared=6)
ALL = KNOWN | MOVING


def weights(tree, name):
    return ALL[name](tree.ratio, tree.returns)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("seed", range(3))
def test_unclipped_ratio_known_at_its_token_takes_any_constant(name, seed):
    tree = drifted(SHARED, seed)
    assert mean_shift(tree, KNOWN[name]) < 1e-12
    assert mean_shift(tree, KNOWN[name], 1.0) < 1e-12


@pytest.mark.parametrize("name", MOVING)
def test_truncated_or_averaged_ratio_lets_a_constant_move_the_mean(name):
    shift = [mean_shift(tree, MOVING[name]) for tree in (drifted(SHARED, seed) for seed in range(10))]
    assert np.median(shift) > 0.02


def log_shift(name, spec, n=60):
    return np.log([mean_shift(drifted(spec, seed), MOVING[name]) for seed in range(n)])


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ("truncation at 1.2 (TIS)", "cumulative, clipped (CTPO)"),
        ("cumulative, clipped (CTPO)", "clip at 1 ± .2 (PPO)"),
        ("clip at 1 ± .2 (PPO)", "sequence mask ± .05"),
    ],
)
def test_harder_truncation_moves_the_mean_further(less, more):
    gap = log_shift(more, TreeSpec()) - log_shift(less, TreeSpec())
    assert gap.mean() > 4 * gap.std(ddof=1) / len(gap) ** 0.5


def test_without_drift_nothing_moves():
    tree = drifted(SHARED, 1, drift=0.0)
    assert max(mean_shift(tree, factor) for factor in ALL.values()) < 1e-12


def test_whole_sequence_ratio_recovers_the_gradient_with_any_constant():
    # E_μ[Πρ · S (R − B)] = ∇J
    tree = drifted(SHARED, 4)
    for b in (0.0, 0.7):
        np.testing.assert_allclose(mean_gradient(tree, whole_sequence, np.full(4, b)), tree.gradient, atol=1e-14)


def correlations(tree, ratio):
    scaled = ratio[:, :, None] * tree.score
    return tree.expect(np.einsum("mtd,mkd->mtk", scaled, scaled)) * (1 - np.eye(4))


@pytest.mark.parametrize("name", KNOWN)
def test_weighted_scores_stay_uncorrelated(name):
    tree = drifted(SHARED, 5)
    np.testing.assert_allclose(correlations(tree, weights(tree, name)), 0, atol=1e-13)


def test_whole_sequence_ratio_correlates_the_positions():
    tree = drifted(SHARED, 5)
    assert np.abs(correlations(tree, whole_sequence(tree.ratio, tree.returns))).max() > 1e-3


@pytest.mark.parametrize("name", KNOWN)
def test_regret_identity_holds_with_ratios_known_at_the_token(name):
    tree = drifted(SHARED, 6)
    ratio = weights(tree, name)
    best = population_moments(tree, position_optimum(tree, ratio), ratio).variance
    for baseline in np.random.default_rng(0).normal(size=(4, 4)):
        excess = population_moments(tree, baseline, ratio).variance - best
        assert abs(excess - regret(tree, baseline, ratio)) < 1e-10


def test_regret_identity_fails_for_the_whole_sequence_ratio():
    tree = drifted(SHARED, 6)
    ratio = whole_sequence(tree.ratio, tree.returns)
    best = population_moments(tree, position_optimum(tree, ratio), ratio).variance
    excess = population_moments(tree, np.ones(4), ratio).variance - best
    assert abs(excess - regret(tree, np.ones(4), ratio)) > 1e-3


def test_ratios_of_four_tokens_by_hand():
    # ρ = .9 1.2 .5 1.1: products .9 1.08 .54 .594; minimum of what came before 1 .9 .9 .5; fourth root of .594 = .878
    rho = np.array([[0.9, 1.2, 0.5, 1.1]])
    expected = {
        "cumulative": [0.9, 1.08, 0.54, 0.594],
        "minimum prefix": [0.9, 1.08, 0.45, 0.55],
        "cumulative, clipped (CTPO)": [0.975, 1.073, 0.958, 0.951],
        "geometric mean (GSPO)": [0.878] * 4,
        "clip at 1 ± .2 (PPO)": [0.9, 1.2, 0.5, 1.1],  # A > 0: only ρ > 1.2 is cut
        "truncation at 1.2 (TIS)": [0.9, 1.2, 0.5, 1.1],
        "sequence mask ± .05": [0.0] * 4,  # .878 is further than .05 from 1
    }
    for name, values in expected.items():
        np.testing.assert_allclose(ALL[name](rho, np.ones((1, 4)))[0], values, atol=5e-4)
    np.testing.assert_array_equal(MOVING["clip at 1 ± .2 (PPO)"](rho, -np.ones((1, 4)))[0], [0.9, 1.2, 0, 1.1])
