"""The computation behind every group baseline: a weighted mean over a group, with or without the rollout itself."""

from collections.abc import Callable
from functools import partial

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.estimators.batch import BaselineResult, Batch
from otb_analysis.estimators.spec import Tail
from otb_analysis.types import Bool, Float

DOMINANT = 0.75
"""Above this share of a group's weight, which at most one rollout has, `total − weight` would cancel."""


def weighted_mean(
    x: Float, weight: Float, counted: Float, groups: Groups, *, leave_one_out: bool
) -> tuple[Float, Bool]:
    """Return the group's weighted mean at every rollout, the plain one of what counts where all weights are zero.

    Σ_j ω_j x_j / Σ_j ω_j over the group, j ≠ i when `leave_one_out`. Nothing is added to the denominator.
    x, ω ≥ 0 and `counted`, 1 or 0, are [N] or [N, T]; ω = 0 takes an entry out.

    Returns:
        The mean, and where the plain one stands in for it because all weights are zero.
    """
    mean, weightless = _means(x, weight, groups, leave_one_out)
    if weightless.any():
        mean = np.where(weightless, _means(x, counted, groups, leave_one_out)[0], mean)
    return (mean, weightless) if leave_one_out else (groups.spread(mean), groups.spread(weightless))


def _means(x: Float, weight: Float, groups: Groups, leave_one_out: bool) -> tuple[Float, Bool]:
    """Mean and where all weights are zero: one row per rollout if each leaves itself out, else one row per group."""
    if leave_one_out:
        total, moment = _sums_of_others(weight, weight * x, groups)
    else:
        total, moment = groups.sum(weight), groups.sum(weight * x)
    weightless = total == 0
    return np.where(weightless, 0.0, moment / np.where(weightless, 1.0, total)), weightless


def _sums_of_others(weight: Float, moment: Float, groups: Groups) -> tuple[Float, Float]:
    """Sum weights and moments over j ≠ i without cancellation.

    `whole − x` loses its digits where x is nearly the whole. So a rollout that dominates its group gets a sum of the
    others alone.
    """
    total = groups.spread(groups.sum(weight))
    dominant = (weight > DOMINANT * total).reshape(len(weight), -1)
    columns = dominant.any(axis=0)  # only these few positions need the second sum
    dominant = dominant[:, columns]

    def others(x: Float, whole: Float) -> Float:
        out = (whole - x).reshape(len(x), -1)
        small = np.where(dominant, 0.0, x.reshape(len(x), -1)[:, columns])
        out[:, columns] = np.where(dominant, groups.spread(groups.sum(small)), out[:, columns])
        return out.reshape(x.shape)

    return others(weight, total), others(moment, groups.spread(groups.sum(moment)))


def without_self(formula: Callable[..., BaselineResult], summary: str) -> Callable[..., BaselineResult]:
    """Return a formula with its sums over j ≠ i: the baseline of rollout i has not seen it, so it is unbiased.

    `summary` is its line in the catalogue.
    """
    loo = partial(formula, leave_one_out=True)
    loo.__doc__ = summary
    return loo


def rollout_average(batch: Batch, weight: Float, *, leave_one_out: bool = False) -> BaselineResult:
    """Return the baseline that is one weighted mean of total returns per rollout.

    B_i = Σ_j ω_j R_j / Σ_j ω_j; zero total weight gives the plain mean of the same rollouts, a group of one B = 0.
    ω [N] is zero for rollouts without tokens.
    """
    mean, weightless = weighted_mean(batch.total, weight, batch.present, batch.groups, leave_one_out=leave_one_out)
    return BaselineResult(np.where(batch.is_singleton, 0.0, mean)[:, None], (weightless | batch.is_singleton)[:, None])


def position_average(batch: Batch, weight: Float, tail: Tail, *, leave_one_out: bool = False) -> BaselineResult:
    """Return the baseline that is a weighted mean over the rollouts alive at the same policy position.

    B_{i,t} = Σ_j ω_{j,t} G_{j,t} / Σ_j ω_{j,t} over j alive at t; zero total weight gives the plain mean of the same
    rollouts, a group of one B = 0, and where no other rollout is alive the tail policy decides.
    """
    alive, groups, returns = batch.alive, batch.groups, batch.returns
    mean, weightless = _means(returns, weight * alive, groups, leave_one_out)
    count = groups.sum(alive)
    lone, taken = count == 1, count > 0
    if leave_one_out:
        lone, taken = groups.spread(lone), batch.mask
    if (weightless & taken).any():
        mean = np.where(weightless, _means(returns, alive, groups, leave_one_out)[0], mean)
    mean, fallback = np.where(lone, 0.0, mean), weightless | lone
    if not leave_one_out:
        mean, fallback = groups.spread(mean), groups.spread(fallback)
    return BaselineResult(mean if tail == "own_return" else _with_tail(batch, mean, tail), fallback)


def _with_tail(batch: Batch, mean: Float, tail: Tail) -> Float:
    """Replace B where no other rollout is alive; a group of one keeps B = 0."""
    finished, _ = weighted_mean(batch.total, batch.final, batch.present, batch.groups, leave_one_out=True)
    lone = batch.groups.spread(batch.groups.sum(batch.alive) == 1) & ~batch.is_singleton[:, None]
    return np.where(lone, batch.returns if tail == "zero" else finished[:, None], mean)
