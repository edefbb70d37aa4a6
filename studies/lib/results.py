"""The committed tables of a study: CSV files that come back as what was written."""

import csv
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import csv as reader

from otb_analysis.errors import StoreError
from otb_analysis.store import RunStore
from studies.lib.record import Row, Rows, Tables


def write_tables(folder: Path, tables: Tables) -> None:
    """Write each table as folder/NAME.csv: floats with every digit they need to come back, None as nothing.

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


class Gathered(dict[str, list[Row]]):
    """Tables that a cell fills bit by bit."""

    def add(self, key: Row, **tables: Rows) -> None:
        """Add rows to tables, each behind the columns of a key."""
        for name, rows in tables.items():
            self.setdefault(name, []).extend({**key, **row} for row in rows)


def training_steps(run: Path, **columns: str) -> list[dict[str, Any]]:
    """Return a row per step of a run with these columns, NAME = SQL over its table `steps`; None for no number."""
    shown = ", ".join(f"{sql} AS {name}" for name, sql in columns.items())
    found = RunStore(run).sql(f"SELECT step, {shown} FROM steps ORDER BY step").to_dict("records")
    return [{str(name): None if value != value else value for name, value in row.items()} for row in found]


def select(rows: Rows, **values: Any) -> Rows:
    """Return the rows whose columns have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def distinct(rows: Rows, column: str) -> list[Any]:
    """Return the values of a column, each once, in the order in which they appear."""
    return list(dict.fromkeys(row[column] for row in rows))
