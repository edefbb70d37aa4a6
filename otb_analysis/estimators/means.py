"""Baselines that look at returns and lengths only."""

from dataclasses import replace

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.estimators.batch import NOWHERE, BaselineResult, Batch
from otb_analysis.estimators.spec import NoOptions
from otb_analysis.estimators.weighting import rollout_average, without_self
from otb_analysis.types import Bool, Float

GRPO_EPSILON = 1e-6  # Added to the standard deviation by the published code

ROUNDING = 1e-12
"""A standard deviation below this share of the returns' size is rounding: equal totals summed in another order."""


def none(batch: Batch, options: NoOptions) -> BaselineResult:
    """Return the return-to-go itself.

    B = 0, A_t = G_t. Unbiased; the yardstick a baseline has to beat.
    """
    return BaselineResult(np.zeros((1, 1)), NOWHERE)


def batch_mean(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the mean total return of the whole batch.

    B = (1/N) Σ_j R_j over all rollouts of all prompts. Public code; the group mean when the batch is one group.
    """
    n = len(batch.mask)
    one_group = replace(batch, groups=Groups(np.zeros(n, np.int64), np.zeros(1, np.int64)))
    return group_mean(one_group, options, leave_one_out=leave_one_out)


batch_mean_loo = without_self(batch_mean, "Centre by the mean total return of all other rollouts in the batch.")


def group_mean(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the mean total return of the rollout's own group.

    B_i = (1/N) Σ_j R_j. Its expectation is (1 − 1/N)·∇J: shorter by 1/N, direction intact. Public code.
    """
    return rollout_average(batch, batch.present, leave_one_out=leave_one_out)


rloo = without_self(group_mean, "Centre by the mean total return of the *other* rollouts of the group.")
"""B_i = Σ_{j≠i} R_j / (N − 1); with one terminal reward A = N/(N−1)·(R − mean). Public code."""


def opo(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the length-weighted mean total return of the group.

    B = Σ_j L_j R_j / Σ_j L_j, L in policy tokens. Equal lengths give the group mean, and constant token energy turns
    `sequence_optimal` into it. Public code.
    """
    return rollout_average(batch, batch.length.astype(np.float64), leave_one_out=leave_one_out)


opo_loo = without_self(opo, "Centre by the length-weighted mean total return of the other rollouts.")


def grpo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean and divide by the group's standard deviation.

    A_t = (G_t − mean_j R_j) / (std_j R_j + 1e-6), ddof 1. A group of one, or of equal total returns, has no scale:
    A = 0 there. Public code, for terminal rewards; with per-token rewards mean and std stay those of total returns.
    """
    flat, scale = group_scale(batch, ddof=1, epsilon=GRPO_EPSILON)
    return replace(group_mean(batch, options), fallback=flat[:, None], scale=scale[:, None])


def group_scale(batch: Batch, *, ddof: int, epsilon: float) -> tuple[Bool, Float]:
    """Return one over the standard deviation of the group's total returns.

    Returns:
        Where there is no scale, a group of one or of equal returns up to rounding [N], and the scale, 0 there [N].
    """
    groups, present = batch.groups, batch.present
    n = groups.sum(present)
    centre = groups.spread(groups.sum(batch.total) / np.maximum(n, 1))
    std = np.sqrt(groups.sum(present * (batch.total - centre) ** 2) / np.maximum(n - ddof, 1))
    size = np.sqrt(groups.sum(batch.total**2) / np.maximum(n, 1))
    flat = batch.is_singleton | groups.spread(std <= ROUNDING * size)
    return flat, np.divide(1.0, groups.spread(std) + epsilon, out=np.zeros(len(flat)), where=~flat)
