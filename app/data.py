"""Cached loads of one run: the pages' only door to its tables and verdicts.

Every cache is bounded. A `Run` is the key; its stamp changes when the run grows, so that it is read again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import streamlit as st
from listing import Run

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.holders import Attributed, NotAttributed
from otb_analysis.answers.pairs import Pair, estimator_pair, pair_of
from otb_analysis.answers.triage import Triage, triage_row
from otb_analysis.diagnostics import ChangePoint, Finding
from otb_analysis.figures import gradient_table
from otb_analysis.figures.comparison import ComparisonInfo
from otb_analysis.figures.fidelity import SOURCES, FidelityInfo, exact_norms, fidelity_columns, fidelity_info
from otb_analysis.figures.gradient_table import evenly, statistics_table
from otb_analysis.figures.pairing import Pairing
from otb_analysis.statistics import Interval, gain_lost
from otb_analysis.store import (
    ASKED_MEMORY,
    RolloutFilter,
    RunStore,
    facts_of_rollouts,
    find_rollouts,
    reward_histogram,
)
from otb_analysis.store import measured as measured_store
from otb_analysis.store.measured import cheap_energies, exact_groups
from otb_analysis.types import Label


@st.cache_resource(max_entries=16, show_spinner=False)
def _store(path: str) -> RunStore:
    return RunStore(path, memory_limit=ASKED_MEMORY)


def store(run: Run) -> RunStore:
    """Return the reader of a run; one reader follows a run that grows."""
    return _store(run.path)


# As a resource: each answer is made once, and `cache_data` would copy every step's products with every question.
@st.cache_resource(max_entries=64, show_spinner=False)
def answers(run: Run) -> RunAnswers:
    """Return what a run says, each answer made when it is first asked."""
    return RunAnswers(store(run))


def config(run: Run) -> Mapping[str, Any]:
    """Return a run's configuration, nested."""
    return answers(run).config


def steps(chosen: Sequence[Run]) -> dict[str, pd.DataFrame]:
    """Return the steps table of each run."""
    return {run.name: answers(run).steps for run in chosen}


def triaged(row: Any, run: Run | None) -> Triage:
    """Return one run of the list; `run` is None for one that cannot be opened."""
    if run is None:
        return triage_row(row, "", None)
    return triage_row(row, run.estimator, lambda: (answers(run).steps, answers(run).findings))


def measured(run: Run) -> Run:
    """Return a run whose stamp changes only when another step is measured, so that less is computed again."""
    return replace(run, stamp=store(run).written("gradients", "grams", "subgroups"))


def measured_labels(run: Run) -> list[Label]:
    """Return (estimator, energy source) of all that was measured, those of Gram matrices first."""
    of_grams = [label for gram in answers(run).grams.values() for label in gram.labels]
    return list(dict.fromkeys([*of_grams, *store(run).stored_labels()]))


@st.cache_data(max_entries=16, show_spinner="Comparing the runs …")
def compared(runs: tuple[Run, ...], pairing: Pairing) -> Pair:
    """Return how two sides of some runs compare: held-out reward, curves over steps, and gradient noise."""
    return pair_of({run.name: answers(run) for run in runs if run.name in pairing.runs}, pairing)


@st.cache_data(max_entries=16, show_spinner="Comparing the estimators …")
def comparison(run: Run, step: int | None, against: str, source: str, estimators: tuple[str, ...]) -> ComparisonInfo:
    """Return how estimators compare with one at a measured step, or over all of them."""
    whole = answers(run).measured
    assert whole is not None
    chosen = whole if step is None else replace(whole, grams=(answers(run).grams[step],))
    return chosen.comparison(against, source, estimators)


@st.cache_data(max_entries=16, show_spinner="Comparing the estimators …")
def compared_estimators(run: Run, a: str, b: str) -> Pair | None:
    """Return how two estimators of a run compare on the same rollouts."""
    measured = answers(run).measured
    return None if measured is None else estimator_pair(measured, run.estimator, a, b)


@st.cache_data(max_entries=64, show_spinner="Computing intervals …")
def _statistics(run: Run, window: int, labels: frozenset[Label]) -> pd.DataFrame:
    grams, known = answers(run).grams, answers(run).known
    return statistics_table(grams, window, known, at=evenly(list(grams)), only=labels)


def statistics(run: Run, window: int, labels: frozenset[Label]) -> pd.DataFrame:
    """Return measures of these estimators over steps, `window` of them pooled; stored ones without Gram matrices."""
    if answers(run).grams:
        return _statistics(run, window, labels)
    table: Any = store(run).gradients_df()
    return table[[label in labels for label in zip(table["estimator"], table["energy_source"], strict=True)]]


@st.cache_data(max_entries=64, show_spinner=False)
def default_window(run: Run) -> int:
    """Return how many measured steps a point pools to begin with."""
    return gradient_table.default_window(answers(run).grams, answers(run).known)


@dataclass(frozen=True)
class MeasuredTokens:
    """Agreement of proxy and exact energies, and how many of the run's measured tokens it rests on."""

    info: FidelityInfo
    loaded: int
    total: int


@st.cache_data(max_entries=8, show_spinner="Comparing proxy and exact norms …")
def fidelity(run: Run, kind: str, source: str = "proxy") -> MeasuredTokens:
    """Return the agreement of proxy and exact energies over a run."""
    table, total = exact_groups(store(run), fidelity_columns(source))
    return MeasuredTokens(fidelity_info(table, kind, source), int(exact_norms(table).count()), total)


@st.cache_data(max_entries=64, show_spinner=False)
def cheap_sources(run: Run) -> list[str]:
    """Return the energies that a run has beside exact norms: the proxy, and its calibration where it was fitted."""
    return cheap_energies(store(run), SOURCES)


@st.cache_data(max_entries=64, show_spinner=False)
def lost_by_proxy(run: Run, source: str = "proxy") -> Interval | None:
    """Return the share of otb's efficiency gain that proxy energies lose, over all measured steps."""
    return gain_lost(list(answers(run).grams.values()), ("otb", source), ("otb", "exact"), known=answers(run).known)


@st.cache_data(max_entries=64, show_spinner=False)
def token_steps(run: Run) -> list[int]:
    """Return the steps whose tokens and rollouts are stored."""
    return measured_store.token_steps(store(run))


@st.cache_data(max_entries=64, show_spinner=False)
def exact_steps(run: Run) -> list[int]:
    """Return the steps at which some groups were measured exactly."""
    return measured_store.exact_steps(store(run))


@st.cache_data(max_entries=32, show_spinner=False)
def rollouts(run: Run, step: int) -> pd.DataFrame:
    """Return the rollouts of one step."""
    return store(run).rollouts_df([step])


@st.cache_data(max_entries=64, show_spinner=False)
def rollout_facts(run: Run) -> dict[str, Any]:
    """Return the ends of what rollouts can be asked for."""
    return facts_of_rollouts(store(run))


@st.cache_data(max_entries=16, show_spinner="Searching …")
def found_rollouts(run: Run, asked: RolloutFilter, most: int) -> tuple[pd.DataFrame, int]:
    """Return the rollouts that are asked for, and how many there are."""
    return find_rollouts(store(run), asked, most)


@st.cache_data(max_entries=16, show_spinner=False)
def rewards(run: Run, asked: RolloutFilter) -> pd.DataFrame:
    """Return counts of the rollouts that are asked for by step and reward."""
    return reward_histogram(store(run), asked)


@st.cache_data(max_entries=64, show_spinner=False)
def occurrences(run: Run, prompt_id: str | None, prompt: str) -> list[tuple[int, int]]:
    """Return the steps and groups that have a prompt, by its name, or by its text where it has none."""
    column, value = ("prompt", prompt) if prompt_id is None else ("prompt_id", prompt_id)
    query = f'SELECT DISTINCT step, "group" FROM rollouts WHERE {column} = ? ORDER BY ALL'
    return [(int(s), int(g)) for s, g in store(run).sql(query, [value]).itertuples(index=False)]


@st.cache_data(max_entries=32, show_spinner=False)
def tokens(run: Run, step: int, group: int) -> pd.DataFrame:
    """Return all tokens of one prompt."""
    return store(run).tokens_df([step], where='"group" = ?', params=[group])


def findings(chosen: Sequence[Run]) -> dict[str, list[Finding]]:
    """Return what every detector says about each run."""
    return {run.name: answers(run).findings for run in chosen}


def changes(chosen: Sequence[Run]) -> dict[str, list[ChangePoint]]:
    """Return the change points of each run."""
    return {run.name: answers(run).changes for run in chosen}


@st.cache_resource(max_entries=8, show_spinner=False)
def attribution(run: Run, step: int) -> Attributed | NotAttributed:
    """Return who holds a step's gradient, or why that is not known."""
    return answers(run).attribution(step)
