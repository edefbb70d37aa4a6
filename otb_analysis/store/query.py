"""One SELECT on a connection that can change nothing and reach nothing else, within bounds of time, memory and size."""

import math
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from otb_analysis.errors import InputError
from otb_analysis.store.parts import literal

ASKED_SECONDS, ASKED_ROWS, ASKED_MEGABYTES, ASKED_MEMORY = 20, 100_000, 20, "256MB"
"""Bounds of a query that somebody typed: on the page Rollouts, or behind `otb query`."""
ASKED_PROCESS = 2_000_000_000
"""Bytes of data that the process of such a query may have; DuckDB keeps most within `ASKED_MEMORY`."""


def open_locked(run_dir: Path, memory_limit: str) -> duckdb.DuckDBPyConnection:
    """Return a connection that can read this run's directory and no other file, and whose settings are final."""
    connection = duckdb.connect()
    connection.execute(f"SET memory_limit={literal(memory_limit)}")
    connection.execute(f"SET temp_directory={literal(str(Path(tempfile.gettempdir()) / 'otb-analysis-spill'))}")
    # A SELECT could otherwise name any data frame in the memory of the caller.
    connection.execute("SET python_enable_replacements=false")
    connection.execute(f"SET allowed_directories=[{literal(str(run_dir))}]")
    connection.execute("SET enable_external_access=false")
    connection.execute("SET lock_configuration=true")
    return connection


@lru_cache
def checked_limit(memory_limit: str) -> str:
    """Return an amount of memory once DuckDB takes it for one.

    Raises:
        InputError: It does not.
    """
    with duckdb.connect() as connection:
        try:
            connection.execute(f"SET memory_limit={literal(memory_limit)}")
        except duckdb.Error as error:
            raise InputError(f"memory_limit is {memory_limit!r}; pass an amount such as '256MB' or '1GB'.") from error
    return memory_limit


@contextmanager
def interrupted_after(seconds: float | None, cursor: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Interrupt what the cursor does in this block after some seconds; None never does."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, cursor.interrupt)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # the cursor is closed next, and must not be interrupted then


def first_rows(
    answer: duckdb.DuckDBPyConnection, rows: int | None, megabytes: float | None = None
) -> pd.DataFrame | None:
    """Return the first rows of an answer, None where they are larger; others are only computed if they must be."""
    if rows is None and megabytes is None:
        return answer.df()
    most, left = math.inf if rows is None else rows, math.inf if megabytes is None else 1e6 * megabytes
    chunks = list[pd.DataFrame]()
    while not chunks or (len(chunks[-1]) and sum(map(len, chunks)) < most):
        chunks.append(answer.fetch_df_chunk())
        left -= 0 if megabytes is None else sum(_size(column) for _, column in chunks[-1].items())
        if left < 0:
            return None
    whole = pd.concat(chunks[:-1] if len(chunks) > 1 and not len(chunks[-1]) else chunks, ignore_index=True)
    return whole if rows is None else whole.head(rows)


def _size(values: Any) -> int:
    """Return about how many bytes values take, with all that they hold: a cell may be a list of texts."""
    if isinstance(values, dict):
        return _size([*values, *values.values()])
    if isinstance(values, list | tuple) or str(getattr(values, "dtype", "")) == "object":
        return 8 + sum(map(_size, values))
    return len(values) if isinstance(values, str | bytes | bytearray) else int(getattr(values, "nbytes", 8))


def check_read_only(cursor: duckdb.DuckDBPyConnection, query: str) -> None:
    """Refuse what is not one SELECT.

    Raises:
        InputError: It is not; the sentence names what it is.
    """
    statements = cursor.extract_statements(query)
    if [s.type for s in statements] != [duckdb.StatementType.SELECT]:
        kinds = ", ".join(s.type.name for s in statements) or "nothing"
        raise InputError(f"a run is read-only, but the query holds {kinds}; pass one SELECT.")


def refused(error: Exception) -> InputError:
    """Return the sentence about a query that DuckDB refused."""
    # DuckDB's second paragraph repeats the query with a caret.
    reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".!")
    return InputError(f"the query cannot be run ({reason}); correct it, or see the columns with DESCRIBE tokens.")
