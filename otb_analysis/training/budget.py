"""What measuring may take, what it took, and what is measured for it.

`measure.budget` b allows b seconds of measuring for every second that the run takes without it. The plan follows from
one timed forward and backward pass (`forecast`, `plan`). After every measured step the true seconds replace the
forecast, and the steps that are left are planned anew. Schedules that the user changed are kept, and their cost is
taken off first, as is that of the level forward.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from otb_analysis.config import MeasureConfig, Schedule, TrainConfig
from otb_analysis.phases import EXPECTED, note, plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.training.plan import (
    ATTRIBUTED,
    EXACT,
    OFF,
    PAIR,
    SPREAD,
    Prices,
    events_of,
    interval_step,
    phases_of,
    plan,
    planned_levels,
    spread,
)

WAITED = 3
"""Steps whose time is known before more than half of the budget is spent at once: the first step is a slow one."""
KEPT = ("price", "known", "spent", "usual", "forward", "prompts", "planned_for")
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
        self.known: dict[str, bool] = {}  # Levels whose price is no forecast any more
        self.spent = 0.0  # Seconds of measuring so far
        self.usual: list[float] = []  # Seconds of everything else, by step
        self.forward: list[float] = []  # Seconds of the level forward, which are part of `spent`, by step
        self.prompts = 0  # Measured exactly so far
        self.planned_for = self.steps  # Steps of the run for which the schedules were made

    def begin(self, step: int, rollouts: Rollouts, per_position: float, usual: float, forward: float) -> MeasureConfig:
        """Plan the run at its first step and return what is measured.

        A step takes `usual` seconds without measuring, and more where it trains on exact norms. Its forward statistics,
        which are always there, take `forward`.
        """
        if not self.price:
            prices = Prices(self.config, rollouts, per_position, self.exact_always)
            usual += prices.own()
            seconds = (self.share * usual - forward) * (self.steps - step)
            self.measure = plan(prices, step, seconds)
            once = {n: replace(s, every=1) if n in self.levels else s for n, s in self.measure.schedules.items()}
            self.price = {name: prices.event(name, schedule) for name, schedule in once.items()}
            if sum(self.price[name] for name in self.levels if self.measure.schedules[name].due(step)) > seconds / 2:
                later = {n: replace(s, first=min(step + WAITED, self.steps - 1)) for n, s in self._planned().items()}
                self.measure = replace(self.measure, **later)
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
        due = [name for name in self.price if self.measure.schedules[name].due(step)]
        worse = 1.0  # How far the forecast was too low, which it then is of other levels, too
        for name in due:
            forecast, self.known[name] = self.price[name], True
            phases = [phase for phase in phases_of(name) if phase != EXACT or not self.exact_always]
            self.price[name] = sum(EXPECTED.get(phase, 0.0) for phase in phases) or forecast
            worse = max(worse, self.price[name] / forecast)
        self.price = {n: p if self.known.get(n) else p * worse for n, p in self.price.items()}
        if "exact" in due:
            self.prompts += self.measure.exact.prompts or self.config.sample.prompts
        # The first step is a slow one: its successors may be cheaper, and so may allow less than was planned
        usual, forward, rest = float(np.median(self.usual)), float(np.median(self.forward)), self.steps - step - 1
        left = self.share * usual * self.steps - self.spent - forward * rest
        planned = self.cost(step + 1)
        more = self.planned_for != self.steps or not planned  # the run became longer, or pays for what was too dear
        if rest > 0 and (due or more or planned > max(0.0, left)):
            self._plan_again(step, left, rest)

    def own(self) -> float:
        """Return the seconds of the last step's exact norms that the training estimator read: they are no measuring."""
        return EXPECTED.get(EXACT, 0.0) if self.exact_always else 0.0

    def cost(self, first: int, levels: Collection[str] | None = None) -> float:
        """Return the seconds that the plan takes from a step to the end of the run, for all or some levels."""
        schedules = self.measure.schedules
        names = self.price if levels is None else levels
        return sum(events_of(schedules[name], first, self.steps) * self.price[name] for name in names)

    def _planned(self) -> dict[str, Any]:
        """Return the schedules that a budget chooses, by level."""
        return {name: getattr(self.measure, name) for name in self.levels}

    def _plan_again(self, step: int, left: float, rest: int) -> None:
        """Spread the seconds that are left over the steps that are left, at the true prices."""
        self.planned_for = self.steps
        left -= self.cost(step + 1, self.price.keys() - self.levels)  # what the user set is paid first
        for name in self.levels:
            schedule = replace(getattr(self.measure, name), every=0)
            if name == "sampled" and ("exact" not in self.levels or self.measure.exact.every):
                self.measure = replace(self.measure, sampled=schedule)
                continue  # exact norms are in its place
            seconds = max(0.0, left)
            if name == "exact" and schedule.prompts:
                schedule = self._prompts_again(schedule, step, seconds, rest)
            else:
                start = step + 1
                if name == "attribution" and self.prompts < MIN_CLUSTERS:
                    start = interval_step(self.measure.exact, start, self.config, self.prompts)
                schedule = spread(schedule, start, self.steps, int(seconds / self.price[name]))
            self.measure = replace(self.measure, **{name: schedule})
            left -= self.price[name] * events_of(schedule, step + 1, self.steps)

    def _prompts_again(self, schedule: Schedule, step: int, seconds: float, rest: int) -> Schedule:
        """Choose prompts and steps anew, so that an interval's prompts are reached if they can be; set the price."""
        each, most = self.price["exact"] / schedule.prompts, self.config.sample.prompts

        def reached(plan: Schedule) -> int:
            return self.prompts + plan.prompts * events_of(plan, step + 1, self.steps)

        def plans_for(seconds: float) -> list[Schedule]:
            choices = [replace(schedule, prompts=p) for p in range(min(PAIR, most), most + 1)]
            return [spread(c, step + 1, self.steps, int(seconds / (c.prompts * each))) for c in choices]

        plans = plans_for(seconds * (1 - ATTRIBUTED)) if "attribution" in self.levels else []
        if not any(reached(plan) >= MIN_CLUSTERS for plan in plans):
            plans = plans_for(seconds)
        plans = [plan for plan in plans if reached(plan) >= MIN_CLUSTERS] or plans
        often = [plan for plan in plans if events_of(plan, step + 1, self.steps) >= min(SPREAD, rest)]
        chosen = often[-1] if often else plans[0]
        self.price["exact"] = each * chosen.prompts
        return chosen

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
        return counts | {"schedules": {name: asdict(schedule) for name, schedule in self._planned().items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        schedules = {name: replace(getattr(self.measure, name), **plan) for name, plan in state["schedules"].items()}
        self.measure = replace(self.measure, **schedules)
        for name in KEPT:
            setattr(self, name, state.get(name, getattr(self, name)))
