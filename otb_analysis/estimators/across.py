"""Baselines that borrow from the other prompts of the batch: shrinkage, a weighted mean, and a regression.

The regression predicts from what is known before each token. Every feature is a number of the rollout, 1 or m, times a
number of the token, 1, f, h or x. So all that the fit needs of a rollout is Σ_t w z zᵀ with z = (1, f, h, x), and no
[N, T, 8] array is ever formed.
"""

from collections.abc import Iterator

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.estimators.group import rloo
from otb_analysis.estimators.spec import FEATURES, BaselineResult, Batch, NoOptions, RegressionOptions
from otb_analysis.types import Bool, Float, NormalEquations

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
    leave_one_out = rloo(batch, options).baseline[:, 0]
    baseline = np.where(batch.is_singleton, 0.0, (1 - shrinkage) * leave_one_out + shrinkage * groups.spread(centre))
    return BaselineResult(baseline[:, None], (batch.is_singleton | groups.spread(undefined))[:, None])


def energy_across_loo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the energy-weighted mean return of the other prompts.

    B_p = Σ_{q≠p} Σ_j W_j R_j / Σ_{q≠p} Σ_j W_j over the rollouts j of prompt q, W_j = Σ_t ρ_t² w_t the energy realized
    at the end: `sequence_optimal` of all other prompts together. Within a prompt few rollouts estimate a weighted mean
    badly; other prompts are many, and independent of y, so it is unbiased. No energy there gives the plain mean of the
    same rollouts, one prompt alone gives `rloo` (`fallback`). Constant energy gives Σ L_j R_j / Σ L_j. Proved.
    """
    groups = batch.groups
    weight, moment, count, total = (
        groups.spread(over_others(groups.sum(x)))
        for x in (batch.final, batch.final * batch.total, batch.present, batch.total)
    )
    weightless = weight == 0
    mean = np.where(weightless, total, moment) / np.where(weightless, np.maximum(count, 1), weight)
    baseline = np.where(count == 0, rloo(batch, options).baseline[:, 0], mean)
    return BaselineResult(baseline[:, None], weightless[:, None])


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


BLOCK_ELEMENTS = 1 << 16
"""Entries of [rows, T] whose features are held at once, so that they stay in cache."""

RANK = 1e-12
"""Below this share of the largest, an eigenvalue of the scaled normal equations is rounding."""

ROUNDING = 1e-12
"""Below this share of Σ w φ², what is left of it around the mean is rounding."""


def energy_regression(batch: Batch, options: RegressionOptions) -> BaselineResult:
    """Centre by what a regression over the other prompts predicts from the past of each token.

    B_{i,t} = φ_{i,t}·β_{−p}, β_{−p} = argmin Σ_{q≠p} Σ_{j,t} w_{j,t} (R_j − φ_{j,t}·β)² + ridge·Σ_k β_k² Σ w φ_k² over
    all tokens of the *other* prompts, w_t = ρ_t² w_t off-policy; the coefficient of 1 is not penalised, and in the
    penalty m counts from the mean of R (if φ has each feature also without m). The features
    φ = (1, m, f, m·f, h, m·h, x, m·x) are known before y_t: m the mean return of the other rollouts of the prompt,
    f = u/(1 + u) with u = W_{t−1}, h = H_t/(1 + H_t) with the entropy H_t (rounding below 0 counts as 0), x = t/T_max,
    t from 1. β has not seen the prompt, so it is unbiased, forward-only, and fits the diagonal of the variance where
    the reward is terminal. The units of weights, rewards and T_max and a constant in all rewards do not matter.

    With `memory` λ the sums of earlier steps count too: Σ_{q≠p} (this step) + λ·`state`, and `Estimate.state` is
    Σ (this step) + λ·`state`.

    Features (1) alone, or a ridge without end, give `energy_across_loo`, (m) alone β·`rloo`. A rollout alone in its
    group has no m and takes no part in a fit with m. Its B, and all of them where the fit has no token with weight, is
    that of `energy_across_loo` (`fallback`). Proved.
    """
    names = options.used
    longest = int(batch.length.max(initial=0))
    if options.T_max and longest > options.T_max:
        raise InputError(
            f"T_max is {options.T_max} but a rollout has {longest} policy tokens; pass the sampling limit."
        )
    by_rollout, by_token = (tuple(FEATURES[name][k] for name in names) for k in (0, 1))
    parts = tuple(dict.fromkeys(("1", *by_token)))
    fitted = batch.present * ~batch.is_singleton if "m" in by_rollout else batch.present
    factor = {"1": np.ones(len(fitted)), "m": rloo(batch, NoOptions()).baseline[:, 0]}
    c = np.stack([factor[name] for name in by_rollout], axis=1)
    z = np.array([parts.index(part) for part in by_token])

    # Σ_t w z zᵀ of every rollout; the first part of z is 1
    inner = np.empty((len(batch.mask), len(parts), len(parts)))
    for rows, tokens in _blocks(batch, parts, options.T_max):
        inner[rows] = (tokens * batch.weight[rows, None, :]) @ tokens.swapaxes(1, 2)
    products = fitted[:, None, None] * c[:, :, None] * c[:, None, :] * inner[:, z[:, None], z]
    gram = batch.groups.sum(products.reshape(len(c), -1)).reshape(-1, len(z), len(z))
    moment = batch.groups.sum((fitted * batch.total)[:, None] * c * inner[:, z, 0])
    old_gram, old_moment = _remembered(batch.state, options)
    others = over_others(gram) + old_gram, over_others(moment) + old_moment
    # Counted, not weighed: a ridge that saw the energy of the prompt itself would bias its baseline
    prompts = int((batch.groups.sum(batch.present) > 0).sum())
    ridge = options.ridge_for(prompts, batch.state is not None and options.memory > 0)
    beta = batch.groups.spread(coefficients(*others, names, ridge))

    by_part = np.stack([(c * beta * (z == k)).sum(axis=1) for k in range(len(parts))], axis=1)
    baseline = np.empty(batch.mask.shape)
    for rows, tokens in _blocks(batch, parts, options.T_max):
        baseline[rows] = (by_part[rows, None, :] @ tokens)[:, 0]
    undefined = (fitted == 0) | batch.groups.spread(np.trace(others[0], axis1=1, axis2=2) == 0)
    if undefined.any():
        baseline[undefined] = energy_across_loo(batch, NoOptions()).baseline[undefined]
    state = None
    if options.memory:
        state = NormalEquations(names, gram.sum(axis=0) + old_gram, moment.sum(axis=0) + old_moment)
    return BaselineResult(baseline, undefined[:, None], state=state)


def _remembered(state: object, options: RegressionOptions) -> tuple[Float, Float]:
    """Return the sums of earlier steps as they count now; zero without memory."""
    names, k = options.used, len(options.used)
    if state is None or not options.memory:
        return np.zeros((k, k)), np.zeros(k)
    if not isinstance(state, NormalEquations):
        raise InputError(f"state is a {type(state).__name__}; pass the state of the same estimator.")
    if state.features != names or state.gram.shape != (k, k) or state.moment.shape != (k,):
        raise InputError(
            f"state has features {state.features} but the options have {names}; pass the state of the same options."
        )
    if not (np.isfinite(state.gram).all() and np.isfinite(state.moment).all()):
        raise InputError("state has a NaN or infinity; pass the state that estimate returned a step earlier.")
    return options.memory * state.gram, options.memory * state.moment


def _blocks(batch: Batch, parts: tuple[str, ...], limit: int) -> Iterator[tuple[slice, Float]]:
    """Yield a few rows at a time and their z [n, len(parts), T]."""
    n, width = batch.mask.shape
    step = max(BLOCK_ELEMENTS // max(width, 1), 1)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        z = np.ones((rows.stop - start, len(parts), width))
        for k, part in enumerate(parts):
            if part == "x":
                z[:, k] = np.arange(1, width + 1) / limit
            elif part == "h":
                entropy = np.maximum(batch.entropy[rows], 0.0)
                np.divide(entropy, 1 + entropy, out=z[:, k])
            elif part == "f":
                z[:, k, :1] = 0.0
                before = np.cumsum(batch.weight[rows, :-1], axis=1)
                np.divide(before, 1 + before, out=z[:, k, 1:])
        yield rows, z


def coefficients(gram: Float, moment: Float, names: tuple[str, ...], ridge: float) -> Float:
    """Return β [P, K] from the normal equations [P, K, K] and [P, K].

    Each feature is first scaled to Σ w φ² = 1, so that the penalty and the rank do not depend on units. Of features
    that the tokens cannot tell apart the shortest β is taken; a feature that is 0 everywhere gets 0.
    """
    # With returns and m counted from Σ w R / Σ w of the tokens a penalty does not see a constant that all rewards
    # share. It takes the features without m, too; where any of them is missing nothing is shifted.
    shift, mean, one = np.tile(np.eye(len(names)), (len(gram), 1, 1)), np.zeros(len(gram)), 0
    plain = {k: FEATURES[name][1] for k, name in enumerate(names) if FEATURES[name][0] == "m"}
    if "1" in names:
        one = names.index("1")
    if {"1", *plain.values()} <= set(names):
        weight = gram[:, one, one]
        mean = moment[:, one] / np.where(weight > 0, weight, 1.0)
        for k, name in plain.items():
            shift[:, k, names.index(name)] = -mean
    back = shift.swapaxes(1, 2)
    centred = shift @ gram @ back
    target = (shift @ (moment - mean[:, None] * gram[:, one])[:, :, None])[:, :, 0]
    square = np.diagonal(centred, axis1=1, axis2=2)
    # Where m is the same everywhere, what is left of m − mean is rounding
    seen = square > ROUNDING * np.diagonal(gram, axis1=1, axis2=2)
    unit = np.where(seen, 1 / np.sqrt(np.where(seen, square, 1.0)), 0.0)
    scaled = centred * unit[:, :, None] * unit[:, None, :] + ridge * np.diag([float(name != "1") for name in names])
    inverse = np.linalg.pinv(scaled, rcond=RANK, hermitian=True)
    beta = (back @ (unit * (inverse @ (unit * target)[:, :, None])[:, :, 0])[:, :, None])[:, :, 0]
    beta[:, one] += mean
    return beta
