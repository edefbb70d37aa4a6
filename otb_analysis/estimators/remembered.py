"""Baselines that remember: earlier steps of a run, earlier epochs of a prompt, earlier rollouts of a group; and EVPO.

What has only seen earlier steps is independent of y given them, so it leaves the mean of the gradient alone. What has
the batch itself in its memory, as published, does not.
"""

import numpy as np

from otb_analysis.arrays import rank_within
from otb_analysis.errors import InputError
from otb_analysis.estimators.group import ROUNDING, batch_mean, group_mean, rloo, without_self
from otb_analysis.estimators.spec import (
    NOWHERE,
    BaselineResult,
    Batch,
    DiscountOptions,
    KalmanOptions,
    NoOptions,
)
from otb_analysis.types import Float, Tallies

EPSILON = 1e-8
"""Added to a standard deviation: by the published code of KRPO, and here for `ebpo`, whose paper says ε only."""


def krpo(batch: Batch, options: KalmanOptions) -> BaselineResult:
    """Centre by a Kalman filter that runs over the group's rollouts one after the other, and divide by its deviation.

    From x = 0 and P = 1, for each rollout in turn: P ← P + Q, K = P/(P + R), x ← x + K·(R_i − x), P ← (1 − K)·P, then
    A_i = (G − x)/(√P + 1e-8). K does not look at rewards, so E ĝ_i = (1 − K_i)/(√P_i + 1e-8)·∇J: the direction of ∇J
    at another length, and the first rollout next to nothing. The filter starts anew in every group. A rollout alone in
    its group has B = 0 (`fallback`). Public code of KRPO, arXiv 2505.07527; the mean is proved.
    """
    groups, n = batch.groups, len(batch.mask)
    order = np.lexsort((batch.present == 0, groups.index))  # those without tokens come last
    rank = np.where(batch.present > 0, rank_within(groups.index, order), -1) if n else np.zeros(0, int)
    x, variance = np.zeros(len(groups.labels)), 1.0
    baseline, scale = np.zeros(n), np.ones(n)
    for k in range(rank.max(initial=-1) + 1):
        rows = np.flatnonzero(rank == k)
        of = groups.index[rows]
        predicted = variance + options.process
        gain = predicted / (predicted + options.noise)
        x[of] += gain * (batch.total[rows] - x[of])
        variance = (1 - gain) * predicted
        baseline[rows], scale[rows] = x[of], 1 / (np.sqrt(variance) + EPSILON)
    alone = batch.is_singleton
    return BaselineResult(
        np.where(alone, 0.0, baseline)[:, None], alone[:, None], scale=np.where(alone, 1.0, scale)[:, None]
    )


def ebpo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean, shrunk towards the mean of all rollouts so far, then whiten over the batch.

    V = (1 − S)·mean_j R_j + S·μ with S = (σ²/n)/(σ²/n + τ²); μ and σ² are mean and variance of the returns of all
    rollouts of the run, τ² the variance of all its group means, this batch included. A = (G − V − m)/(s + 1e-8), m
    and s mean and standard deviation of R − V over the batch's rollouts: m takes V back where the batch is one prompt,
    which then is `grpo`. A rollout alone in its group has B = m
    (`fallback`), no spread gives A = 0 (`fallback`). After the text of EBPO, arXiv 2602.05165; the authors' code was
    not seen, and ddof 1 everywhere is ours.
    """
    means, state = group_mean(batch, options).baseline[:, 0], _pooled(batch)
    counted, present = batch.groups.sum(batch.present), batch.present > 0
    baseline = np.where(batch.is_singleton, 0.0, _shrunk(means, batch.groups.spread(counted), state))
    raw = (batch.total - baseline)[present]
    shift, spread = raw.mean() if len(raw) else 0.0, raw.std(ddof=1) if len(raw) > 1 else 0.0
    flat = spread <= ROUNDING * np.sqrt((batch.total**2).sum() / max(len(raw), 1))
    scale = np.full((1, 1), 0.0 if flat else 1 / (spread + EPSILON))
    return BaselineResult((baseline + shift)[:, None], (batch.is_singleton | flat)[:, None], scale=scale, state=state)


def ebpo_loo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the other rollouts' mean, shrunk towards the mean of all rollouts of earlier steps.

    B_i = (1 − S)·mean_{j≠i} R_j + S·μ, S = (σ²/(n − 1))/(σ²/(n − 1) + τ²) as in `ebpo`, but μ, σ² and τ² are those of
    *earlier* steps, and nothing is whitened: given them it is unbiased. The first step is `rloo`. Proved.
    """
    means, count = rloo(batch, options).baseline[:, 0], batch.groups.sum(batch.present)
    baseline = _shrunk(means, batch.groups.spread(count) - 1, _tallies(batch, 3))
    alone = batch.is_singleton
    return BaselineResult(np.where(alone, 0.0, baseline)[:, None], alone[:, None], state=_pooled(batch))


def _shrunk(means: Float, count: Float, state: Tallies | None) -> Float:
    """Return each rollout's mean of so many returns, shrunk to the mean of all; as it is where nothing is known."""
    if state is None:
        return means
    sigma_sq, tau_sq = state.sums[:, 2] / np.maximum(state.sums[:, 0] - 1, 1)  # of returns, and of group means
    noise = sigma_sq / np.maximum(count, 1)
    share = np.divide(noise, noise + tau_sq, out=np.zeros(len(means)), where=noise > 0)
    return (1 - share) * means + share * state.sums[0, 1]


def _pooled(batch: Batch) -> Tallies:
    """Return the moments of earlier steps with those of this batch's returns and group means."""
    n = batch.groups.sum(batch.present)
    means = batch.groups.sum(batch.total)[n > 0] / n[n > 0]
    # How many they are, their mean and Σ (x − mean)²
    pairs = [(x, x.mean() if len(x) else 0.0) for x in (batch.total[batch.present > 0], means)]
    new = np.array([[len(x), mean, ((x - mean) ** 2).sum()] for x, mean in pairs])
    old = _tallies(batch, 3)
    if old is None:
        return Tallies(np.arange(2), new)
    # Welford's sums of two samples (Chan, Golub and LeVeque)
    count = np.maximum(old.sums[:, 0] + new[:, 0], 1)
    away, share = new[:, 1] - old.sums[:, 1], new[:, 0] / count
    squares = old.sums[:, 2] + new[:, 2] + away**2 * old.sums[:, 0] * share
    return Tallies(np.arange(2), np.stack([old.sums[:, 0] + new[:, 0], old.sums[:, 1] + away * share, squares], axis=1))


def _tallies(batch: Batch, width: int) -> Tallies | None:
    """Return what earlier steps left, checked."""
    state = batch.state
    if state is None:
        return None
    if (
        not isinstance(state, Tallies)
        or state.sums.shape != (len(state.key), width)
        or not np.isfinite(state.sums).all()
    ):
        raise InputError("state is not that of this estimator; pass the state that estimate returned a step earlier.")
    return state


def dbb(batch: Batch, options: DiscountOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the prompt's discounted Beta mean, and divide by its standard deviation.

    Each prompt begins with α = β = 1; when it is sampled α ← λα + Σ_j R_j and β ← λβ + Σ_j (1 − R_j). Then
    p̂ = α/(α + β) and A = (G − p̂)/√(p̂(1 − p̂)). `EstimatorInputs.prompt` tells prompts apart; without it every group
    is a new one. Made for rewards from 0 to 1; where p̂ leaves (0, 1), A = 0 (`fallback`). Text of the discounted
    Beta–Bernoulli estimator, arXiv 2603.18444, with the λ of its 8B model; the authors' code was not seen. Without
    rollout i, and not divided, it is unbiased given earlier epochs.
    """
    groups, n = batch.groups, batch.groups.sum(batch.present)
    key = np.arange(len(n))
    if batch.prompt is not None:
        there = batch.present > 0  # the others have no number
        key[groups.index[there]] = batch.prompt[there]
    old = _tallies(batch, 2) if batch.prompt is not None else None
    old = old or Tallies(key[:0], np.ones((0, 2)))
    known, place = np.unique(np.concatenate([old.key, key[n > 0]]), return_inverse=True)
    sums = np.ones((len(known), 2))
    sums[place[: len(old.key)]] = old.sums
    paid = np.stack([groups.sum(batch.total), n - groups.sum(batch.total)], axis=1)
    visited = place[len(old.key) :]
    alpha_beta = np.ones_like(paid)
    alpha_beta[n > 0] = sums[visited]
    alpha_beta = options.discount * alpha_beta + paid
    sums[np.unique(visited)] *= options.discount
    np.add.at(sums, visited, paid[n > 0])  # a prompt may have several groups in a batch
    state = Tallies(known.astype(np.int64), sums) if batch.prompt is not None else None
    counts = groups.spread(alpha_beta)
    if leave_one_out:
        counts = counts - np.stack([batch.total, batch.present - batch.total], axis=1)
    whole = counts.sum(axis=1)
    mean = np.divide(counts[:, 0], whole, out=np.zeros(len(whole)), where=whole > 0)
    if leave_one_out:
        return BaselineResult(mean[:, None], (whole <= 0)[:, None], state=state)
    variance = mean * (1 - mean)
    flat = variance <= ROUNDING
    scale = np.divide(1.0, np.sqrt(np.maximum(variance, ROUNDING)), out=np.zeros(len(mean)), where=~flat)
    return BaselineResult(mean[:, None], flat[:, None], scale=scale[:, None], state=state)


dbb_loo = without_self(dbb, "Centre by the prompt's discounted Beta mean without the rollout.")


def evpo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the critic where it explains the returns of the batch, else by the batch mean.

    B_t = V(h_t) where 1 − Var(G_t − V(h_t))/Var(G_t) > 0 over the batch's policy tokens, else `batch_mean`. The switch
    looks at the very returns, so it is biased even with a perfect critic. Abstract of EVPO, arXiv 2604.19485; the
    authors' code was not seen. That tokens, not rollouts, are counted, and that nothing is divided by, is ours.
    """
    to_go, value = batch.returns[batch.mask], batch.value[batch.mask]
    if len(to_go) and np.var(to_go - value) < np.var(to_go):
        return BaselineResult(batch.value, NOWHERE)
    return batch_mean(batch, options)
