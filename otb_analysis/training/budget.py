"""What to measure, and when, so that measuring takes at most a share of the run's time.

`measure.budget` b allows b seconds of measuring for every second that the run takes without it. The plan follows from
one timed forward and backward pass (`forecast`). After every measured step the true seconds replace the forecast, and
the steps that are left are planned anew. Schedules that the user changed are kept, and their cost is taken off first.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.config import (
    AttributionSchedule,
    MeasureConfig,
    SampledSchedule,
    Schedule,
    StepSchedule,
    TrainConfig,
)
from otb_analysis.measurement.levels import positions
from otb_analysis.phases import EXPECTED, note, plural
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

PHASES_OF = {
    "exact": ("exact norms", "Gram matrix", "smaller groups"),
    "sampled": ("drawn tokens",),
    "attribution": ("attribution",),
}
"""Levels that a budget plans → the phases in which they are measured."""
OFF: dict[str, StepSchedule] = {"exact": Schedule(), "sampled": SampledSchedule(), "attribution": AttributionSchedule()}


def planned_levels(measure: MeasureConfig) -> list[str]:
    """Return the levels whose schedules are the default ones, which a budget may replace."""
    default = MeasureConfig()
    return [name for name in PHASES_OF if getattr(measure, name) == getattr(default, name)]


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

    def event(self, name: str, schedule: StepSchedule) -> float:
        """Return the seconds of one event of a level alone."""
        alone = replace(self.config.measure, **OFF | {name: schedule})
        return sum(seconds for level, seconds in self.levels(alone) if level.name in PHASES_OF[name])

    def total(self, measure: MeasureConfig, first: int) -> float:
        """Return the seconds that a configuration takes from a step to the end of the run."""
        steps = range(first, self.config.optimize.steps)
        return sum(seconds * sum(map(level.due, steps)) for level, seconds in self.levels(measure))


def apart(steps: int, events: int) -> int:
    """Return the steps between two of so many events in so many steps, the first of which is the first step."""
    return max(1, -(-steps // events))


def plan(prices: Prices, first: int, seconds: float) -> MeasureConfig:
    """Return the configuration whose measuring from step `first` to the end takes at most `seconds`.

    Exact norms with all estimators' Gram matrix come first, of at least two prompts, and then as many as an interval
    takes. A quarter is kept for attribution beside that, which takes what is left. Where two prompts cannot be measured
    even once, a tenth of the tokens is drawn; where that is too dear as well, the level `forward` alone is left.
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
        chosen = replace(chosen, attribution=_often(prices, "attribution", AttributionSchedule(first=first), left))
    return chosen


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


KEPT = ("price", "known", "spent", "usual", "prompts")
"""What a resumed run goes on from, beside its schedules."""


class Budget:
    """Seconds that measuring may take and has taken, and what is measured for them."""

    def __init__(self, config: TrainConfig, exact_always: bool):
        self.config, self.exact_always = config, exact_always
        self.share, self.steps = config.measure.budget, config.optimize.steps
        self.levels = planned_levels(config.measure)  # Whose schedule is planned
        # What is measured from now on: what the user set, until the first step is timed
        self.measure = replace(config.measure, **{name: OFF[name] for name in self.levels})
        self.price: dict[str, float] = {}  # Seconds of one event, by level
        self.spent = 0.0  # Seconds of measuring so far
        self.usual: list[float] = []  # Seconds of everything else, by step
        self.known: dict[str, bool] = {}  # Levels whose price is no forecast any more
        self.prompts = 0  # Measured exactly so far

    def begin(self, step: int, rollouts: Rollouts, per_position: float, usual: float, forward: float) -> MeasureConfig:
        """Plan the run at its first step and return what is measured.

        A step takes `usual` seconds without measuring. Its forward statistics, which are always there, take `forward`.
        """
        if not self.price:
            prices = Prices(self.config, rollouts, per_position, self.exact_always)
            self.measure = plan(prices, step, (self.share * usual - forward) * (self.steps - step))
            self.price = {n: prices.event(n, replace(getattr(self.measure, n), every=1)) for n in self.levels}
            if self.share * usual < forward:
                note(
                    f"measure.budget is {self.share:g}, but the level forward, which always runs, takes "
                    f"{forward / usual:.1%} of a step: nothing else is measured."
                )
            else:
                note(self.interval(step))
        return self.measure

    def record(self, step: int, seconds: Mapping[str, float]) -> None:
        """Add a step's seconds by column, as the trainer times them; plan anew after a step that measured."""
        by_phase = {name.removeprefix("seconds_"): value for name, value in seconds.items()}
        measured = by_phase.get("measure", 0.0) + by_phase.get("forward", 0.0)
        self.spent += measured
        self.usual.append(sum(by_phase.values()) - by_phase.get("evaluate", 0.0) - measured)
        due = [name for name in self.levels if getattr(self.measure, name).due(step)]
        worse = 1.0  # How far the forecast was too low, which it then is of other levels, too
        for name in due:
            forecast, self.known[name] = self.price[name], True
            self.price[name] = sum(EXPECTED.get(phase, 0.0) for phase in PHASES_OF[name]) or forecast
            worse = max(worse, self.price[name] / forecast)
        self.price = {n: p if self.known.get(n) else p * worse for n, p in self.price.items()}
        if "exact" in due:
            self.prompts += self.measure.exact.prompts or self.config.sample.prompts
        # The first step is a slow one: its successors may be cheaper, and so may allow less than was planned
        left, rest = self.share * float(np.median(self.usual)) * self.steps - self.spent, self.steps - step - 1
        if rest > 0 and (due or self._cost(step + 1) > max(0.0, left)):
            self._plan_again(step, left, rest)

    def _cost(self, first: int) -> float:
        """Seconds that the plan takes from a step to the end of the run."""
        return sum(events_of(getattr(self.measure, n), first, self.steps) * self.price[n] for n in self.price)

    def _plan_again(self, step: int, left: float, rest: int) -> None:
        """Spread the seconds that are left over the steps that are left, at the true prices."""
        for name in self.levels:
            schedule = getattr(self.measure, name)
            if name == "sampled" and self.measure.exact.every:
                continue  # exact norms are in its place
            seconds = max(0.0, left)
            if name == "exact" and schedule.prompts:
                each, prompts = self.price[name] / schedule.prompts, range(PAIR, self.config.sample.prompts + 1)
                rest_of_interval = each * (MIN_CLUSTERS - self.prompts)
                if "attribution" in self.levels and seconds * (1 - ATTRIBUTED) >= rest_of_interval:
                    seconds *= 1 - ATTRIBUTED
                enough = [p for p in prompts if int(seconds / (p * each)) >= min(SPREAD, rest)]
                schedule = replace(schedule, prompts=max(enough, default=min(PAIR, schedule.prompts)))
                self.price[name] = each * schedule.prompts
            count = min(rest, int(seconds / self.price[name]))
            every = apart(rest, count) if count else 0
            self.measure = replace(self.measure, **{name: replace(schedule, every=every, first=step + every)})
            left -= self.price[name] * events_of(getattr(self.measure, name), step + 1, self.steps)

    def interval(self, first: int) -> str:
        """Say how many measured steps, up to which step, the prompts of an interval take."""
        exact, most = self.measure.exact, self.config.sample.prompts
        at = [step for step in range(first, self.steps) if exact.due(step)]
        if not at:
            return "No prompt is measured exactly, so no interval will be shown; raise --measure.budget."
        each = min(exact.prompts or most, most)
        wanted = -(-MIN_CLUSTERS // each)
        if len(at) < wanted:
            return (
                f"An interval takes {MIN_CLUSTERS} prompts and this run measures {len(at) * each}; raise "
                "--measure.budget or --optimize.steps."
            )
        return f"The {MIN_CLUSTERS} prompts of an interval take {plural(wanted, 'step')}, until step {at[wanted - 1]}."

    def state(self) -> dict[str, Any]:
        """Return plain values from which a resumed run goes on."""
        counts = {name: getattr(self, name) for name in KEPT}
        return counts | {"schedules": {name: asdict(getattr(self.measure, name)) for name in self.levels}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        schedules = {name: replace(getattr(self.measure, name), **plan) for name, plan in state["schedules"].items()}
        self.measure = replace(self.measure, **schedules)
        for name in KEPT:
            setattr(self, name, state[name])
