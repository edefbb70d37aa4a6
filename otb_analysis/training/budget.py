"""What measuring costs, and what a budget measures.

Costs are forecast in multiples of one timed forward and backward pass; the seconds of the first event of each level
replace them. `measure.budget` b saves b seconds for every second that the run takes without measuring, and an event
takes place once it is saved for. Prices follow the pace of the steps: a machine that others leave, or answers that
grow, change the seconds of both. The seconds buy every estimator's gradient on the prompts of an interval, at any
length of the answers; then drawn tokens, the norms of whole groups, and attribution. Schedules that the user changed
are kept, and their cost is taken off first, as is that of the level forward.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.config import (
    AttributionSchedule,
    MeasureConfig,
    SampledSchedule,
    Schedule,
    StepSchedule,
    TrainConfig,
)
from otb_analysis.measurement.forward import completion_logprobs
from otb_analysis.measurement.level import NORM, drawn_share, first_groups, level_of, positions, prefix_share, read_once
from otb_analysis.measurement.measurer import EXACT, SKETCHED, GramMethod
from otb_analysis.phases import EXPECTED, duration, note, plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS, smaller_sizes
from otb_analysis.types import Bool

# Measured, beside a pass of the same rollouts, on one busy core: the small model (0.4 M parameters, 26 tokens a
# rollout), a Llama of 42 M (28 tokens), SmolLM2-135M (78 tokens). Small models pay for calls rather than arithmetic.
#
#                                    0.4 M     42 M    135 M
#   exact norms (13 and 25 seen)      9–16      6.4      8.0
#   smaller groups, each size            2        –        –
#
# Prompts made up a third of the positions there.
WHOLE, SMALLER = 1.5, 0.2
"""Exact norms of whole rollouts; the Gram matrix of one smaller group size, as a part of the whole one's cost."""
TIMED = 256
"""Most positions of the rollouts whose pass is timed."""
REPEATED, LONG_ENOUGH = 5, 0.2
"""Most passes that are timed, and the seconds of them that suffice."""
FAR, SHORT = 2.0, 1.0
"""A forecast that was off by more than this factor is corrected with a note, if more than so many seconds."""
LISTED = 5
"""Steps that are named one by one."""
PAIR = 2
"""Fewest prompts of a measured step: a variance between prompts needs two."""
SPREAD = 6
"""Measured steps that are wanted before more prompts are measured at each: enough for a curve over the run."""
MARGIN = 1.2
"""A forecast counts this many times, until the true seconds are known."""
RECENT = 5
"""Steps whose median is the pace: one slow step says nothing."""
ROUNDING = 1e-9
"""Added to the number of prompts that a sum pays for."""
NORMS = "exact norms"
"""The phase of exact norms, which are part of the step itself where the estimator trains on them."""
OFF: dict[str, StepSchedule] = {
    "gradients": Schedule(), "sampled": SampledSchedule(), "exact": Schedule(), "attribution": AttributionSchedule(),
}  # fmt: skip
"""What a budget buys, in this order."""
KEPT = ("price", "pace", "timed", "saved", "credited", "other", "usual", "prompts")
"""What a resumed run goes on from."""


@dataclass(frozen=True)
class PlannedLevel:
    """One thing that is measured."""

    name: str  # The phase in which it is measured
    what: str  # Words for the sentence
    due: Callable[[int], bool]  # Whether it runs at a step
    multiple: float  # Its cost in forward and backward passes of its rollouts
    rows: Bool  # True at those rollouts [N]
    sharers: float = math.inf  # Processes that can share it out, at most

    def seconds(self, rollouts: Rollouts, per_position: float) -> float:
        """Return what one event takes where a forward and backward pass takes so many seconds per position."""
        return self.multiple * per_position * positions(rollouts, self.rows)


def levels(
    config: TrainConfig,
    rollouts: Rollouts,
    exact_always: bool = False,
    gram: GramMethod | None = None,
    processes: int = 1,
) -> list[PlannedLevel]:
    """Return everything that a run measures, with its cost on rollouts such as these.

    `exact_always`: the training estimator reads exact norms of all rollouts at each step. `gram`: how the Gram matrix
    is measured, by default exactly unless the configuration asks for sketches. Of several `processes` the one with most
    prompts sets the price.
    """
    measure, group, every = config.measure, rollouts.group, np.ones(len(rollouts.group), bool)
    exact, gradients, planned = measure.exact, measure.gradients, list[PlannedLevel]()
    normed = first_groups(group, every, exact.prompts) & (exact.every > 0)
    compared = normed | (first_groups(group, every, gradients.prompts) & (gradients.every > 0))

    def prompts(rows: Bool) -> str:
        return f"{plural(len(np.unique(group[rows])), 'prompt')} ({plural(int(rows.sum()), 'rollout')})"

    rows = every if exact_always else normed
    norms = WHOLE + NORM[measure.engine if rollouts.soft is None else "reference"] * prefix_share(rollouts, rows)
    if exact_always:
        planned.append(PlannedLevel(NORMS, "exact norms of every rollout", lambda step: True, norms, rows))
    elif normed.any():
        planned.append(PlannedLevel(NORMS, prompts(normed), exact.due, norms, rows))
    if compared.any():
        usual = SKETCHED if measure.gram == "sketch" else EXACT * read_once(rollouts, compared)
        passes, what = gram.passes if gram else usual, "" if (compared == normed).all() else prompts(compared)

        def due(step: int) -> bool:
            return exact.due(step) or gradients.due(step)

        planned.append(PlannedLevel("Gram matrix", what, due, passes, compared))
        if measure.subgroups and (sizes := len(smaller_sizes(group[compared]))):
            planned.append(PlannedLevel("smaller groups", "", due, SMALLER * sizes * passes, compared))
    for name, plan in measure.levels.items():
        if plan.every > 0:
            level = level_of(name)
            rows = first_groups(group, ~normed, plan.prompts) if isinstance(plan, Schedule) else every
            cost = level.passes(plan, rollouts, rows)
            planned.append(PlannedLevel(level.phase, level.describe(plan), plan.due, cost, rows, level.sharers))
    for i, one in enumerate(planned):
        # whole prompts are dealt out, so that the slowest process sets the pace
        count, workers = max(len(np.unique(group[one.rows])), 1), int(min(processes, one.sharers))
        planned[i] = replace(one, multiple=one.multiple * -(-count // workers) / count)
    return planned


def seconds_per_position(
    model: PreTrainedModel,
    rollouts: Rollouts,
    temperature: float,
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> float:
    """Time a forward and backward pass of the first rollouts, after one that warms up; a short pass is repeated."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    ends = np.cumsum(rollouts.attention_mask.sum(axis=1))
    rows = np.arange(max(1, int(np.searchsorted(ends, TIMED, side="right"))))
    part, times = rollouts.take(rows), list[float]()
    while len(times) < 2 or (len(times) < REPEATED and sum(times) < LONG_ENOUGH):
        start = perf_counter()
        with arithmetic():
            total = completion_logprobs(model, part, temperature).logprob.sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        float(next(g for g in gradients if g is not None).sum())  # waits for a GPU
        times.append(perf_counter() - start)
    return float(np.median(times[1:])) / int(ends[rows[-1]])


class Forecast:
    """Notes before a run's first measured step what its schedules will take, and corrects itself afterwards."""

    def __init__(self, config: TrainConfig, exact_always: bool, processes: int = 1):
        self.config, self.exact_always, self.processes = config, exact_always, processes
        self.levels: list[PlannedLevel] = []
        self.seconds: dict[str, float] = {}  # Of one event, by phase
        self.corrected = False

    def announce(self, step: int, rollouts: Rollouts, per_position: float, usual: float) -> None:
        """Note what measuring will take from a step on; a step takes `usual` seconds without it."""
        self.levels = levels(self.config, rollouts, self.exact_always, processes=self.processes)
        self.seconds = {level.name: level.seconds(rollouts, per_position) for level in self.levels}
        EXPECTED.update(self.seconds)
        steps, together = self.steps(step), dict[tuple[int, ...], list[str]]()
        for level in self.levels:
            if level.what and (due := tuple(filter(level.due, steps))):
                together.setdefault(due, []).append(level.what)
        what = ", ".join(
            f"{' and '.join(dict.fromkeys(words))} at {steps_in_words(due)}" for due, words in together.items()
        )
        costs = [self.cost(s) for s in steps]
        alike = len({round(c, 9) for c in costs}) == 1
        often = (" each time" if alike else " the first time") + f", {rough_duration(sum(costs))} in all"
        cost = f"about {rough_duration(costs[0])}{often if len(steps) > 1 else ''}"
        note(f"Measuring {what}: {cost}; a step takes about {rough_duration(usual)} besides.")

    def steps(self, first: int) -> list[int]:
        """Return the measured steps from `first` on."""
        rest = range(first, self.config.optimize.steps)
        return [step for step in rest if any(level.due(step) for level in self.levels)]

    def cost(self, step: int) -> float:
        """Return the forecast seconds of measuring at a step."""
        return sum(self.seconds[level.name] for level in self.levels if level.due(step))

    def correct(self, step: int) -> None:
        """Replace the forecast by the times of the first measured step, with a note where it was far off."""
        if self.corrected or not self.cost(step):  # nothing was measured yet, or no pass timed
            return
        self.corrected, before = True, self.cost(step)
        self.seconds = {name: EXPECTED.get(name, value) for name, value in self.seconds.items()}
        took = self.cost(step)
        if max(before, took) > SHORT and not 1 / FAR <= took / before <= FAR:
            rest = sum(map(self.cost, self.steps(step + 1)))
            more = f"; about {rough_duration(rest)} more are to come" if rest else ""
            note(f"Measuring took {rough_duration(took)} and not {rough_duration(before)}{more}.")


def rough_duration(seconds: float) -> str:
    """Return a time to two digits where it is short: 0.4 s, 9 s, 1:20 min."""
    return f"{seconds:.1f} s" if seconds < 9.95 and f"{seconds:.1f}"[-1] != "0" else duration(seconds)


def steps_in_words(steps: Sequence[int]) -> str:
    """Return steps in words: step 0; steps 0, 20, 40; or 12 steps (0, 5, 10, … 55)."""
    if len(steps) <= LISTED:
        return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
    return f"{plural(len(steps), 'step')} ({', '.join(map(str, steps[:3]))}, … {steps[-1]})"


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
    usual = {"exact": (NORMS,), "gradients": ("Gram matrix", "smaller groups")}
    return usual[name] if name in usual else (level_of(name).phase,)


def prompts_due(measure: MeasureConfig, name: str, step: int, most: int) -> int:
    """Return how many of a step's prompts a level measures, 0 where it is not due; 1 where it takes the whole batch."""
    if name in ("exact", "gradients"):
        return measure.prompts_due(step, most)[name == "gradients"]
    schedule = measure.schedules[name]
    return schedule.due(step) and (min(schedule.prompts or most, most) if isinstance(schedule, Schedule) else 1)


class Budget:
    """Seconds that measuring may take, saved step by step, and what is measured for them at the next step."""

    def __init__(self, config: TrainConfig, exact_always: bool, processes: int = 1):
        self.config, self.exact_always, self.processes = config, exact_always, processes
        self.share, self.steps, self.most = config.measure.budget, config.optimize.steps, config.sample.prompts
        self.levels = planned_levels(config.measure, exact_always)
        default = MeasureConfig()
        off = {n: plan for n, plan in OFF.items() if getattr(config.measure, n) == getattr(default, n)}
        self.given = replace(config.measure, **off)  # The schedules that the user set
        self.measure = self.given  # What is measured at the next step
        self.asked: dict[str, int] = {}  # Events that they will have by level, or prompts of them
        self.price: dict[str, float] = {}  # Seconds at today's pace of one event by level, or of one prompt of it
        self.pace = 0.0  # Seconds of a recent step without measuring
        self.timed: list[str] = []  # Levels whose price is no forecast any more
        self.saved = dict.fromkeys(self.levels, 0.0)  # Seconds that wait for the next event of each level
        self.credited = 0.0  # Seconds that were saved so far
        self.other = 0.0  # Seconds of the level forward, and of measuring beside its events
        self.usual: list[float] = []  # Seconds of everything else, by step
        self.prompts = 0  # Whose gradients were measured so far

    def begin(self, step: int, rollouts: Rollouts, per_position: float, usual: float, forward: float) -> MeasureConfig:
        """Forecast the prices at the first step, say how far they reach, and return what that step measures.

        A step takes `usual` seconds without measuring. Its forward statistics, which are always there, take `forward`.
        """
        if "sampled" in self.levels:
            self.given = replace(self.given, sampled=SampledSchedule(share=drawn_share(rollouts), by="proxy"))
        of_the_step = ("exact",) if self.exact_always else ()  # these are part of the step itself
        names = [name for name in self.given.schedules if name not in of_the_step]
        for name in names:
            self.asked[name] = sum(prompts_due(self.given, name, step, self.most) for step in range(self.steps))
            if name not in self.price and (self.asked[name] or name in self.levels):
                self.price[name] = self._forecast(name, rollouts, per_position)
        self._save_and_plan(step, usual, forward)
        note(self.reach(step, usual, forward))
        return self.measure

    def _forecast(self, name: str, rollouts: Rollouts, per_position: float) -> float:
        """Return the seconds of one event of a level, by the prompt where it measures whole groups."""
        plans = {n: replace(plan, every=0) for n, plan in self.given.schedules.items() if n not in self.given.further}
        if name in plans:
            few = PAIR if self.processes > 1 else 0  # what the first events measure, which few processes can share
            once = {"every": 1, "first": 0} | ({"prompts": few} if isinstance(plans[name], Schedule) else {})
            plans[name] = replace(plans[name], **once)
        alone = replace(self.given, **plans, further={} if name in plans else {name: 1})
        events = levels(replace(self.config, measure=alone), rollouts, processes=self.processes)
        seconds = sum(lv.seconds(rollouts, per_position) for lv in events if lv.name in phases_of(name))
        return MARGIN * seconds / prompts_due(alone, name, 0, len(rollouts.prompts))

    def record(self, step: int, seconds: Mapping[str, float]) -> None:
        """Add a step's seconds by column, as the trainer times them, and plan the next step."""
        by_phase = {name.removeprefix("seconds_"): value for name, value in seconds.items()}
        needed = EXPECTED.get(NORMS, 0.0) if self.exact_always else 0.0  # what the estimator trains on is no measuring
        measured = by_phase.get("measure", 0.0) + by_phase.get("forward", 0.0) - needed
        self.usual.append(sum(by_phase.values()) - by_phase.get("evaluate", 0.0) - measured)
        before, self.pace = self.pace, float(np.median(self.usual[-RECENT:]))
        if before > 0:
            self.price = {name: price * self.pace / before for name, price in self.price.items()}
        due, worse = {name: prompts_due(self.measure, name, step, self.most) for name in self.price}, 1.0
        for name, prompts in due.items():
            if not prompts:
                continue
            took = sum(EXPECTED.get(phase, 0.0) for phase in phases_of(name)) or self.price[name] * prompts
            if name not in self.timed:
                self.timed.append(name)
                worse = max(worse, took / (self.price[name] * prompts)) if name in self.levels else worse
            self.price[name] = took / prompts
            if self.usual[-1] > 0:  # the machine may be slower at this step than it usually is
                self.price[name] *= self.pace / self.usual[-1]
            measured -= took
            if name in self.levels:
                self.saved[name] -= took
        # A forecast that was too low for one level is too low for the others, too
        self.price = {name: p if name in self.timed else p * worse for name, p in self.price.items()}
        self.other += measured
        self.prompts += due.get("gradients", 0)
        self._save_and_plan(step + 1, self.pace, by_phase.get("forward", 0.0))

    def _income(self, usual: float, other: float) -> float:
        """Return what all steps so far and the next one may spend on the levels that are planned.

        What the user set is paid evenly over the run, at today's prices.
        """
        fixed = sum(prompts * self.price.get(name, 0.0) for name, prompts in self.asked.items()) / self.steps
        return self.share * (sum(self.usual) + usual) - self.other - other - fixed * (len(self.usual) + 1)

    def _rate(self, usual: float, other: float) -> float:
        """Return what a step to come may spend on those levels: the mean of all, at today's pace."""
        return self._income(usual, other) / (sum(self.usual) + usual) * usual

    def _save_and_plan(self, step: int, usual: float, other: float) -> None:
        """Save what the next step may spend, and choose what it measures.

        The prompts of an interval are paid for first. Beyond them each level saves half of what those before it left.
        """
        if not self.price or not self.levels or step >= self.steps:
            return
        income = self._income(usual, other)
        left, first = income - self.credited, self.levels[0]
        early = first == "gradients" and self.prompts < MIN_CLUSTERS
        for turn, name in enumerate((*self.levels, first)):  # what nobody needs goes to the first one
            part = left if early or left < 0 or turn >= len(self.levels) - 1 else left / 2
            part = min(part, max(0.0, self.price[name] * self.most - self.saved[name]))
            self.saved[name] += part
            left -= part
        self.credited = income - left  # where everything is measured, seconds are left over
        to_come = max(0.0, self._rate(usual, other)) * (self.steps - step - 1)
        due = self._due_next(to_come if early else to_come / 2)
        plans = {name: getattr(self.given, name) for name in due}
        for name, plan in plans.items():
            prompts = {"prompts": due[name]} if isinstance(plan, Schedule) else {}
            plans[name] = replace(plan, every=1, first=0, **prompts)
        self.measure = replace(self.given, **plans)

    def _due_next(self, to_come: float) -> dict[str, int]:
        """Return how many prompts the planned levels measure next; gradients will get `to_come` seconds more.

        As many prompts at one step give more pairs than over several steps. So prompts are added as soon as the run
        pays for `SPREAD` measured steps. Where it pays for no pair, tokens of all prompts are drawn. The norms of one
        prompt are measured where those of all compared ones are too dear.
        """
        saved, due = self.saved, dict[str, int]()
        if "gradients" in saved:
            pair = min(PAIR, self.most)
            pays = int((max(0.0, saved["gradients"]) + to_come) / self.price["gradients"] + ROUNDING)
            if pays < pair and "sampled" in saved:
                saved["sampled"] += max(0.0, saved["gradients"])
                saved["gradients"] = min(0.0, saved["gradients"])
                due["sampled"] = self.most
            elif pays >= pair:
                due["gradients"] = min(
                    pays, max(pair, min(self.most, (self.prompts + pays) // min(SPREAD, self.steps)))
                )
        paid = {name: int(max(0.0, seconds) / self.price[name] + ROUNDING) for name, seconds in saved.items()}
        if prompts := due.get("gradients", 0) * (due.get("gradients", 0) <= paid.get("gradients", 0)):
            norms = (saved.get("exact", 0.0) + to_come / 2) / self.price.get("exact", np.inf)
            whole = norms + ROUNDING >= prompts
            due |= {"sampled": prompts, "exact": prompts if whole else 1}
        if "gradients" not in saved or self.prompts >= MIN_CLUSTERS:
            due["attribution"] = 1
        return {name: prompts for name, prompts in due.items() if prompts <= paid.get(name, 0)}

    def reach(self, step: int, usual: float, forward: float) -> str:
        """Say by which step the prompts of an interval are measured, or why they will not be."""
        if self.share * usual < forward:
            return (
                f"measure.budget is {self.share:g}, but the level forward, which always runs, takes "
                f"{forward / usual:.1%} of a step: nothing else is measured while that is so."
            )
        if "gradients" not in self.levels:
            return (
                f"measure.budget pays for {' and '.join(self.levels) or 'nothing'} beside the schedules that you set."
            )
        rate, lacking = self._rate(usual, forward), MIN_CLUSTERS - self.prompts
        steps = lacking * self.price["gradients"] / rate if rate > 0 else np.inf
        if step + steps <= self.steps:
            return f"The {MIN_CLUSTERS} prompts of an interval will be measured by about step {step + int(steps)}."
        pays = int(rate * (self.steps - step) / self.price["gradients"]) if rate > 0 else 0
        return (
            f"An interval takes {MIN_CLUSTERS} prompts, and this budget pays for about {self.prompts + pays}; raise "
            "--measure.budget or --optimize.steps."
        )

    def state(self) -> dict[str, Any]:
        """Return plain values from which a resumed run goes on."""
        return {name: getattr(self, name) for name in KEPT}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; an earlier version's state is left out, so that saving begins anew."""
        if set(KEPT) <= set(state):
            vars(self).update({name: state[name] for name in KEPT})
