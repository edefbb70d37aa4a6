"""Cached verdicts on a run: alarms, change points, who holds a step's gradient, advice.

A leading underscore keeps the run itself out of the cache's key, which its path and stamp make.
"""

from collections.abc import Sequence

import data
import pandas as pd
import streamlit as st
from listing import Run

from otb_analysis.diagnostics import (
    ChangePoint,
    Finding,
    StepAttribution,
    advise_run,
    change_points,
    diagnose,
    trained_label,
    update_rollouts,
)
from otb_analysis.errors import InputError
from otb_analysis.store import attributed_steps, step_attribution, step_series


@st.cache_data(max_entries=64, show_spinner=False)
def _diagnosis(_run: Run, path: str, stamp: str) -> tuple[list[Finding], list[ChangePoint]]:
    series = step_series(data.steps([_run])[_run.name])
    return diagnose(series), change_points(series)


def findings(chosen: Sequence[Run]) -> dict[str, list[Finding]]:
    """Return what every detector says about each run."""
    return {run.name: _diagnosis(run, run.path, run.stamp)[0] for run in chosen}


def changes(chosen: Sequence[Run]) -> dict[str, list[ChangePoint]]:
    """Return the change points of each run."""
    return {run.name: _diagnosis(run, run.path, run.stamp)[1] for run in chosen}


@st.cache_data(max_entries=64, show_spinner=False)
def _attributed(_run: Run, path: str, stamp: str) -> list[int]:
    return attributed_steps(data.store(_run))


def attributed(run: Run) -> list[int]:
    """Return the steps whose tokens carry their share of the gradient."""
    return _attributed(run, run.path, run.stamp)


@st.cache_data(max_entries=8, show_spinner=False)
def _attribution(_run: Run, path: str, stamp: str, step: int) -> tuple[StepAttribution, pd.DataFrame]:
    store = data.store(_run)
    return step_attribution(store, step), store.tokens_df([step], ["rollout", "t", "token"])


def attribution(run: Run, step: int) -> tuple[StepAttribution, pd.DataFrame]:
    """Return who holds a step's gradient, and the text of its tokens."""
    return _attribution(run, run.path, run.stamp, step)


@st.cache_data(max_entries=64, show_spinner="Comparing estimators …")
def _advice(_run: Run, path: str, stamp: str) -> str | None:
    grams = data.grams(_run)
    if not grams:
        return None
    try:
        config = data.config(_run)
        smaller = data.store(_run).subgroup_grams()
        present = trained_label(config, [label for gram in grams.values() for label in gram.labels])
        found = advise_run(grams, smaller, present, n_rollouts=update_rollouts(config))
    except InputError as error:
        return f"Not known: {error}"
    return f"{found.reason} {found.sizes_line}"


def advice(run: Run) -> str | None:
    """Return which estimator and group size the run's own rollouts advise, None where no step compared estimators."""
    return _advice(run, run.path, run.stamp)
