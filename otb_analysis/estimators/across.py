"""Baselines that borrow from the other prompts of the batch."""

import numpy as np

from otb_analysis.estimators.batch import BaselineResult, Batch
from otb_analysis.estimators.means import rloo
from otb_analysis.estimators.spec import NoOptions
from otb_analysis.types import Bool, Float

SHRINKAGE_EPSILON = 1e-6  # Added to the denominator of λ by the published code


def james_stein(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the other rollouts' mean, shrunk towards the mean of the other prompts.

    B_i = (1 − λ)·mean_{j≠i} R_j + λ·m with, over the *other* prompts q only, m = mean_q R̄_q, v² = mean_q var_q/n_q
    (ddof 1; prompts with two rollouts or more), s² = mean_q (R̄_q − m)² and λ = v²/(v² + s² + 1e-6). Neither λ nor m
    has seen rollout i, so it is unbiased. Equal means everywhere give λ near 1; one prompt alone gives `rloo`
    (`fallback`). Public code; arXiv 2511.03710.
    """
    groups, n = batch.groups, batch.groups.sum(batch.present)
    mean = groups.sum(batch.total) / np.maximum(n, 1)
    away = batch.present * (batch.total - groups.spread(mean))
    noise = groups.sum(away**2) / np.maximum(n - 1, 1) / np.maximum(n, 1)
    centre, spread, lone = _others(mean, n > 0)
    v_sq, _, _ = _others(noise, n > 1)
    shrinkage = groups.spread(np.where(lone, 0.0, v_sq / (v_sq + spread + SHRINKAGE_EPSILON)))
    group_mean = rloo(batch, options).baseline[:, 0]
    baseline = np.where(batch.is_singleton, 0.0, (1 - shrinkage) * group_mean + shrinkage * groups.spread(centre))
    return BaselineResult(baseline[:, None], (batch.is_singleton | groups.spread(lone))[:, None])


def james_stein_corrected(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the other rollouts' mean, shrunk towards the mean of the other prompts as far as their noise says.

    As `james_stein`, but λ = v²/(v² + τ²) with v² = σ²/(n − 1) the noise of the mean that is shrunk, σ² = mean_q var_q,
    and τ² = max(s² − mean_q var_q/n_q, 0) the spread of the prompts' own means: s² (ddof 1 here) is the spread of
    *estimated* means, which holds their noise. The published λ takes s² for τ² and shrinks too little. Fewer than two
    other prompts, or none with two rollouts, give `rloo` (`fallback`). Proved.
    """
    groups, n = batch.groups, batch.groups.sum(batch.present)
    mean = groups.sum(batch.total) / np.maximum(n, 1)
    away = batch.present * (batch.total - groups.spread(mean))
    variance = groups.sum(away**2) / np.maximum(n - 1, 1)
    centre, spread, _ = _others(mean, n > 0)
    sigma_sq, _, unknown = _others(variance, n > 1)
    noise, _, _ = _others(variance / np.maximum(n, 1), n > 1)
    others = (n > 0).sum() - (n > 0)
    tau_sq = np.maximum(spread * others / np.maximum(others - 1, 1) - noise, 0)
    v_sq = sigma_sq / np.maximum(n - 1, 1)
    undefined = unknown | (others < 2)
    known = ~undefined & (v_sq > 0)
    shrinkage = groups.spread(np.divide(v_sq, v_sq + tau_sq, out=np.zeros(len(n)), where=known))
    own = rloo(batch, options).baseline[:, 0]
    baseline = np.where(batch.is_singleton, 0.0, (1 - shrinkage) * own + shrinkage * groups.spread(centre))
    return BaselineResult(baseline[:, None], (batch.is_singleton | groups.spread(undefined))[:, None])


def energy_across_loo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the energy-weighted mean return of the other prompts.

    B_p = Σ_{q≠p} Σ_j W_j R_j / Σ_{q≠p} Σ_j W_j over the rollouts j of prompt q, W_j = Σ_t ρ_t² w_t the energy realized
    at the end: `sequence_optimal` of all other prompts together. Within a prompt few rollouts estimate a weighted mean
    badly; other prompts are many, and independent of y, so it is unbiased. No energy there gives the plain mean of the
    same rollouts, one prompt alone gives `rloo` (`fallback`). Constant energy gives Σ L_j R_j / Σ L_j. Proved.
    """
    baseline, undefined = mean_of_others(batch)
    return BaselineResult(baseline[:, None], undefined[:, None])


def mean_of_others(batch: Batch) -> tuple[Float, Bool]:
    """Return the baseline of `energy_across_loo` and where it is a fallback, both [N]."""
    groups = batch.groups
    weight, moment, count, total = (
        groups.spread(over_others(groups.sum(x)))
        for x in (batch.final, batch.final * batch.total, batch.present, batch.total)
    )
    weightless, lone = weight == 0, count == 0
    mean = np.where(weightless, total, moment) / np.where(weightless, np.maximum(count, 1), weight)
    return np.where(lone, rloo(batch, NoOptions()).baseline[:, 0], mean), weightless


def over_others(x: Float) -> Float:
    """Return Σ_{q≠p} x_q at every prompt p, [P, ...].

    Summed from both ends: `total − x_p` would lose its digits where prompt p holds nearly all of the total.
    """
    nothing = np.zeros((1, *x.shape[1:]))
    before = np.concatenate([nothing, np.cumsum(x, axis=0)])[:-1]
    after = np.concatenate([nothing, np.cumsum(x[::-1], axis=0)])[:-1][::-1]
    return before + after


def _others(x: Float, counted: Bool) -> tuple[Float, Float, Bool]:
    """Mean and variance (ddof 0) of x over the other counted prompts, 0 where there is none, and where that is [P]."""
    origin = x[counted].mean() if counted.any() else 0.0
    d = np.where(counted, x - origin, 0.0)
    others = counted.sum() - counted
    mean, square = ((part.sum() - part) / np.maximum(others, 1) for part in (d, d**2))
    return np.where(others > 0, mean + origin, 0.0), np.maximum(square - mean**2, 0.0), others == 0
