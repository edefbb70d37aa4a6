"""How often the alarms cry wolf on synthetic calm series, and how soon they see a change at a known step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.alarm_series import calm_series, replaced
from benchmarks.config import AlarmsConfig
from benchmarks.publish import Column, Report, Row, notes_of, report_of
from otb_analysis.diagnostics import DETECTORS, StepSeries, change_points
from otb_analysis.types import Float

LENGTHS = (50, 100, 200, 500)
LENGTH, AT = 200, 100
"""Steps of a run with a change, and the step of the change."""

CHANGE_POINTS = "change_points"
ANY = "any of them"
"""The family, since a reader of the page looks at all detectors and change points of a run at once."""

NEAR = 10
"""Steps within which a change point must lie of the true one."""


def _calm_cell(row: Row, length: int) -> str:
    return "{rate:.1%} [{rate_low:.1%}, {rate_high:.1%}]".format_map(row["lengths"][str(length)])


COLUMNS: dict[str, Column] = {
    "detector": "{detector}",
    **{f"{length} steps": partial(_calm_cell, length=length) for length in LENGTHS},
    "with an alarm": "{alarm_rate:.1%}",
    "known change": "{change}",
    "found": "{found:.0%}",
    "fired before": "{before:.1%}",
    "median delay": "{delay:.0f}",
}

Columns = Mapping[str, Float]


@dataclass(frozen=True)
class Case:
    """One known change."""

    detector: str
    change: str  # In words
    column: str
    values: Callable[[np.random.Generator, Columns], Float]  # Of the column from step `start` on
    start: int = AT

    def apply(self, random: np.random.Generator, series: StepSeries) -> StepSeries:
        """Return a calm run with the change in it."""
        return replaced(series, self.start, **{self.column: self.values(random, series.columns)})


def _ramp(rate: float) -> Float:
    """A factor (1 + rate) once more at every step from the change on."""
    return (1 + rate) ** np.maximum(np.arange(LENGTH) - AT + 1, 0)


def _clipped(random: np.random.Generator, columns: Columns) -> Float:
    return np.where(np.arange(LENGTH) < AT, random.random(LENGTH) < 0.1, 1.0)


def _equal_groups(random: np.random.Generator, columns: Columns) -> Float:
    return random.binomial(columns["n_prompts"].astype(int), 0.8).astype(float)


Z = "certificate_prob_z"
CASES = (
    Case("reward_fall", "reward × .1 at once", "reward_mean", lambda r, c: 0.1 * c["reward_mean"]),
    Case("reward_fall", "reward down 5 % a step", "reward_mean", lambda r, c: c["reward_mean"] * _ramp(-0.05)),
    Case("vanished_gradient", "‖ḡ‖ exactly 0", "grad_norm", lambda r, c: 0 * c["grad_norm"]),
    Case("not_finite", "‖ḡ‖ infinite", "grad_norm", lambda r, c: np.inf * c["grad_norm"]),
    Case("gradient_surge", "‖ḡ‖ × 5 at once", "grad_norm", lambda r, c: 5 * c["grad_norm"]),
    Case("gradient_surge", "‖ḡ‖ × 2 at once", "grad_norm", lambda r, c: 2 * c["grad_norm"]),
    Case("gradient_surge", "‖ḡ‖ up 10 % a step", "grad_norm", lambda r, c: c["grad_norm"] * _ramp(0.1)),
    Case("entropy_collapse", "entropy × .2 at once", "entropy_mean", lambda r, c: 0.2 * c["entropy_mean"]),
    Case("entropy_collapse", "entropy down 5 % a step", "entropy_mean", lambda r, c: c["entropy_mean"] * _ramp(-0.05)),
    Case("entropy_rise", "entropy × 5 at once", "entropy_mean", lambda r, c: 5 * c["entropy_mean"]),
    Case("entropy_rise", "entropy up 5 % a step", "entropy_mean", lambda r, c: c["entropy_mean"] * _ramp(0.05)),
    Case("length_drift", "length × 2.5 at once", "length_mean", lambda r, c: 2.5 * c["length_mean"]),
    Case("length_drift", "length down 3 % a step", "length_mean", lambda r, c: c["length_mean"] * _ramp(-0.03)),
    Case("zero_variance_groups", "80 % of groups of equal reward", "n_zero_variance_groups", _equal_groups),
    Case("ratio_tails", "largest log ratio around 3", "mismatch_max", lambda r, c: r.gamma(10, 0.3, LENGTH)),
    Case("ratio_tails", "half of the tokens clipped", "ratio_clip_share", lambda r, c: r.beta(20, 20, LENGTH)),
    Case("tail_index", "Pareto-k of exact norms near 2", "exact_tail_k", lambda r, c: r.normal(2, 0.3, LENGTH)),
    Case("tail_index", "Pareto-k of exact norms near 1.5", "exact_tail_k", lambda r, c: r.normal(1.5, 0.3, LENGTH)),
    Case("clip_fraction", "from 10 % of steps clipped to all", "clipped", _clipped, start=0),
    Case("sampling_certificate", "mean z of one column 2 (a wrong temperature)", Z, lambda r, c: c[Z] + 2.0),
    Case("sampling_certificate", "mean z of one column ½ (a slight filter)", Z, lambda r, c: c[Z] + 0.5),
)  # fmt: skip


def run(config: AlarmsConfig) -> Report:
    """Measure every detector on synthetic calm series of several lengths and on runs with a known change."""
    calm = calm_rates(config.series, config.seed)
    rows = [{"detector": c.detector, "change": c.change} | calm[c.detector] | power(c, config) for c in CASES]
    for factor in (3.0, 2.0):
        change = {"detector": CHANGE_POINTS, "change": f"‖ḡ‖ × {factor:g} at once"}
        rows.append(change | calm[CHANGE_POINTS] | dating_power(config, factor))
    rows.append({"detector": ANY} | calm[ANY])
    title = f"Alarms on {config.series:,} synthetic calm series a length, and on {config.changed} with each change"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, length=LENGTH, at=AT, near=NEAR))


def calm_rates(series: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return how often every detector, and the family, fires in this many calm series of each of `LENGTHS`."""
    counts = {name: np.zeros((len(LENGTHS), 2), int) for name in (*DETECTORS, CHANGE_POINTS, ANY)}
    for at, length in enumerate(LENGTHS):
        for run in range(series):
            for name, fired in _firings(calm_series(np.random.default_rng([seed, length, run]), length)).items():
                counts[name][at] += fired
    rates = {}
    for name, by_length in counts.items():
        (fired, alarms), n = by_length.sum(axis=0), series * len(LENGTHS)
        lengths = {str(length): _rate(k, series) for length, k in zip(LENGTHS, by_length[:, 0], strict=True)}
        rates[name] = _rate(fired, n) | {"alarm_rate": float(alarms / n), "lengths": lengths}
    return rates


def _firings(run: StepSeries) -> dict[str, tuple[bool, bool]]:
    """Whether each ever fired, and whether with an alarm; change points know no alarm."""
    detections = {name: detect(run) for name, detect in DETECTORS.items()}
    fired = {name: (one.fired, one.alarm_step is not None) for name, one in detections.items()}
    fired[CHANGE_POINTS] = (len(change_points(run)) > 0, False)
    return fired | {ANY: (any(one for one, _ in fired.values()), any(alarm for _, alarm in fired.values()))}


def _rate(fired: int, n: int) -> dict[str, float]:
    interval = stats.binomtest(int(fired), n).proportion_ci(method="exact")
    low, high = float(interval.low), float(interval.high)
    return {"calm": n, "fired": int(fired), "rate": float(fired / n), "rate_low": low, "rate_high": high}


def power(case: Case, config: AlarmsConfig) -> dict[str, object]:
    """Return how often a detector sees a change, how often it had fired before it, and the median delay in steps."""
    delays, before = [], 0
    for random in _generators(config):
        first = DETECTORS[case.detector](case.apply(random, calm_series(random, LENGTH))).watch_step
        if first is not None:
            before += first < AT
            delays += [first - AT] if first >= AT else []
    left = config.changed - before
    delay = float(np.median(delays)) if delays else None
    return {"found": len(delays) / max(left, 1), "before": before / config.changed, "delay": delay}


def dating_power(config: AlarmsConfig, factor: float) -> dict[str, object]:
    """Return how often a change point of ‖ḡ‖ lies near a lasting rise by a factor."""
    near = 0
    for random in _generators(config):
        run = calm_series(random, LENGTH)
        points = change_points(replaced(run, AT, grad_norm=factor * run.columns["grad_norm"]), ("grad_norm",))
        near += any(abs(point.step - AT) <= NEAR for point in points)
    return {"found": near / config.changed}


def _generators(config: AlarmsConfig) -> Iterator[np.random.Generator]:
    return (np.random.default_rng([config.seed, LENGTH, run, AT]) for run in range(config.changed))
