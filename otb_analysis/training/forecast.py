"""What measuring will cost, said before it is paid: multiples of one forward and backward pass of what is measured.

After the first measured step, what it took takes their place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from otb_analysis.config import MeasureConfig, TrainConfig
from otb_analysis.measurement.forward import completion_logprobs
from otb_analysis.phases import EXPECTED, duration, note, phase, plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import smaller_sizes
from otb_analysis.training.policy.policy import Policy
from otb_analysis.types import Bool, Int

# Measured, beside a pass of the same rollouts, on one busy core: the small model (0.4 M parameters, 26 tokens a
# rollout), a Llama of 42 M (28 tokens), SmolLM2-135M (78 tokens). Small models pay for calls rather than arithmetic.
#
#                                    0.4 M     42 M    135 M
#   exact norms (13 and 25 seen)      9–16      6.4      8.0
#   Gram matrix, all estimators       9–10        –        9
#   smaller groups, each size            2        –        –
#   drawn tokens, a tenth              2–3      3.5        –
#   sketched norms, a direction     0.4–.7     0.25      0.5
#   attribution with its split        5–10      2.5    > 2.4
NORM = {"auto": 0.35, "fast": 0.35, "generic": 0.6, "reference": 1.0}
"""Exact norms, by engine, for each token: of the share of its rollout that it sees. A backward pass without weight
gradients is a third of a forward and backward pass."""
WHOLE = 1.5
"""Exact norms of whole rollouts."""
GRAM = 10.0
"""The Gram matrix of all estimators."""
SMALLER = 2.5
"""The Gram matrix of groups cut to one smaller size, of a few estimators."""
DRAWN, FOUND = 1.0, 2.0
"""Norms of drawn tokens, for each: of the share of its rollout that it sees; and what finding them takes."""
DIRECTION = 0.4
"""Sketched norms, for each direction."""
ATTRIBUTION, SPLIT = 2.4, 1.0
"""Attribution, and telling signal from noise."""

TIMED = 256
"""Positions of the rollouts whose pass is timed, if there are as many."""
REPEATED, LONG_ENOUGH = 5, 0.2
"""Passes that are timed at most, and seconds of them that suffice."""
OFF = 2.0
"""A forecast that was wrong by more than this factor is corrected aloud."""
SHORT = 1.0
"""Seconds below which a wrong forecast surprises nobody."""
LISTED = 5
"""Steps that are named one by one."""


@dataclass(frozen=True)
class Level:
    """One thing that is measured.

    Attributes:
        name: The phase in which it is measured.
        what: What it measures of what, for the sentence.
        due: Whether it runs at a step.
        multiple: Forward and backward passes of its rollouts.
        rows: Those rollouts [N].
    """

    name: str
    what: str
    due: Callable[[int], bool]
    multiple: float
    rows: Bool


def levels(config: TrainConfig, rollouts: Rollouts, exact_always: bool = False) -> list[Level]:
    """Return everything that a run measures, with its cost on rollouts such as these.

    Args:
        config: The run.
        rollouts: Of one step.
        exact_always: True when the training estimator reads exact norms of all rollouts at each step.
    """
    own, every = config.measure, np.ones(len(rollouts.group), bool)
    exact = rollouts.group < (own.exact.prompts or len(rollouts.prompts))
    others = rollouts.group[~exact] if own.exact.every > 0 else rollouts.group
    found = list(_exact(own, rollouts, exact))
    if exact_always:
        norms = _norms(own, rollouts, every)
        found = [Level("exact norms", "exact norms of every rollout", lambda step: True, norms, every), *found[1:]]
    if own.sampled.every > 0:
        rows = _first(rollouts, others, own.sampled.prompts)
        tokens = FOUND + DRAWN * own.sampled.share * seen(rollouts, rows)
        found.append(Level("drawn tokens", f"{own.sampled.share:.0%} of the tokens", own.sampled.due, tokens, rows))
    if own.sketch.every > 0:
        rows, passes = _first(rollouts, others, own.sketch.prompts), DIRECTION * own.sketch.directions
        found.append(Level("sketched norms", "sketched norms", own.sketch.due, passes, rows))
    if own.attribution.every > 0:
        passes = ATTRIBUTION + SPLIT * own.attribution.split
        found.append(Level("attribution", "attribution", own.attribution.due, passes, every))
    return found


def _exact(own: MeasureConfig, rollouts: Rollouts, rows: Bool) -> Iterator[Level]:
    if own.exact.every <= 0:
        return
    prompts = f"{plural(len(np.unique(rollouts.group[rows])), 'prompt')} ({plural(int(rows.sum()), 'rollout')})"
    yield Level("exact norms", prompts, own.exact.due, _norms(own, rollouts, rows), rows)
    yield Level("Gram matrix", "", own.exact.due, GRAM, rows)
    if own.subgroups and (sizes := len(smaller_sizes(rollouts.group[rows]))):
        yield Level("smaller groups", "", own.exact.due, SMALLER * sizes, rows)


def _first(rollouts: Rollouts, groups: Int, prompts: int) -> Bool:
    """True at the rollouts of the first groups; of all where `prompts` is 0."""
    return np.isin(rollouts.group, np.unique(groups)[: prompts or None])


def _norms(own: MeasureConfig, rollouts: Rollouts, rows: Bool) -> float:
    return WHOLE + NORM[own.engine] * seen(rollouts, rows)


def seen(rollouts: Rollouts, rows: Bool) -> float:
    """Return Σ_t (tokens before t)/L over the policy's tokens, the mean over rollouts weighed by their lengths L."""
    mask = rollouts.mask[rows]
    return float(mask @ np.arange(mask.shape[1]) @ np.ones(len(mask)) / max(positions(rollouts, rows), 1))


def positions(rollouts: Rollouts, rows: Bool) -> int:
    """Return the tokens of some rollouts, prompts included."""
    return int(rollouts.attention_mask[rows].sum())


def seconds_per_position(policy: Policy, rollouts: Rollouts) -> float:
    """Time a forward and backward pass of the first rollouts, a short one a few times; nothing of it is kept."""
    ends = np.cumsum(rollouts.attention_mask.sum(axis=1))
    rows = np.arange(max(1, int(np.searchsorted(ends, TIMED, side="right"))))
    part, times = rollouts.take(rows), list[float]()
    while not times or (len(times) < REPEATED and sum(times) < LONG_ENOUGH):
        start = perf_counter()
        with policy.arithmetic():
            total = completion_logprobs(policy.model, part, policy.temperature).logprob.sum()
        found = torch.autograd.grad(total, policy.parameters, allow_unused=True)
        float(next(g for g in found if g is not None).sum())  # waits for a GPU
        times.append(perf_counter() - start)
    return float(np.median(times)) / int(ends[rows[-1]])


class Forecast:
    """Says before a run's first measured step what measuring will take, and afterwards whether that was right."""

    def __init__(self, config: TrainConfig, exact_always: bool):
        self.config, self.exact_always = config, exact_always
        self.levels: list[Level] = []
        self.seconds: dict[str, float] = {}
        self.said = False

    def announce(self, step: int, policy: Policy, rollouts: Rollouts, so_far: float, update: float) -> None:
        """Time a pass at the first step that measures, and note what is to be expected.

        Args:
            step: The step.
            policy: The policy.
            rollouts: The step's.
            so_far: Seconds that sampling and scoring took.
            update: Forward and backward passes of all rollouts that the update still takes.
        """
        if self.levels or not any(level.due(step) for level in levels(self.config, rollouts, self.exact_always)):
            return
        self.levels = levels(self.config, rollouts, self.exact_always)
        with phase("timing one forward and backward pass"):
            each = seconds_per_position(policy, rollouts)
        self.seconds = {lv.name: lv.multiple * each * positions(rollouts, lv.rows) for lv in self.levels}
        every = np.ones(len(rollouts.group), bool)
        updating = update * each * positions(rollouts, every)
        EXPECTED.update(self.seconds | {"update": updating})
        note(self.sentence(step, so_far + updating))

    def sentence(self, step: int, usual: float) -> str:
        """Return the forecast in words.

        Args:
            step: The first measured step.
            usual: Seconds of a step without measuring.
        """
        what = " and ".join(dict.fromkeys(level.what for level in self.levels if level.what))
        steps = self.steps(step)
        costs = [self.cost(s) for s in steps]
        alike = len({round(c, 9) for c in costs}) == 1
        often = (" each time" if alike else " the first time") + f", {about(sum(costs))} in all"
        cost = f"about {about(costs[0])}{often if len(steps) > 1 else ''}"
        return f"Measuring {what} at {listed(steps)}: {cost}; a step takes about {about(usual)} besides."

    def steps(self, first: int) -> list[int]:
        """Return the measured steps from `first` on."""
        rest = range(first, self.config.optimize.steps)
        return [step for step in rest if any(level.due(step) for level in self.levels)]

    def cost(self, step: int) -> float:
        """Return the seconds that measuring takes at a step, as far as is known."""
        return sum(self.seconds[level.name] for level in self.levels if level.due(step))

    def correct(self, step: int) -> None:
        """Put what the first measured step took in place of the forecast, and say so where that was far off."""
        if self.said or not self.seconds:  # where the pass could not be timed, nothing was said
            return
        self.said, before = True, self.cost(step)
        self.seconds = {name: EXPECTED.get(name, value) for name, value in self.seconds.items()}
        took = self.cost(step)
        if max(before, took) > SHORT and not 1 / OFF <= took / before <= OFF:
            rest = sum(self.cost(s) for s in self.steps(step + 1))
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
