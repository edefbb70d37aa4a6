"""The verdict of an audit: at most three sentences to act on, each with its number and interval."""

from dataclasses import replace

from otb_analysis.audit.results import Planner, Proxy, is_told
from otb_analysis.audit.sampling_report import SamplingReport
from otb_analysis.audit.sampling_text import sampling_lines
from otb_analysis.diagnostics.advice import Advice, Advised
from otb_analysis.figures.conclusion import shown_name
from otb_analysis.statistics import MIN_CLUSTERS, Conclusion, Interval
from otb_analysis.statistics.comparisons.verdicts import MARGIN


def verdict(
    whole: Advice | None,
    sizes: Advice | None,
    planner: Planner,
    proxy: Proxy | None,
    sampling: SamplingReport | None,
    conclusion: Conclusion | None = None,
) -> tuple[str, ...]:
    """Return which estimator, which group size, and whether the proxy will do.

    Tokens that another sampler drew come first, in place of the proxy: nothing else can be believed then.

    `whole` judges estimators at the recorded group size, `sizes` at smaller ones too. Without gradients one sentence
    on dead groups is left.
    """
    alarm = sampling is not None and sampling.alarm
    sentences = [sampling_lines(sampling)[0]] if sampling is not None and alarm else []
    sentences += [_estimator(whole, conclusion)] if whole else []
    if sizes and len({one.choice.size for one in sizes.candidates}) > 1:
        sentences.append(_size(sizes))
    elif planner.dead:
        last = planner.dead[-1]
        sentences.append(f"In groups of {last.size}, {last.share:.0%} teach nothing ({last.n_prompts} groups).")
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
        return f"{name} is {_cell(best.ratio)} times as efficient as {now}."
    quiet = conclusion.best if conclusion and not any(is_told(one.ratio) for one in advice.candidates) else None
    if quiet is not None and quiet.sf is not None:
        return f"{shown_name(quiet.label)} has {_cell(quiet.sf)} of rloo's variance at equal progress."
    return f"Estimators: no difference shown from {now}{_highest(advice)}."


def _size(advice: Advice) -> str:
    present = advice.present
    same = [
        one
        for one in advice.candidates
        if (one.choice.estimator, one.choice.energy_source) == (present.estimator, present.energy_source)
    ]
    whole, others = present.size, [one for one in same if one.choice != present]
    for one in others:
        if one.better:
            return f"Groups of {one.choice.size} are {_cell(one.ratio)} times as efficient as groups of {whole}."
    if others and all(one.ratio and one.ratio.high is not None and one.ratio.high < 1 for one in others):
        return f"Keep groups of {whole}: the best smaller size has {_cell(others[0].ratio)} of their efficiency."
    return f"Group size: no difference shown from {whole}{_highest(replace(advice, candidates=tuple(others)))}."


def _highest(advice: Advice) -> str:
    """Return the highest ratio that has an interval, as an aside, or why there is none."""
    tested = [one for one in advice.candidates if is_told(one.ratio)]
    if tested:
        top: Advised = max(tested, key=lambda one: one.ratio.estimate if one.ratio else 0.0)
        return f"; the highest ratio is {_cell(top.ratio)}"
    counts = [one.ratio.n_clusters for one in advice.candidates if one.ratio is not None]
    few = bool(counts) and max(counts) < MIN_CLUSTERS
    return f"; needs {MIN_CLUSTERS} prompts" if few else "; noise hides the gradient"


def _proxy(proxy: Proxy) -> str:
    kept = proxy.kept
    if kept is None or kept.low is None or kept.high is None or not is_told(kept):
        inside = proxy.within
        if inside is None or inside.low is None:
            return "Proxy: no difference shown."
        return f"Proxy: log correlation {_cell(inside)}; its cost is not known."
    if kept.low >= 1 - MARGIN:
        return f"The proxy will do: otb keeps {_cell(kept)} of its efficiency."
    if kept.high < 1:
        return f"The proxy costs: otb keeps {_cell(kept)} of its efficiency."
    return f"Proxy: no difference shown; otb keeps {_cell(kept)} of its efficiency."


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    ends = "" if interval.low is None else f" ({interval.low:.2f}–{interval.high:.2f})"
    return f"{interval.estimate:.2f}{ends}"
