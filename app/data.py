"""Which runs there are, and cached loads of each: the pages' only door to tables and verdicts.

Every cache is bounded. A `Run` is the key; its stamp changes when the run grows, so that it is read again.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any

import pandas as pd
import streamlit as st

from otb_analysis.answers import RunAnswers, designs
from otb_analysis.answers.holders import Attributed, NotAttributed, Sized
from otb_analysis.answers.pairs import Pair, estimator_pair, pair_of
from otb_analysis.answers.token_formula import TokenFormula, token_formula
from otb_analysis.answers.triage import Triage, triage_row
from otb_analysis.errors import STOPS
from otb_analysis.figures import pairs
from otb_analysis.figures.comparison import ComparisonInfo
from otb_analysis.figures.curves import CurvesInfo
from otb_analysis.figures.fidelity import FidelityInfo, fidelity_columns, fidelity_info
from otb_analysis.figures.runs import Pairing
from otb_analysis.figures.styles import Style
from otb_analysis.statistics import Interval, gain_lost
from otb_analysis.store import (
    ASKED_MEMORY,
    RolloutFilter,
    RunStore,
    StoredPrompt,
    TokenArrays,
    find_rollouts,
    runs_df,
)
from otb_analysis.store.measured import exact_groups
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
    style: Style  # Of its place among all runs of the root, in order of creation


def root(option: str = "--root", variable: str = "OTB_RUNS", default: Path = Path("runs")) -> Path:
    """Return the folder of runs, or another: what the option names after `--`, else the variable, else a default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, dest="value")
    named = parser.parse_known_args(sys.argv[1:])[0].value or os.environ.get(variable)
    return Path(named or default).expanduser().resolve()


def stamps() -> dict[str, str]:
    """Return a text for each entry of the root that changes when a run grows, is replaced or ends.

    It holds the times of what every step changes, and is taken before anything is read of the entry.
    """
    try:
        entries = sorted(entry for entry in root().iterdir() if not entry.name.startswith("."))
    except OSError:
        return {}
    stamps = dict.fromkeys((entry.name for entry in entries), "")
    for entry, watched in product(entries, ("run.json", "run.sqlite", "steps")):
        with suppress(OSError):  # an entry has not all of them
            stamps[entry.name] += f" {watched} {(entry / watched).stat().st_mtime_ns}"
    return stamps


@st.cache_data(max_entries=4, show_spinner=False, ttl=10)  # a process that is killed changes no file
def runs(folder: str, stamps: dict[str, str]) -> pd.DataFrame:
    """Return the table of all runs of a folder, broken ones with their reason."""
    return runs_df(folder)


def states(seen: dict[str, str]) -> list[Any]:
    """Return what changes when any run of the root grows, is replaced or ends, by a kill too; of these `stamps`."""
    try:
        return [seen, *runs(str(root()), seen)["status"]]
    except STOPS:  # the page that is drawn again says why
        return [seen]


@st.cache_resource(max_entries=16, show_spinner=False, hash_funcs={Run: attrgetter("path")})
def store(run: Run) -> RunStore:
    """Return the reader of a run; one reader follows a run that grows."""
    return RunStore(run.path, memory_limit=ASKED_MEMORY)


# As a resource: each answer is made once, and `cache_data` would copy every step's products with every question.
@st.cache_resource(max_entries=64, show_spinner=False)
def answers(run: Run) -> RunAnswers:
    """Return what a run says, each answer made when it is first asked."""
    return RunAnswers(store(run))


@st.cache_data(max_entries=64, show_spinner=False, hash_funcs={FunctionType: attrgetter("__qualname__")})
def cached(run: Run, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of the store says of a run, asked once while the run does not grow."""
    return question(store(run), *arguments)


def triaged(row: Any, run: Run | None) -> Triage:
    """Return one run of the list; `run` is None for one that cannot be opened."""
    if run is None:
        return triage_row(row, "", None)
    return triage_row(row, run.estimator, lambda: answers(run).judged)


def measured(run: Run) -> Run:
    """Return a run whose stamp changes only when another step is measured, while it runs: less is computed again."""
    stamp = run.stamp if run.status != "running" else store(run).change_token("gradients", "grams", "subgroups")
    return replace(run, stamp=stamp)


@st.cache_data(max_entries=16, show_spinner="Comparing the runs …")
def compared(runs: tuple[Run, ...], pairing: Pairing) -> Pair:
    """Return how two sides of some runs compare: held-out reward, curves over steps, and gradient noise."""
    return pair_of({run.name: answers(run) for run in runs if run.name in pairing.runs}, pairing)


@st.cache_data(max_entries=16, show_spinner="Comparing the runs …")
def pooled(runs: tuple[Run, ...], design: str) -> tuple[str, ...]:
    """Return what those of some runs say together that can be pooled, being of one design; nothing of a single one."""
    alike = {run.name: of for run in runs if (of := answers(run)).grams and of.design == design}
    return designs(alike)[design].lines if len(alike) > 1 else ()


@st.cache_data(max_entries=16, show_spinner="Comparing the estimators …")
def comparison(run: Run, step: int | None, against: str, source: str, estimators: tuple[str, ...]) -> ComparisonInfo:
    """Return how estimators compare with one at a measured step, or over all of them."""
    whole = answers(run).measured
    assert whole is not None
    chosen = whole if step is None else replace(whole, grams=(answers(run).grams[step],), _decided={})
    return chosen.comparison(against, source, estimators)


@st.cache_data(max_entries=16, show_spinner="Comparing the estimators …")
def compared_estimators(run: Run, a: str, b: str) -> Pair | None:
    """Return how two estimators of a run compare on the same rollouts."""
    measured = answers(run).measured
    return None if measured is None else estimator_pair(measured, a, b)


@st.cache_data(max_entries=64, show_spinner="Computing intervals …")
def over_training(run: Run, against: Label, chosen: tuple[Label, ...]) -> CurvesInfo:
    """Return a few estimators over one on the same rollouts, by block of measured steps."""
    return pairs.over_training(answers(run).grams, against, chosen, answers(run).proved)


# As a resource: its correlations are made once, after the first figure was sent.
@st.cache_resource(max_entries=4, show_spinner="Comparing proxy and exact norms …")
def fidelity(run: Run, kind: str, source: str) -> tuple[FidelityInfo, int, int]:
    """Return the agreement of proxy and exact energies over a run, and of how many tokens with both it has how many."""
    table, total = exact_groups(store(run), fidelity_columns(source))
    return fidelity_info(table, kind, source), len(table["grad_norm_sq"].dropna()), total


@st.cache_data(max_entries=64, show_spinner=False)
def lost_by_proxy(run: Run, source: str) -> Interval | None:
    """Return the share of otb's efficiency gain that proxy energies lose over all steps; None where it is not known."""
    if answers(run).alarm:
        return None
    return gain_lost(list(answers(run).grams.values()), ("otb", source), ("otb", "exact"), known=answers(run).proved)


@st.cache_data(max_entries=32, show_spinner=False)
def rollouts(run: Run, step: int) -> pd.DataFrame:
    """Return the rollouts of one step."""
    return store(run).rollouts_df([step])


@st.cache_data(max_entries=16, show_spinner="Searching …")
def found_rollouts(run: Run, asked: RolloutFilter, most: int, order: str) -> tuple[pd.DataFrame, int]:
    """Return the rollouts that are asked for, and how many there are."""
    return find_rollouts(store(run), asked, most, order)


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
def texts_of_tokens(run: Run, step: int, rollout: int) -> pd.DataFrame:
    """Return what the tokens of one rollout say, who wrote them, and how large they are."""
    columns = ["t", "turn", "mask", "token", "grad_norm_sq", "measured_by", "energy_proxy"]
    return store(run).tokens_df([step], columns, where="rollout = ?", params=[rollout]).sort_values("t")


@st.cache_resource(max_entries=64, show_spinner=False)
def looks_of(browser: bytes) -> dict[str, int]:
    """Return of each run the newest step that a browser has drawn."""
    return {}


def looks() -> dict[str, int]:
    """Return of each run the newest step that was drawn here: in this browser, where it has Streamlit's cookie."""
    cookie = str(st.context.cookies.get("_streamlit_xsrf", ""))  # where Streamlit tests a page it is a mock
    known = re.fullmatch(r"2\|([0-9a-f]{8})\|([0-9a-f]+)\|\d+", cookie)
    if known is None or len(known[2]) % 2:
        return st.session_state.setdefault("_looks", {})
    mask, masked = map(bytes.fromhex, known.groups())  # each page load masks the same token anew
    return looks_of(bytes(byte ^ mask[at % 4] for at, byte in enumerate(masked)))


@st.cache_resource(max_entries=8, show_spinner=False)
def attribution(run: Run, step: int) -> Attributed | NotAttributed:
    """Return who holds a step's gradient, or why that is not known."""
    return answers(run).attribution(step)


@st.cache_resource(max_entries=8, show_spinner=False)
def sizes(run: Run, step: int) -> Sized | None:
    """Return the tokens of a step by size; None where none is known."""
    return answers(run).sizes(step)


@st.cache_data(max_entries=64, show_spinner=False)
def first_prompt(run: Run, step: int) -> int | None:
    """Return the prompt of a step to begin with; None where none stands out."""
    return answers(run).first_prompt(step)


@st.cache_resource(max_entries=4, show_spinner=False)
def _arrays(run: Run, step: int, group: int | None) -> TokenArrays:
    return store(run).token_arrays(step, group)


def _prompt(run: Run, step: int, group: int) -> StoredPrompt:
    table, arrays = tokens(run, step, group), partial(_arrays, run, step)
    return StoredPrompt(run.estimator, answers(run).config, group, table, arrays)


@st.cache_data(max_entries=64, show_spinner=False)
def prompt_labels(run: Run, step: int, group: int) -> list[Label]:
    """Return the estimators whose advantages are stored or can be computed for a prompt; the trained one is first."""
    return _prompt(run, step, group).labels()


@st.cache_data(max_entries=64, show_spinner=False)
def as_estimated(run: Run, step: int, group: int, label: Label) -> pd.DataFrame:
    """Return a prompt's tokens with the baseline and advantage of an estimator."""
    return _prompt(run, step, group).with_estimator(label)


@st.cache_data(max_entries=64, show_spinner="Asking the estimator …")
def written_out(run: Run, step: int, group: int, label: Label, rollout: int, t: int) -> TokenFormula | None:
    """Return an estimator's baseline at one token, written out."""
    prompt = _prompt(run, step, group)
    inputs, rollouts = prompt.inputs(label)
    return token_formula(label[0], inputs, rollouts, rollout, t, prompt.options(label))
