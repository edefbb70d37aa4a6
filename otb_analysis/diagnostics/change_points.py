"""Change points of a finished series, offline: where did its level change for good?

Unlike a detector's first firing this looks at all steps, later ones too: it dates what happened, it does not warn.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from otb_analysis.diagnostics.findings import StepSeries
from otb_analysis.diagnostics.windows import MIN_SPREAD, NORMAL
from otb_analysis.types import Float

LOGARITHMIC = ("grad_norm", "entropy_mean", "length_mean")
"""Columns whose changes are factors."""

COLUMNS = (*LOGARITHMIC, "energy_tail_k")
"""Columns that are searched by default. Not the reward: a learning curve is a ramp, which segments only cut up."""

BLOCK = 5
"""Steps averaged into one point: neighbours are alike, and a change within five steps is one change."""

PENALTY = 8.0
"""Price of one more change point in units of σ²·log n. 2 would be the Bayesian information criterion's for
independent noise; autocorrelation and slow trends ask for more."""

LEAST_JUMP, SHORT = 3.5, 5.0
"""A change point counts where the levels on its sides differ by `LEAST_JUMP`·(1 + `SHORT`/n) standard deviations σ of
one of the n points: σ is estimated from n − 1 differences, and of few it comes out small too often."""

LEAST_FACTOR, LEAST_SHIFT = 1.4, 1.0
"""They differ by this factor, too, or for columns that are no logarithms by this much: a slow decay, or the slow rise
of the tail index in a healthy run, would be cut into steps otherwise."""


@dataclass(frozen=True)
class ChangePoint:
    """One lasting change of level."""

    column: str
    step: int  # First step of the new level, to within `BLOCK` steps
    before: float  # Level of the segment before it, in the column's unit
    after: float  # Level of the segment that begins here


def change_points(series: StepSeries, columns: tuple[str, ...] = COLUMNS) -> list[ChangePoint]:
    """Find the lasting changes of some quantities: the best cut of their block medians into segments.

    Minimises Σ over segments of the squared deviations + penalty · number of changes, penalty = 8·σ²·log n, σ from the
    differences of neighbouring points, robustly. Positive quantities are taken by their logarithm.
    """
    points = [point for name in columns for point in _of_one(series, name)]
    return sorted(points, key=lambda point: (point.step, point.column))


def _of_one(series: StepSeries, name: str) -> list[ChangePoint]:
    step, (value,) = series.recorded(name)
    log = name in LOGARITHMIC
    step, value = (step[value > 0], np.log(value[value > 0])) if log else (step, value)
    n = value.size // BLOCK
    if n < 6:
        return []
    # Medians of blocks: a single spike is no change of level.
    points = np.median(value[: n * BLOCK].reshape(n, BLOCK), axis=1)
    sigma = _noise(points, MIN_SPREAD if log else 1e-9)
    ends = best_cut(points, PENALTY * sigma**2 * np.log(n))
    edges = [0, *ends]
    # The cost is of means, but the levels reported are medians, which an outlier does not move.
    levels = [float(np.median(points[a:b])) for a, b in pairwise(edges)]
    least = max(LEAST_JUMP * (1 + SHORT / n) * sigma, np.log(LEAST_FACTOR) if log else LEAST_SHIFT)
    return [
        ChangePoint(name, int(step[at * BLOCK]), *(float(np.exp(x)) if log else x for x in (before, after)))
        for at, (before, after) in zip(ends, pairwise(levels), strict=False)
        if abs(after - before) >= least
    ]


def best_cut(points: Float, penalty: float) -> list[int]:
    """Return where segments of two points or more end that minimise Σ (x − segment mean)² + penalty · segments.

    Optimal partitioning (Jackson et al. 2005): F(t) = min_s F(s) + cost(s, t) + penalty, in n steps of up to n numbers.
    """
    x = points - points.mean()
    one, two = (np.concatenate([[0.0], np.cumsum(x**k)]) for k in (1, 2))
    least, start = np.full(x.size + 1, np.inf), np.zeros(x.size + 1, int)
    least[0] = 0.0
    for t in range(2, x.size + 1):
        s = np.arange(t - 1)
        total = least[s] + (two[t] - two[s]) - (one[t] - one[s]) ** 2 / (t - s) + penalty
        start[t] = int(total.argmin())
        least[t] = total[start[t]]
    ends = [x.size]
    while start[ends[0]]:
        ends.insert(0, int(start[ends[0]]))
    return ends


def _noise(points: Float, least: float) -> float:
    """Standard deviation of one point, from neighbouring differences, which a change of level touches once."""
    return max(NORMAL * float(np.median(np.abs(np.diff(points)))) / np.sqrt(2), least)
