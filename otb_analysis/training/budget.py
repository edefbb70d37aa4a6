"""What measuring may take, what it took, and what is measured for it.

`measure.budget` b allows b seconds of measuring for every second that the run takes without it. First it buys every
estimator's gradient on the prompts of an interval, at any length of the answers; then drawn tokens, then the norms of
whole groups, then attribution. The prices are forecast from one timed forward and backward pass, and replaced by the
true seconds of each measured step; the steps that are left are then planned anew. Schedules that the user changed are
kept, and their cost is taken off first, as is that of the level forward.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from otb_analysis.measurement.level import positions
from otb_analysis.measurement.levels import drawn_share, level_of
from otb_analysis.phases import EXPECTED, note, plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.training.forecast import PlannedLevel, levels

PAIR = 2
"""Fewest prompts of a measured step: a variance between prompts needs two."""
SPREAD = 6
"""Measured steps that are wanted before more prompts are measured at each: enough for a curve over the run."""
MARGIN = 1.2
"""A forecast counts this many times, until the true seconds are known."""
WAITED = 3
"""Steps whose time is known before more than half of the budget is spent at once: the first step is a slow one."""
EXACT = "exact norms"
"""The phase of exact norms, which are part of the step itself where the estimator trains on them."""
KEPT = ("price", "known", "spent", "usual", "forward", "prompts", "planned_for")
"""What a resumed run goes on from, beside its schedules."""
OFF: dict[str, StepSchedule] = {
    "gradients": Schedule(), "sampled": SampledSchedule(), "exact": Schedule(), "attribution": AttributionSchedule(),
}  # fmt: skip
"""What a budget buys, in this order."""


def planned_levels(measure: MeasureConfig, exact_always: bool) -> list[str]:
    """Return the levels that a budget may plan: those with the default schedule, but none that measures them, too."""
    default = MeasureConfig()
    free = [name for name in OFF if getattr(measure, name) == getattr(default, name)]
    taken = set[str]()
    if "gradients" not in free:  # norms are not wanted beside them, unless they are asked for
        taken = {"exact", "sampled"}
    elif measure.exact.every and "exact" not in free:  # norms come with gradients
        taken = {"gradients", "sampled"}
    if exact_always:
        taken |= {"exact", "sampled"}
    return [name for name in free if name not in taken]


def phases_of(name: str) -> tuple[str, ...]:
    """Return the phases in which a level is measured."""
    usual = {"exact": (EXACT,), "gradients": ("Gram matrix", "smaller groups")}
    return usual[name] if name in usual else (level_of(name).phase,)


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

    def of(self, name: str) -> float:
        """Return the seconds of one event of a level, by the prompt where it measures whole groups."""
        measure = self.config.measure
        off = {n: replace(getattr(measure, n), every=0) for n in measure.schedules if n not in measure.further}
        if name in off:
            once = {"every": 1, "first": 0} | ({"prompts": 0} if isinstance(off[name], Schedule) else {})
            off[name] = replace(off[name], **once)
        alone = replace(measure, **off, further={} if name in off else {name: 1})
        event = sum(seconds for level, seconds in self.levels(alone) if level.name in phases_of(name))
        return event / prompts_due(alone, name, 0, len(self.rollouts.prompts))


def prompts_due(measure: MeasureConfig, name: str, step: int, most: int) -> int:
    """Return how many of a step's prompts a level measures, 0 where it is not due; 1 where it takes the whole batch."""
    if name in ("exact", "gradients"):
        return measure.prompts_due(step, most)[name == "gradients"]
    schedule = measure.schedules[name]
    return schedule.due(step) and (min(schedule.prompts or most, most) if isinstance(schedule, Schedule) else 1)


def spread(schedule: Any, first: int, steps: int, events: int) -> Any:
    """Return a schedule of just so many events, evenly spread from step `first` to the last step of a run."""
    events = min(events, steps - first)
    every = (steps - first) // events if events else 0
    return replace(schedule, every=every, first=steps - 1 - (events - 1) * every if events else first)


class Budget:
    """Seconds that measuring may take and has taken, and what is measured for them."""

    def __init__(self, config: TrainConfig, exact_always: bool):
        self.config, self.exact_always = config, exact_always
        self.share, self.steps = config.measure.budget, config.optimize.steps
        self.levels = planned_levels(config.measure, exact_always)  # Whose schedule is planned
        # What is measured from now on: what the user set, until the first step is timed
        default = MeasureConfig()
        off = {n: schedule for n, schedule in OFF.items() if getattr(config.measure, n) == getattr(default, n)}
        self.measure = replace(config.measure, **off)
        self.price: dict[str, float] = {}  # Seconds of one event by level, or of one prompt of it
        self.known: dict[str, bool] = {}  # Levels whose price is no forecast any more
        self.spent = 0.0  # Seconds of measuring so far
        self.usual: list[float] = []  # Seconds of everything else, by step
        self.forward: list[float] = []  # Seconds of the level forward, which are part of `spent`, by step
        self.prompts = 0  # Whose gradients were measured so far
        self.planned_for = self.steps  # Steps of the run for which the schedules were made

    def begin(self, step: int, rollouts: Rollouts, per_position: float, usual: float, forward: float) -> MeasureConfig:
        """Plan the run at its first step and return what is measured.

        A step takes `usual` seconds without measuring, and more where it trains on exact norms. Its forward statistics,
        which are always there, take `forward`.
        """
        if not self.price:
            if "sampled" in self.levels:
                self.measure = replace(self.measure, sampled=SampledSchedule(share=drawn_share(rollouts), by="proxy"))
            prices = Prices(replace(self.config, measure=self.measure), rollouts, per_position, self.exact_always)
            usual += prices.own()
            given = {name for name, schedule in self.measure.schedules.items() if schedule.every}
            priced = {*self.levels, *given, *(["gradients"] if self.measure.exact.every else [])}
            unpriced = {"exact"} if self.exact_always else set()  # they are part of the step itself
            self.price = {name: prices.of(name) for name in sorted(priced - unpriced)}
            seconds = (self.share * usual - forward) * (self.steps - step)
            self._plan(step, seconds, early=True)
            if self.cost(step, self.levels, step + 1) > seconds / 2:
                self._plan(min(step + WAITED, self.steps - 1), seconds, early=True)
            if self.share * usual < forward:
                note(
                    f"measure.budget is {self.share:g}, but the level forward, which always runs, takes "
                    f"{forward / usual:.1%} of a step: nothing else is planned while that is so."
                )
            else:
                note(self.interval(step))
        return self.measure

    def record(self, step: int, seconds: Mapping[str, float]) -> None:
        """Add a step's seconds by column, as the trainer times them; plan anew after a step that measured."""
        by_phase = {name.removeprefix("seconds_"): value for name, value in seconds.items()}
        forward = by_phase.get("forward", 0.0)
        measured = by_phase.get("measure", 0.0) + forward - self.own()
        self.spent += measured
        self.forward.append(forward)
        self.usual.append(sum(by_phase.values()) - by_phase.get("evaluate", 0.0) - measured)
        worse, due = 1.0, self._due(step)  # How far the forecast was too low, which it then is of other levels, too
        for name, prompts in due.items():
            forecast, surprise = self.price[name], not self.known.get(name) and name not in self.measure.further
            self.known[name] = True
            self.price[name] = sum(EXPECTED.get(phase, 0.0) for phase in phases_of(name)) / prompts or forecast
            worse = max(worse, self.price[name] / forecast) if forecast and surprise else worse
        self.price = {n: p if self.known.get(n) else p * worse for n, p in self.price.items()}
        self.prompts += due.get("gradients", 0)
        # The first step is a slow one: its successors may be cheaper, and so may allow less than was planned
        usual, forward, rest = float(np.median(self.usual)), float(np.median(self.forward)), self.steps - step - 1
        left = self.share * usual * self.steps - self.spent - forward * rest
        planned = self.cost(step + 1)
        more = self.planned_for != self.steps or not planned  # the run became longer, or pays for what was too dear
        if rest > 0 and (due or more or planned > max(0.0, left)):
            self.planned_for = self.steps
            self._plan(step + 1, left)

    def own(self) -> float:
        """Return the seconds of the last step's exact norms that the training estimator read: they are no measuring."""
        return EXPECTED.get(EXACT, 0.0) if self.exact_always else 0.0

    def cost(self, first: int, names: Collection[str] | None = None, end: int | None = None) -> float:
        """Return the seconds that the plan takes from a step to `end`, by default the run's, for all levels or some."""
        steps = range(first, self.steps if end is None else end)
        due = (item for step in steps for item in self._due(step).items())
        return sum(prompts * self.price[name] for name, prompts in due if names is None or name in names)

    def _due(self, step: int) -> dict[str, int]:
        """Return how many prompts each level measures at a step, of those that are due."""
        most = self.config.sample.prompts
        return {name: n for name in self.price if (n := prompts_due(self.measure, name, step, most))}

    def _plan(self, first: int, seconds: float, early: bool = False) -> None:
        """Choose the schedules from step `first` on that take at most so many seconds; `early`: it begins there.

        An interval's prompts are paid for first. Beyond them each level may take half of what is left, and gradients
        what nobody took. Where the gradients of two prompts are too dear even once, tokens of all prompts are drawn.
        """
        off = {name: replace(getattr(self.measure, name), every=0) for name in self.levels}
        self.measure = replace(self.measure, **off)
        left, caps = max(0.0, seconds - self.cost(first)), dict[str, float]()  # what the user set is paid first
        if "gradients" not in self.levels:
            self._attribute(first, left)
            return
        each = self.price["gradients"]
        missing, whole = max(MIN_CLUSTERS - self.prompts, 0), int(left / each)
        part = max(min(whole, missing), whole // 2)
        for again in (False, True):
            self.measure = replace(self.measure, gradients=self._pairs(first, part, missing, early))
            rest = left - self.cost(first, ["gradients"])
            for name in ("sampled", "exact", "attribution"):
                if name in self.levels:
                    alone = name == "attribution" or not self.measure.gradients.every
                    allowed = min(rest, caps[name]) if again else rest if alone else rest / 2
                    (self._attribute if name == "attribution" else partial(self._follow, name))(first, allowed)
                    caps[name] = self.cost(first, [name])
                    rest -= caps[name]
            part = int((left - sum(caps.values())) / each)

    def _pairs(self, first: int, paid: int, missing: int, early: bool) -> Schedule:
        """Return when so many prompts are measured, of which an interval still lacks some.

        As many prompts at one step give more pairs than over several steps. So prompts are added as soon as `SPREAD`
        steps are measured, and steps once all prompts are.
        """
        rest, most = self.steps - first, self.config.sample.prompts
        plans = [(p, min(rest, paid // p)) for p in range(min(PAIR, most), most + 1)]
        plans = [plan for plan in plans if plan[0] * plan[1] >= missing] or plans
        often = [plan for plan in plans if plan[1] >= min(SPREAD, rest)]
        prompts, events = often[-1] if often else plans[0]
        if early and events:
            return Schedule(prompts=prompts, every=-(-rest // events), first=first)
        return spread(Schedule(prompts=prompts), first, self.steps, events)

    def _follow(self, name: str, first: int, seconds: float) -> None:
        """Measure a level at as many of the steps with gradients as the seconds pay for, of the same prompts.

        The norms of all of them let estimators that read norms be compared; where that is too dear, one prompt's are
        measured.
        """
        gradients, price = self.measure.gradients, self.price[name]
        if name == "sampled" and not gradients.every:
            events = int(max(seconds, 0.0) / (price * self.config.sample.prompts))
            drawn = spread(replace(self.measure.sampled, prompts=0), first, self.steps, events)
            self.measure = replace(self.measure, sampled=drawn)
            return
        steps = sum(map(gradients.due, range(first, self.steps)))
        for prompts in (gradients.prompts, 1) if name == "exact" else (gradients.prompts,):
            events = min(steps, int(max(seconds, 0.0) / (price * max(prompts, 1))))
            if events:
                plan = {"prompts": prompts, "every": gradients.every * -(-steps // events), "first": gradients.first}
                self.measure = replace(self.measure, **{name: replace(getattr(self.measure, name), **plan)})
                return
        self.measure = replace(self.measure, **{name: replace(getattr(self.measure, name), every=0)})

    def _attribute(self, first: int, seconds: float) -> None:
        """Attribute as often as the seconds pay for, from the step on at which an interval has its prompts."""
        if "attribution" in self.levels:
            most, prompts, start = self.config.sample.prompts, self.prompts, first
            for step in range(first, self.steps) if prompts < MIN_CLUSTERS else ():
                prompts += (count := self.measure.prompts_due(step, most)[1])
                start = step if count else start
                if prompts >= MIN_CLUSTERS:
                    break
            events = int(max(seconds, 0.0) / self.price["attribution"])
            self.measure = replace(
                self.measure, attribution=spread(self.measure.attribution, start, self.steps, events)
            )

    def interval(self, first: int) -> str:
        """Say how many measured steps, up to which step, the prompts of an interval take."""
        counts = {
            s: n for s in range(first, self.steps) if (n := self.measure.prompts_due(s, self.config.sample.prompts)[1])
        }
        if not counts:
            return "No prompt's gradients are measured, so no interval will be shown; raise --measure.budget."
        reached = [
            step for step, total in zip(counts, np.cumsum(list(counts.values())), strict=True) if total >= MIN_CLUSTERS
        ]
        if not reached:
            return (
                f"An interval takes {MIN_CLUSTERS} prompts and this run measures {sum(counts.values())}; raise "
                "--measure.budget or --optimize.steps."
            )
        steps = plural(list(counts).index(reached[0]) + 1, "step")
        return f"The {MIN_CLUSTERS} prompts of an interval take {steps}, until step {reached[0]}."

    def state(self) -> dict[str, Any]:
        """Return plain values from which a resumed run goes on."""
        schedules = {name: asdict(getattr(self.measure, name)) for name in self.levels}
        return {name: getattr(self, name) for name in KEPT} | {"schedules": schedules}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        if "gradients" in self.levels and "gradients" not in state["schedules"]:
            # Of a version that planned norms first: this one plans anew, with what is left.
            for name in ("spent", "usual", "forward", "planned_for"):
                setattr(self, name, state.get(name, getattr(self, name)))
            return
        schedules = {name: replace(getattr(self.measure, name), **plan) for name, plan in state["schedules"].items()}
        self.measure = replace(self.measure, **schedules)
        for name in KEPT:
            setattr(self, name, state.get(name, getattr(self, name)))
