"""Which group size serves the estimator that trained, in one sentence; only sizes that were measured for it."""

from collections.abc import Sequence

from otb_analysis.answers.sentences import interval_words
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.figures.numbers import shown_name
from otb_analysis.statistics import REFERENCE, is_informative
from otb_analysis.types import Label

UNSAID = 0.5
"""A share with a longer interval is not said."""


def size_line(planner: Planner, trained: Sequence[Label]) -> str:
    """Return the sentence on group sizes, from measured gradients, else from success rates; empty without either.

    The estimator that trained is judged; where noise leaves it open, `rloo` beside it. What counts is the cost of the
    same rollouts in groups of another size; every claim takes an interval that holds with all others.
    """
    size, own = planner.recorded_size, trained[0] if trained else REFERENCE
    measured: dict[Label, set[int]] = {}
    for label in dict.fromkeys((own, REFERENCE)):
        cells = [one for one in planner.cells if (one.estimator, one.energy_source) == label and one.cut]
        measured[label] = {one.size for one in cells} - {size}
        costs = {
            one.size: one.cost
            for one in cells
            if one.size != size and one.cost is not None and is_informative(one.cost)
        }
        less = {n: cost for n, cost in costs.items() if (cost.high or 1) < 1}
        more = {n: cost for n, cost in costs.items() if (cost.low or 0) > 1}
        if not less and (not more or len(more) < len(cells) - 1):
            continue
        n, cost = min((less or more).items(), key=lambda of: of[1].estimate)
        noise = f"with {shown_name(label)} the same rollouts give {interval_words(cost)} times the noise"
        if label != own:
            return f"Keep groups of {size}: no difference shown for {shown_name(own)}; {noise} in groups of {n}."
        return (
            f"Try groups of {n}, not {size}: {noise}." if less else f"Keep groups of {size}: in groups of {n} {noise}."
        )
    if measured[own]:
        listed = ", ".join(map(str, sorted(measured[own])))
        return f"Keep groups of {size}: no difference shown for {shown_name(own)} in groups of {listed}."
    dead = planner.dead[-1] if planner.dead else None
    if dead is None or dead.share.estimate == 1:
        return planner.note if dead is not None else ""
    if dead.share.low is not None and dead.share.high is not None and dead.share.high - dead.share.low > UNSAID:
        return ""
    ends = "" if dead.share.low is None else f" ({dead.share.low:.0%}–{dead.share.high:.0%})"
    return f"In groups of {dead.size}, {dead.share.estimate:.0%}{ends} teach nothing: all their rewards are equal."
