"""The decision in sentences of at most 40 words, true whatever the data are: what to train with, why, what next."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from otb_analysis.diagnostics.planner import Planner
from otb_analysis.estimators import registered
from otb_analysis.figures.numbers import shown_name
from otb_analysis.phases import plural
from otb_analysis.statistics import DIFFERENCE, MIN_CLUSTERS, REFERENCE, Comparison, Decision, Interval, is_informative
from otb_analysis.types import Label

FAR = 20
"""Above this multiple of the measured prompts the prompts needed are not given as a number."""
SELDOM = 20
"""Most steps between two measurements that are advised."""
UNSAID = 0.5
"""A share of groups without signal with a longer interval is not said."""
PER_CENT = f"{100 * DIFFERENCE:.0f} %"
NOT_MEASURED = (
    "Nothing is known of its baselines: no step measured every estimator's gradient. "
    "--measure.gradients.every 10 --measure.gradients.prompts 16 of otb train does, and --measure.budget .25 keeps all "
    "measuring within a quarter of the run's time; for recorded rollouts otb audit --model DIR --rollouts FILE "
    "says what it costs."
)
ANOTHER_SAMPLER = (
    "So nothing is proved of any baseline on these rollouts, and none is recommended: the true gradient takes tokens "
    "of the stated sampler. Next: state it right, or sample again."
)
FASTER = "a quieter gradient need not learn faster, so compare held-out reward over several seeds"


def decision_lines(
    decision: Decision, beside: Decision | None, trained: Sequence[Label], config: Mapping[str, Any], path: str
) -> tuple[str, ...]:
    """Return what to train with next and why, what holds against `rloo`, and what to do.

    Args:
        decision: All estimators against the one that trained; `beside`, where it is not None, against `rloo`.
        trained: The estimators that trained.
        config: Configuration of one of the runs, whose directory is `path`, for the command that measures more.
    """
    if decision.cause in ("no reference", "alone", "equal rewards", "few prompts"):
        return _untested(decision, config, path)
    best, names = decision.best, shown_name(decision.against)
    m, n = decision.looked_at, decision.n_prompts
    against_rloo = [*filter(None, [beside and _beside(beside, trained), _trained_too(decision, trained)])]
    if best is not None:
        verb = "Keep" if best.label in trained else "Train with"
        first = (
            f"{verb} {shown_name(best.label)}: {_by(best, names)}, all {m} baselines looked at together, {n} prompts."
        )
        count, worse = len(decision.better), len(decision.worse)
        more = f"{count} of {m} are shown to be better than {names}, {worse} to be worse, {m - count - worse} neither"
        more += f"{_open(decision)}."
        return first, more, *against_rloo, f"Next: {_train_command(best.label, config, path)}; {FASTER}."
    worse_ones = [one.label for one in decision.worse]
    kept = dict.fromkeys(shown_name(label) for label in trained if label not in worse_ones)
    keep = f"Keep {' and '.join(kept)}: " if kept else ""  # where it is not known what trained, nothing is kept
    more = _measure_line(decision, config, path)
    if decision.cause:
        why = "its step length" if decision.against[0] not in ("rloo", "none") else "a step length"
        hidden = f"Noise hides the true gradient, along which {why} must be estimated."
        wide = "The ends of every interval differ by a factor of 100 or more."
        first = f"{keep}no baseline can be told from {names} on {n} prompts. {wide if decision.signal else hidden}"
        return _capital(first), *against_rloo, more
    behind = f"; {len(decision.worse)} shown to be worse" * bool(decision.worse) + _open(decision)
    first = f"{keep}none of {m} baselines is shown to be better than {names} on {n} prompts{behind}."
    open_ones, lead = [one for one in decision.tested if not one.worse], decision.nearest
    whole = len(decision.tested) == m  # one with an interval by itself may have none that holds with all others
    if whole and lead is None:
        return _capital(f"{keep}all {m} baselines are shown to be worse than {names} on {n} prompts."), *against_rloo
    if whole and all(_within(one.together) for one in open_ones):
        what = f"no difference from {names} is larger than {PER_CENT}" if not behind else (
            f"none of {m} baselines is better than {names} by more than {PER_CENT}"
        )  # fmt: skip
        return _capital(f"{keep}{what} on {n} prompts, all {m} together{behind}."), *against_rloo
    near = lead and f"Nearest is {shown_name(lead.label)}, perhaps by chance: {_by(lead, names)}, all {m} together."
    return _capital(first), *filter(None, [near]), *against_rloo, more


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _open(decision: Decision) -> str:
    """Return how many have no interval of their own."""
    looked = [one for one in decision.comparisons if one.one_look is None or one.one_look.low is None]
    if not looked:
        return ""
    along = not decision.signal and all(one.by == "efficiency" for one in looked)
    return f"; {len(looked)} more cannot be judged, since noise hides {'the true gradient' if along else 'them'}"


def _trained_too(decision: Decision, trained: Sequence[Label]) -> str:
    """Return how what trained stands, where several did and all are compared with `rloo`."""
    stands: dict[str, list[str]] = {}
    for label in trained:
        one = decision.comparison_of(label)
        if one is not None and decision.best not in (None, one):
            state = "better than rloo, too" if one.better else "worse than rloo" if one.worse else "open against rloo"
            stands.setdefault(state, []).append(shown_name(label))
    said = [f"{' and '.join(names)} {'are' if names[1:] else 'is'} {state}" for state, names in stands.items()]
    return f"Of what trained, {'; '.join(said)}." if said else ""


def interval_words(one: Interval) -> str:
    """Return a ratio with its interval: `0.73 (0.64–0.83)`, with a third digit where an end would read 1.00."""
    if one.low is None or one.high is None:
        return f"{one.estimate:.2f}"
    ends = ".3f" if "1.00" in (f"{one.low:.2f}", f"{one.high:.2f}") else ".2f"
    middle = ends if f"{one.estimate:.2f}" == "1.00" else ".2f"
    return f"{one.estimate:{middle}} ({one.low:{ends}}–{one.high:{ends}})"


def _by(one: Comparison, names: str) -> str:
    assert one.together is not None
    if one.by == "variance":
        return f"its variance at equal progress (SF) is {interval_words(one.together)} times {names}'s"
    share = "the share of its update along the true gradient (efficiency)"
    return f"{share} is {interval_words(one.together)} times {names}'s"


def _within(one: Interval | None) -> bool:
    if one is None or one.low is None or one.high is None:
        return False
    return one.low > 1 - DIFFERENCE and one.high < 1 / (1 - DIFFERENCE)


def _beside(decision: Decision, trained: Sequence[Label]) -> str:
    m, best = decision.looked_at, decision.best
    if decision.cause:
        return "Against rloo: no baseline can be told from it either."
    if best is None:
        return f"Against rloo: none of {m} is shown to be better."
    count = len(decision.better)
    worse = f", {len(decision.worse)} to be worse" * bool(decision.worse)
    lead = f"{count} of {m} {'are' if count > 1 else 'is'} shown to be better{worse}; the best is"
    assert best.together is not None
    what = "of its variance at equal progress" if best.by == "variance" else "times its efficiency"
    who = shown_name(best.label) + ", which trained" * (best.label in trained)
    return f"Against rloo: {lead} {who}, {interval_words(best.together)} {what}, all together."


def _untested(decision: Decision, config: Mapping[str, Any], path: str) -> tuple[str, ...]:
    base, n = shown_name(decision.against), decision.n_prompts
    if decision.cause == "no reference":
        return (
            "Nothing can be compared: rloo, which the true gradient is measured by, takes at least two rollouts of a "
            "prompt.",
            "Next: sample several answers to each prompt: --sample.group_size 8.",
        )
    if decision.cause == "alone":
        return (
            f"Nothing can be compared: only {base} and multiples of it were measured.",
            "Next: --measure.gradients.every 10 of otb train measures every baseline.",
        )
    if decision.cause == "equal rewards":
        return (
            f"Nothing can be compared: in every measured group all rewards were equal, so the gradient of {base} is 0.",
            "Such groups teach nothing, whatever the baseline. Next: start from a policy that sometimes succeeds, or "
            "choose an easier task.",
        )
    return (
        f"Nothing can be told apart yet: {n} prompt{'s were' if n != 1 else ' was'} measured, and a recommendation "
        f"takes {MIN_CLUSTERS}.",
        _measure_line(decision, config, path),
    )


def _train_command(label: Label, config: Mapping[str, Any], path: str) -> str:
    """Return how to train with an estimator: the run's own configuration with another baseline."""
    entry = registered(label[0])
    energy = " --estimator.energy exact" if entry is not None and entry.reads_energy and label[1] == "exact" else ""
    options = f"--estimator.name {quote(label[0])}{energy}"
    if "source" in config or not config or not path:
        return f"subtract it in your trainer (in otb train: {options})"
    return f"otb train --config {quote(f'{path}/run.json')} --run {quote(f'{Path(path).name}-{label[0]}')} {options}"


def _measure_line(decision: Decision, config: Mapping[str, Any], path: str) -> str:
    """Return for how many prompts a difference of 10 % would be shown, and the command that measures them."""
    needed, n = decision.n_needed, decision.n_prompts
    if needed is None or needed > FAR * max(n, 1):
        return f"To show a difference of {PER_CENT} takes many times more prompts than {n}."
    if needed <= n and not decision.cause:
        return f"{n} prompts suffice to show a difference of {PER_CENT}; a smaller one takes more."
    count = rounded(max(needed, MIN_CLUSTERS))
    shows = "tell the true gradient from noise" if decision.cause == "noise" else f"show a difference of {PER_CENT}"
    if decision.cause == "few prompts":
        shows = "give the first intervals"
    return f"About {count:,} prompts would {shows}: {measure_command(count, config, path)}"


def measure_command(needed: int, config: Mapping[str, Any], path: str) -> str:
    """Return the command that measures so many prompts, at a run's own steps if it has enough."""
    source = config.get("source")
    if isinstance(source, Mapping):
        model = quote(str(config.get("model") or "DIR"))
        files = quote(str(config.get("rollouts") or "FILE"))
        return f"record more, then otb audit --model {model} --rollouts {files} --go"
    options = measure_options(needed, config)
    if not config:  # of a run without one nothing can be repeated
        return f"otb train {options}"
    return f"otb train --config {quote(f'{path}/run.json')} --run {quote(f'{Path(path).name}-more')} {options}"


def measure_options(needed: int, config: Mapping[str, Any]) -> str:
    """Return what to add to a run's own command so that it measures this many prompts, at its own steps if it can."""
    sample, optimize = config.get("sample"), config.get("optimize")
    prompts = sample.get("prompts") if isinstance(sample, Mapping) else None
    steps = optimize.get("steps") if isinstance(optimize, Mapping) else None
    options = "--measure.gradients.prompts 0"
    if not isinstance(prompts, int) or not isinstance(steps, int) or prompts < 1 or steps < 1:
        return f"{options} --measure.gradients.every 5"
    measured = math.ceil(needed / prompts)
    if measured <= steps:
        return f"{options} --measure.gradients.every {min(steps // measured, SELDOM)}"
    return f"{options} --measure.gradients.every 1 --sample.prompts {math.ceil(needed / steps)}"


def rounded(count: int) -> int:
    """Round up to two significant digits."""
    unit = 10 ** max(len(str(count)) - 2, 0)
    return math.ceil(count / unit) * unit


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
    if planner.filtered is not None:
        return planner.filtered.line
    if dead.share.low is not None and dead.share.high is not None and dead.share.high - dead.share.low > UNSAID:
        return ""
    ends = "" if dead.share.low is None else f", {dead.share.low:.0%}–{dead.share.high:.0%}"
    # Groups of the largest size have no larger ones that they are cut from, so the share is a count.
    count = f"{round(dead.share.estimate * dead.n_groups):,} of {plural(dead.n_groups, 'group')}"
    return (
        f"In groups of {dead.size}, {count} ({dead.share.estimate:.0%}{ends}) teach nothing: their rewards are equal."
    )
