"""Baselines of other published methods that look at returns alone: centred elsewhere than at the mean, or rescaled."""

from dataclasses import replace

import numpy as np

from otb_analysis.estimators.batch import BaselineResult, Batch
from otb_analysis.estimators.means import ROUNDING, group_mean
from otb_analysis.estimators.spec import NoOptions, QuantileOptions
from otb_analysis.types import Float, Int

WHITENING_EPSILON = 1e-8  # Added to the variance by the published code


def maxrl(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean and divide by it.

    A_t = (G_t − r̄)/r̄, r̄ = mean_j R_j; A = 0 where r̄ = 0 (`fallback`). With rewards 0 or 1, N rollouts and success rate
    p its expectation is Σ_{k<N} (1 − p)^{k−1} ∇p, the gradient of −Σ_{k<N} (1 − p)^k/k, which is log p as N grows: rare
    successes count more. Public code; the expectation is proved.
    """
    groups = batch.groups
    n = np.maximum(groups.sum(batch.present), 1)
    mean, size = groups.sum(batch.total) / n, np.sqrt(groups.sum(batch.total**2) / n)
    nothing = batch.is_singleton | groups.spread(np.abs(mean) <= ROUNDING * size)
    scale = np.divide(1.0, groups.spread(mean), out=np.zeros(len(nothing)), where=~nothing)
    return replace(group_mean(batch, options), fallback=nothing[:, None], scale=scale[:, None])


def mc_grpo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the median total return of the group, whose median rollout is one more than counts.

    A = (R − median_j R_j)·N/(N − 1) for an odd N: the median rollout has A = 0, and the mean is over the other N − 1.
    An even N has no median rollout: the middle of two, and no factor. Known from the abstract; that nothing is divided
    by a spread, and the even N, are our choice.
    """
    n = batch.groups.sum(batch.present).astype(np.int64)
    median = (_ordered(batch, (n - 1) // 2) + _ordered(batch, n // 2)) / 2
    factor = np.where((n % 2 == 1) & (n > 1), n / np.maximum(n - 1, 1), 1.0)
    baseline = np.where(batch.is_singleton, 0.0, batch.groups.spread(median))
    return BaselineResult(baseline[:, None], batch.is_singleton[:, None], scale=batch.groups.spread(factor)[:, None])


def qae(batch: Batch, options: QuantileOptions) -> BaselineResult:
    """Centre by a quantile of the total returns of the group.

    B = the least R_j that a share q of the group does not exceed. With rewards 0 or 1 it is 0 where at most 1 − q of
    the group succeeds, so that only successes move anything, and 1 elsewhere, so that only failures do. Known from the
    abstract; q = 0.4 and that nothing is divided by a spread are our choice.
    """
    n = batch.groups.sum(batch.present)
    # q·n is rounded: 0.7 · 10 would be the eighth
    rank = np.ceil(options.quantile * n - ROUNDING * n).astype(np.int64) - 1
    quantile = _ordered(batch, np.maximum(rank, 0))
    baseline = np.where(batch.is_singleton, 0.0, batch.groups.spread(quantile))
    return BaselineResult(baseline[:, None], batch.is_singleton[:, None])


def gpg(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean and multiply by the batch's rollouts over those that were paid.

    A = α·(G − mean_j R_j), α = N/max(#{R_j ≠ 0}, 1) over the whole batch. Public code.
    """
    factor = batch.present.sum() / max(np.count_nonzero(batch.total), 1)
    return replace(group_mean(batch, options), scale=np.full((1, 1), factor))


def reinforce_plus_plus_baseline(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean, then whiten over all tokens of the batch.

    With x_i = R_i − mean_j R_j and L_i tokens, A = (G − mean_j R_j − μ)/√(σ² + 1e-8), μ = Σ L_i x_i/Σ L_i and σ² the
    variance of x over tokens, ddof 1. No spread, as with equal returns everywhere, gives A = 0 (`fallback`). A rollout
    alone in its group has mean 0 (`fallback`). Public code, for terminal rewards.
    """
    centre = np.where(batch.is_singleton, 0.0, group_mean(batch, options).baseline[:, 0])
    length = batch.length.astype(np.float64)
    tokens, x = length.sum(), batch.present * (batch.total - centre)
    shift = (length * x).sum() / max(tokens, 1)
    variance = (length * (x - shift) ** 2).sum() / max(tokens - 1, 1)
    flat = np.sqrt(variance) <= ROUNDING * np.sqrt((length * batch.total**2).sum() / max(tokens, 1))
    scale = 0.0 if flat else 1 / np.sqrt(variance + WHITENING_EPSILON)
    return BaselineResult((centre + shift)[:, None], (batch.is_singleton | flat)[:, None], scale=np.full((1, 1), scale))


def _ordered(batch: Batch, rank: Int) -> Float:
    """Return the total return of each group with so many below it, 0 where there is none [P]."""
    groups, count = batch.groups, batch.groups.count
    order = np.lexsort((batch.total, batch.present == 0, groups.index))  # those without tokens come last
    starts = np.cumsum(count) - count
    place = np.minimum(starts + np.minimum(rank, np.maximum(count - 1, 0)), max(len(order) - 1, 0))
    return batch.total[order[place]] if len(order) else np.zeros(len(count))
