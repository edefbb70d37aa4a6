"""Intervals over independent clusters: prompts for claims about one run, seeds for claims about runs.

Tokens and rollouts of one prompt are dependent, so only whole clusters are deleted or resampled. Fewer than
`MIN_CLUSTERS` clusters give a point and no interval.

Where a few prompts hold most of a variance, a sample without them gives too small a value *and* too small a standard
error, so Student's interval fails on one side. `Studentized` has two closed-form corrections, both estimated from the
clusters' influences, which mend most of it; neither ever shortens the interval.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from otb_analysis.errors import InputError, nearest
from otb_analysis.types import Float


@dataclass(frozen=True)
class Studentized:
    """The law of (θ̂ − θ)/se, estimated from the clusters; Student's for symmetric light-tailed ones.

    With a = skewness/√K, Hall's g(T) = T + a·T²/3 + a²·T³/27 + a/6 is symmetric to second order; its inverse
    g⁻¹(q) = (3/a)·((1 + a·(q − a/6))^{1/3} − 1) corrects the quantiles for skewness. The variance of se² depends on the
    kurtosis, and with it the degrees of freedom: 2/(κ/K + 2/(K − 1)), κ the excess kurtosis, at least 0. On each side
    the wider of the plain and the corrected quantile counts. Sources: Hall (1992), On the removal of skewness by
    transformation; Satterthwaite (1946). The combination is ours; docs/coverage.md has what it covers.
    """

    skew: float
    degrees: float

    @classmethod
    def from_influence(cls, influence: Float) -> "Studentized":
        """Estimate the law from the clusters.

        Args:
            influence: One value per cluster, up to a shift and a positive factor [K], K > 3; a cluster that pulls the
                estimate up has a large one.
        """
        k = influence.size
        # Clusters that are alike up to rounding have no shape to correct for.
        if np.ptp(influence) <= 1e-12 * np.abs(influence).max(initial=0.0):
            return cls(0.0, k - 1.0)
        z = (influence - influence.mean()) / influence.std()
        # Sample skewness and excess kurtosis with the usual small-sample corrections (G₁ and G₂).
        skewness = np.mean(z**3) * np.sqrt(k * (k - 1)) / (k - 2)
        kurtosis = ((k + 1) * (np.mean(z**4) - 3) + 6) * (k - 1) / ((k - 2) * (k - 3))
        # Negative excess kurtosis would shorten the interval; of few clusters that is not to be trusted.
        return cls(float(skewness / np.sqrt(k)), float(2 / (max(kurtosis, 0.0) / k + 2 / (k - 1))))

    def quantiles(self, level: float) -> tuple[float, float]:
        """Return how many standard errors the interval reaches down and up from the estimate."""
        t, a = float(special.stdtrit(self.degrees, (1 + level) / 2)), self.skew
        # At skewness 0 the correction vanishes but 3/a does not exist. cbrt has a real root below 0, a power has none.
        down, up = (t, -t) if abs(a) < 1e-6 else (3 / a * (np.cbrt(1 + a * (q - a / 6)) - 1) for q in (t, -t))
        # The wider of the two on each side: skewness of few clusters is too noisy to shorten an interval by.
        return max(t, float(down)), max(t, -float(up))

    def p_value(self, distance: float, stderr: float = 1.0) -> float:
        """Return one minus the level at which the interval just reaches a hypothesis so far from the estimate."""
        # Clusters that all agree: the value is known, so the hypothesis is certain or impossible.
        if stderr <= 1e-12 * max(abs(distance), 1e-3):
            return 1.0 if abs(distance) < 1e-9 else 0.0
        # The interval reaches a hypothesis by the wider of two quantiles, so the p-value is the larger of two.
        a, t = self.skew, distance / stderr
        symmetric = np.sign(t) * (t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6)
        return float(min(2 * special.stdtr(self.degrees, -max(min(abs(t), symmetric), 0.0)), 1.0))


MIN_CLUSTERS = 16
"""Below this many clusters no interval is given: measured coverage is too far from nominal to print one."""

LEVEL = 0.95
"""Nominal coverage, unless a caller asks for another."""

SCALES: dict[str, tuple[Callable[[Float], Float], Callable[[Float], Float]]] = {
    "linear": (lambda x: x, lambda x: x),
    "log": (np.log, np.exp),
    "logit": (special.logit, special.expit),
    "fisher": (np.arctanh, np.tanh),
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


def unless_hidden(interval: Interval | None) -> Interval | None:
    """Return an interval of a positive quantity; None where noise hides it, though the clusters suffice for one."""
    if interval is not None and (is_informative(interval) or interval.n_clusters < MIN_CLUSTERS):
        return interval
    return None


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
    p_value = law.p_value(centre, stderr) if scale == "log" else None
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
    return Interval(estimate, low, high, k, estimand, law.p_value(float(logs.mean()), stderr))


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


@dataclass(frozen=True)
class Passing:
    """Success on P prompts of n answers each."""

    average: Interval  # avg@n: the share of answers that are right, which is also the estimate of pass@1
    at: dict[int, Interval]  # k → pass@k, the chance that at least one of k answers is right, for k = 1, 2, 4, … ≤ n

    @property
    def largest(self) -> int:
        """The largest k."""
        return max(self.at)


def passing(success: ArrayLike) -> Passing:
    """Return avg@n and pass@k of answers, k = 1, 2, 4, … ≤ n, each with its 95 % interval over prompts.

    Raises:
        InputError: There are no answers, or their shape is another.
    """
    right = np.asarray(success, dtype=bool)
    if right.ndim != 2 or not right.size:
        raise InputError(f"success has shape {right.shape}; pass one row per prompt and one column per answer, [P, n].")
    n, count = right.shape[1], right.sum(axis=1)
    # One number per prompt: its answers share its difficulty and are no independent observations.
    at = {k: share_interval(pass_at_k(count, n, k), f"pass@{k}") for k in (1 << i for i in range(n.bit_length()))}
    return Passing(share_interval(count / n, f"avg@{n}"), at)


def pass_at_k(correct: ArrayLike, n: int, k: int) -> Float:
    """Return 1 − C(n−c, k)/C(n, k) per prompt [P], the unbiased estimate of the chance that one of k answers is right.

    c [P] counts the right ones among n answers.

    C(n−c, k)/C(n, k) is the share of the k-subsets of the n answers that hold no right one; it is computed as
    Π_{j<k} (n−c−j)/(n−j), in which nothing overflows. For k = 1 it is c/n, for k = n it is 1 where any answer is right.
    Chen et al. 2021 (arXiv 2107.03374), equation 1. Unbiased: proved there.

    Raises:
        InputError: k is not in 1 … n, or a count not in 0 … n.
    """
    count = np.asarray(correct, dtype=float)
    if not 1 <= k <= n:
        raise InputError(f"k is {k} but every prompt has {n} answers; choose k from 1 to {n}.")
    if count.size and not (count.min() >= 0 and count.max() <= n):
        raise InputError(f"correct holds {count.min():g} to {count.max():g} of {n} answers; pass counts from 0 to {n}.")
    drawn = np.arange(k)  # a factor of 0 appears as soon as k exceeds the wrong answers
    return 1.0 - (np.maximum(n - count[..., None] - drawn, 0.0) / (n - drawn)).prod(axis=-1)


def share_interval(values: ArrayLike, estimand: str) -> Interval:
    """Return the mean of one value in [0, 1] per prompt, with a 95 % interval that stays in [0, 1].

    The delete-one-prompt jackknife on the logit scale. Where that scale ends, at a mean of 0 or 1 or one prompt away
    from it, the interval is Clopper and Pearson's with S = Σ values successes in P draws, real S allowed: a value in
    [0, 1] of mean p has at most the variance p(1 − p) of a success. For S = 0 it is [0, 1 − (α/2)^{1/P}]. Below
    `MIN_CLUSTERS` prompts it is a point without interval.
    """
    x = np.asarray(values, dtype=float)
    interval = cluster_jackknife(x[:, None], lambda rows: rows[..., 0], estimand, scale="logit")
    if interval is not None and (interval.low is not None or x.size < MIN_CLUSTERS):
        return interval
    # Too near 0 or 1 for the logit: leaving out one prompt, or none, reaches the end of the scale.
    # A value in [0, 1] varies at most as much as a success, so counting it as a part of one is on the safe side.
    total, rest, tail = x.sum(), (1.0 - x).sum(), (1 - LEVEL) / 2
    low = float(special.betaincinv(total, rest + 1, tail)) if total > 0 else 0.0
    high = float(special.betainccinv(total + 1, rest, tail)) if rest > 0 else 1.0
    return Interval(float(x.mean()), low, high, x.size, estimand)
