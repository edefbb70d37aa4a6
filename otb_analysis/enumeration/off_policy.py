"""Importance ratios on enumerated policies: which let a baseline leave the mean alone, and how far the others move it.

A ratio that is known at its token and not clipped multiplies s_t by something of mean zero given the prefix, so any
constant drops out. Truncation, clipping, masks and averages over the whole completion break that.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from otb_analysis.enumeration.population import masked_rows
from otb_analysis.enumeration.trees import Tree, TreeSpec, random_tree
from otb_analysis.types import Float

DRIFT = 0.2
"""The policy that sampled has parameters larger by this share."""

Factor = Callable[[Float, Float], Float]
"""(ρ [M, T], A [M, T]) → what multiplies A_t s_t [M, T]."""


def cumulative(rho: Float, advantage: Float) -> Float:
    """Return Π_{j≤t} ρ_j.

    Args:
        rho: Token ratios ρ [M, T].
        advantage: Not looked at.
    """
    return np.asarray(np.cumprod(rho, axis=1), np.float64)


def minimum_prefix(rho: Float, advantage: Float) -> Float:
    """Return ρ_t · min_{j<t} ρ_j, at most ρ_t. The product form is a guess (MinPRO, arXiv 2601.22718).

    Args:
        rho: Token ratios ρ [M, T].
        advantage: Not looked at.
    """
    before = np.concatenate([np.ones((len(rho), 1)), rho[:, :-1]], axis=1)
    return rho * np.minimum.accumulate(before, axis=1)


def ctpo_clip(rho: Float, advantage: Float) -> Float:
    """Return the cumulative ratio with its logarithm clipped to [−.025 √t, .05 √t] (CTPO, arXiv 2605.07331).

    Args:
        rho: Token ratios ρ [M, T].
        advantage: Not looked at.
    """
    edge = np.sqrt(np.arange(1, rho.shape[1] + 1))
    return np.exp(np.clip(np.log(cumulative(rho, advantage)), -0.025 * edge, 0.05 * edge))


def ppo_clip(rho: Float, advantage: Float) -> Float:
    """Return ρ_t, and 0 where PPO's clip at 1 ± .2 has no gradient: A > 0 with ρ > 1.2, A < 0 with ρ < .8.

    Args:
        rho: Token ratios ρ [M, T].
        advantage: A [M, T].
    """
    clipped = ((advantage > 0) & (rho > 1.2)) | ((advantage < 0) & (rho < 0.8))
    return np.where(clipped, 0.0, rho)


def sequence_mask(rho: Float, advantage: Float) -> Float:
    """Return ρ_t, and 0 in completions whose geometric mean ratio is more than .05 from 1.

    Args:
        rho: Token ratios ρ [M, T].
        advantage: Not looked at.
    """
    return rho * (np.abs(geometric_mean(rho, advantage) - 1) < 0.05)


def geometric_mean(rho: Float, advantage: Float) -> Float:
    """Return (Π_j ρ_j)^{1/T} at every token (GSPO).

    Args:
        rho: Token ratios ρ [M, T].
        advantage: Not looked at.
    """
    return np.broadcast_to(np.exp(np.log(rho).mean(axis=1, keepdims=True)), rho.shape)


def whole_sequence(rho: Float, advantage: Float) -> Float:
    """Return Π_j ρ_j at every token: unbiased for ∇J, but not known at the token.

    Args:
        rho: Token ratios ρ [M, T].
        advantage: Not looked at.
    """
    return np.broadcast_to(rho.prod(axis=1, keepdims=True), rho.shape)


KNOWN: dict[str, Factor] = {
    "token": lambda rho, advantage: rho,
    "cumulative": cumulative,
    "minimum prefix": minimum_prefix,
}
"""Known at the token and unclipped: any constant leaves the mean alone and the system stays diagonal."""

MOVING: dict[str, Factor] = {
    "truncation at 1.2 (TIS)": lambda rho, advantage: np.minimum(rho, 1.2),
    "cumulative, clipped (CTPO)": ctpo_clip,
    "clip at 1 ± .2 (PPO)": ppo_clip,
    "sequence mask ± .05": sequence_mask,
    "geometric mean (GSPO)": geometric_mean,
}
"""A constant moves the mean."""


def drifted(spec: TreeSpec, seed: int, drift: float = DRIFT) -> Tree:
    """Draw a policy and the one that sampled for it: same features and rewards, parameters larger by a share.

    Args:
        spec: What to draw from; without end token, so that every completion has T tokens.
        seed: Seed of features, parameters and rewards.
        drift: The share.
    """
    older = replace(spec, scale=spec.scale * (1 + drift))
    return random_tree(spec, np.random.default_rng(seed)).sampled_by(random_tree(older, np.random.default_rng(seed)))


def mean_gradient(tree: Tree, factor: Factor, baseline: Float) -> Float:
    """Return E[Σ_t f(ρ, A)_t A_t s_t], A = G − B, exactly [D].

    Args:
        tree: The policy, with the one that samples.
        factor: f.
        baseline: B [T] or [M, T].
    """
    advantage = tree.returns - masked_rows(baseline, tree)
    return np.einsum("m,mt,mtd->d", tree.prob, factor(tree.ratio, advantage) * advantage, tree.score)


def mean_shift(tree: Tree, factor: Factor, baseline: float | None = None) -> float:
    """Return how far a constant baseline moves the mean: ‖E g(B) − E g(0)‖/‖∇J‖.

    Args:
        tree: The policy, with the one that samples.
        factor: What multiplies A_t s_t.
        baseline: B; None means J, the limit of the group mean.
    """
    b = np.full(tree.mask.shape[1], tree.objective if baseline is None else baseline)
    moved = mean_gradient(tree, factor, b) - mean_gradient(tree, factor, np.zeros_like(b))
    return float(np.linalg.norm(moved) / np.linalg.norm(tree.gradient))
