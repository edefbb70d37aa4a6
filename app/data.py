"""Which runs there are, and cached loads of each: the pages' only door to tables and verdicts.

Every cache is bounded. A `Run` is the key; its stamp changes when the run grows, so that it is read again.
"""

import argparse
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.holders import Attributed, NotAttributed
from otb_analysis.answers.pairs import Pair, estimator_pair, pair_of
from otb_analysis.answers.triage import Triage, triage_row
from otb_analysis.errors import STOPS
from otb_analysis.figures import variance
from otb_analysis.figures.comparison import ComparisonInfo
from otb_analysis.figures.fidelity import SOURCES, FidelityInfo, exact_norms, fidelity_columns, fidelity_info
from otb_analysis.figures.runs import Pairing
from otb_analysis.figures.token_formula import TokenFormula, token_formula
from otb_analysis.figures.variance import evenly, statistics_table
from otb_analysis.statistics import Interval, gain_lost
from otb_analysis.store import (
    ASKED_MEMORY,
    RolloutFilter,
    RunStore,
    StoredPrompt,
    TokenArrays,
    facts_of_rollouts,
    find_rollouts,
    reward_histogram,
    runs_df,
)
from otb_analysis.store import measured as measured_store
from otb_analysis.store.measured import cheap_energies, exact_groups
from otb_analysis.store.runs import can_be_opened, estimator_names
from otb_analysis.types import Label


@dataclass(frozen=True)
class Run:
    """One readable run as pages hand it around.

    Attributes:
        stamp: Changes whenever the run grows or its run.json changes; part of every cache key.
    """

    path: str
    stamp: str
    name: str
    estimator: str
    status: str


def _asked(option: str, variable: str) -> str | None:
    """Return a folder that is named after `--`, else by a variable."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, dest="value")
    return parser.parse_known_args(sys.argv[1:])[0].value or os.environ.get(variable)


def root() -> Path:
    """Return the folder of runs: `--root` after `--`, else the variable OTB_RUNS, else `runs`."""
    return Path(_asked("--root", "OTB_RUNS") or "runs").expanduser().resolve()


def studies_root() -> Path:
    """Return the folder of studies: `--studies` after `--`, else OTB_STUDIES, else `studies` here or beside the app."""
    here, beside = Path("studies"), Path(__file__).parent.parent / "studies"
    named = _asked("--studies", "OTB_STUDIES")
    return Path(named or (here if here.is_dir() else beside)).expanduser().resolve()


def stamps() -> dict[str, str]:
    """Return a text for each entry of the root that changes when a run grows, is replaced or ends.

    It holds the times of what every step changes, and is taken before anything is read of the entry.
    """
    try:
        entries = sorted(entry for entry in root().iterdir() if not entry.name.startswith("."))
    except OSError:
        return {}
    times: dict[str, list[str]] = {}
    for entry in entries:
        for watched in ("run.json", "run.sqlite", "steps"):
            try:
                time = str((entry / watched).stat().st_mtime_ns)
            except OSError:
                time = "0"
            times.setdefault(entry.name, []).append(time)
    return {name: "-".join(one) for name, one in times.items()}


@st.cache_data(max_entries=4, show_spinner=False, ttl=10)  # a process that is killed changes no file
def runs(folder: str, stamps: dict[str, str]) -> pd.DataFrame:
    """Return the table of all runs of a folder, broken ones with their reason."""
    return runs_df(folder)


def states(seen: dict[str, str]) -> tuple[object, ...]:
    """Return what changes when any run of the root grows, is replaced or ends, by a kill too; of these `stamps`."""
    try:
        return seen, *runs(str(root()), seen)["status"]
    except STOPS:  # the page that is drawn again says why
        return (seen,)


def readable(table: pd.DataFrame, stamps: dict[str, str]) -> list[Run]:
    """Return the runs that can be opened and have at least one complete step: running ones first, newest first."""
    columns: Any = table[["run", "status", "created", "n_steps"]]  # of a hundred, in pieces
    usable = columns[can_be_opened(columns)]
    rank = usable["status"].map({"running": 0, "complete": 1}).fillna(2)
    usable = usable.assign(_rank=rank).sort_values(["_rank", "created", "run"], ascending=[True, False, True])
    estimators, folder = estimator_names(table), root()
    rows = [(str(name), str(status)) for name, status in zip(usable["run"], usable["status"], strict=True)]
    return [Run(str(folder / n), stamps.get(n, ""), n, estimators.get(n, ""), status) for n, status in rows]


@st.cache_resource(max_entries=16, show_spinner=False, hash_funcs={Run: attrgetter("path")})
def store(run: Run) -> RunStore:
    """Return the reader of a run; one reader follows a run that grows."""
    return RunStore(run.path, memory_limit=ASKED_MEMORY)


# As a resource: each answer is made once, and `cache_data` would copy every step's products with every question.
@st.cache_resource(max_entries=64, show_spinner=False)
def answers(run: Run) -> RunAnswers:
    """Return what a run says, each answer made when it is first asked."""
    return RunAnswers(store(run))


def triaged(row: Any, run: Run | None) -> Triage:
    """Return one run of the list; `run` is None for one that cannot be opened."""
    if run is None:
        return triage_row(row, "", None)
    return triage_row(row, run.estimator, lambda: (answers(run).steps, answers(run).findings))


def measured(run: Run) -> Run:
    """Return a run whose stamp changes only when another step is measured, so that less is computed again."""
    return replace(run, stamp=store(run).written("gradients", "grams", "subgroups"))


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
def statistics(run: Run, window: int, labels: frozenset[Label]) -> pd.DataFrame:
    """Return measures of these estimators over steps, `window` of them pooled; stored ones without Gram matrices."""
    if grams := answers(run).grams:
        return statistics_table(grams, window, answers(run).known, at=evenly(list(grams)), only=labels)
    table: Any = store(run).gradients_df()
    return table[[label in labels for label in zip(table["estimator"], table["energy_source"], strict=True)]]


@st.cache_data(max_entries=64, show_spinner=False)
def default_window(run: Run) -> int:
    """Return how many measured steps a point pools to begin with."""
    return variance.default_window(answers(run).grams, answers(run).known)


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


@st.cache_resource(max_entries=8, show_spinner=False)
def attribution(run: Run, step: int) -> Attributed | NotAttributed:
    """Return who holds a step's gradient, or why that is not known."""
    return answers(run).attribution(step)


@st.cache_resource(max_entries=4, show_spinner=False)
def _arrays(run: Run, step: int, group: int | None) -> TokenArrays:
    return store(run).token_arrays(step, group)


def _prompt(run: Run, step: int, group: int) -> StoredPrompt:
    arrays = partial(_arrays, run, step)
    return StoredPrompt(run.estimator, answers(run).config, group, tokens(run, step, group), arrays)


@st.cache_data(max_entries=64, show_spinner=False)
def prompt_labels(run: Run, step: int, group: int) -> list[Label]:
    """Return the estimators whose advantages are stored or can be computed for a prompt; the trained one is first."""
    return _prompt(run, step, group).labels()


@st.cache_data(max_entries=64, show_spinner=False)
def as_estimated(run: Run, step: int, group: int, label: Label) -> pd.DataFrame:
    """Return a prompt's tokens with the baseline and advantage of an estimator."""
    return _prompt(run, step, group).under(label)


@st.cache_data(max_entries=64, show_spinner="Asking the estimator …")
def written_out(run: Run, step: int, group: int, label: Label, rollout: int, t: int) -> TokenFormula | None:
    """Return an estimator's baseline at one token, written out."""
    prompt = _prompt(run, step, group)
    inputs, rollouts = prompt.inputs(label)
    return token_formula(label[0], inputs, rollouts, rollout, t, prompt.options(label))
