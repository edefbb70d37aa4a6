"""Token energies as data: how well one source stands in for another, how they go with rewards, how heavy their tail is.

Baselines normalise their weights within (prompt, position), so a proxy that only misses each cell's scale loses
nothing: Pearson was .68 pooled and .99 within cells. Pooled figures alone mislead.

An energy-weighted baseline differs from the group mean by Cov(W, R)/mean(W), so corr(W_T, R) within a prompt is the
statistic to look at first: where it is near 0 there is nothing to gain.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.statistics.intervals import Interval, cluster_jackknife
from otb_analysis.types import Float, Int


def position_cells(group: ArrayLike, length: int) -> Int:
    """Number the (prompt, position) cells of [N, T] arrays: the cell of each token [N, T]."""
    codes = np.unique(np.asarray(group), return_inverse=True)[1].astype(np.int64)
    return codes[:, None] * length + np.arange(length)


def deviation(x: Float, cells: Int) -> Float:
    """Subtract each cell's mean: x − x̄_c, exactly 0 throughout a cell whose values are all alike."""
    scale = np.zeros(cells.max(initial=-1) + 1)
    np.maximum.at(scale, cells, np.abs(x))
    centred = x - (np.bincount(cells, x) / np.maximum(np.bincount(cells), 1))[cells]
    # What rounding leaves of a constant is not a deviation, and would correlate with anything.
    return np.where(np.abs(centred) > 1e-13 * scale[cells], centred, 0.0)


def cell_ranks(x: Float, cells: Int) -> Float:
    """Rank values within their cells, ties averaged, scaled to (0, 1) so that cells of any size weigh alike."""
    # Ranking (cell, value) pairs at once; equal pairs share the mean of their ranks.
    pair = cells * x.size + np.unique(x, return_inverse=True)[1]
    _, place, ties = np.unique(pair, return_inverse=True, return_counts=True)
    ranks, count = (np.cumsum(ties) - (ties - 1) / 2)[place], np.bincount(cells)
    return (ranks - (np.cumsum(count) - count)[cells]) / (count + 1)[cells]


def log_correlation(
    x: Float, y: Float, prompt: Int, cell: Int | None = None, weight: Float | None = None
) -> Interval | None:
    """Return the correlation of log x and log y, over tokens at which both are positive."""
    both = (x > 0) & (y > 0)
    cell, weight = None if cell is None else cell[both], None if weight is None else weight[both]
    return correlation(np.log(x[both]), np.log(y[both]), prompt[both], cell, weight)


def correlation(
    x: Float, y: Float, prompt: Int, cell: Int | None = None, weight: Float | None = None
) -> Interval | None:
    """Return the Pearson correlation of two variables [n] with a jackknife interval over prompts.

    corr(x − x̄_c, y − ȳ_c) with (prompt, position) cells, corr(x, y) without; no cell spans two prompts. The interval is
    formed on Fisher's scale, atanh r.

    Args:
        weight: What each entry counts [n], such as 1/π of drawn ones, whose population it then is about; without cells.

    Returns:
        None where either variable is constant; a point below 16 prompts.
    """
    if cell is not None:
        cell = np.unique(cell, return_inverse=True)[1]
        x, y = deviation(x, cell), deviation(y, cell)
    code = np.unique(prompt, return_inverse=True)[1]
    scale = [np.abs(v).max(initial=0.0) or 1.0 for v in (x, y)]
    x, y = x / scale[0], y / scale[1]
    one = np.ones_like(x) if weight is None else weight / weight.max(initial=1.0)
    sums = np.stack([np.bincount(code, one * v) for v in (np.ones_like(x), x, y, x * x, x * y, y * y)], axis=1)
    return cluster_jackknife(sums, _pearson, "Pearson correlation", scale="fisher")


def _pearson(mean: Float) -> Float:
    """Return r from means of 1, x, y, x², xy, y²."""
    n, x, y, xx, xy, yy = np.moveaxis(mean, -1, 0)
    spread = (xx * n - x * x) * (yy * n - y * y)
    return np.divide(xy * n - x * y, np.sqrt(np.maximum(spread, 0)), out=np.full_like(spread, np.nan), where=spread > 0)


@dataclass(frozen=True)
class Association:
    """Agreement of two variables; None where it is undefined (fewer than three values, or a constant one)."""

    n: int
    pearson: float | None
    log_pearson: float | None  # Linear correlation of the logarithms, where both are positive
    spearman: float | None


@dataclass(frozen=True)
class Fidelity:
    """Agreement of a proxy with exact energies; made by `fidelity`, read by figures and reports."""

    pooled: Association  # Over all values at once
    # Over deviations from cell means (of values, logarithms, ranks within the cell), in cells of two or more values;
    # None when no cells were given.
    within: Association | None
    n_cells: int  # Cells of two or more values


def fidelity(
    proxy: ArrayLike, exact: ArrayLike, mask: ArrayLike | None = None, cell: ArrayLike | None = None
) -> Fidelity:
    """Agreement of proxy energies with exact ones, pooled and within cells.

    Within a cell c: corr(x − x̄_c, y − ȳ_c); the logarithms and the ranks likewise. A positive factor per cell on the
    proxy's logarithm, or any increasing function per cell for the ranks, changes nothing within. For the ranks, values
    are rounded to 0.1 % first: rollouts with the same prefix have the same energy, and rounding is not an order.

    Args:
        mask: True where a value counts; values that are not finite (not measured) never count.
        cell: Integer cell of each value, as from `position_cells`; any shape that broadcasts.

    Raises:
        InputError: The shapes differ.
    """
    x, y = np.asarray(proxy, dtype=float), np.asarray(exact, dtype=float)
    if x.shape != y.shape:
        raise InputError(f"proxy has shape {x.shape} but exact {y.shape}; pass one value of each per token.")
    shaped = dict[str, np.ndarray]()
    for name, value in (("mask", True if mask is None else mask), ("cell", 0 if cell is None else cell)):
        try:
            shaped[name] = np.broadcast_to(np.asarray(value), x.shape)
        except ValueError as error:
            shape = np.shape(value)
            raise InputError(f"{name} has shape {shape} but the energies {x.shape}; pass one per token.") from error
    chosen = np.isfinite(x) & np.isfinite(y) & shaped["mask"].astype(bool)
    cells = np.unique(shaped["cell"][chosen], return_inverse=True)[1]
    ((agreement,),) = _agreements(x[chosen], y[chosen], cells, np.zeros(cells.size, np.int64))
    return Fidelity(agreement.pooled, None, 0) if cell is None else agreement


def fidelity_by_part(
    proxy: ArrayLike, exact: ArrayLike, cell: ArrayLike, part: ArrayLike
) -> tuple[Fidelity, dict[int, Fidelity]]:
    """Return `fidelity` of all values [N], and of the values of each part; one without finite values is left out.

    Args:
        part: Integer part of each value, such as its step; all values of a cell are in one part.

    Raises:
        InputError: The shapes differ, or values of one cell are in several parts.
    """
    x, y = np.asarray(proxy, dtype=float), np.asarray(exact, dtype=float)
    cells, parts = np.asarray(cell), np.asarray(part)
    if not (x.ndim == 1 and x.shape == y.shape == cells.shape == parts.shape):
        raise InputError(
            f"proxy has shape {x.shape}, exact {y.shape}, cell {cells.shape} and part {parts.shape}; pass four "
            "arrays of shape [N]."
        )
    order = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    order = order[np.argsort(parts[order], kind="stable")]
    _, first, cells = np.unique(cells[order], return_index=True, return_inverse=True)
    names, code = np.unique(parts[order], return_inverse=True)
    if np.any(code != code[first][cells]):
        raise InputError("values of one cell are in several parts; number the cells of each part on their own.")
    (whole,), by_part = _agreements(x[order], y[order], cells, np.zeros(order.size, np.int64), code)
    return whole, dict(zip(names.tolist(), by_part, strict=False))  # of nothing one empty part


def _agreements(x: Float, y: Float, cells: Int, *partitions: Int) -> list[list[Fidelity]]:
    """Return `fidelity` of each part, for several partitions of the same values.

    A partition numbers the part of each value, ascending. A cell is within one part, so what deviates within cells is
    the same for all partitions.
    """
    positive = (x > 0) & (y > 0)
    shared = np.bincount(cells, minlength=1)[cells] > 1  # a value alone in its cell deviates from nothing
    logs = [np.log(v[positive]) for v in (x, y)]
    # Rounded to a relative 2⁻¹⁰: rollouts that share a prefix share the energy up to rounding, which is no order.
    rounded = (np.ldexp(np.round(m * 1024) / 1024, e) for m, e in map(np.frexp, (x[shared], y[shared])))
    ranks = [cell_ranks(v, cells[shared]) for v in rounded]
    kinds = (shared, [x[shared], y[shared]]), (shared & positive, [v[shared[positive]] for v in logs]), (shared, ranks)
    within = [(of, [deviation(v, cells[of]) for v in pair]) for of, pair in kinds]
    first, fidelities = np.unique(cells[shared], return_index=True)[1], list[list[Fidelity]]()
    for part in partitions:
        n, every = int(part.max(initial=0)) + 1, np.ones(part.size, bool)
        pooled = (every, [x, y]), (positive, logs), (every, [cell_ranks(v, part) for v in (x, y)])
        agreed = list[list[Association]]()
        for kind in (pooled, within):
            counts = np.bincount(part[kind[0][0]], minlength=n).tolist()
            agreed.append(list(map(Association, counts, *(_correlations(pair, part[of], n) for of, pair in kind))))
        fidelities.append(list(map(Fidelity, *agreed, np.bincount(part[shared][first], minlength=n).tolist())))
    return fidelities


def realized_fidelity(proxy: ArrayLike, exact: ArrayLike, mask: ArrayLike, group: ArrayLike) -> Fidelity:
    """Agreement of realized energies W_t = Σ_{j≤t} w_j, which are what `otb` weights by.

    Running sums are correlated along a rollout by construction, so these figures are higher than those of w_t; the part
    within (prompt, position) is the one that reaches the baseline.

    Args:
        exact: Exact token energies [N, T]; a rollout counts up to its first token that was not measured.

    Raises:
        InputError: The shapes differ or are not [N, T].
    """
    x, y, chosen = np.asarray(proxy, dtype=float), np.asarray(exact, dtype=float), np.asarray(mask, dtype=bool)
    if not (x.ndim == 2 and x.shape == y.shape == chosen.shape):
        raise InputError(f"proxy has shape {x.shape}, exact {y.shape} and mask {chosen.shape}; pass all as [N, T].")
    # NaN is absorbing: after a token that was not measured the running sum is unknown, hence not compared.
    running = [np.cumsum(np.where(chosen, w, 0.0), axis=1) for w in (x, y)]
    position = np.cumsum(chosen, axis=1) - 1
    # By policy position, as the baseline compares: a column counts tool tokens too.
    cells = position_cells(group, x.shape[1])[:, :1] + position
    return fidelity(running[0], running[1], chosen, cells)


def _correlations(variables: list[Float], part: Int, n: int) -> list[float | None]:
    """Return Pearson's r of two variables within each of n parts, of ascending number; None where it is undefined."""
    count, correlations = np.bincount(part, minlength=n), np.full(n, np.nan)
    known = count >= 3
    chosen, count = known[part], count[known]
    first, pair, varied = np.cumsum(count) - count, list[Float](), np.ones(len(count), bool)
    for v in (variable[chosen] for variable in variables):
        # A spread of no more than what rounding leaves of a constant is none.
        spread = np.maximum.reduceat(v, first) - np.minimum.reduceat(v, first)
        varied &= spread > 1e-12 * np.maximum.reduceat(np.abs(v), first)
        v = v - np.repeat(np.add.reduceat(v, first) / count, count)
        # Scaled so that squares of energies of any size neither overflow nor vanish.
        largest = np.maximum.reduceat(np.abs(v), first)
        pair.append(v / np.repeat(np.where(varied, largest, 1.0), count))
    xx, xy, yy = (np.add.reduceat(a * b, first) for a, b in ((pair[0],) * 2, pair, (pair[1],) * 2))
    r = np.divide(xy, np.sqrt(xx * yy), out=np.full_like(xy, np.nan), where=varied)
    correlations[known] = np.clip(r, -1, 1)
    return [None if value != value else value for value in correlations.tolist()]


@dataclass(frozen=True)
class WeightStatistics:
    """Energies against rewards; made by `weight_statistics`."""

    # corr(W_T, R) over the rollouts of each prompt, prompts in ascending order [P]; NaN where either is constant.
    total_reward_corr: Float
    # The same of deviations from the prompts' means, over all prompts at once; None where it is undefined.
    pooled_total_reward_corr: float | None


def weight_statistics(energy: ArrayLike, mask: ArrayLike, reward: ArrayLike, group: ArrayLike) -> WeightStatistics:
    """Correlate energies with rewards within prompts: corr(W_T, R) over rollouts, W_T = Σ_t w_t.

    Multiplying all energies, or all rewards, of a prompt by a positive constant does not change the prompt's figure.

    Raises:
        InputError: The shapes do not fit, or an energy inside the mask is negative or not finite.
    """
    w, chosen = np.asarray(energy, dtype=float), np.asarray(mask, dtype=bool)
    r, names = np.asarray(reward, dtype=float), np.asarray(group)
    if w.ndim != 2 or w.shape != chosen.shape:
        raise InputError(f"energy has shape {w.shape} but mask {chosen.shape}; pass both as [N, T].")
    if r.shape != (len(w),) or names.shape != (len(w),):
        raise InputError(
            f"reward has shape {r.shape} and group {names.shape} but there are {len(w)} rollouts; pass one of each per "
            "rollout, shape [N]."
        )
    bad = chosen & ~(np.isfinite(w) & (w >= 0))
    if bad.any():
        n, t = np.argwhere(bad)[0]
        raise InputError(f"energy[{n}, {t}] is {w[n, t]}; energies are finite squared norms, at least 0.")
    unique, codes = np.unique(names, return_inverse=True)
    n_prompts = unique.size
    # Deviations from the prompt's mean: between prompts both energy and reward go with difficulty.
    dw, dr = (deviation(x, codes) for x in (np.where(chosen, w, 0.0).sum(axis=1), r))
    ww, wr, rr = (np.bincount(codes, x, n_prompts) for x in (dw * dw, dw * dr, dr * dr))
    # Prompts whose rewards are all equal say nothing about the correlation and would only dilute the pooled one.
    informative = (ww > 0) & (rr > 0)
    norm = np.sqrt(ww * rr)
    each = np.divide(wr, norm, out=np.full(n_prompts, np.nan), where=norm > 0)
    sum_ww, sum_wr, sum_rr = (x[informative].sum() for x in (ww, wr, rr))
    # Sums before the quotient: a mean of the prompts' correlations would let prompts of two rollouts, ±1, decide.
    scale = sum_ww * sum_rr
    return WeightStatistics(each, float(sum_wr / np.sqrt(scale)) if scale > 0 else None)


TAIL, TOP = 0.1, 0.01
"""Shares of the values that make up the tail of `pareto_k` and the top of `top_share`."""

MIN_EXCEEDANCES = 25
"""Fewer tail values than this give no index."""


def pareto_k(values: ArrayLike) -> float | None:
    """Shape k of a generalised Pareto law fitted to the upper tenth of `values`.

    P(X − u > x | X > u) ≈ (1 + k·x/σ)^{−1/k}; moments of order 1/k and above are infinite. On token *energies* k ≥ ½
    makes the standard error of a variance estimate unreliable; an infinite gradient variance needs k ≥ 1. Exponential
    tails have k = 0, a bounded quantity (the logit proxy is at most 2) has k < 0. Fitted by maximum likelihood over
    k ≥ −1, below which the likelihood has no maximum, in one dimension (Grimshaw 1993). None with fewer than
    `MIN_EXCEEDANCES` values above the threshold or where they are all alike.
    """
    x = np.asarray(values, dtype=float).ravel()
    x = x[np.isfinite(x)]
    if x.size == 0:
        return None
    threshold = np.quantile(x, 1 - TAIL)  # the law is fitted to what lies above it
    excess = x[x > threshold] - threshold
    if excess.size < MIN_EXCEEDANCES or np.ptp(excess) <= 1e-12 * np.abs(x).max():
        return None
    excess = excess / excess.max()  # the shape has no unit

    def fit(u: float) -> tuple[float, float]:
        """Return the best k of θ = k/σ = eᵘ − 1, and −log L / n − 1 = log σ + k."""
        theta = np.expm1(u)
        # log(1 + θ) is u itself where θ rounds to −1: the search looks far below 0 on bounded values.
        k = np.where(excess == 1, u, np.log1p(theta * excess)).mean()
        return k, k + np.log(k / theta if theta else excess.mean())

    def loss(u: float) -> float:
        k, value = fit(u)
        return value if k > -1 else -2 - k  # −1 at the bound, where σ is the largest value

    with np.errstate(divide="ignore"):
        optimum: Any = scipy.optimize.minimize_scalar(loss, (0, np.log1p(1 / np.median(excess))), tol=1e-6)
    k = float(fit(optimum.x)[0]) if optimum.fun < -1 else -1.0
    return k if np.isfinite(k) else None


def top_share(values: ArrayLike) -> float | None:
    """Share of the total that the largest 1 % of the values hold: Σ_{top ⌈n/100⌉} |x| / Σ |x|.

    None where there is no value or the total is 0; 1 when one value is everything.
    """
    x = np.abs(np.asarray(values, dtype=float).ravel())
    x = x[np.isfinite(x)]
    total = x.sum()
    if total == 0:
        return None
    n_top = int(np.ceil(TOP * x.size))
    return float(np.partition(x, x.size - n_top)[x.size - n_top :].sum() / total)
