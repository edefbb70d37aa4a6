"""Which runs there are: the folder that was asked for, what changes when a run does, and what can be opened."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from otb_analysis.errors import STOPS
from otb_analysis.store import runs_df
from otb_analysis.store.runs import can_be_opened, estimator_names


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


def stamp(path: Path) -> str:
    """Return a text that changes when a run grows, is replaced or ends: the times of what every step changes."""
    times = []
    for watched in (path / "run.json", path / "run.sqlite", path / "steps"):
        try:
            times.append(watched.stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return "-".join(map(str, times))


def stamps() -> dict[str, str]:
    """Return a text for each entry of the root that changes when it does; taken before anything is read of it."""
    try:
        names = sorted(entry for entry in os.listdir(root()) if not entry.startswith("."))
    except OSError:
        return {}
    return {name: stamp(root() / name) for name in names}


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
    estimators = estimator_names(table)
    folder = root()
    return [
        Run(str(folder / name), stamps.get(str(name), ""), str(name), estimators.get(str(name), ""), str(status))
        for name, status in zip(usable["run"], usable["status"], strict=True)
    ]
