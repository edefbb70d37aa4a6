"""A comparison in three sentences: which baseline, by how much with its interval, what to do next; and the advice."""

import math
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Any

from otb_analysis.diagnostics import advise, trained_label, update_rollouts
from otb_analysis.errors import InputError
from otb_analysis.estimators import proved, registered
from otb_analysis.figures.numbers import formatted, interval_cell
from otb_analysis.statistics import MIN_CLUSTERS, NOTHING, Conclusion, Interval, Verdict, gradient_noise_scale
from otb_analysis.statistics.comparisons.verdicts import MARGIN, names
from otb_analysis.types import Gram, Label, Proved

FAR = 20
"""Above this multiple of the measured prompts the prompts needed are not given as a number."""

SELDOM = 20
"""Most steps between two measurements that are advised."""

MORE = "a larger --sample.prompts, with --measure.exact.prompts 0 --measure.exact.every 1"

COMMAND = "your run's command"

PER_CENT = f"{100 * MARGIN:.0f} %"


NO_GRAMS = (
    "Not known: no step measured every estimator's gradient; the level exact does: "
    "otb train --measure.exact.every 10 --measure.exact.prompts 16, or for recorded rollouts "
    "otb audit --model DIR --rollouts FILE."
)


def trained_labels(config: Mapping[str, Any], grams: Iterable[Gram]) -> tuple[Label, ...]:
    """Return the estimator that a run trains with; empty where its configuration names none that was measured."""
    try:
        return (trained_label(config, [label for gram in grams for label in gram.labels]),)
    except InputError:  # a run of somebody else's tool need not name one of ours
        return ()


def advice_line(
    grams: Mapping[int, Gram], subgroups: Mapping[int, Mapping[int, Gram]], config: Mapping[str, Any]
) -> str:
    """Return which estimator and group size to train with, or why that is not known.

    `grams` by step and `subgroups` by size and step, as `RunStore.grams` and `RunStore.subgroup_grams` return them.
    """
    if not grams:
        return NO_GRAMS
    try:
        labels = [label for gram in grams.values() for label in gram.labels]
        advice = advise(
            grams, subgroups, trained_label(config, labels), update_rollouts(config), proved(labels, config)
        )
    except InputError as error:
        return f"Not known: {error}"
    return f"{advice.reason} {advice.sizes_line}"


def conclusion_sentences(
    conclusion: Conclusion, trained: Sequence[Label] = (), config: Mapping[str, Any] | None = None
) -> tuple[str, str, str]:
    """Return what the comparison says, each sentence of at most 40 words and true whatever the data are.

    `config` is that of one of the runs, for the command that measures more.
    """
    config = config or {}
    if conclusion.cause:
        return _untested(conclusion, config)
    if conclusion.best:
        return _ahead(conclusion, conclusion.best, trained)
    if conclusion.worst:
        return _behind(conclusion, conclusion.worst, trained)
    if conclusion.different:
        return _mixed(conclusion, trained)
    if not conclusion.undecided:
        return _same(conclusion, trained)
    return _undecided(conclusion, trained, config)


def signal_sentence(conclusion: Conclusion, trained: Sequence[Label] = ()) -> str:
    """Return why estimators without a proved projection are not judged, and what it takes; empty where they are."""
    untested = [v.label for v in conclusion.verdicts if not v.c_known and not v.tested]
    listed = list(dict.fromkeys(name for name, _ in sorted(untested, key=lambda label: label not in trained)))
    if conclusion.cause not in ("", "noise") or not listed or conclusion.signal.positive:
        return ""
    first = ", ".join(listed[:3]) + (" and others" if len(listed) > 3 else "")
    needed = conclusion.signal.n_needed
    return (
        f"Not judged: {first}. Their step length must be estimated along ∇J, and on {conclusion.n_prompts} prompts "
        f"noise exceeds that signal; {_prompts(needed, conclusion.n_prompts)} would show it."
    )


def noise_scale_line(grams: Sequence[Gram], labels: Iterable[Label], known: Proved = NOTHING) -> str:
    """Return at how many prompts noise equals signal under some estimators, in one line; empty where none was measured.

    The noise scale is V/‖m‖² in prompts, see `gradient_noise_scale`.
    """
    measured = {label for gram in grams for label in gram.labels}
    by_scale: dict[str, list[str]] = {}
    for label in dict.fromkeys(labels):
        if label in measured:
            scale = gradient_noise_scale(grams, label, known)
            text = noise_scale_cell(scale, ".0f")
            by_scale.setdefault(text, []).append(shown_name(label))
    listed = ", ".join(f"{' and '.join(who)} {text}" for text, who in by_scale.items())
    return f"Noise scale, the number of prompts at which noise equals signal: {listed}." if listed else ""


def noise_scale_cell(scale: Interval | None, form: str = "") -> str:
    """Return a noise scale as it is read: `116 [50, 254]`, `116 [50, ∞]`, or what it is above where noise hides it."""
    if scale is None:
        return "not known, since noise hides the signal"
    if math.isinf(scale.estimate) and scale.low is not None:
        return f"above {formatted(scale.low, form)}"
    return interval_cell(scale, form)


def shown_name(label: Label) -> str:
    """Return how an estimator is called in a sentence."""
    name, source = label
    name = "no baseline (none)" if name == "none" else name
    return {"exact": f"{name} with exact norms", "calibrated": f"{name} with calibrated energies"}.get(source, name)


def train_options(label: Label) -> str:
    """Return what to add to a run's own command so that it trains with an estimator."""
    entry = registered(label[0])
    reads = entry is not None and entry.reads_energy
    energy = " --estimator.energy exact" if reads and label[1] == "exact" else ""
    return f"--estimator.name {quote(label[0])}{energy}"


def measure_options(needed: int, config: Mapping[str, Any]) -> str:
    """Return what to add to a run's own command so that it measures this many prompts, at its own steps if it can."""
    sample, optimize = config.get("sample"), config.get("optimize")
    prompts = sample.get("prompts") if isinstance(sample, Mapping) else None
    steps = optimize.get("steps") if isinstance(optimize, Mapping) else None
    options = "--measure.exact.prompts 0"
    if not isinstance(prompts, int) or not isinstance(steps, int) or prompts < 1 or steps < 1:
        return f"{options} --measure.exact.every 5"
    measured = math.ceil(needed / prompts)
    if measured <= steps:
        return f"{options} --measure.exact.every {min(steps // measured, SELDOM)}"
    return f"{options} --measure.exact.every 1 --sample.prompts {math.ceil(needed / steps)}"


def _ahead(conclusion: Conclusion, best: Verdict, trained: Sequence[Label]) -> tuple[str, str, str]:
    name, base = shown_name(best.label), conclusion.against[0]
    better = names([v for v in conclusion.verdicts if v.better])
    free = "the best" if best.label[1] == "exact" else "the best that needs no exact norms"
    first = f"{better} of {_tested(conclusion)} beat {base} on {conclusion.n_prompts} prompts; {free} is {name}."
    if better == 1:
        others = names(conclusion.tested) - 1
        rest = f"; none of the other {others} tested does" if others else ""
        first = f"{name} beats {base} on {conclusion.n_prompts} prompts{rest}."
    faster = "a quieter gradient need not learn faster"
    if best.label in trained or any(conclusion.alike.get(t) == conclusion.alike.get(best.label) for t in trained):
        return first, _by_how_much(best, base), (
            f"Next: keep {name}; {faster}, so compare held-out reward with {base} over several seeds: "
            f"add {train_options(conclusion.against)}."
        )  # fmt: skip
    return first, _by_how_much(best, base), (
        f"Next: train with it (add {train_options(best.label)} to {COMMAND}); {faster}, so compare held-out "
        "reward over several seeds."
    )  # fmt: skip


def _behind(conclusion: Conclusion, worst: Verdict, trained: Sequence[Label]) -> tuple[str, str, str]:
    base, worse = conclusion.against[0], [v for v in conclusion.verdicts if v.worse]
    fell = f"{names(worse)} of {_tested(conclusion)} fell behind"
    first = f"No baseline beat {base} on {conclusion.n_prompts} prompts; {fell}."
    behind = [v.label for v in worse if v.label in trained]
    keep = f"Next: keep what you have{_named(trained)}; nothing was shown to be better."
    instead = f"add {train_options(conclusion.against)} to {COMMAND}"
    remedy = f"Next: train with {base} instead of {shown_name(behind[0])}: {instead}." if behind else keep
    return first, f"Farthest behind is {shown_name(worst.label)}. {_by_how_much(worst, base)}", remedy


def _mixed(conclusion: Conclusion, trained: Sequence[Label]) -> tuple[str, str, str]:
    """Some estimators differ, but none that a run can train with is better or worse in every measure."""
    base, lead, count = conclusion.against[0], conclusion.different[0], names(conclusion.different)
    who = f"{count} of {_tested(conclusion)} differ" if count > 1 else f"{shown_name(lead.label)} differs"
    return (
        f"{who} from {base} on {conclusion.n_prompts} prompts, but nothing that one can train with is better or worse "
        "in every respect.",
        f"For {shown_name(lead.label)}: {_by_how_much(lead, base)}",
        f"Next: keep what you have{_named(trained)}; what is ahead in one measure is behind in another.",
    )


def _same(conclusion: Conclusion, trained: Sequence[Label]) -> tuple[str, str, str]:
    base = conclusion.against[0]
    widest = max(conclusion.within, key=lambda v: (v.sf.high or 0) - (v.sf.low or 0) if v.sf else 0.0)
    return (
        f"No difference from {base} is larger than {PER_CENT}: none of {_tested(conclusion)} was told from it on "
        f"{conclusion.n_prompts} prompts, and every interval is within that.",
        f"The widest is of {shown_name(widest.label)}. {_by_how_much(widest, base)}",
        f"Next: keep what you have{_named(trained)}; another of these baselines would hardly change the noise.",
    )


def _undecided(conclusion: Conclusion, trained: Sequence[Label], config: Mapping[str, Any]) -> tuple[str, str, str]:
    base = conclusion.against[0]
    close = f"; {names(conclusion.within)} within {PER_CENT} of it" if conclusion.within else ""
    first = f"None of {_tested(conclusion)} can be told from {base} on {conclusion.n_prompts} prompts{close}."
    lead = min(conclusion.undecided, key=lambda v: v.sf.estimate if v.sf else math.inf)
    chance = f"Lowest of the undecided is {shown_name(lead.label)}, perhaps by chance. {_by_how_much(lead, base)}"
    if conclusion.n_needed is None or conclusion.n_needed > FAR * conclusion.n_prompts:
        far = f"Next: keep what you have{_named(trained)}; to tell them apart takes many times more prompts."
        return first, chance, far
    return first, chance, (
        f"Next: measure {_prompts(conclusion.n_needed, conclusion.n_prompts)}, which would decide on it, by adding "
        f"{measure_options(_rounded(conclusion.n_needed), config)}."
    )  # fmt: skip


def _untested(conclusion: Conclusion, config: Mapping[str, Any]) -> tuple[str, str, str]:
    base, n = conclusion.against[0], conclusion.n_prompts
    if conclusion.cause == "no reference":
        return (
            f"Nothing can be compared: {base} was not measured.",
            f"Every comparison is with {base}, which takes at least two rollouts per prompt.",
            "Next: sample groups: otb train --sample.group_size 8.",
        )
    if conclusion.cause == "alone":
        return (
            f"Nothing can be compared: only {base} and multiples of it were measured.",
            "A multiple of an update is the same update with another step length.",
            f"Next: measure every estimator, by adding {measure_options(MIN_CLUSTERS, config)}.",
        )
    if conclusion.cause == "equal rewards":
        return (
            f"Nothing can be compared: in every measured group all rewards were equal, so the gradient of {base} is 0.",
            "Such groups teach nothing, whatever the baseline.",
            "Next: start from a policy that sometimes succeeds, or choose an easier task.",
        )
    if conclusion.cause == "few prompts":
        return (
            f"Nothing can be told apart yet: {n} prompt{'s were' if n != 1 else ' was'} measured, and an interval "
            f"takes {MIN_CLUSTERS}.",
            "Without intervals the order of the estimators may be chance.",
            f"Next: measure at least {MIN_CLUSTERS} prompts, by adding {measure_options(MIN_CLUSTERS, config)}.",
        )
    needed = conclusion.signal.n_needed
    far = needed is None or needed > FAR * n
    return (
        f"Nothing can be told apart on {n} prompts: their noise exceeds the signal.",
        "The step length of every estimator here must be estimated along ∇J, whose estimate is lost in the noise.",
        f"Next: measure {_prompts(needed, n)} by adding "
        + (f"{MORE}." if far else f"{measure_options(_rounded(needed or 0), config)}."),
    )


def _by_how_much(verdict: Verdict, base: str) -> str:
    if verdict.sf is not None and (not verdict.differs_in or "sf" in verdict.differs_in):
        saved = _saved(verdict.sf) if verdict.differs_in else ""
        return f"Its variance at equal progress (SF) is {_interval(verdict.sf)} times {base}'s{saved}."
    ratio = verdict.efficiency
    shown = _interval(ratio) if ratio else "not known"
    return f"The share of its update along ∇J (efficiency) is {shown} times {base}'s."


def _saved(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    # The end of the interval nearer to 1: the estimate itself would promise too much where the interval is wide.
    share = round(100 * (1 - (ratio.high if ratio.estimate < 1 else ratio.low)))
    if share == 0:
        return ""
    return f": for the same noise it needs at least {abs(share)} % {'fewer' if share > 0 else 'more'} rollouts"


def _interval(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.estimate:.2f}"
    ends = ".3f" if "1.00" in (f"{ratio.low:.2f}", f"{ratio.high:.2f}") else ".2f"  # on which side of 1 it ends
    return f"{ratio.estimate:.2f} ({ratio.low:{ends}}–{ratio.high:{ends}})"


def _tested(conclusion: Conclusion) -> str:
    count = names(conclusion.tested)
    return "1 baseline tested" if count == 1 else f"{count} baselines tested"


def _named(trained: Sequence[Label]) -> str:
    shown = list(dict.fromkeys(shown_name(label) for label in trained))
    return f" ({', '.join(shown[:3])})" if shown else ""


def _prompts(needed: int | None, measured: int) -> str:
    if needed is None or needed > FAR * measured:
        return "many times more prompts"
    return f"about {_rounded(needed):,} prompts instead of {measured}"


def _rounded(count: int) -> int:
    """Round up to two significant digits."""
    unit = 10 ** max(len(str(count)) - 2, 0)
    return math.ceil(count / unit) * unit
