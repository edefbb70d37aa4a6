"""What `otb query` says: the answer to one SELECT, or of a whole run its rollouts, their rewards and all columns."""

import math
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.figures.styles import cell
from otb_analysis.report.document import Grid, Part
from otb_analysis.report.records import jsonable
from otb_analysis.schema import TABLES
from otb_analysis.store import ASKED_ROWS, RolloutFilter, RunStore, facts_of_rollouts, find_rollouts, reward_histogram

SHOWN, WIDEST = 50, 120
"""Rows of an answer that a terminal shows, and characters of a cell."""
MOST = 500
"""Rollouts that are listed, as on the page Rollouts."""
COLUMNS = {
    name: pd.DataFrame({"column": c.name, "unit": c.unit, "meaning": c.meaning} for c in of)
    for name, of in TABLES.items()
}
"""The columns of every table of a run with their units and meanings."""
WORDS = {math.inf: "infinite", -math.inf: "minus infinite"}


def answer_record(run: str, table: pd.DataFrame) -> dict[str, Any]:
    """Return the answer for JSON; `cut` says that there may be more rows, `infinite` which cells of `rows` were.

    A missing number and NaN are null alike: frames do not tell them apart. The column `not_finite` of `steps` does.
    """
    infinite = [
        {"row": int(row), "column": str(name), "is": WORDS[float(values[row])]}
        for name, values in ((name, table[name].to_numpy()) for name in table.select_dtypes("floating"))
        for row in np.flatnonzero(np.isinf(values.astype(np.float64, copy=False)))
    ]
    rows = {"columns": list(map(str, table)), "rows": jsonable(table), "n": len(table), "cut": len(table) == ASKED_ROWS}
    return {"run": run, **rows, "infinite": infinite}


def answer_parts(table: pd.DataFrame) -> list[Part]:
    """Return the first rows of an answer for the terminal; text is shown as text, whatever it holds."""
    cut = f"The first {SHOWN} of {len(table):,} rows; --json has all." if len(table) > SHOWN else f"{len(table):,} rows"
    texts = tuple(_cell(str(name)) for name in table.select_dtypes(exclude="number"))
    columns = {_cell(str(name)): [_cell(value) for value in table[name].head(SHOWN)] for name in table}
    return [Grid("", pd.DataFrame(columns), texts=texts), cut]


def _cell(value: Any) -> str:
    """Return a value as one line of text in which no character acts on the terminal."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    text = str(value) if isinstance(value, list | dict) else cell(value)
    return repr(text)[1:-1][:WIDEST]


def rollouts_record(store: RunStore) -> dict[str, Any]:
    """Return what the page Rollouts shows before anything is asked: ends, rewards by step, rollouts, all columns.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    everything = RolloutFilter()
    rollouts, total = find_rollouts(store, everything, MOST)
    rewards = jsonable(reward_histogram(store, everything))
    return {
        "run": store.path.name, "ends": facts_of_rollouts(store), "n_rollouts": total, "rewards_by_step": rewards,
        "rollouts": jsonable(rollouts), "columns": jsonable(COLUMNS),
    }  # fmt: skip


def columns_parts() -> list[Part]:
    """Return the columns of every table of a run with their units and meanings."""
    return [Grid("", of, f"Table {name}", texts=("unit",), folds=("meaning",)) for name, of in COLUMNS.items()]
