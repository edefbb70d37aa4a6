"""What a comparison of A and B says, in one sentence or two of at most 40 words, the answer first."""

from collections.abc import Sequence

from otb_analysis.figures.numbers import number, span
from otb_analysis.figures.pair_curves import PairPanel, differs
from otb_analysis.figures.pair_gradients import NoiseInfo
from otb_analysis.statistics import MIN_CLUSTERS

NOTHING = "A and B share no step, so nothing can be compared."


def runs_verdict(panels: Sequence[PairPanel], noise: NoiseInfo) -> str:
    """Return what two runs, or two groups of them, differ in: reward first, then gradient noise."""
    parts = [reward_words(panel) for panel in panels if panel.quantity.column == "reward_mean"]
    return " ".join([*parts, *noise_words(noise)]) or NOTHING


def estimators_verdict(noise: NoiseInfo) -> str:
    """Return which of two estimators is less noisy on the same rollouts."""
    return " ".join(noise_words(noise)) or " ".join(noise.notes)


def reward_words(panel: PairPanel) -> str:
    """Say by how much the rewards differ."""
    one, steps = panel.whole, len(panel.step)
    if one is None:
        return "The rewards' difference is not known."
    on = f"over {steps} shared step{'s' * (steps != 1)}"
    if one.low is None or one.high is None:
        return f"B's reward is {_signed(one.estimate)} {on}, without an interval: that takes {_needs(panel)}."
    if not panel.differs:
        words = f"{_signed(one.estimate)} ({_signed(one.low)} to {_signed(one.high)})"
        return f"Rewards are not distinguishable {on}: B − A is {words}."
    more = "more" if one.estimate > 0 else "less"
    size = abs(one.estimate)
    ends = sorted((abs(one.low), abs(one.high)))  # both of one sign: the interval leaves out 0
    return f"B earns {number(size)} ({span(*ends)}) {more} reward a step than A {on}."


def noise_words(noise: NoiseInfo) -> list[str]:
    """Say how the variances at equal progress compare: the first comparison that has an interval."""
    known = [row for row in noise.rows if row.sf is not None and row.sf.low is not None]
    if not known:
        return ["Gradient noise has no interval."] if noise.rows else []
    row = known[0]
    ratio = row.sf
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    words = f"{number(ratio.estimate)} ({span(ratio.low, ratio.high)})"
    if not differs(ratio, 1.0):
        return [f"Gradient noise is not distinguishable: SF ratio {words}."]
    return [f"B's gradient has {words} times A's variance at equal progress."]


def _needs(panel: PairPanel) -> str:
    return f"{MIN_CLUSTERS} steps" if len(panel.a) == 1 else "seeds that differ"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)
