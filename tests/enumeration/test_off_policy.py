"""Importance ratios: which keep the mean, which move it, and where the optimum goes."""

import numpy as np
import pytest

from otb_analysis.enumeration import TreeSpec, population_moments, position_optimum, random_tree, regret
from otb_analysis.enumeration.trees import Tree


def drifted(seed, drift=0.2):
    """A policy and the slightly older one that sampled: same features, parameters a step apart."""
    spec = {"horizon": 4, "shared": 6}
    target = random_tree(TreeSpec(**spec), np.random.default_rng(seed))
    older = random_tree(TreeSpec(**spec, scale=1 + drift), np.random.default_rng(seed))
    return target.sampled_by(older)


def cumulative(rho):
    return np.cumprod(rho, axis=1)


def minimum_prefix(rho):
    least = np.minimum.accumulate(np.concatenate([np.ones((len(rho), 1)), rho[:, :-1]], axis=1), axis=1)
    return rho * least


def ctpo(rho):
    edge = np.sqrt(np.arange(1, rho.shape[1] + 1))
    return np.exp(np.clip(np.log(cumulative(rho)), -0.025 * edge, 0.05 * edge))


KNOWN = {"token": lambda rho: rho, "cumulative": cumulative, "minimum prefix": minimum_prefix}
TRUNCATED = {
    "TIS cap 1.2": lambda rho: np.minimum(rho, 1.2),
    "CTPO clip": ctpo,
    "PPO clip .05": lambda rho: np.clip(rho, 0.95, 1.05),
    "sequence mask .05": lambda rho: rho * (np.abs(np.exp(np.log(rho).mean(axis=1)) - 1) < 0.05)[:, None],
    "GSPO geometric mean": lambda rho: np.exp(np.log(rho).mean(axis=1))[:, None] * np.ones_like(rho),
}


def moved(tree, ratio):
    """How far subtracting the constant 1 moves the mean, as a share of the gradient."""
    zero = np.zeros(tree.mask.shape[1])
    with_constant = population_moments(tree, zero + 1.0, ratio).mean
    return np.linalg.norm(with_constant - population_moments(tree, zero, ratio).mean) / np.linalg.norm(tree.gradient)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("seed", range(3))
def test_unclipped_ratio_known_at_its_token_takes_any_constant(name, seed):
    tree = drifted(seed)
    assert moved(tree, KNOWN[name](tree.ratio)) < 1e-12


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_or_averaged_ratio_lets_a_constant_move_the_mean(name):
    shift = [moved(tree, TRUNCATED[name](tree.ratio)) for tree in map(drifted, range(10))]
    assert np.median(shift) > 0.005


def test_harder_truncation_moves_the_mean_further():
    trees = list(map(drifted, range(20)))
    shift = {name: np.median([moved(t, ratio(t.ratio)) for t in trees]) for name, ratio in TRUNCATED.items()}
    assert shift["TIS cap 1.2"] < shift["CTPO clip"] < shift["sequence mask .05"]
    assert shift["TIS cap 1.2"] < shift["PPO clip .05"] < shift["sequence mask .05"]


def test_whole_sequence_ratio_recovers_the_gradient():
    # E_μ[Πρ · S R] = ∇J
    tree = drifted(4)
    whole = np.broadcast_to(tree.ratio.prod(axis=1)[:, None], tree.mask.shape)
    assert population_moments(tree, np.zeros(4), whole).relative_bias < 1e-12


@pytest.mark.parametrize("ratio", KNOWN.values(), ids=list(KNOWN))
def test_weighted_scores_stay_uncorrelated(ratio):
    tree = drifted(5)
    scaled = ratio(tree.ratio)[:, :, None] * tree.score
    products = tree.expect(np.einsum("mtd,mkd->mtk", scaled, scaled))
    np.testing.assert_allclose(products * (1 - np.eye(4)), 0, atol=1e-13)


def test_regret_identity_holds_with_token_ratios():
    tree: Tree = drifted(6)
    best = population_moments(tree, position_optimum(tree)).variance
    for baseline in np.random.default_rng(0).normal(size=(4, 4)):
        excess = population_moments(tree, baseline).variance - best
        assert abs(excess - regret(tree, baseline)) < 1e-10
