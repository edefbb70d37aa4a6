"""Intervals over independent clusters: prompts for claims about one run, seeds for claims about runs.

Tokens and rollouts of one prompt are dependent, so only whole clusters are deleted or resampled. Fewer than
`MIN_CLUSTERS` clusters give a point and no interval.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from otb_analysis.errors import InputError, nearest
from otb_analysis.statistics.inference.studentized import Studentized
from otb_analysis.types import Float

MIN_CLUSTERS = 16
"""Below this many clusters no interval is given: measured coverage is too far from nominal to print one."""

LEVEL = 0.95
"""Nominal coverage, unless a caller asks for another."""

SCALES: dict[str, tuple[Callable[[Float], Float], Callable[[Float], Float]]] = {
    "linear": (lambda x: x, lambda x: x),
    "log": (np.log, np.exp),
    "logit": (special.logit, special.expit),
}
"""Names of scales, with the map onto each and back."""


@dataclass(frozen=True)
class Interval:
    """A point and, from `MIN_CLUSTERS` clusters up, an interval around it."""

    estimate: float
    low: float | None  # Lower end, or None where no interval is given
    high: float | None
    n_clusters: int  # Independent clusters it rests on
    estimand: str
    # Two-sided p-value of the estimand being 1, for positive quantities and ratios with an interval: below 1 − level
    # exactly where the interval excludes 1.
    p_value: float | None = None


WIDE = 100.0
"""An interval of a positive quantity whose ends differ by this factor says that noise hides it, and is not shown."""


def is_informative(interval: Interval | None) -> bool:
    """Tell whether an interval of a positive quantity or ratio says something: it has ends, not too far apart."""
    if interval is None or interval.low is None or interval.high is None:
        return False
    return interval.low > 0 and interval.high < WIDE * interval.low


def jackknife_interval(
    estimate: float, replicates: ArrayLike, estimand: str, scale: str = "log", level: float = LEVEL
) -> Interval | None:
    """Interval from delete-one-cluster replicates, on a transformed scale, safe for skewed and heavy-tailed clusters.

    f⁻¹(f(θ̂) ∓ q·se), se² = (K−1)/K · Σ_k (f(θ̂_(k)) − mean)², with f the identity, log or logit and q from
    `Studentized`. For a mean of symmetric light-tailed clusters on the linear scale this is Student's interval. On the
    log scale of a ratio of two means it is a paired interval whose estimand is the ratio of expectations (not the mean
    of the clusters' ratios).

    Args:
        replicates: θ̂_(k), the value without cluster k [K].

    Returns:
        None when the estimate itself is not finite; a point without interval below `MIN_CLUSTERS` clusters or where
        the estimate or a replicate is outside the domain of the scale.

    Raises:
        InputError: The scale is unknown.
    """
    centre, values, stderr = _on_scale(scale, estimate, replicates)
    k = values.size
    if not np.isfinite(estimate):
        return None
    point = Interval(float(estimate), None, None, k, estimand)
    if k < MIN_CLUSTERS or not np.isfinite(stderr):
        return point
    law = Studentized.from_influence(-values)  # deleting a cluster that pulls the value up lowers it
    down, up = law.quantiles(level)
    with np.errstate(over="ignore"):  # exp of a very wide interval is ∞, and then there is no interval
        low, high = SCALES[scale][1](np.array([centre - down * stderr, centre + up * stderr]))
    if not np.isfinite(high):
        return point
    # Only a ratio has a natural hypothesis: that the two are equal.
    p_value = _p_value(law, centre, stderr) if scale == "log" else None
    return Interval(float(estimate), float(low), float(high), k, estimand, p_value)


def ratio_of_differences(numerator: Float, denominator: Float, estimand: str) -> Interval | None:
    """Interval of x/y for two quantities of either sign, from delete-one-cluster replicates of both (Fieller, 1954).

    All θ with |x̂ − θŷ| ≤ q·se(x̂ − θŷ), q of Student's law with K − 1 degrees of freedom. For each θ the difference is
    on the linear scale, where a jackknife holds; x̂/ŷ itself is on none, since ŷ may be near 0. A difference that is not
    told from 0 in the denominator leaves a point.

    Args:
        numerator: x̂ from all clusters, then without each of them [1 + K]; the denominator alike.

    Returns:
        None where either is not finite or the denominator is not positive.
    """
    x, y, k = float(numerator[0]), float(denominator[0]), numerator.size - 1
    if not (np.isfinite(x) and np.isfinite(y) and y > 0):
        return None
    point = Interval(x / y, None, None, k, estimand)
    replicates = np.stack([numerator[1:], denominator[1:]])
    if k < MIN_CLUSTERS or not np.isfinite(replicates).all():
        return point
    if x == 0 and not replicates[0].any():  # no difference at all: a share of 0, whatever it is a share of
        return Interval(0.0, 0.0, 0.0, k, estimand)
    centred = replicates - replicates.mean(axis=1, keepdims=True)
    q = float(special.stdtrit(k - 1, (1 + LEVEL) / 2))
    (xx, xy), (_, yy) = q**2 * (k - 1) / k * (centred @ centred.T)
    # θ²(ŷ² − q²Var y) − 2θ(x̂ŷ − q²Cov) + (x̂² − q²Var x) ≤ 0: between its two roots where it opens upwards.
    square, linear, constant = y**2 - yy, x * y - xy, x**2 - xx
    if square <= 0:
        return point
    half = np.sqrt(max(linear**2 - square * constant, 0.0))
    return Interval(x / y, float((linear - half) / square), float((linear + half) / square), k, estimand)


def cluster_jackknife(
    table: ArrayLike, statistic: Callable[[Float], Float], estimand: str, scale: str = "log"
) -> Interval | None:
    """Jackknife interval of a function of means, from one row of sufficient statistics per cluster; None without any.

    Args:
        table: One row per cluster [K, S], for example (Σ x, count) of each prompt.
        statistic: Maps mean rows [..., S] to values [...], vectorised over the leading axes.

    Raises:
        InputError: The table is not two-dimensional, or the scale is unknown.
    """
    rows = np.asarray(table, dtype=float)
    if rows.ndim != 2:
        raise InputError(f"table has shape {rows.shape}; pass one row of sufficient statistics per cluster, [K, S].")
    if len(rows) == 0:
        return None
    mean = rows.mean(axis=0)
    # An affine form of (Σ − row)/(K−1) that stays exact when all rows are equal.
    deleted = mean - (rows - mean) / max(len(rows) - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate, replicates = statistic(mean), statistic(deleted)
    return jackknife_interval(float(estimate), replicates, estimand, scale)


def log_ratio_t(numerator: ArrayLike, denominator: ArrayLike, name: str = "ratio") -> Interval | None:
    """Paired Student t interval on the clusters' log-ratios: exp(mean ± t_{K−1} · s/√K) of log(a_k/b_k), both [K].

    The estimand is the *geometric mean ratio* over clusters, not the ratio of the means. None where a value is not
    positive, since the geometric mean does not exist.

    Raises:
        InputError: The two arguments differ in shape.
    """
    a, b = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if a.shape != b.shape or a.ndim != 1:
        raise InputError(f"numerator has shape {a.shape} but denominator {b.shape}; pass one value per cluster, [K].")
    if a.size == 0 or not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        return None
    # Paired by cluster: what makes a prompt hard is in both and cancels in the ratio.
    logs, k = np.log(a / b), a.size
    estimate, estimand = float(np.exp(logs.mean())), f"geometric mean over clusters of the {name}"
    if k < MIN_CLUSTERS:
        return Interval(estimate, None, None, k, estimand)
    law, stderr = Studentized(0.0, k - 1.0), float(logs.std(ddof=1) / np.sqrt(k))
    half = law.quantiles(LEVEL)[0] * stderr
    low, high = float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))
    return Interval(estimate, low, high, k, estimand, _p_value(law, float(logs.mean()), stderr))


def seed_mean(values: ArrayLike, estimand: str, scale: str = "linear") -> Interval | None:
    """Return the mean of one value per seed, with Student's 95 % interval from two seeds up.

    f⁻¹(f(x̄) ∓ t_{K−1}·se) with se² = (K−1)/K · Σ_k (f(x̄_(k)) − mean)² over the means without one seed; with f the
    identity it is x̄ ∓ t_{K−1}·s/√K. Unlike the intervals over prompts it trusts that the seeds are about normal on that
    scale: a few seeds do not show their skewness. Training outcomes are averages over many tokens and prompts; rewards
    of single prompts are not, and have `cluster_jackknife`.

    Returns:
        None without a value or where one is not finite; a point for one seed, for seeds that are all alike, and where
        a mean is outside the domain of the scale.

    Raises:
        InputError: The scale is unknown.
    """
    x = np.asarray(values, dtype=float).ravel()
    k = x.size
    if k == 0 or not np.isfinite(x).all():
        return None
    # Means without one seed, as over prompts: one formula for every scale.
    mean = float(x.mean())
    centre, _, stderr = _on_scale(scale, mean, (x.sum() - x) / max(k - 1, 1))
    # Seeds that agree to the last digit do not show their spread: no interval, rather than one of length 0.
    if k < 2 or np.ptp(x) == 0 or not np.isfinite(stderr):
        return Interval(mean, None, None, k, estimand)
    # No correction for skewness: three to ten values do not show it, and its estimate would be noise.
    half = float(special.stdtrit(k - 1, (1 + LEVEL) / 2) * stderr)
    low, high = SCALES[scale][1](np.array([centre - half, centre + half]))
    return Interval(mean, float(low), float(high), k, estimand)


def _on_scale(scale: str, estimate: float, replicates: ArrayLike) -> tuple[float, Float, float]:
    """Return f(θ̂), f(θ̂_(k)) [K] and the jackknife's standard error, NaN where any of them is not finite.

    Raises:
        InputError: The scale is unknown.
    """
    if scale not in SCALES:
        raise InputError(f"scale is {scale!r}; {nearest(scale, SCALES)}")
    transform = SCALES[scale][0]
    with np.errstate(divide="ignore", invalid="ignore"):
        centre, values = float(transform(np.asarray(estimate, dtype=float))), transform(np.asarray(replicates, float))
    if not (values.size and np.isfinite(centre) and np.isfinite(values).all()):
        return centre, values, np.nan
    # A replicate moves by only 1/(K−1) of what its cluster is off, hence K−1 in front of their variance.
    return centre, values, float(np.sqrt((values.size - 1) * values.var()))  # √((K−1)/K·Σ(f − mean)²)


def _p_value(law: Studentized, centre: float, stderr: float) -> float:
    # Clusters that all agree: the ratio is known, so the hypothesis is certain or impossible.
    if stderr <= 1e-12 * max(abs(centre), 1e-3):
        return 1.0 if abs(centre) < 1e-9 else 0.0
    return law.p_value(centre / stderr)
