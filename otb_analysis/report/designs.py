"""Measured steps of several runs, sorted by what makes them comparable, with what is proved and concluded of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from otb_analysis.estimators import proved_in_all, unproved_because
from otb_analysis.figures.conclusion import conclusion_sentences, trained_labels
from otb_analysis.report.runs import by_name, config_of
from otb_analysis.statistics import Conclusion, conclude
from otb_analysis.store import RunStore
from otb_analysis.store.reader import WHOLE, scope_of
from otb_analysis.types import Gram, Label, Proved


@dataclass(frozen=True)
class MeasuredRun:
    """The steps of one run that belong to a design."""

    name: str
    config: Mapping[str, Any]
    grams: tuple[Gram, ...]


@dataclass(frozen=True)
class Design:
    """Steps of one task, group size and scope."""

    name: str
    runs: tuple[MeasuredRun, ...]

    @property
    def grams(self) -> list[Gram]:
        """Every measured step."""
        return [gram for run in self.runs for gram in run.grams]

    @cached_property
    def known(self) -> Proved:
        """What is proved of an estimator in every run that has it."""
        return proved_in_all([({label for g in run.grams for label in g.labels}, run.config) for run in self.runs])

    @property
    def unproved(self) -> str:
        """Why projections of some run are all estimated, in one line; empty where none is."""
        reasons = {run.name: unproved_because(run.config) for run in self.runs}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)

    @property
    def trained(self) -> tuple[Label, ...]:
        """The estimators that the runs train with."""
        return tuple(dict.fromkeys(label for run in self.runs for label in trained_labels(run.config, run.grams)))

    @cached_property
    def conclusion(self) -> Conclusion:
        """What the paired comparisons with rloo allow to be said."""
        return conclude(self.grams, self.known, first=self.trained)

    @property
    def sentences(self) -> tuple[str, str, str]:
        """The same in words."""
        return conclusion_sentences(self.conclusion, self.trained, self.runs[0].config)


def designs(stores: Sequence[RunStore]) -> dict[str, Design]:
    """Return every measured step under what makes steps comparable: task, group size, soft tokens and scope.

    Bias and variance depend on N, and tasks and scopes do not share a gradient, so steps that differ in any of these
    are never averaged. Steps of different policies on one task are: the figures then describe an average policy of
    these runs.
    """
    runs_by_name: dict[str, list[MeasuredRun]] = {}
    for run, store in by_name(stores).items():
        config = config_of(store)
        of_run: dict[str, list[Gram]] = {}
        for gram in store.grams().values():
            of_run.setdefault(_name(store, config, gram), []).append(gram)
        for name, grams in of_run.items():
            runs_by_name.setdefault(name, []).append(MeasuredRun(run, config, tuple(grams)))
    return {name: Design(name, tuple(runs)) for name, runs in runs_by_name.items()}


def _name(store: RunStore, config: Mapping[str, Any], gram: Gram) -> str:
    scope = scope_of(store)
    of_part = "" if scope == WHOLE else f", scope {scope!r}"
    size = round(gram.n_rollouts / max(gram.n_prompts, 1))
    sample = config.get("sample")
    soft = sample.get("soft") if isinstance(sample, Mapping) else 0  # their J is that of other answers
    return f"{config.get('task', 'task not stored')}, groups of {size}{f', {soft} soft tokens' * bool(soft)}{of_part}"
