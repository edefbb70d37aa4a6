"""The records of a diagnosis: a run's scalars step by step, what a detector computed from them, what it says.

Every statistic is causal: its value at a step is a function of that step and those before it, so the step at which it
first reached a threshold is the step at which a watcher of the running run would have seen it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from otb_analysis.errors import InputError
from otb_analysis.phases import plural
from otb_analysis.types import Float, Int

Level = Literal["ok", "watch", "alarm", "not measured", "too short"]
SEVERITY: dict[Level, int] = {"alarm": 0, "watch": 1, "not measured": 2, "too short": 3, "ok": 4}
"""Order in which findings are shown: the worst first."""


@dataclass(frozen=True)
class StepSeries:
    """Scalars of one run; made by the store from its steps table, read by detectors."""

    step: Int  # Step numbers [S], ascending
    # Name in `schema.STEPS` → values [S]; NaN where a step did not record it, ±∞ where it recorded NaN or ±∞
    columns: Mapping[str, Float]

    def __post_init__(self) -> None:
        """Check the shapes and the order."""
        if np.any(np.diff(self.step) <= 0):
            raise InputError("step is not ascending; pass each step once, in order.")
        for name, values in self.columns.items():
            if np.shape(values) != np.shape(self.step):
                raise InputError(
                    f"{name} has shape {np.shape(values)} but there are {len(self.step)} steps; pass one value a step."
                )

    def recorded(self, *names: str) -> tuple[Int, list[Float]]:
        """Return the steps that recorded a finite value of all of some columns, and their values there."""
        missing = np.full(len(self.step), np.nan)
        values = [np.asarray(self.columns.get(name, missing), dtype=float) for name in names]
        known = np.isfinite(values).all(axis=0) if values else np.zeros(len(self.step), bool)
        return np.asarray(self.step)[known], [x[known] for x in values]

    def until(self, step: int) -> "StepSeries":
        """Return the series up to a step: what was known at that time."""
        kept = np.asarray(self.step) <= step
        return StepSeries(np.asarray(self.step)[kept], {name: np.asarray(x)[kept] for name, x in self.columns.items()})


@dataclass(frozen=True)
class Evidence:
    """One causal statistic against its two thresholds."""

    column: str  # Column of `schema.STEPS` it is computed from
    statistic: str  # What `score` is, in words
    step: Int  # Steps that recorded the column [K]
    value: Float  # The column there [K]
    score: Float  # The statistic [K]; NaN while too few steps are known
    watch: float  # Score from which on it is worth a look
    alarm: float  # Score from which on something is wrong; ∞ where the statistic never calls for more than a look

    @property
    def ready(self) -> bool:
        """True when enough steps are known for a score."""
        return bool(np.isfinite(self.score).any())

    @property
    def level(self) -> Level:
        """The highest level reached so far, at whatever step."""
        if not self.ready:
            return "not measured"
        if self.first(self.alarm) is not None:
            return "alarm"
        return "ok" if self.first(self.watch) is None else "watch"

    def first(self, threshold: float) -> int | None:
        """Return the index of the first score at or above a threshold, None where there is none."""
        with np.errstate(invalid="ignore"):
            reached = np.flatnonzero(self.score >= threshold)
        return int(reached[0]) if reached.size else None

    def shown(self) -> int:
        """Return the index whose numbers a reason quotes: the first at the level reached, else the last score."""
        reached = self.first(self.alarm if self.level == "alarm" else self.watch)
        return int(np.flatnonzero(np.isfinite(self.score))[-1]) if reached is None else reached


@dataclass(frozen=True)
class Finding:
    """What one detector says about one run."""

    detector: str  # Its name in `DETECTORS`
    # `ok`, `watch`, `alarm`, the highest reached so far, or `not measured`, or `too short` where every step of the run
    # recorded what is needed and they are too few.
    level: Level
    # One sentence with the numbers; for `not measured`, what is missing and what measures it; for `too short`, how many
    # steps are needed.
    reason: str
    # The step at which it first reached `watch` or more, known at that step; None where it never did.
    watch_step: int | None = None
    alarm_step: int | None = None  # The same for `alarm`
    evidence: tuple[Evidence, ...] = ()  # The statistics behind it, the one that decided first

    @property
    def fired(self) -> bool:
        """True when it ever reached watch or alarm."""
        return self.watch_step is not None


def deciding(evidence: Sequence[Evidence]) -> Evidence:
    """Return the statistic that decides: that of the worst level, and among equals the earliest."""
    return min((one for one in evidence if one.ready), key=lambda one: (SEVERITY[one.level], one.step[one.shown()]))


def finding_of(detector: str, evidence: Sequence[Evidence], reason: str) -> Finding:
    """Return the finding of some statistics of which at least one is ready."""
    ready = [one for one in evidence if one.ready]
    first = deciding(ready)
    ordered = (first, *(one for one in ready if one is not first))
    watch = [int(one.step[at]) for one in ready if (at := one.first(one.watch)) is not None]
    alarm = [int(one.step[at]) for one in ready if (at := one.first(one.alarm)) is not None]
    return Finding(detector, first.level, reason, min(watch, default=None), min(alarm, default=None), ordered)


def unmeasured(detector: str, series: StepSeries, needed: int, columns: Sequence[str], remedy: str) -> Finding:
    """Return the finding of a detector without enough recorded steps.

    `needed` steps of any one of the columns would be enough. `remedy` says what measures them; it ends a sentence.
    """
    # One column is enough, so the remedy is about the one that was recorded most often.
    counts = {name: len(series.recorded(name)[0]) for name in columns}
    most = max(counts, key=lambda name: counts[name])
    if counts[most] == 0:
        return Finding(detector, "not measured", f"{' and '.join(columns)} never recorded; {remedy}.")
    counted = f"{most} was recorded at {plural(counts[most], 'step')}, {needed} are needed"
    if counts[most] == len(series.step) < needed:
        return Finding(detector, "too short", f"{counted}; the run has {counts[most]}.")
    return Finding(detector, "not measured", f"{counted}; {remedy}.")


MIN_SPREAD = 0.05
"""Least spread of logarithms, 5 %: a quantity that happens to repeat itself must not make every change infinite."""

NORMAL = 1.4826
"""Standard deviation of a normal law per unit of its median absolute deviation."""


def trailing(x: Float, window: int, statistic: Callable[..., Float]) -> Float:
    """Return a statistic of the last `window` values at every index [K]; NaN before there are so many.

    The statistic takes [..., window] and `axis`, such as `np.median`.
    """
    values = np.full(x.size, np.nan)
    if x.size >= window:
        values[window - 1 :] = statistic(sliding_window_view(x, window), axis=-1)
    return values


def robust(x: Float) -> tuple[Float, Float]:
    """Return median and robust spread along the last axis."""
    centre = np.median(x, axis=-1)
    # Medians of medians: a surge among the values hardly moves the spread it is held against.
    deviation = np.median(np.abs(x - centre[..., None]), axis=-1)
    return centre, np.maximum(NORMAL * deviation, MIN_SPREAD)
