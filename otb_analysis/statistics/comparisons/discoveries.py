"""Which of many estimators really differ: false-discovery control over paired comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from otb_analysis.errors import InputError, nearest
from otb_analysis.statistics.inference.intervals import Interval
from otb_analysis.statistics.moments.paired import PairedRatios

MEASURES = ("variance", "sf", "efficiency")


@dataclass(frozen=True)
class Discovery:
    """One estimator's comparison among many.

    Attributes:
        estimator: Its name.
        energy_source: Its energy source.
        ratio: The paired ratio with its (uncorrected) interval.
        p_value: Two-sided p-value of ratio = 1 from the same jackknife.
        q_value: The smallest false-discovery rate at which it counts as different.
        different: q_value ≤ rate.
    """

    estimator: str
    energy_source: str
    ratio: Interval
    p_value: float
    q_value: float
    different: bool


def discoveries(
    pairs: Sequence[PairedRatios],
    measure: str = "efficiency",
    rate: float = 0.05,
    method: Literal["bh", "by"] = "by",
) -> list[Discovery]:
    """Comparisons that stand after controlling the false-discovery rate over all of them.

    All estimators are measured on the same rollouts, so their p-values are dependent; Benjamini–Yekutieli (`by`) holds
    under any dependence and costs a factor Σ 1/i over Benjamini–Hochberg (`bh`).

    Args:
        pairs: One entry per estimator, as from `paired_ratios`.
        measure: `variance`, `sf` or `efficiency`.
        rate: Share of false discoveries tolerated among those reported.
        method: `by` or `bh`.

    Returns:
        The entries that have an interval, smallest q-value first. Those without one (too few prompts) cannot be tested.

    Raises:
        InputError: The measure is unknown.
    """
    if measure not in MEASURES:
        raise InputError(f"measure is {measure!r}; {nearest(measure, MEASURES)}")
    tested = [
        (pair, ratio) for pair in pairs if (ratio := getattr(pair, measure)) is not None and ratio.p_value is not None
    ]
    if not tested:
        return []
    p_values = [ratio.p_value for _, ratio in tested]
    q_values = stats.false_discovery_control(p_values, method=method)
    found = [
        Discovery(pair.estimator, pair.energy_source, ratio, p, float(q), bool(q <= rate))
        for (pair, ratio), p, q in zip(tested, p_values, q_values, strict=True)
    ]
    return sorted(found, key=lambda d: (d.q_value, d.p_value))
