"""What so many seconds of measuring pay for: prompts, steps and levels, by forecast prices."""

from dataclasses import dataclass, replace
from typing import Any

from otb_analysis.config import (
    AttributionSchedule,
    MeasureConfig,
    SampledSchedule,
    Schedule,
    StepSchedule,
    TrainConfig,
)
from otb_analysis.measurement.level import positions
from otb_analysis.measurement.levels import level_of
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.training.forecast import PlannedLevel, levels

PAIR = 2
"""Fewest prompts of a measured step: a variance between prompts needs two."""
SPREAD = 6
"""Measured steps that are wanted before more prompts are measured at each: enough for a curve over the run."""
ATTRIBUTED = 0.25
"""Part of the budget that attribution may take, once the rest reaches the prompts of an interval."""
MARGIN = 1.2
"""A forecast counts this many times, until the true seconds are known."""

EXACT = "exact norms"
"""The phase of exact norms, which are part of the step itself where the estimator trains on them."""
OFF: dict[str, StepSchedule] = {"exact": Schedule(), "sampled": SampledSchedule(), "attribution": AttributionSchedule()}


def planned_levels(measure: MeasureConfig) -> list[str]:
    """Return the levels whose schedules are the default ones, which a budget may replace."""
    default = MeasureConfig()
    return [name for name in OFF if getattr(measure, name) == getattr(default, name)]


def phases_of(name: str) -> tuple[str, ...]:
    """Return the phases in which a level is measured."""
    return (EXACT, "Gram matrix", "smaller groups") if name == "exact" else (level_of(name).phase,)


@dataclass(frozen=True)
class Prices:
    """Forecast seconds of every level on rollouts such as these."""

    config: TrainConfig
    rollouts: Rollouts
    per_position: float  # Seconds of a forward and backward pass per position
    exact_always: bool  # The training estimator reads exact norms at each step: they are part of the step itself

    def levels(self, measure: MeasureConfig) -> list[tuple[PlannedLevel, float]]:
        """Return what a configuration measures beside the training itself, with the seconds of one event."""
        every = levels(replace(self.config, measure=measure), self.rollouts, self.exact_always)
        second = MARGIN * self.per_position
        return [(lv, second * lv.multiple * positions(self.rollouts, lv.rows)) for lv in every[self.exact_always :]]

    def own(self) -> float:
        """Return the seconds of the exact norms that the training estimator reads at each step."""
        always = levels(self.config, self.rollouts, self.exact_always)[: self.exact_always]
        return sum(self.per_position * lv.multiple * positions(self.rollouts, lv.rows) for lv in always)

    def event(self, name: str, schedule: StepSchedule) -> float:
        """Return the seconds of one event of a level alone; `schedule` counts where a budget could plan the level."""
        alone = replace(self.config.measure, **OFF | ({name: schedule} if name in OFF else {}))
        return sum(seconds for level, seconds in self.levels(alone) if level.name in phases_of(name))

    def total(self, measure: MeasureConfig, first: int) -> float:
        """Return the seconds that a configuration takes from a step to the end of the run."""
        steps = range(first, self.config.optimize.steps)
        return sum(seconds * sum(map(level.due, steps)) for level, seconds in self.levels(measure))


def apart(steps: int, events: int) -> int:
    """Return the steps between two of so many events in so many steps, the first of which is the first step."""
    return max(1, -(-steps // events))


def spread(schedule: Any, first: int, steps: int, events: int) -> Any:
    """Return a schedule of just so many events, evenly spread from step `first` to the last step of a run."""
    events = min(events, steps - first)
    every = (steps - first) // events if events else 0
    return replace(schedule, every=every, first=steps - 1 - (events - 1) * every if events else first)


def plan(prices: Prices, first: int, seconds: float) -> MeasureConfig:
    """Return the configuration whose measuring from step `first` to the end takes at most `seconds`.

    Exact norms with all estimators' Gram matrix come first, of at least two prompts, and then as many as an interval
    takes. A quarter is kept for attribution beside that, which takes what is left once these are measured. Where two
    prompts cannot be measured even once, a tenth of the tokens is drawn; where that is too dear as well, the level
    `forward` alone is left.
    """
    measure = prices.config.measure
    free = planned_levels(measure)
    chosen = replace(measure, **{name: OFF[name] for name in free})
    left = seconds - prices.total(chosen, first)
    if "exact" in free:
        exact = _exact(prices, first, left * (1 - ATTRIBUTED))
        if "attribution" not in free or prompts_of(exact, first, prices.config) < MIN_CLUSTERS:
            exact = _exact(prices, first, left)
        chosen = replace(chosen, exact=exact)
        if not exact.every and "sampled" in free:
            chosen = replace(chosen, sampled=_often(prices, "sampled", SampledSchedule(first=first), left))
    if "attribution" in free:
        left = seconds - prices.total(chosen, first)
        schedule = AttributionSchedule(first=interval_step(chosen.exact, first, prices.config))
        chosen = replace(chosen, attribution=_often(prices, "attribution", schedule, left))
    return chosen


def interval_step(exact: Schedule, first: int, config: TrainConfig, before: int = 0) -> int:
    """Return the step from which on attribution may spend: that with an interval's prompts, or the last measured one.

    So many prompts were measured `before` step `first`, the first one where nothing is measured exactly.
    """
    at = [step for step in range(first, config.optimize.steps) if exact.due(step)]
    each = exact.prompts or config.sample.prompts
    wanted = max(1, -(-(MIN_CLUSTERS - before) // each))
    return at[min(wanted, len(at)) - 1] if at else first


def _exact(prices: Prices, first: int, seconds: float) -> Schedule:
    """The exact norms and Gram matrices that so many seconds pay for; off where they pay for none.

    As many prompts at one step give more pairs than over several steps. So prompts are added as soon as `SPREAD` steps
    are measured, and steps once all prompts are.
    """
    steps, most = prices.config.optimize.steps - first, len(prices.rollouts.prompts)
    best = Schedule(prompts=min(PAIR, most), first=first)
    for prompts in range(min(PAIR, most), most + 1):
        schedule = _often(prices, "exact", Schedule(prompts=prompts, first=first), seconds)
        if not schedule.every or (best.every and events_of(schedule, first, first + steps) < min(SPREAD, steps)):
            break
        best = schedule
    return best


def _often(prices: Prices, name: str, schedule: Any, seconds: float) -> Any:
    """A schedule as often as the seconds allow, or never."""
    steps = prices.config.optimize.steps - schedule.first
    price = prices.event(name, replace(schedule, every=1))
    events = min(steps, int(max(seconds, 0.0) / price))
    return replace(schedule, every=apart(steps, events) if events else 0)


def events_of(schedule: StepSchedule, first: int, steps: int) -> int:
    """Return how often a level is measured from a step to the end of a run."""
    return sum(map(schedule.due, range(first, steps)))


def prompts_of(exact: Schedule, first: int, config: TrainConfig) -> int:
    """Return how many prompts a schedule measures from a step to the end of a run."""
    return events_of(exact, first, config.optimize.steps) * (exact.prompts or config.sample.prompts)
