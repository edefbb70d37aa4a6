"""The verdict of an audit: at most three sentences to act on, each with its number and interval."""

import numpy as np

from otb_analysis.audit.results import Proxy, is_told
from otb_analysis.audit.sampling_report import SamplingReport
from otb_analysis.audit.sampling_text import sampling_lines
from otb_analysis.diagnostics.advice import Advice, Advised
from otb_analysis.diagnostics.planner import Cell, Planner
from otb_analysis.figures.conclusion import shown_name
from otb_analysis.statistics import MIN_CLUSTERS, REFERENCE, Conclusion, Interval
from otb_analysis.statistics.comparisons.verdicts import MARGIN
from otb_analysis.types import Label


def verdict(
    whole: Advice | None,
    planner: Planner,
    proxy: Proxy | None,
    sampling: SamplingReport | None,
    conclusion: Conclusion | None = None,
) -> tuple[str, ...]:
    """Return which estimator, which group size, and whether the proxy will do.

    Tokens that another sampler drew come first, in place of the proxy: nothing else can be believed then.

    `whole` judges estimators at the recorded group size. Without gradients one sentence on dead groups is left.
    """
    alarm = sampling is not None and sampling.alarm
    sentences = [sampling_lines(sampling)[0]] if sampling is not None and alarm else []
    dead = bool(planner.dead) and planner.dead[-1].share.estimate == 1
    if dead:
        sentences.append("Every group has equal rewards, so there is no gradient to compare; take other prompts.")
    sentences += [_estimator(whole, conclusion)] if whole and not dead else []
    if dead:
        pass
    elif planner.cells and whole:
        sentences.append(size_sentence(planner, (whole.present.estimator, whole.present.energy_source)))
    elif planner.dead:
        last = planner.dead[-1]
        sentences.append(
            f"In groups of {last.size}, {_percent(last.share)} teach nothing: all their rewards are equal."
        )
    if proxy and not alarm:
        sentences.append(_proxy(proxy))
    return tuple(sentences)


def _estimator(advice: Advice, conclusion: Conclusion | None) -> str:
    """Say which estimator is more efficient; where noise hides that, which has less variance at equal progress."""
    now = shown_name((advice.present.estimator, advice.present.energy_source))
    cheap = [one for one in advice.candidates if one.better and one.choice.energy_source in ("none", "proxy")]
    best = cheap[0] if cheap else None
    if best is not None:
        name = shown_name((best.choice.estimator, best.choice.energy_source))
        return f"Use {name}: {_cell(best.ratio)} times as efficient as {now}."
    quiet = conclusion.best if conclusion and not any(is_told(one.ratio) for one in advice.candidates) else None
    if quiet is not None and quiet.sf is not None:
        hidden = "" if now == REFERENCE[0] else f"; {_undecided((now, 'none'))}"
        return f"Try {shown_name(quiet.label)}: {_cell(quiet.sf)} of rloo's variance at equal progress{hidden}."
    return f"Keep {now}: no difference shown{_highest(advice)}."


def size_sentence(planner: Planner, trained: Label) -> str:
    """Say which group size serves the trainer's estimator; where that is not decided, what serves `rloo`."""
    size = planner.recorded_size
    for label in dict.fromkeys((trained, REFERENCE)):
        others = [cell for cell in planner.cells if (cell.estimator, cell.energy_source) == label and cell.size != size]
        told = [cell.cost for cell in others if cell.cost and is_told(cell.cost)]
        better = [cell for cell in others if cell.cost in told and (cell.cost.high or 1) < 1]
        name = shown_name(label)
        if better:
            best = min(better, key=_cost)
            if label == trained:
                return f"Use groups of {best.size}, not {size}: {name} {_gain(best)} at the same rollouts."
            hidden = _undecided(trained)
            return f"Try groups of {best.size}, not {size}: {name} {_gain(best)}; {hidden}."
        if label == trained and others and all(cell.cost in told and (cell.cost.low or 0) > 1 for cell in others):
            nearest = min(others, key=_cost)
            return f"Keep groups of {size}: in groups of {nearest.size} {name} {_gain(nearest)}."
    best = planner.best_size
    if best is not None and not (best.low or 0) <= (size or 0) <= (best.high or np.inf):
        hidden = "" if trained == REFERENCE else f"; {_undecided(trained)}"
        ends = f"{best.estimate:.0f} ({best.low:.1f}–{best.high:.1f})"
        return f"Try groups of {ends}, not {size}: rloo's variance is least there{hidden}."
    sizes = sorted({cell.size for cell in planner.cells})
    return f"Keep groups of {size}: no difference shown from {sizes[0]} to {sizes[-1]}."


def _undecided(label: Label) -> str:
    return f"for {shown_name(label)} noise leaves it open"


def _cost(cell: Cell) -> float:
    return cell.cost.estimate if cell.cost else 1.0


def _gain(cell: Cell) -> str:
    """Return what a size does to an estimator, in words."""
    cost = cell.cost
    if cell.estimator in ("none", REFERENCE[0]):
        return f"has {_cell(cost)} of the variance"
    assert cost is not None and cost.low is not None and cost.high is not None
    turned = Interval(1 / cost.estimate, 1 / cost.high, 1 / cost.low, cost.n_clusters, cost.estimand)
    return f"is {_cell(turned)} times as efficient"


def _highest(advice: Advice) -> str:
    """Return the highest ratio that has an interval, as an aside, or why there is none."""
    tested = [one for one in advice.candidates if is_told(one.ratio)]
    if tested:
        top: Advised = max(tested, key=lambda one: one.ratio.estimate if one.ratio else 0.0)
        name = shown_name((top.choice.estimator, top.choice.energy_source))
        return f"; highest is {name}, {_cell(top.ratio)} times"
    counts = [one.ratio.n_clusters for one in advice.candidates if one.ratio is not None]
    few = bool(counts) and max(counts) < MIN_CLUSTERS
    return f"; that takes {MIN_CLUSTERS} prompts" if few else "; noise hides the gradient, so audit more prompts"


def _proxy(proxy: Proxy) -> str:
    kept = proxy.kept
    if kept is None or kept.low is None or kept.high is None or not is_told(kept):
        inside = proxy.within
        if inside is None or inside.low is None:
            return "Proxy: no difference shown."
        return f"Proxy: log correlation with exact norms {_cell(inside)}; what it costs otb is not known."
    if kept.low >= 1 - MARGIN:
        return f"Use the proxy: otb keeps {_cell(kept)} of its efficiency."
    if kept.high < 1:
        return f"The proxy costs: otb keeps {_cell(kept)} of its efficiency."
    return f"Proxy: no difference shown; otb keeps {_cell(kept)} of its efficiency."


def _percent(share: Interval) -> str:
    ends = "" if share.low is None or share.high is None else f" ({share.low:.0%}–{share.high:.0%})"
    return f"{share.estimate:.0%}{ends}"


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    ends = "" if interval.low is None else f" ({interval.low:.2f}–{interval.high:.2f})"
    return f"{interval.estimate:.2f}{ends}"
