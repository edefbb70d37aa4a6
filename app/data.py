"""Cached loads of one run: the pages' only door to its tables and verdicts.

Every cache is bounded. A `Run` is the key; its stamp changes when the run grows, so that it is read again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import streamlit as st
from listing import Run

from otb_analysis.diagnostics import ChangePoint, Finding, StepAttribution, change_points, diagnose
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.estimators import proved
from otb_analysis.figures import measured_run
from otb_analysis.figures.comparison import ComparisonInfo, comparison_info
from otb_analysis.figures.conclusion import advice_line
from otb_analysis.figures.fidelity import SOURCES, FidelityInfo, exact_norms, fidelity_columns, fidelity_info
from otb_analysis.figures.gradient_table import evenly, statistics_table
from otb_analysis.figures.measured_run import PLANNED, conclusion_of, planner_of
from otb_analysis.figures.pair_curves import PairPanel, compare_curves
from otb_analysis.figures.pair_gradients import NoiseInfo, RunGrams, compare_estimators, compare_noise, joint_proofs
from otb_analysis.figures.pairing import Pairing
from otb_analysis.figures.triage import Triage, triage_row
from otb_analysis.statistics import REFERENCE, Interval, gain_lost, gradient_noise_scale
from otb_analysis.store import (
    ASKED_MEMORY,
    RolloutFilter,
    RunStore,
    attributed_steps,
    facts_of_rollouts,
    find_rollouts,
    reward_histogram,
    step_attribution,
    step_series,
)
from otb_analysis.store import measured as measured_store
from otb_analysis.store.measured import cheap_energies, exact_groups, measured_grams, stored_config
from otb_analysis.store.reader import scope_of
from otb_analysis.types import Gram, Label, Proved


@st.cache_resource(max_entries=16, show_spinner=False)
def _store(path: str) -> RunStore:
    return RunStore(path, memory_limit=ASKED_MEMORY)


def store(run: Run) -> RunStore:
    """Return the reader of a run; one reader follows a run that grows."""
    return _store(run.path)


@st.cache_data(max_entries=64, show_spinner=False)
def config(run: Run) -> dict[str, object]:
    """Return a run's configuration, nested."""
    return stored_config(store(run))


@st.cache_data(max_entries=64, show_spinner=False)
def _steps(run: Run) -> pd.DataFrame:
    return store(run).steps_df()


def steps(chosen: Sequence[Run]) -> dict[str, pd.DataFrame]:
    """Return the steps table of each run."""
    return {run.name: _steps(run) for run in chosen}


def triaged(row: Any, run: Run | None) -> Triage:
    """Return one run of the list; `run` is None for one that cannot be opened."""
    if run is None:
        return triage_row(row, "", None)
    return triage_row(row, run.estimator, lambda: (_steps(run), _diagnosis(run)[0]))


def measured(run: Run) -> Run:
    """Return a run whose stamp changes only when another step is measured, so that less is computed again."""
    return replace(run, stamp=store(run).written("gradients", "grams", "subgroups"))


@st.cache_resource(max_entries=64, show_spinner=False)
def _labels_of_steps(path: str) -> dict[int, dict[Label, None]]:
    """Return the labels that were measured at each step, as far as they were read: a run that grows adds to them."""
    return {}


@st.cache_data(max_entries=64, show_spinner=False)
def _stored_labels(run: Run) -> list[Label]:
    known, steps = _labels_of_steps(run.path), store(run).steps_with("gradients", "estimator")
    if not known.keys() <= set(steps):  # it went back some steps
        known.clear()
    if new := [step for step in steps if step not in known]:
        rows = store(run).gradients_df(new, ["step", "estimator", "energy_source"])
        for step, name, source in rows.itertuples(index=False, name=None):
            known.setdefault(step, {})[str(name), str(source)] = None
    return list({label: None for step in sorted(known) for label in known[step]})


# As a resource: `cache_data` would copy every step's products with every question.
@st.cache_resource(max_entries=8, show_spinner="Reading the Gram matrices …")
def grams(run: Run) -> dict[int, Gram]:
    """Return of every measured step what compares its estimators; steps seen before are not read again."""
    return measured_grams(store(run), _stored_labels(run))


def measured_labels(run: Run) -> list[Label]:
    """Return (estimator, energy source) of all that was measured, those of Gram matrices first."""
    return list(dict.fromkeys([*(one for gram in grams(run).values() for one in gram.labels), *_stored_labels(run)]))


def known(run: Run) -> Proved:
    """Return what is proved of a run's estimators."""
    return proved({label for gram in grams(run).values() for label in gram.labels}, config(run))


@st.cache_data(max_entries=16, show_spinner="Comparing the runs …")
def compared(runs: tuple[Run, ...], pairing: Pairing) -> tuple[tuple[PairPanel, ...], NoiseInfo]:
    """Return how two sides of some runs compare: curves over steps, and gradient noise on shared measured steps."""
    chosen = {run.name: run for run in runs if run.name in pairing.runs}
    parts = {name: RunGrams(config(run), grams(run), scope_of(store(run))) for name, run in chosen.items()}
    known = joint_proofs(list(parts.values()))
    # A run's own matrices were reduced for what is proved in that run alone; mostly that is the same.
    unlike = {
        name: store(chosen[name]).reduced_grams((REFERENCE, known.truth))
        for name, one in parts.items()
        if not all(gram.stands(known.truth) for gram in one.grams.values())
    }
    joint = {name: replace(one, grams=unlike.get(name, one.grams)) for name, one in parts.items()}
    return compare_curves(steps(list(chosen.values())), pairing), compare_noise(pairing, joint, known)


@st.cache_data(max_entries=16, show_spinner="Comparing the estimators …")
def comparison(run: Run, step: int | None, against: str, source: str, estimators: tuple[str, ...]) -> ComparisonInfo:
    """Return how estimators compare with one at a measured step, or over all of them."""
    chosen = list(grams(run).values()) if step is None else [grams(run)[step]]
    return comparison_info(chosen, against, source, estimators, known(run))


@st.cache_data(max_entries=16, show_spinner="Comparing the estimators …")
def compared_estimators(run: Run, a: Label, b: Label) -> tuple[tuple[PairPanel, ...], NoiseInfo]:
    """Return how two estimators of a run compare on the same rollouts."""
    return compare_estimators(grams(run), a, b, known(run))


@st.cache_data(max_entries=64, show_spinner="Comparing the estimators …")
def conclusion(run: Run) -> tuple[str, ...]:
    """Return what a run's comparisons with rloo say, in three sentences; none where no step was measured."""
    return conclusion_of(grams(run), known(run), config(run))


@st.cache_data(max_entries=64, show_spinner="Comparing estimators …")
def advice(run: Run) -> str:
    """Return which estimator and group size the run's own rollouts advise, or why that is not known."""
    return advice_line(grams(run), store(run).subgroup_grams(), config(run))


@st.cache_data(max_entries=64, show_spinner="Planning …")
def planner(run: Run) -> Planner:
    """Return how efficient a run's rollouts would be in groups of other sizes."""
    sizes = store(run).subgroup_grams() if grams(run) else {}
    rollouts = store(run).rollouts_df(columns=list(PLANNED))
    return planner_of(grams(run), sizes, rollouts, len(store(run).complete_steps()), known(run), config(run))


@st.cache_data(max_entries=64, show_spinner=False)
def noise_scale(run: Run) -> Interval | None:
    """Return at how many prompts the noise of `rloo` equals its signal, over all measured steps."""
    measured = list(grams(run).values())
    return gradient_noise_scale(measured, REFERENCE, known(run)) if measured else None


@st.cache_data(max_entries=64, show_spinner="Computing intervals …")
def _statistics(run: Run, window: int, labels: frozenset[Label]) -> pd.DataFrame:
    measured = grams(run)
    return statistics_table(measured, window, known(run), at=evenly(list(measured)), only=labels)


def statistics(run: Run, window: int, labels: frozenset[Label]) -> pd.DataFrame:
    """Return measures of these estimators over steps, `window` of them pooled; stored ones without Gram matrices."""
    if grams(run):
        return _statistics(run, window, labels)
    table: Any = store(run).gradients_df()
    return table[[label in labels for label in zip(table["estimator"], table["energy_source"], strict=True)]]


@st.cache_data(max_entries=64, show_spinner=False)
def default_window(run: Run) -> int:
    """Return how many measured steps a point pools to begin with."""
    return measured_run.default_window(grams(run), known(run))


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
    return gain_lost(list(grams(run).values()), ("otb", source), ("otb", "exact"), known=known(run))


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


@st.cache_data(max_entries=64, show_spinner=False)
def _diagnosis(run: Run) -> tuple[list[Finding], list[ChangePoint]]:
    series = step_series(_steps(run))
    return diagnose(series), change_points(series)


def findings(chosen: Sequence[Run]) -> dict[str, list[Finding]]:
    """Return what every detector says about each run."""
    return {run.name: _diagnosis(run)[0] for run in chosen}


def changes(chosen: Sequence[Run]) -> dict[str, list[ChangePoint]]:
    """Return the change points of each run."""
    return {run.name: _diagnosis(run)[1] for run in chosen}


@st.cache_data(max_entries=64, show_spinner=False)
def attributed(run: Run) -> list[int]:
    """Return the steps whose tokens carry their share of the gradient."""
    return attributed_steps(store(run))


@st.cache_data(max_entries=8, show_spinner=False)
def attribution(run: Run, step: int) -> tuple[StepAttribution, pd.DataFrame]:
    """Return who holds a step's gradient, and the text of its tokens."""
    return step_attribution(store(run), step), store(run).tokens_df([step], ["rollout", "t", "token"])
