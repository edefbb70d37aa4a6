"""Measured steps that can be pooled, of one run or several, the decision that follows, and its sentences.

A sentence has at most 40 words and is true whatever the data are: what to train with, why, what next.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd

from otb_analysis.config import section
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.estimators import registered
from otb_analysis.figures.comparison import RATIOS, ComparisonInfo, comparison_info, comparison_table
from otb_analysis.figures.styles import beside_one, noise_scale_cell, shown_name
from otb_analysis.phases import plural
from otb_analysis.statistics import (
    DIFFERENCE,
    MIN_CLUSTERS,
    REFERENCE,
    Comparison,
    Decision,
    Interval,
    decide,
    is_informative,
    pooled_statistics,
)
from otb_analysis.types import Gram, Label, Proved

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
EVERY, WATCHED_PROMPTS = 10, 16
WATCHED = f"measure=MeasureConfig(exact=Schedule(), gradients=Schedule(every={EVERY}, prompts={WATCHED_PROMPTS}))"
"""What the monitor of a TRL trainer takes to measure every estimator's gradient."""
OF_TRL = ("OTBMonitor", "OTBGRPOTrainer")
"""What made a run of TRL's training: its weights are gone when it ends, so more is measured while it trains."""
ANOTHER_SAMPLER = (
    "So nothing is proved of any baseline on these rollouts, and none is recommended: the true gradient takes tokens "
    "of the stated sampler. Next: state it right, or sample again."
)
ONE_PROMPT = "Most measured steps have one prompt, but variance and true gradient are seen between prompts of one step."
UNDEFINED = "Not shown: {}, which noise hides on so few prompts; measure more prompts or pool more steps."
FASTER = "a quieter gradient need not learn faster, so compare held-out reward over several seeds"


def not_measured(config: Mapping[str, Any]) -> str:
    """Return what a run says that measured no estimator's gradient: what measures it, and the price."""
    if section(config, "source").get("made_by") not in OF_TRL:
        return NOT_MEASURED
    return (
        f"{NOT_MEASURED.partition('.')[0]}. {WATCHED} of OTBMonitor or RecordConfig does (docs/trl.md), for 10 to 20 "
        "forward and backward passes of 16 prompts' rollouts at every tenth batch."
    )


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
    m, n, count, worse = decision.looked_at, decision.n_prompts, len(decision.better), len(decision.worse)
    against_rloo = _against_rloo(decision, beside, trained)
    hidden = len(decision.hidden)
    along = not decision.signal and all(one.by == "efficiency" for one in decision.hidden)
    what = "the true gradient" if along else "them"
    unjudged = f"; {hidden} cannot be judged, since noise hides {what}" if hidden else ""
    if best is None:
        behind = f"; {worse} shown to be worse" * bool(worse) + unjudged
        first, near, more = _none_better(decision, names, behind, _measure_line(decision, config, path))
        # Where it is not known what trained, nothing is kept.
        worse_ones = [one.label for one in decision.worse]
        kept = dict.fromkeys(shown_name(label) for label in trained if label not in worse_ones)
        first = f"Keep {' and '.join(kept)}: {first}" if kept else f"{first[0].upper()}{first[1:]}"
        return tuple(filter(None, [first, near, *against_rloo, more]))
    entry = registered(best.label[0])
    exact = entry is not None and entry.reads_energy and best.label[1] == "exact"
    options = f"--estimator.name {quote(best.label[0])}{' --estimator.energy exact' * exact}"
    how = f"subtract it in your trainer (in otb train: {options})"
    if config and path and "source" not in config:
        how = _again(best.label[0], options, path)
    verb = "Keep" if best.label in trained else "Train with"
    shown = f"{count} of {m} {'is' if count == 1 else 'are'} shown to be better than {names}, {worse} to be worse"
    together = f"all {m} baselines looked at together, " * (m > 1)
    return (
        f"{verb} {shown_name(best.label)}: {_by(best, names)}, {together}{n} prompts.",
        f"{shown}, {m - count - worse - hidden} neither{unjudged}.",
        *against_rloo,
        f"Next: {how}; {FASTER}.",
    )


def _none_better(decision: Decision, names: str, behind: str, more: str) -> tuple[str, str, str]:
    """Return that none is shown to be better, which is nearest, and `more` where more prompts could tell."""
    m, n, lead = decision.looked_at, decision.n_prompts, decision.nearest
    ends = [(one.together.low, one.together.high) for one in decision.tested if one.together and not one.worse]
    none, together = f"none of {m} baselines is", f", all {m} together"
    if m == 1:
        none, together = "the other baseline is not", ""
    judged = m - len(decision.hidden)
    whole = len(decision.tested) == judged  # one with an interval by itself may have none that holds with all others
    if decision.cause:
        why = "its step length" if decision.against[0] not in ("rloo", "none") else "a step length"
        hidden = f"Noise hides the true gradient, along which {why} must be estimated."
        wide = "The ends of every interval differ by a factor of 100 or more."
        hidden = ONE_PROMPT if decision.update == 1 else wide if decision.signal else hidden
        return f"no baseline can be told from {names} on {n} prompts. {hidden}", "", more
    if lead is None and len(decision.tested) == m:
        every = f"all {m} baselines are" if m > 1 else "the other baseline is"
        return f"{every} shown to be worse than {names} on {n} prompts.", "", ""
    if whole and lead and all((low or 0) > 1 - DIFFERENCE and (high or 2) < 1 / (1 - DIFFERENCE) for low, high in ends):
        what = f"no difference from {names} is larger than {PER_CENT}"
        none = none if judged == m else "none that can be judged is"
        what = f"{none} better than {names} by more than {PER_CENT}" if behind else what
        return f"{what} on {n} prompts{together}{behind}.", "", ""
    near = f"Nearest is {shown_name(lead.label)}, perhaps by chance: {_by(lead, names)}{together}." if lead else ""
    return f"{none} shown to be better than {names} on {n} prompts{behind}.", near, more


def _against_rloo(decision: Decision, beside: Decision | None, trained: Sequence[Label]) -> list[str]:
    """Return what holds against `rloo`, and how what trained stands where several did and all are compared with it.

    It is no advice, and says so: the best against `rloo` need not be better than the one that trained.
    """
    lines, best = list[str](), beside and beside.best
    which = "Compared with rloo, which did not train:"
    if beside is not None and (beside.cause or best is None):
        none = f"none of {beside.looked_at} is shown to be better"
        lines.append(f"{which} {'no baseline can be told from it either' if beside.cause else none}.")
    elif beside is not None and best is not None:
        assert best.together is not None
        count = len(beside.better)
        worse = f", {len(beside.worse)} worse" * bool(beside.worse)
        lead = f"{count} of {beside.looked_at} {'are' if count > 1 else 'is'} shown to be better{worse}; the best is"
        what = "variance at equal progress" if best.by == "variance" else "efficiency"
        who = shown_name(best.label) + ", which trained" * (best.label in trained)
        one = decision.comparison_of(best.label)
        if one is None or best.label in trained:
            stands_to_it = ""
        elif one.better or one.worse:
            stands_to_it = f", and {'better' if one.better else 'worse'} than what trained"
        else:
            stands_to_it = ", yet not shown to beat what trained"
        lines.append(f"{which} {lead} {who}, {interval_words(best.together)} times rloo's {what}{stands_to_it}.")
    stands: dict[str, list[str]] = {}
    for label in trained:
        one = decision.comparison_of(label)
        if one is not None and decision.best not in (None, one):
            state = "better than rloo, too" if one.better else "worse than rloo" if one.worse else "open against rloo"
            stands.setdefault(state, []).append(shown_name(label))
    parts = [f"{' and '.join(names)} {'are' if names[1:] else 'is'} {state}" for state, names in stands.items()]
    return [*lines, f"Of what trained, {'; '.join(parts)}."] if parts else lines


def interval_words(one: Interval) -> str:
    """Return a ratio with its interval: `0.73 (0.64–0.83)`, with more digits where an end would read 1.00."""
    if one.low is None or one.high is None:
        return f"{one.estimate:.2f}"
    ends = beside_one(one)
    middle = ends if f"{one.estimate:.2f}" == "1.00" else ".2f"
    return f"{one.estimate:{middle}} ({one.low:{ends}}–{one.high:{ends}})"


def _by(one: Comparison, names: str) -> str:
    assert one.together is not None
    if one.by == "variance":
        return f"its variance at equal progress (SF) is {interval_words(one.together)} times {names}'s"
    share = "the share of its update along the true gradient (efficiency)"
    return f"{share} is {interval_words(one.together)} times {names}'s"


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


def _again(suffix: str, options: str, path: str) -> str:
    """Return the command that makes a run again with other options."""
    return f"otb train --config {quote(f'{path}/run.json')} --run {quote(f'{Path(path).name}-{suffix}')} {options}"


def _measure_line(decision: Decision, config: Mapping[str, Any], path: str) -> str:
    """Return for how many prompts a difference of 10 % would be shown, and the command that measures them."""
    needed, n = decision.n_needed, decision.n_prompts
    if decision.cause and decision.update == 1:
        return f"Next: measure several prompts at each step: {_together(config, path)}"
    if needed is None or needed > FAR * max(n, 1):
        return f"To show a difference of {PER_CENT} takes many times more prompts than {n}."
    if needed <= n and not decision.cause:
        return f"{n} prompts suffice to show a difference of {PER_CENT}; a smaller one takes more."
    count = max(needed, MIN_CLUSTERS)
    unit = 10 ** max(len(str(count)) - 2, 0)
    count = math.ceil(count / unit) * unit  # up to two significant digits
    shows = "tell the true gradient from noise" if decision.cause == "noise" else f"show a difference of {PER_CENT}"
    if decision.cause == "few prompts":
        shows = "give the first intervals"
    options = measure_options(count, config)
    if section(config, "source").get("made_by") in OF_TRL:
        plan = section(section(config, "measure"), "gradients")
        every, prompts = (plan.get("every"), plan.get("prompts")) if plan.get("every") else (EVERY, WATCHED_PROMPTS)
        of_batch = min(one for one in (prompts, section(config, "sample").get("prompts"), count) if one)
        batches = every * math.ceil(max(count - n, 1) / of_batch)
        how = ", measured as so far" if plan.get("every") else f" with {WATCHED}"
        command = f"train {batches:,} more batches{how} (docs/trl.md)."
    elif isinstance(config.get("source"), Mapping):
        command = f"record more, then {_audit(config)}"
    else:  # of a run without a configuration nothing can be repeated
        command = _again("more", options, path) if config else f"otb train {options}"
    return f"About {count:,} prompts would {shows}: {command}"


def _together(config: Mapping[str, Any], path: str) -> str:
    """Return what measures several prompts at a step; more steps of one prompt show nothing, however many they are."""
    if section(config, "source").get("made_by") in OF_TRL:
        return f"train with more prompts in a batch (TRL's gradient_accumulation_steps) and {WATCHED} (docs/trl.md)."
    if isinstance(config.get("source"), Mapping):
        return f"record several of a step, then {_audit(config)}"
    sampled = section(config, "sample").get("prompts")
    more = "" if isinstance(sampled, int) and sampled > 1 else f" --sample.prompts {WATCHED_PROMPTS}"
    options = f"--measure.gradients.prompts 0{more}"
    return _again("more", options, path) if config else f"otb train {options}"


def _audit(config: Mapping[str, Any]) -> str:
    model, files = (quote(str(config.get(name) or other)) for name, other in (("model", "DIR"), ("rollouts", "FILE")))
    return f"otb audit --model {model} --rollouts {files} --go"


def measure_options(needed: int, config: Mapping[str, Any]) -> str:
    """Return what to add to a run's own command so that it measures this many prompts, at its own steps if it can."""
    prompts, steps = section(config, "sample").get("prompts"), section(config, "optimize").get("steps")
    options = "--measure.gradients.prompts 0"
    if not (isinstance(prompts, int) and isinstance(steps, int) and prompts > 0 and steps > 0):
        return f"{options} --measure.gradients.every 5"
    measured = math.ceil(needed / prompts)
    if measured <= steps:
        return f"{options} --measure.gradients.every {min(steps // measured, SELDOM)}"
    # More steps, not larger ones: efficiency is that of an update of as many prompts.
    return f"{options} --measure.gradients.every 1 --optimize.steps {measured}"


def size_line(planner: Planner, trained: Sequence[Label]) -> str:
    """Return the sentence on group sizes, from measured gradients, else from success rates; empty without either.

    The estimator that trained is judged; where noise leaves it open, `rloo` beside it. What counts is the cost of the
    same rollouts in groups of another size; every claim takes an interval that holds with all others.
    """
    size, judged = planner.recorded_size, trained[0] if trained else REFERENCE
    measured: dict[Label, set[int]] = {}
    for label in dict.fromkeys((judged, REFERENCE)):
        cells = [one for one in planner.cells if (one.estimator, one.energy_source) == label]
        measured[label] = {one.size for one in cells} - {size}
        costs = {one.size: one.cost for one in cells if one.size != size and one.cost and is_informative(one.cost)}
        less = {n: cost for n, cost in costs.items() if (cost.high or 1) < 1}
        more = {n: cost for n, cost in costs.items() if (cost.low or 0) > 1}
        if not less and (not more or len(more) < len(cells) - 1):
            continue
        n, cost = min((less or more).items(), key=lambda of: of[1].estimate)
        noise = f"with {shown_name(label)} the same rollouts give {interval_words(cost)} times the noise"
        if label != judged:
            return f"Group size, now {size}: no difference shown for {shown_name(judged)}; {noise} in groups of {n}."
        keep = f"Keep groups of {size}: in groups of {n} {noise}."
        return f"Try groups of {n}, not {size}: {noise}." if less else keep
    if measured[judged]:
        listed = ", ".join(map(str, sorted(measured[judged])))
        return f"Keep groups of {size}: no difference shown for {shown_name(judged)} in groups of {listed}."
    if not planner.dead:
        return ""
    dead, share = planner.dead[-1], planner.dead[-1].share
    if planner.dead[0].share.estimate == 1:
        return planner.note
    if planner.filtered is not None:
        return planner.filtered.line
    if share.low is not None and share.high is not None and share.high - share.low > UNSAID:
        return ""
    ends = "" if share.low is None else f", {share.low:.0%}–{share.high:.0%}"
    # Groups of the largest size have no larger ones that they are cut from, so the share is a count.
    count = f"{round(share.estimate * dead.n_groups):,} of {plural(dead.n_groups, 'group')}"
    return f"In groups of {dead.size}, {count} ({share.estimate:.0%}{ends}) teach nothing: their rewards are equal."


def planner_words(planner: Planner) -> str:
    """Return what the picture of group sizes shows, in one line."""
    words = f"How efficient the same {planner.n_rollouts} rollouts would be in groups of other sizes."
    if all(cell.efficiency is None for cell in planner.cells):
        words = (
            f"What the same {planner.n_rollouts} rollouts would cost in groups of other sizes, beside what they cost "
            f"in groups of {planner.recorded_size}: below 1 is better. Bars hold together with 95 %. No efficiency by "
            "itself is known."
        )
    return f"{words} Star: shown to be a curve's best."


def forest_words(info: ComparisonInfo) -> str:
    """Return what points, intervals and their order in the forest are, which ratios have no panel, what has no mark."""
    of = f"{plural(info.n_prompts, 'prompt')} of {plural(info.n_steps, 'measured step')}"
    start = f"How noisy each estimator is beside {info.against}, on the same rollouts: {of}."
    if info.n_prompts < MIN_CLUSTERS:
        read = f"Below {MIN_CLUSTERS} prompts these are points without intervals."
    elif not info.sampled:
        read = "Nothing is judged, since another sampler drew the tokens. Bars: 95 % of one look."
    elif not info.judged:
        read = f"What is judged has no interval here, so no estimator can be told from {info.against}."
    elif any(row.told for row in info.rows):
        read = f"95 % intervals over prompts: thick, one look; thin, {info.together}."
        read += " Proved step lengths first." * any(row.c_known for row in info.rows if row.decides)
    else:
        read = (
            f"95 % intervals over prompts: thick, one look; thin, {info.together}. No interval of {info.together} "
            f"leaves out 1: no estimator can be told from {info.against}, and their order says nothing."
        )
    hidden = " and ".join(title.lower() for k, (_, title, _) in enumerate(RATIOS) if k not in info.shown)
    why = [UNDEFINED.format(hidden)] if hidden and info.sampled and len(info.rows) > 1 else []
    bare = ", ".join(row.label for row in info.rows if row not in info.marked)
    why += [f"Noise hides every ratio of {bare}, so the figure leaves them out."] if bare else []
    return " ".join([start, read, *why])


FORMULAS = (
    (
        "Efficiency",
        "⟨m, ∇J⟩² / (‖∇J‖² · (‖m‖² + variance)): share of an update of P prompts along ∇J, the true gradient.",
    ),
    (
        "Variance at equal progress",
        "SF = batch variance ÷ projection²; the variance itself where c is 1.",
    ),
    (
        "Batch variance",
        "Σ_p ‖ḡ_p − ḡ‖² / (P(P − 1)) over the P measured prompts, ḡ_p the mean gradient of prompt p's group.",
    ),
    (
        "Step length c",
        "⟨m, ∇J⟩ / ‖∇J‖², m the estimator's mean gradient, ∇J from unbiased ones on other prompts; 1 where proved.",
    ),
    (
        "Noise scale",
        "V / ‖m‖² in prompts, V the variance of one prompt's group gradient: at this many prompts the noise of an "
        "update is as large as its signal. An unbiased estimator with P prompts has efficiency P / (P + noise scale). "
        "It is not shown by itself where fewer prompts were measured than a third of the noise scale.",
    ),
)
"""What tables compare, by title, as formulas in a sentence."""
SHORTER = "A shorter step has less variance anyway: compare by efficiency or by variance at equal progress."

MATTER = 8
"""Rows that are shown unless another number is asked for."""

COMMON: tuple[Label, ...] = (
    ("none", "none"),
    ("group_mean", "none"),
    ("grpo", "none"),
    ("otb", "proxy"),
    ("otb_loo", "proxy"),
    ("sequence_optimal_loo", "proxy"),
    ("value", "none"),
    ("batch_mean", "none"),
)
"""Estimators that fill the table after the reference, those that trained, and the best."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps of one task, group size and scope."""

    name: str  # What they have in common
    grams: tuple[Gram, ...]
    known: Proved  # What is proved of the estimators; nothing where another sampler drew the tokens
    trained: tuple[Label, ...]  # The estimators that trained, as far as they were measured
    config: Mapping[str, Any]  # Of one of the runs, for the commands that are printed
    path: str  # That run's directory
    alarm: str = ""  # What the sampling check says where another sampler drew the tokens
    reservations: tuple[str, ...] = ()  # Whose estimator was not measured; why nothing is proved
    steps: tuple[int, ...] = ()  # Which they are, where they are of one run
    sized: Callable[[], str] = str  # What is said of the group size, found when it is first needed; `str` says nothing
    _decided: dict[Label, Decision] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def decision(self) -> Decision:
        """Which baseline for the next run, against the one that trained; `rloo` where several did, or none measured."""
        return self.decided(self.trained[0] if len(self.trained) == 1 else REFERENCE)

    def decided(self, against: Label) -> Decision:
        """Return the comparisons of all estimators with one of them."""
        if against not in self._decided:
            self._decided[against] = decide(self.grams, against, self.known, self.trained, sampled=not self.alarm)
        return self._decided[against]

    @cached_property
    def against_rloo(self) -> Decision | None:
        """The same against `rloo`; None where that trained, up to the length of its steps."""
        rloo = self.decision.alike.get(REFERENCE)
        same = rloo is None or self.decision.against in (REFERENCE, rloo.of)
        return None if same else self.decided(REFERENCE)

    @property
    def over_rloo(self) -> Decision:
        """All estimators over `rloo`; where that was not measured, over what trained."""
        return self.against_rloo or self.decision

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """What all this says, in the sentences of every door; an alarm first."""
        if self.alarm:
            return (self.alarm, ANOTHER_SAMPLER)
        verdict = decision_lines(self.decision, self.against_rloo, self.trained, self.config, self.path)
        return (*verdict, *self.reservations, *filter(None, [self.sized()]))

    def comparison(
        self, against: str | Label | None = None, source: str = "both", estimators: Iterable[str] | None = None
    ) -> ComparisonInfo:
        """Return every estimator over one of them, by default as `over_rloo`, for all tables and the forest.

        Raises:
            InputError: The estimator was not measured.
        """
        base = against or self.over_rloo.against
        decided = (self.decided(label) for gram in self.grams for label in gram.labels if base in (label, label[0]))
        return comparison_info(self.grams, base, source, estimators, self.known, next(decided, None))

    def to_dataframe(self, against: str | Label | None = None) -> pd.DataFrame:
        """Return one row per estimator: each ratio with the ends of its intervals, what is told, its own values.

        `together` is the interval that holds with all others, of the ratio in `decides`; null where noise hides one.

        Raises:
            InputError: The estimator was not measured.
        """
        return comparison_table(self.comparison(against))

    def noise_scale(self, label: Label = REFERENCE) -> Interval | None:
        """Return at how many prompts the noise of an estimator equals its signal, V/‖m‖², as far as that is told."""
        rows = pooled_statistics(self.grams, known=self.known, only=(label,))
        return rows[0].shown("noise_scale") if rows else None

    def repeats(self, label: Label) -> bool:
        """Tell whether an estimator made the same updates as another one that stands for it."""
        one = self.over_rloo.alike[label]
        return one.of != label and one.identical

    @property
    def matter(self) -> list[Label]:
        """The eight estimators to show: rloo, what trained, the best, those told apart, then the usual ones."""
        alike, decisions = self.over_rloo.alike, (self.decision, self.over_rloo)
        best = [one.best.label for one in decisions if one.best is not None]
        told = [one.label for of in decisions for one in (*of.better, *of.worse)]
        named = (alike[one].of if one in alike and self.repeats(one) else one for one in
                 (REFERENCE, *self.trained, *best, *told, *COMMON, *alike))  # fmt: skip
        return [label for label in dict.fromkeys(named) if label in alike][:MATTER]

    @property
    def notes(self) -> list[str]:
        """What stands below a table over `rloo`: who is told from it, who is the same update, the noise scales."""
        decision, base = self.over_rloo, shown_name(self.over_rloo.against)
        told = {"better": decision.better, "worse": decision.worse}
        lists = {words: ", ".join(shown_name(one.label) for one in of) for words, of in told.items() if of}
        claims = "; ".join(f"{words} than {base}: {which}" for words, which in lists.items())
        pairs = [(shown_name(label), shown_name(one.of), one) for label, one in decision.alike.items()]
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
        same = [f"{name} = {other}" for name, other, one in pairs if one.identical]
        times = [f"{name} = {one.factor:.4g} × {other}" for name, other, one in pairs if not one.identical]
        steps, counts = len(self.grams), Counter(label for gram in self.grams for label in gram.labels)
        fewer = [f"{'/'.join(label)} ({n} of {steps} steps)" for label, n in counts.items() if n < steps]
        lines = {
            f"* all {decision.looked_at} together leaves out 1; {claims}.": claims,
            f"Identical on these rollouts, shown once: {', '.join(same)}.": same,
            f"The same update with another step length: {', '.join(times)}.": times,
            f"Not measured at every step, so only ratios compare: {', '.join(fewer)}.": fewer,
            self.noise_scale_line: True,
        }
        return [line for line, said in lines.items() if line and said]

    @property
    def noise_scale_line(self) -> str:
        """The noise scales of `rloo` and of what trained, in one line; empty where no gradient is known to be one."""
        if self.alarm or self.over_rloo.cause == "equal rewards":
            return ""
        by_scale: dict[str, list[str]] = {}
        for label in dict.fromkeys((REFERENCE, *self.trained)):
            if any(label in gram.labels for gram in self.grams):
                by_scale.setdefault(noise_scale_cell(self.noise_scale(label)), []).append(shown_name(label))
        listed = ", ".join(f"{' and '.join(who)} {text}" for text, who in by_scale.items())
        return f"Noise scale, the number of prompts at which noise equals signal: {listed}."
