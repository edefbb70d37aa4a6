"""Cached loads of one run: the pages' only door to its tables. Every cache is bounded and forgets a run that grew."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st
from listing import Run

from otb_analysis.diagnostics import trained_label
from otb_analysis.errors import InputError
from otb_analysis.estimators import proved
from otb_analysis.figures import FidelityInfo, conclusion_sentences, fidelity_info, headline_info, statistics_table
from otb_analysis.figures.fidelity import SOURCES, exact_norms
from otb_analysis.figures.runs import Headline
from otb_analysis.statistics import Interval, conclude, gain_lost
from otb_analysis.store import EXACT_ROWS, RunStore
from otb_analysis.types import Gram, Proved

MAX_WINDOW = 10
"""Most measured steps that one point pools."""

MEMORY = "512MB"
MAX_TOKENS = 1_000_000
"""Most measured tokens one page loads; beyond it a seeded choice of whole prompts is taken, and the page says so."""


@st.cache_resource(max_entries=16, show_spinner=False)
def _store(path: str) -> RunStore:
    return RunStore(path, memory_limit=MEMORY)


def store(run: Run) -> RunStore:
    """Return the reader of a run."""
    return _store(run.path)


@st.cache_data(max_entries=64, show_spinner=False)
def _config(path: str, stamp: str) -> dict[str, object]:
    config = _store(path).info.get("config")
    return config if isinstance(config, dict) else {}


def config(run: Run) -> dict[str, object]:
    """Return a run's configuration, nested."""
    return _config(run.path, run.stamp)


@st.cache_data(max_entries=64, show_spinner=False)
def _steps(path: str, stamp: str) -> pd.DataFrame:
    return _store(path).steps_df()


def steps(chosen: Sequence[Run]) -> dict[str, pd.DataFrame]:
    """Return the steps table of each run."""
    return {run.name: _steps(run.path, run.stamp) for run in chosen}


def headline(run: Run) -> Headline:
    """Return a run's headline numbers."""
    return headline_info(run.name, run.estimator, _steps(run.path, run.stamp))


@st.cache_data(max_entries=8, show_spinner="Reading the Gram matrices …")
def _grams(path: str, stamp: str) -> dict[int, Gram]:
    return _store(path).grams()


def grams(run: Run) -> dict[int, Gram]:
    """Return the Gram matrix of every measured step."""
    return _grams(run.path, run.stamp)


@st.cache_data(max_entries=64, show_spinner="Computing intervals …")
def _statistics(path: str, stamp: str, window: int) -> pd.DataFrame:
    grams = _grams(path, stamp)
    return statistics_table(grams, window, _known(path, stamp))


def _known(path: str, stamp: str) -> Proved:
    labels = {label for gram in _grams(path, stamp).values() for label in gram.labels}
    return proved(labels, _config(path, stamp))


def known(run: Run) -> Proved:
    """Return what is proved of a run's estimators."""
    return _known(run.path, run.stamp)


@st.cache_data(max_entries=64, show_spinner="Comparing the estimators …")
def _conclusion(path: str, stamp: str) -> tuple[str, ...]:
    config, grams = _config(path, stamp), list(_grams(path, stamp).values())
    if not grams:
        return ()
    try:
        trained = [trained_label(config, [label for gram in grams for label in gram.labels])]
    except InputError:  # a run of somebody else's tool need not name one of ours
        trained = []
    return conclusion_sentences(conclude(grams, _known(path, stamp), first=trained), trained, config)


def conclusion(run: Run) -> tuple[str, ...]:
    """Return what a run's comparisons with rloo say, in three sentences; none where no step was measured."""
    return _conclusion(run.path, run.stamp)


def statistics(run: Run, window: int) -> pd.DataFrame:
    """Return the measures of every estimator over steps; without Gram matrices the stored points."""
    table = _statistics(run.path, run.stamp, window)
    return table if len(table) else _store(run.path).gradients_df()


def default_window(run: Run) -> int:
    """Return the fewest measured steps to pool for which the last point has all its measures; at most `MAX_WINDOW`."""
    for window in (1, 2, 3, 5):
        table: Any = statistics(run, window)
        if table.empty or table.loc[table["step"] == table["step"].max(), "projection"].notna().any():
            return window
    return MAX_WINDOW


@dataclass(frozen=True)
class MeasuredTokens:
    """Agreement of proxy and exact energies, and how many of the run's measured tokens it rests on."""

    info: FidelityInfo
    loaded: int
    total: int


@st.cache_data(max_entries=8, show_spinner="Comparing proxy and exact norms …")
def _fidelity(path: str, stamp: str, kind: str, source: str) -> MeasuredTokens:
    store = _store(path)
    total = int(store.sql(f"SELECT count(*) AS n FROM tokens WHERE {EXACT_ROWS}")["n"].iloc[0])
    share = min(1000, 1000 * MAX_TOKENS // max(total, 1))
    columns = [
        "step",
        "group",
        "rollout",
        "t",
        "mask",
        SOURCES[source],
        "grad_norm_sq",
        "measured_by",
        "inclusion_prob",
    ]
    groups = f'SELECT DISTINCT step, "group" FROM tokens WHERE {EXACT_ROWS} AND hash(step, "group") % 1000 < {share}'
    names = ", ".join(f'"{c}"' for c in columns)
    table: Any = store.sql(f'SELECT {names} FROM tokens WHERE mask AND (step, "group") IN ({groups})')
    return MeasuredTokens(fidelity_info(table, kind, source), int(exact_norms(table).count()), total)


def fidelity(run: Run, kind: str, source: str = "proxy") -> MeasuredTokens:
    """Return the agreement of proxy and exact energies over a run."""
    return _fidelity(run.path, run.stamp, kind, source)


@st.cache_data(max_entries=64, show_spinner=False)
def _sources(path: str, stamp: str) -> list[str]:
    counts = ", ".join(f'count("{column}") AS "{name}"' for name, column in SOURCES.items())
    found = _store(path).sql(f"SELECT {counts} FROM tokens WHERE {EXACT_ROWS}")
    return [name for name in SOURCES if found[name].iloc[0]]


def cheap_sources(run: Run) -> list[str]:
    """Return the energies that a run has beside exact norms: the proxy, and its calibration where it was fitted."""
    return _sources(run.path, run.stamp)


@st.cache_data(max_entries=64, show_spinner=False)
def _gain_lost(path: str, stamp: str, estimator: str, source: str) -> Interval | None:
    return gain_lost(list(_grams(path, stamp).values()), (estimator, source), (estimator, "exact"))


def lost_by_proxy(run: Run, source: str = "proxy", estimator: str = "otb") -> Interval | None:
    """Return the share of an estimator's efficiency gain that proxy energies lose, over all measured steps."""
    return _gain_lost(run.path, run.stamp, estimator, source)


@st.cache_data(max_entries=64, show_spinner=False)
def _token_steps(path: str, stamp: str) -> list[int]:
    query = "SELECT DISTINCT step FROM tokens WHERE step IN (SELECT step FROM rollouts) ORDER BY step"
    return [int(s) for s in _store(path).sql(query)["step"]]


def token_steps(run: Run) -> list[int]:
    """Return the steps whose tokens and rollouts are stored."""
    return _token_steps(run.path, run.stamp)


@st.cache_data(max_entries=64, show_spinner=False)
def _exact_steps(path: str, stamp: str) -> list[int]:
    query = "SELECT step FROM steps WHERE n_measured_prompts > 0 ORDER BY step"
    return [int(s) for s in _store(path).sql(query)["step"]]


def exact_steps(run: Run) -> list[int]:
    """Return the steps at which some groups were measured exactly."""
    return _exact_steps(run.path, run.stamp)


@st.cache_data(max_entries=32, show_spinner=False)
def _rollouts(path: str, stamp: str, step: int) -> pd.DataFrame:
    return _store(path).rollouts_df([step])


def rollouts(run: Run, step: int) -> pd.DataFrame:
    """Return the rollouts of one step."""
    return _rollouts(run.path, run.stamp, step)


@st.cache_data(max_entries=32, show_spinner=False)
def _tokens(path: str, stamp: str, step: int, group: int) -> pd.DataFrame:
    return _store(path).tokens_df([step], where='"group" = ?', params=[group])


def tokens(run: Run, step: int, group: int) -> pd.DataFrame:
    """Return all tokens of one prompt."""
    return _tokens(run.path, run.stamp, step, group)
