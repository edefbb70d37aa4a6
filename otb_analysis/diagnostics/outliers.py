"""Single-step outliers of a series against the steps around it, later ones too: they date what happened, and warn not.

A detector's medians do not see one step far from all others, and a change point is a change that lasts.
"""

from dataclasses import dataclass

import numpy as np

from otb_analysis.diagnostics.findings import StepSeries

OUTLIERS = ("grad_norm", "advantage_max", "length_max")
"""Columns that are looked at; values of exactly 0 are left out."""

AROUND, LEAST = 20, 10
"""Steps on each side that say what is usual, and how many of them a step needs in all."""

FACTOR = 5.0
"""An outlier is at least so many times the usual."""

BEYOND = 8.0
"""And so many times as far above the median, in logarithms, as the 90 % quantile of the steps around.

That is ten standard deviations of lognormal noise. The quantile grows with a heavy tail, as the median absolute
deviation does not: eight of those call 86 % of Pareto series of 500 steps, and this calls 3 %.
"""


@dataclass(frozen=True)
class Outlier:
    """One step far above the steps around it."""

    column: str
    step: int
    value: float  # In the column's unit
    usual: float  # Median of the steps around, without it

    @property
    def multiple(self) -> float:
        """The value over the usual."""
        return self.value / self.usual


def single_step_outliers(series: StepSeries, columns: tuple[str, ...] = OUTLIERS) -> list[Outlier]:
    """Find single steps whose value is far above the usual, the largest multiple first.

    Step t of a positive x is one where log x_t − m ≥ max(log 5, 8·(q − m)), m the median and q the 90 % quantile of
    log x at the up to 20 recorded steps on each side. More than two among five steps are a change of level, and none.
    Runs of pure noise of 12 to 500 steps that have one: at most 1 % where it is lognormal (σ up to 1), exponential or
    |Student t₃|; 4 % where it is Pareto with infinite variance; 34 % where log x is t₃ of standard deviation ½.
    """
    outliers = []
    for name in columns:
        step, (value,) = series.recorded(name)
        step, value = step[value > 0], value[value > 0]
        if value.size <= LEAST:
            continue
        log, usual = np.log(value), np.full(value.size, np.nan)  # The median, at outliers alone
        some = np.flatnonzero(log - log.min() >= np.log(FACTOR))  # no other step can be one
        around = some[:, None] + np.delete(np.arange(-AROUND, AROUND + 1), AROUND)
        whole = (around >= 0).all(axis=1) & (around < log.size).all(axis=1)
        quantiles = np.empty((2, some.size))
        quantiles[:, whole] = np.quantile(log[around[whole]], [0.5, 0.9], axis=1)
        for row in np.flatnonzero(~whole):
            quantiles[:, row] = np.quantile(log[around[row][(around[row] >= 0) & (around[row] < log.size)]], [0.5, 0.9])
        middle, high = quantiles
        found_here = log[some] - middle >= np.maximum(np.log(FACTOR), BEYOND * (high - middle))
        usual[some[found_here]] = np.exp(middle[found_here])
        near = np.convolve(np.isfinite(usual), np.ones(5), "same")
        alone = np.flatnonzero(np.isfinite(usual) & (near <= 2))
        outliers += [Outlier(name, int(step[t]), float(value[t]), float(usual[t])) for t in alone]
    return sorted(outliers, key=lambda one: -one.multiple)
