"""The baseline that a regression over the other prompts predicts from what is known before each token.

Every feature is a number of the rollout, 1 or m, times a number of the token, 1, f, h or x. So all that the fit needs
of a rollout is Σ_t w z zᵀ with z = (1, f, h, x), and no [N, T, 8] array is ever formed.
"""

from collections.abc import Iterator

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.estimators.across import mean_of_others, over_others
from otb_analysis.estimators.batch import BaselineResult, Batch, provided
from otb_analysis.estimators.means import rloo
from otb_analysis.estimators.spec import FEATURES, NoOptions, RegressionOptions
from otb_analysis.types import Float, NormalEquations

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
    _check(batch, names, options)
    by_rollout, by_token = (tuple(FEATURES[name][k] for name in names) for k in (0, 1))
    parts = tuple(dict.fromkeys(("1", *by_token)))
    fitted = batch.present * ~batch.is_singleton if "m" in by_rollout else batch.present
    factor = {"1": np.ones(len(fitted)), "m": rloo(batch, NoOptions()).baseline[:, 0]}
    c = np.stack([factor[name] for name in by_rollout], axis=1)
    z = np.array([parts.index(part) for part in by_token])

    inner = _inner_products(batch, parts, options.T_max)
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
        baseline[undefined] = mean_of_others(batch)[0][undefined, None]
    state = None
    if options.memory:
        state = NormalEquations(names, gram.sum(axis=0) + old_gram, moment.sum(axis=0) + old_moment)
    return BaselineResult(baseline, undefined[:, None], state=state)


def _check(batch: Batch, names: tuple[str, ...], options: RegressionOptions) -> None:
    longest = int(batch.length.max(initial=0))
    if options.T_max and longest > options.T_max:
        raise InputError(
            f"T_max is {options.T_max} but a rollout has {longest} policy tokens; pass the sampling limit."
        )
    state, k = batch.state, len(names)
    if state is None or not options.memory:
        return
    if state.features != names or state.gram.shape != (k, k) or state.moment.shape != (k,):
        raise InputError(
            f"state has features {state.features} but the options have {names}; pass the state of the same options."
        )
    if not (np.isfinite(state.gram).all() and np.isfinite(state.moment).all()):
        raise InputError("state has a NaN or infinity; pass the state that estimate returned a step earlier.")


def _remembered(state: NormalEquations | None, options: RegressionOptions) -> tuple[Float, Float]:
    """Return the sums of earlier steps as they count now; zero without memory."""
    k = len(options.used)
    if state is None or not options.memory:
        return np.zeros((k, k)), np.zeros(k)
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
                entropy = np.maximum(provided(batch.entropy)[rows], 0.0)
                np.divide(entropy, 1 + entropy, out=z[:, k])
            elif part == "f":
                z[:, k, :1] = 0.0
                before = np.cumsum(batch.weight[rows, :-1], axis=1)
                np.divide(before, 1 + before, out=z[:, k, 1:])
        yield rows, z


def _inner_products(batch: Batch, parts: tuple[str, ...], limit: int) -> Float:
    """Return Σ_t w z zᵀ of every rollout [N, len(parts), len(parts)]; the first part is 1."""
    out = np.empty((len(batch.mask), len(parts), len(parts)))
    for rows, z in _blocks(batch, parts, limit):
        out[rows] = (z * batch.weight[rows, None, :]) @ z.swapaxes(1, 2)
    return out


def coefficients(gram: Float, moment: Float, names: tuple[str, ...], ridge: float) -> Float:
    """Return β [P, K] from the normal equations [P, K, K] and [P, K].

    Each feature is first scaled to Σ w φ² = 1, so that the penalty and the rank do not depend on units. Of features
    that the tokens cannot tell apart the shortest β is taken; a feature that is 0 everywhere gets 0.
    """
    shift, mean = _centring(gram, moment, names)
    back, one = shift.swapaxes(1, 2), names.index("1") if "1" in names else 0
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


def _centring(gram: Float, moment: Float, names: tuple[str, ...]) -> tuple[Float, Float]:
    """Return the matrix that makes m of φ into m − mean [P, K, K], and mean = Σ w R / Σ w of the tokens [P].

    With returns and m counted from there a penalty does not see a constant that all rewards share. It takes the
    features without m, too; where any of them is missing nothing is shifted.
    """
    shift, mean = np.tile(np.eye(len(names)), (len(gram), 1, 1)), np.zeros(len(gram))
    plain = {k: FEATURES[name][1] for k, name in enumerate(names) if FEATURES[name][0] == "m"}
    if {"1", *plain.values()} <= set(names):
        one = names.index("1")
        weight = gram[:, one, one]
        mean = moment[:, one] / np.where(weight > 0, weight, 1.0)
        for k, name in plain.items():
            shift[:, k, names.index(name)] = -mean
    return shift, mean
