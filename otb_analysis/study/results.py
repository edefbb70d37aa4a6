"""The committed tables of a study: CSV files that come back as what was written."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import csv as reader

from otb_analysis.errors import StoreError
from otb_analysis.study.cache import Finished
from otb_analysis.study.record import Cell, Rows, Tables, Value

COST = "cost"
"""Name of the table that every study has: what each cell took, and where."""


def write_tables(folder: Path, tables: Tables) -> None:
    """Write each table as NAME.csv: floats with every digit they need to come back, None as nothing.

    Args:
        folder: studies/NN_slug/results.
        tables: Rows by name.

    Raises:
        StoreError: The disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in tables.items():
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                columns = dict.fromkeys(column for row in rows for column in row)
                writer = csv.DictWriter(file, list(columns), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    except OSError as error:
        raise StoreError(f"cannot write the tables to {folder} ({error.strerror}); pass another --out.") from error


def read_tables(folder: Path) -> dict[str, Rows]:
    """Return the rows of a study's tables by name; empty when it has no results.

    Args:
        folder: studies/NN_slug/results.

    Raises:
        StoreError: A file is no table.
    """
    found: dict[str, Rows] = {}
    for path in sorted(folder.glob("*.csv")):
        try:
            found[path.stem] = reader.read_csv(path).to_pylist()
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise StoreError(f"{path} cannot be read ({error}); run the study again.") from error
    return found


def select(rows: Rows, **values: Any) -> Rows:
    """Return the rows whose columns have these values.

    Args:
        rows: Of a table.
        **values: Column and value.
    """
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def distinct(rows: Rows, column: str) -> list[Any]:
    """Return the values of a column, each once, in the order in which they appear.

    Args:
        rows: Of a table.
        column: Its name.
    """
    return list(dict.fromkeys(row[column] for row in rows))


def cost_rows(cells: Sequence[Cell], results: Sequence[Finished]) -> list[dict[str, Value]]:
    """Return what each cell took.

    Args:
        cells: In the order of the study.
        results: One per cell.
    """
    return [_cost(cell, one) for cell, one in zip(cells, results, strict=True)]


def _cost(cell: Cell, one: Finished) -> dict[str, Value]:
    processor = None if one.processor_minutes is None else round(one.processor_minutes, 2)
    return {
        "cell": cell.name,
        "minutes": round(one.minutes, 2),
        "processor_minutes": processor,
        "peak_mib": one.peak_mib,
        "machine": one.machine,
    }
