"""What `otb query` says: the answer to one SELECT, or of a whole run its rollouts, their rewards and all columns."""

from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

from otb_analysis.figures.numbers import cell
from otb_analysis.report.record import infinite_cells, written
from otb_analysis.report.terminal import terminal_table
from otb_analysis.schema import TABLES
from otb_analysis.store import (
    ASKED_ROWS,
    RolloutFilter,
    RunStore,
    facts_of_rollouts,
    find_rollouts,
    reward_histogram,
)
from otb_analysis.store.asked import asked_sql

SHOWN, WIDEST = 50, 120
"""Rows of an answer that a terminal shows, and characters of a cell."""

MOST = 500
"""Rollouts that are listed, as on the page Rollouts."""


def answer(store: RunStore, query: str) -> pd.DataFrame:
    """Return the answer to one SELECT, within the bounds of the page Rollouts.

    Raises:
        InputError: The query is not one SELECT, cannot be run, or takes too long.
        StoreError: A part is broken, or the answer needs too much memory.
    """
    return asked_sql(store.path, query)


def answer_record(store: RunStore, query: str) -> dict[str, Any]:
    """Return the answer for JSON; `cut` says that there may be more rows, `infinite` which cells of `rows` were.

    A missing number and NaN are null alike: frames do not tell them apart. The column `not_finite` of `steps` does.
    """
    table = answer(store, query)
    columns = [str(name) for name in table]
    rows = {"columns": columns, "rows": written(table), "n": len(table), "cut": len(table) == ASKED_ROWS}
    return {"run": store.path.name, **rows, "infinite": infinite_cells(table)}


def answer_parts(table: pd.DataFrame) -> list[Table | str]:
    """Return the first rows of an answer for the terminal; text is shown as text, whatever it holds."""
    numeric = table.select_dtypes("number").columns
    cut = f"The first {SHOWN} of {len(table):,} rows; --json has all." if len(table) > SHOWN else f"{len(table):,} rows"
    shown = terminal_table("", "", (), ())
    for name in table:
        shown.add_column(Text(_cell(str(name))), justify="right" if name in numeric else "left")
    for row in table.head(SHOWN).itertuples(index=False):
        shown.add_row(*(Text(_cell(value)) for value in row))
    return [shown, cut]


def _cell(value: Any) -> str:
    """Return a value as one line of text in which no character acts on the terminal."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    text = str(value) if isinstance(value, list | dict) else cell(value)
    return repr(text)[1:-1][:WIDEST]


def rollouts_record(store: RunStore, asked: RolloutFilter | None = None) -> dict[str, Any]:
    """Return what the page Rollouts shows before anything is asked: ends, rewards by step, rollouts, all columns.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    asked = asked or RolloutFilter()
    rollouts, total = find_rollouts(store, asked, MOST)
    return {
        "run": store.path.name, "ends": facts_of_rollouts(store), "n_rollouts": total,
        "rewards_by_step": written(reward_histogram(store, asked)), "rollouts": written(rollouts),
        "columns": columns_record(),
    }  # fmt: skip


def columns_record() -> dict[str, list[dict[str, str]]]:
    """Return the columns of every table of a run with their units and meanings."""
    return {
        table: [{"column": c.name, "unit": c.unit, "meaning": c.meaning} for c in columns]
        for table, columns in TABLES.items()
    }


def columns_tables() -> list[Table]:
    """Return the same for the terminal."""
    tables = []
    for name, columns in columns_record().items():
        table = terminal_table(f"Table {name}", "", ("column", "unit"), ())
        table.add_column("meaning", overflow="fold")
        for one in columns:
            table.add_row(one["column"], one["unit"], Text(one["meaning"]))
        tables.append(table)
    return tables
