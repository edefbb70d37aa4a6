"""Measured steps that can be pooled, of one run or several, and the decision that follows from them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from otb_analysis.answers.sentences import ANOTHER_SAMPLER, decision_lines
from otb_analysis.figures.comparison import ComparisonInfo, comparison_info, comparison_table
from otb_analysis.figures.numbers import noise_scale_cell, shown_name
from otb_analysis.statistics import REFERENCE, Decision, Interval, decide, pooled_statistics
from otb_analysis.types import Gram, Label, Proved

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

    @property
    def against(self) -> Label:
        """What all estimators are compared with: the one that trained; `rloo` where several did, or none measured."""
        return self.trained[0] if len(self.trained) == 1 else REFERENCE

    @property
    def decision(self) -> Decision:
        """Which baseline for the next run, against the one that trained."""
        return self.decided(self.against)

    def decided(self, against: Label) -> Decision:
        """Return the comparisons of all estimators with one of them."""
        if against not in self._decided:
            self._decided[against] = decide(self.grams, against, self.known, self.trained, sampled=not self.alarm)
        return self._decided[against]

    @property
    def beside(self) -> Decision | None:
        """The same against `rloo`; None where that trained, up to the length of its steps."""
        rloo = self.decision.alike.get(REFERENCE)
        same = self.against == REFERENCE or rloo is None or rloo.of == self.against
        return None if same else self.decided(REFERENCE)

    @property
    def over_rloo(self) -> Decision:
        """All estimators over `rloo`; where that was not measured, over what trained."""
        return self.beside or self.decision

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """What all this says, in the sentences of every door; an alarm first."""
        if self.alarm:
            return (self.alarm, ANOTHER_SAMPLER)
        found = decision_lines(self.decision, self.beside, self.trained, self.config, self.path)
        return (*found, *self.reservations, *filter(None, [self.sized()]))

    def comparison(
        self, against: str | Label | None = None, source: str = "both", estimators: Iterable[str] | None = None
    ) -> ComparisonInfo:
        """Return every estimator over one of them, by default as `over_rloo`, for all tables and the forest.

        Raises:
            InputError: The estimator was not measured.
        """
        base = against or self.over_rloo.against
        return comparison_info(self.grams, base, source, estimators, self.known, not self.alarm)

    def to_dataframe(self, against: str | Label | None = None) -> pd.DataFrame:
        """Return one row per estimator: each ratio with the ends of its intervals, what is told, its own values.

        `together` is the interval that holds with all others, of the ratio in `decides`; null where noise hides one.

        Raises:
            InputError: The estimator was not measured.
        """
        return comparison_table(self.comparison(against))

    def noise_scale(self, label: Label = REFERENCE) -> Interval | None:
        """Return at how many prompts the noise of an estimator equals its signal, V/‖m‖², as far as that is told."""
        found = pooled_statistics(self.grams, known=self.known, only=(label,))
        return found[0].shown("noise_scale") if found else None

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
