"""A forecast of what measuring will cost, in multiples of one timed forward and backward pass.

After the first measured step its true times replace the forecast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch

from otb_analysis.config import MeasureConfig, Schedule, TrainConfig
from otb_analysis.measurement.forward import completion_logprobs
from otb_analysis.measurement.gram_method import EXACT, SKETCHED, GramMethod
from otb_analysis.measurement.level import first_groups, positions, read_once, seen
from otb_analysis.measurement.levels import NORM, level_of
from otb_analysis.phases import EXPECTED, duration, note, phase, plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import smaller_sizes
from otb_analysis.training.policy.policy import Policy
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

Planner = Callable[[int, Rollouts, float, float], MeasureConfig]
"""Returns what is measured from a step's rollouts, the seconds of a pass per position, and those of a step."""

TIMED = 256
"""Most positions of the rollouts whose pass is timed."""
REPEATED, LONG_ENOUGH = 5, 0.2
"""Most passes that are timed, and the seconds of them that suffice."""
OFF, SHORT = 2.0, 1.0
"""A forecast that was off by more than this factor is corrected with a note, if more than so many seconds."""
LISTED = 5
"""Steps that are named one by one."""


@dataclass(frozen=True)
class PlannedLevel:
    """One thing that is measured."""

    name: str  # The phase in which it is measured
    what: str  # Words for the sentence
    due: Callable[[int], bool]  # Whether it runs at a step
    multiple: float  # Its cost in forward and backward passes of its rollouts
    rows: Bool  # True at those rollouts [N]


def levels(
    config: TrainConfig, rollouts: Rollouts, exact_always: bool = False, gram: GramMethod | None = None
) -> list[PlannedLevel]:
    """Return everything that a run measures, with its cost on rollouts such as these.

    `exact_always`: the training estimator reads exact norms of all rollouts at each step. `gram`: how the Gram matrix
    is measured, by default exactly unless the configuration asks for sketches.
    """
    measure, group, every = config.measure, rollouts.group, np.ones(len(rollouts.group), bool)
    exact, gradients, planned = measure.exact, measure.gradients, list[PlannedLevel]()
    normed = first_groups(group, every, exact.prompts) & (exact.every > 0)
    compared = normed | (first_groups(group, every, gradients.prompts) & (gradients.every > 0))

    def prompts(rows: Bool) -> str:
        return f"{plural(len(np.unique(group[rows])), 'prompt')} ({plural(int(rows.sum()), 'rollout')})"

    if exact_always:
        norms = _norms(measure, rollouts, every)
        planned.append(PlannedLevel("exact norms", "exact norms of every rollout", lambda step: True, norms, every))
    elif normed.any():
        norms = _norms(measure, rollouts, normed)
        planned.append(PlannedLevel("exact norms", prompts(normed), exact.due, norms, normed))
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
            planned.append(PlannedLevel(level.phase, level.words(plan), plan.due, cost, rows))
    return planned


def _norms(measure: MeasureConfig, rollouts: Rollouts, rows: Bool) -> float:
    engine = measure.engine if rollouts.soft is None else "reference"
    return WHOLE + NORM[engine] * seen(rollouts, rows)


def seconds_per_position(policy: Policy, rollouts: Rollouts) -> float:
    """Time a forward and backward pass of the first rollouts, after one that warms up; a short pass is repeated."""
    ends = np.cumsum(rollouts.attention_mask.sum(axis=1))
    rows = np.arange(max(1, int(np.searchsorted(ends, TIMED, side="right"))))
    part, times = rollouts.take(rows), list[float]()
    while len(times) < 2 or (len(times) < REPEATED and sum(times) < LONG_ENOUGH):
        start = perf_counter()
        with policy.arithmetic():
            total = completion_logprobs(policy.model, part, policy.temperature).logprob.sum()
        gradients = torch.autograd.grad(total, policy.parameters, allow_unused=True)
        float(next(g for g in gradients if g is not None).sum())  # waits for a GPU
        times.append(perf_counter() - start)
    return float(np.median(times[1:])) / int(ends[rows[-1]])


class Forecast:
    """Notes before a run's first measured step what measuring will take, and corrects itself afterwards."""

    def __init__(self, config: TrainConfig, exact_always: bool, budget: Planner | None = None):
        self.config, self.exact_always, self.budget = config, exact_always, budget
        self.levels: list[PlannedLevel] = []
        self.seconds: dict[str, float] = {}
        self.timed = self.corrected = False

    def announce(self, step: int, policy: Policy, rollouts: Rollouts, so_far: float, update: float) -> None:
        """Time a pass at the first step that measures, let the budget plan, and note the forecast.

        `so_far`: seconds that sampling and scoring took. `update`: forward and backward passes of all rollouts that the
        update still takes.
        """
        planned = levels(self.config, rollouts, self.exact_always)
        if self.timed or not (self.budget or any(level.due(step) for level in planned)):
            return
        with phase("timing one forward and backward pass"):
            each = seconds_per_position(policy, rollouts)
        self.timed = True
        updating = update * each * positions(rollouts, np.ones(len(rollouts.group), bool))
        if self.budget is not None:
            measure = self.budget(step, rollouts, each, so_far + updating)
            self.config = replace(self.config, measure=measure)
            planned = levels(self.config, rollouts, self.exact_always)
        self.levels = planned
        self.seconds = {lv.name: lv.multiple * each * positions(rollouts, lv.rows) for lv in self.levels}
        EXPECTED.update(self.seconds | {"update": updating})
        if self.steps(step):
            note(self.sentence(step, so_far + updating))

    def sentence(self, step: int, usual: float) -> str:
        """Return the forecast from a step on, in words; `usual`: seconds of a step without measuring."""
        steps, together = self.steps(step), dict[tuple[int, ...], list[str]]()
        for level in self.levels:
            if level.what and (at := tuple(filter(level.due, steps))):
                together.setdefault(at, []).append(level.what)
        what = ", ".join(f"{' and '.join(dict.fromkeys(words))} at {listed(at)}" for at, words in together.items())
        costs = [self.cost(s) for s in steps]
        alike = len({round(c, 9) for c in costs}) == 1
        often = (" each time" if alike else " the first time") + f", {about(sum(costs))} in all"
        cost = f"about {about(costs[0])}{often if len(steps) > 1 else ''}"
        return f"Measuring {what}: {cost}; a step takes about {about(usual)} besides."

    def steps(self, first: int) -> list[int]:
        """Return the measured steps from `first` on."""
        rest = range(first, self.config.optimize.steps)
        return [step for step in rest if any(level.due(step) for level in self.levels)]

    def cost(self, step: int) -> float:
        """Return the forecast seconds of measuring at a step."""
        return sum(self.seconds[level.name] for level in self.levels if level.due(step))

    def correct(self, step: int, to_come: float | None = None) -> None:
        """Replace the forecast by the times of the first measured step, with a note where it was far off.

        `to_come`: seconds of measuring that a budget still plans; without a budget, what was announced goes on.
        """
        if self.corrected or not self.cost(step):  # nothing was measured yet, or no pass timed
            return
        self.corrected, before = True, self.cost(step)
        self.seconds = {name: EXPECTED.get(name, value) for name, value in self.seconds.items()}
        took = self.cost(step)
        if max(before, took) > SHORT and not 1 / OFF <= took / before <= OFF:
            rest = sum(map(self.cost, self.steps(step + 1))) if to_come is None else to_come
            more = f"; about {about(rest)} more are to come" if rest else ""
            note(f"Measuring took {about(took)} and not {about(before)}{more}.")


def about(seconds: float) -> str:
    """Return a time to two digits where it is short: 0.4 s, 9 s, 1:20 min."""
    return f"{seconds:.1f} s" if seconds < 9.95 and f"{seconds:.1f}"[-1] != "0" else duration(seconds)


def listed(steps: Sequence[int]) -> str:
    """Return steps in words: step 0; steps 0, 20, 40; or 12 steps (0, 5, 10, … 55)."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= LISTED:
        return f"steps {', '.join(map(str, steps))}"
    return f"{plural(len(steps), 'step')} ({', '.join(map(str, steps[:3]))}, … {steps[-1]})"
