"""run.sqlite: which steps a run has, its small tables, and the list of its Parquet files, each checked when it is read.

One transaction adds a step, so a reader sees all of it or nothing. A rollback journal and no write-ahead log: nothing
lies beside the file once a transaction ended, network disks work, and readers need no right to write. SQLite has no
checksums of its own, so the row of a step in `written` holds how many rows each table has of it and a sum over every
column. A changed bit, a lost row and an exchanged one change a sum.
"""

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from math import isfinite
from pathlib import Path
from time import time
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pandas.util import hash_array as pandas_hash_array
from pyarrow.compute import call_function

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.phases import note
from otb_analysis.schema import TABLES, Column
from otb_analysis.store.layout import CATALOGUE, refused_link

ARROW = {
    "BIGINT": pa.int64(),
    "INTEGER": pa.int32(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
}
"""DuckDB's type names, as the schema writes them, in Arrow."""

SMALL = ("steps", "rollouts", "gradients", "sampling")
"""The tables of the schema that live in the catalogue."""
LARGE = tuple(table for table in TABLES if table not in SMALL)
"""Those that live in Parquet files."""

PARTS = (
    Column("step", "BIGINT", "", "Step whose rows the file holds.", key=True),
    Column("table", "VARCHAR", "", "Table of the schema."),
    Column("file", "VARCHAR", "", "Path inside the run."),
    Column("rows", "BIGINT", "", "Rows of this step in the file."),
    Column("crc32", "BIGINT", "", "CRC-32 of the file's bytes."),
    Column("fields", "VARCHAR", "", "Columns and their types, as JSON."),
    Column("recorded", "VARCHAR", "", "Columns that hold any value of this step, with commas between."),
)
"""The table of Parquet files: a row for each file of a step, or of several steps once they are compacted."""

_SCHEMA = {table: TABLES[table] for table in SMALL} | {"parts": PARTS}
_SQL = {
    "BIGINT": "BIGINT",
    "INTEGER": "INT",
    "FLOAT": "REAL",
    "DOUBLE": "DOUBLE",
    "VARCHAR": "TEXT",
    "BOOLEAN": "BOOLEAN",
}
_ARROW = {_SQL[dtype]: kind for dtype, kind in ARROW.items()}
_KINDS = frozenset(ARROW.values())
hash_array: Any = pandas_hash_array
WAIT = 60
"""Seconds to wait for a transaction of another process; they take milliseconds. A writer then says so and waits on."""
_REMEDY = {
    sqlite3.SQLITE_BUSY: "try again once the program that holds it has let go",
    sqlite3.SQLITE_READONLY: "its writer was killed in the middle of a step, so read it once with the right to write",
}


_IN = " WHERE step IN (SELECT value FROM json_each(?))"


@contextmanager
def transaction(run_dir: Path, *, write: bool = False) -> Iterator[sqlite3.Connection]:
    """Yield a connection to a run's catalogue on which all reading is of one moment, or all writing happens at once.

    Raises:
        StoreError: The file is missing, a link, or cannot be read.
        sqlite3.Error: It cannot be written.
    """
    path = run_dir / CATALOGUE
    if path.is_symlink():
        raise refused_link(path)
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=WAIT, isolation_level=None)
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be opened ({error}); restore it from a copy of the run.") from error
    try:
        # A view or a trigger of somebody else's file must not run.
        db.execute("PRAGMA trusted_schema=OFF")
        db.execute(f"PRAGMA query_only={'OFF' if write else 'ON'}")
        _patiently(db, "BEGIN IMMEDIATE") if write else db.execute("BEGIN")
        yield db
        _patiently(db, "COMMIT") if write else db.execute("COMMIT")
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of a message that quotes what is broken
        if write and isinstance(error, sqlite3.Error):
            raise
        remedy = _REMEDY.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "restore it from a copy of the run")
        why = " ".join(str(error).split())  # it quotes what is broken, line ends included
        raise StoreError(f"{path} cannot be read ({why}); {remedy}.") from error
    finally:
        db.close()  # what was not committed is rolled back


def _patiently(db: sqlite3.Connection, statement: str) -> None:
    """Run a statement of a writer however long another program keeps its lock: reading a run never ends it."""
    while True:
        try:
            db.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        note("another program has held a run's run.sqlite for a while; the run goes on once it lets go.")


def make(db: sqlite3.Connection) -> None:
    """Make the tables of an empty catalogue."""
    db.execute("BEGIN IMMEDIATE")
    for table, columns in _SCHEMA.items():
        named = ", ".join(f"{quoted(c.name)} {_SQL[c.dtype]}{' NOT NULL' * c.key}" for c in columns)
        db.execute(f"CREATE TABLE {table} ({named})")
        db.execute(f"CREATE {'UNIQUE ' * (table == 'steps')}INDEX {table}_of_step ON {table} (step)")
    counts = ", ".join(f"{table}_rows BIGINT NOT NULL, {table}_sums BLOB NOT NULL" for table in _SCHEMA)
    db.execute(f"CREATE TABLE written (step INTEGER PRIMARY KEY, {counts})")
    db.execute("CREATE TABLE totals (steps BIGINT NOT NULL, changes BIGINT NOT NULL, columns BIGINT NOT NULL)")
    db.execute("INSERT INTO totals VALUES (0, 0, ?)", [_columns(db)])
    # Numbers that comparisons ask for, derived from `grams` and `subgroups` when a step is measured (`products`).
    db.execute("CREATE TABLE products (step BIGINT, size BIGINT, numbers BLOB, crc32 BIGINT)")
    db.execute("CREATE INDEX products_of_step ON products (step)")
    db.execute("COMMIT")


def add_step(db: sqlite3.Connection, step: int, tables: Mapping[str, pa.Table]) -> None:
    """Add a step: its rows of the small tables and of `parts`; tables that are left out have none.

    Raises:
        InputError: A column beyond the schema held numbers before and holds texts now.
        sqlite3.Error: The disk refuses.
    """
    values: dict[str, object] = {"step": step}
    for table in _SCHEMA:
        rows = tables.get(table, pa.table({}))
        if table == "steps" and len(rows):  # which numbers are NaN or infinite: frames do not tell NaN from null
            row = rows.to_pylist()[0]
            kept = row.pop("not_finite", None)  # of an earlier run
            named = kept or ", ".join(name for name, x in row.items() if isinstance(x, float) and not isfinite(x))
            names = pa.array([str(named) if named else None] * len(rows), pa.string())
            rows = rows.select(list(row)).append_column("not_finite", names)
        n, sums = _insert(db, table, rows) if len(rows) else (0, b"")
        values |= {f"{table}_rows": n, f"{table}_sums": sums}
    db.execute(f"INSERT INTO written ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", [*values.values()])
    db.execute("UPDATE totals SET steps = steps + 1, changes = changes + 1")
    db.execute(f"PRAGMA user_version={int(time())}")  # a copy of the file has another time, and the same number


def _insert(db: sqlite3.Connection, table: str, rows: pa.Table) -> tuple[int, bytes]:
    """Insert rows of one step; return how many, and the sums of all columns that the table has."""
    types = _types(db, table)
    columns = _fitting(table, rows, types)
    for name, column in columns.items():
        if name not in types:
            types[name] = next(kind for kind, arrow in _ARROW.items() if arrow == column.type)
            try:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {quoted(name)} {types[name]}")
                db.execute("UPDATE totals SET columns = ?", [_columns(db)])
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR:
                    raise  # of the disk
                raise InputError(f"{table} cannot have a column {name!r} ({error}); rename it.") from error
    # SQLite would store NaN as null.
    values = [["nan" if v != v else v for v in column.to_pylist()] for column in columns.values()]
    places = f"({', '.join(map(quoted, columns))}) VALUES ({', '.join('?' * len(columns))})"
    db.executemany(f"INSERT INTO {table} {places}", zip(*values, strict=True))
    sums = column_sums(columns, [0, len(rows)])
    return len(rows), np.array([sums[name][0] if name in sums else 0 for name in types], dtype="<u8").tobytes()


def _fitting(table: str, rows: pa.Table, types: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
    """Return the columns as flags, numbers and texts; what is none of these becomes JSON, and what is null goes."""
    columns = dict[str, pa.ChunkedArray]()
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if column.null_count == len(column):  # null is what a column holds that is left out
            continue
        if column.type not in _KINDS:
            wider = pa.string() if pa.types.is_large_string(column.type) else None
            wider = pa.float32() if pa.types.is_float16(column.type) else wider
            wider = pa.int64() if pa.types.is_integer(column.type) else wider
            try:
                column = column.cast(wider) if wider else column
            except pa.ArrowInvalid as error:
                raise InputError(f"column {name!r} of {table} cannot be stored ({error}); pass it as text.") from error
        if column.type not in _KINDS or (types.get(name) == "TEXT" and not pa.types.is_string(column.type)):
            texts = [None if value is None else json.dumps(value, default=str) for value in column.to_pylist()]
            column = pa.chunked_array([pa.array(texts, pa.string())])
        elif pa.types.is_string(column.type) and types.get(name, "TEXT") != "TEXT":
            raise InputError(f"column {name!r} of {table} held numbers before and holds texts now; name it otherwise.")
        columns[name] = column
    return columns


def replace_parts(db: sqlite3.Connection, parts: pa.Table) -> None:
    """Say anew in which Parquet files the rows of some steps lie."""
    for step in parts["step"].unique().to_pylist():
        db.execute("DELETE FROM parts WHERE step = ?", [step])
        n, sums = _insert(db, "parts", parts.filter(call_function("equal", [parts["step"], step])))
        db.execute("UPDATE written SET parts_rows = ?, parts_sums = ? WHERE step = ?", [n, sums, step])
        db.execute("UPDATE totals SET changes = changes + 1")


def remove_steps(db: sqlite3.Connection, steps: Collection[int]) -> None:
    """Remove all that is in the catalogue of some steps."""
    for step in steps:
        for table in (*_SCHEMA, "products", "written"):
            db.execute(f"DELETE FROM {table} WHERE step = ?", [step])
    db.execute("UPDATE totals SET steps = (SELECT count(*) FROM written), changes = changes + 1")


def last_written(db: sqlite3.Connection) -> int:
    """Return when the last step was added, in seconds since 1970 UTC; 0 where that was not kept."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def add_products(db: sqlite3.Connection, step: int, products: Iterable[tuple[int, bytes]]) -> None:
    """Add what was derived of a step: a size of smaller groups, 0 for whole ones, and numbers."""
    given = list(products)
    sizes = [size for size, _ in given]
    rows = [(step, size, numbers, _products_sum(step, size, numbers, sizes)) for size, numbers in given]
    db.executemany("INSERT INTO products (step, size, numbers, crc32) VALUES (?, ?, ?, ?)", rows)


def products(db: sqlite3.Connection, steps: Collection[int] | None, *, whole: bool) -> Iterator[tuple[int, int, bytes]]:
    """Yield step, size and numbers of what was derived, of whole groups or of smaller ones.

    A step where anything of it is lost or changed is left out.
    """
    numbers = "CASE WHEN (size = 0) = ? THEN numbers END"  # 200 KB that nobody asked for are not read
    query = f"SELECT step, size, {numbers}, crc32 FROM products{_IN * (steps is not None)} ORDER BY step, size"
    asked = [whole] if steps is None else [whole, json.dumps([int(step) for step in steps])]
    for _, of_step in groupby(db.execute(query, asked), lambda row: row[0]):
        rows = list(of_step)
        sizes, wanted = [size for _, size, *_ in rows], [row for row in rows if (row[1] == 0) == whole]
        if all(isinstance(n, bytes) and _products_sum(step, size, n, sizes) == crc for step, size, n, crc in wanted):
            yield from (row[:3] for row in wanted)


def _products_sum(step: int, size: int, numbers: bytes, sizes: Sequence[int]) -> int:
    """Return the checksum of what was derived of a step for one of its sizes."""
    return crc32(numbers, crc32(repr((step, size, sizes)).encode()))


def written_steps(db: sqlite3.Connection, where: Path) -> list[int]:
    """Return the steps of a run, in order.

    Raises:
        StoreError: The catalogue says that it has more or fewer.
    """
    steps = [step for (step,) in db.execute("SELECT step FROM written ORDER BY step")]
    n, columns = db.execute("SELECT steps, columns FROM totals").fetchone() or (-1, -1)
    if n != len(steps) or any(type(step) is not int for step in steps):
        raise _changed(where, f"it has {len(steps)} steps where {n} were written")
    if columns != _columns(db):
        raise _changed(where, "its columns have other names or types")
    return steps


def column_names(db: sqlite3.Connection, table: str) -> list[str]:
    """Return the columns of a small table: the schema's in its order, then the extra ones."""
    return list(dict.fromkeys([*(c.name for c in _SCHEMA[table]), *_types(db, table)]))


def check_names(table: str, columns: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a column that a table does not have."""
    for name in columns:
        if name not in known:
            raise InputError(f"{table} has no column {name!r}; {nearest(name, known)}")


def read(
    db: sqlite3.Connection,
    where: Path,
    table: str,
    steps: Collection[int] | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return columns of a small table, by step and in the order of writing, every bit as written; `None` asks for all.

    A column of the schema that the run does not have is null.

    Raises:
        InputError: A column is unknown; the nearest is named.
        StoreError: The rows are not those that were written.
    """
    types, chosen = _types(db, table), _IN * (steps is not None)
    asked = [] if steps is None else [json.dumps([int(step) for step in steps])]
    known = column_names(db, table)
    columns = known if columns is None else columns
    check_names(table, columns, known)
    names = list(dict.fromkeys(["step", *(name for name in columns if name in types)]))
    query = f"SELECT step, {table}_rows, {table}_sums FROM written{chosen} ORDER BY step"
    written = db.execute(query, asked).fetchall()
    if steps is None:
        written_steps(db, where)
    copy = where / f"{table}.parquet"
    try:
        expected = _Expected(where, table, types, written)
        if steps is None and copy.is_file() and not copy.is_symlink():
            # Of a run that has ended, many times as fast. It is believed where it fits the sums, as the rows are.
            with suppress(StoreError, OSError, pa.ArrowException, KeyError, TypeError, ValueError):
                rows = pq.ParquetFile(copy).read(names, use_threads=False)
                return expected.table({name: rows[name].cast(_ARROW[types[name]]) for name in names}, columns)
        query = f"SELECT {', '.join(map(quoted, names))} FROM {table}{chosen} ORDER BY step, _rowid_"
        # All values in one list: 100,000 rows that are kept as tuples cost twice the time.
        values = list(chain.from_iterable(db.execute(query, asked)))
        arrays = {name: _array(values[at :: len(names)], types[name]) for at, name in enumerate(names)}
        return expected.table(arrays, columns)
    except (TypeError, ValueError, KeyError, pa.ArrowException) as error:  # values of other kinds than were written
        raise _changed(where, f"{table} holds what was never written ({error})") from error


class _Expected:
    """How many rows and which sums each step of a small table was written with, from (step, rows, sums) of each."""

    def __init__(
        self, where: Path, table: str, types: Mapping[str, str], written: Sequence[tuple[int, int, bytes]]
    ) -> None:
        self.where, self.name = where, table
        self.steps, counts = (np.array([row[i] for row in written], dtype=np.int64) for i in (0, 1))
        self.ends, width = np.concatenate([[0], np.cumsum(counts)]), 8 * len(types)
        if any(len(row[2]) > width for row in written):
            raise _changed(where, f"a column of {table} is missing")
        # A column that came later has no sum in the steps before it.
        joined = b"".join(row[2].ljust(width, b"\0") for row in written)
        self.sums = dict(zip(types, np.frombuffer(joined, "<u8").reshape(len(written), len(types)).T, strict=True))

    def table(self, arrays: Mapping[str, pa.Array | pa.ChunkedArray], columns: Sequence[str]) -> pa.Table:
        """Return columns, null where there is no array of them.

        Raises:
            StoreError: The arrays are not what was written.
        """
        of_rows, n = arrays["step"].to_numpy(zero_copy_only=False), int(self.ends[-1])
        if len(of_rows) != n or (of_rows != np.repeat(self.steps, np.diff(self.ends))).any():
            raise _changed(self.where, f"it has {len(of_rows)} rows of {self.name} where {n} were written")
        for name, column in arrays.items():
            wrong = np.flatnonzero(column_sums({name: column}, self.ends)[name] != self.sums[name])
            if len(wrong):
                step = self.steps[wrong[0]]
                raise _changed(self.where, f"{name} of {self.name} at step {step} is not what was written")
        kinds = {c.name: ARROW[c.dtype] for c in _SCHEMA[self.name]}
        asked = columns or ["step"]
        return pa.table({name: arrays[name] if name in arrays else pa.nulls(n, kinds[name]) for name in asked})


def _array(values: Sequence[Any], kind: str) -> pa.Array:
    """Return stored values as a column: NaN again where a text says so, floats where whole numbers became floats."""
    arrow = _ARROW[kind]
    try:
        column = pa.array(values)  # without a type: with one, Arrow makes 2 of 2.5
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # NaN as a text among numbers
        column = pa.array([None if v is None else float(v) for v in values], pa.float64())
    if pa.types.is_boolean(arrow) and not set(values) <= {None, 0, 1}:
        return column
    return column if pa.types.is_integer(arrow) and pa.types.is_floating(column.type) else column.cast(arrow)


def column_sums(
    columns: Mapping[str, pa.ChunkedArray | pa.Array], ends: Sequence[int] | np.ndarray
) -> dict[str, np.ndarray]:
    """Return, of each column, a sum over each run of rows [len(ends) − 1] that changes with any value, null or order.

    Args:
        ends: Where the runs begin, then where the last one ends.
    """
    where, n = np.asarray(ends), int(ends[-1])
    filled = [name for name, column in columns.items() if column.null_count < len(column)]
    texts = [name for name in filled if pa.types.is_string(columns[name].type)]
    names = [*texts, *(name for name in filled if name not in texts)]
    seen, values = np.zeros((len(names), n), np.uint64), np.zeros((len(names) - len(texts), n))
    if texts:
        whole = (column.fill_null("") if column.null_count else column for column in (columns[name] for name in texts))
        of_texts = [column.to_numpy(zero_copy_only=False) for column in whole]
        seen[: len(texts)] = hash_array(np.concatenate(of_texts), categorize=False).reshape(-1, n)
    # Flags and whole numbers as floats, and null as NaN: a later step may make floats of a column.
    for row, name in zip(values, names[len(texts) :], strict=True):
        row[:] = columns[name].to_numpy(zero_copy_only=False)
    values += 0.0  # −0 is stored as 0
    values[np.isnan(values)] = np.nan  # one kind of it
    seen[len(texts) :] = hash_array(values.ravel()).reshape(values.shape)
    place = np.arange(n) - np.repeat(where[:-1], np.diff(where))
    keys = np.array([crc32(name.encode()) + 1 for name in names], np.uint64)
    with np.errstate(over="ignore"):
        seen = (seen ^ keys[:, None]) * (2 * place.astype(np.uint64) + np.uint64(1))
        for row, name in zip(seen, names, strict=True):
            if columns[name].null_count:
                row[~columns[name].is_valid().to_numpy(zero_copy_only=False)] = 0
        total = np.zeros((len(names), n + 1), np.uint64)
        np.cumsum(seen, axis=1, out=total[:, 1:])
        sums = np.diff(total[:, where], axis=1)
    none = np.zeros(len(where) - 1, np.uint64)
    return {name: none for name in columns} | dict(zip(names, sums, strict=True))


def stamp(db: sqlite3.Connection, tables: Collection[str]) -> str:
    """Return a text that changes when steps with rows of these tables are added, removed or written again."""
    marks, checksum = ", ".join(repr(table) for table in tables if table in LARGE), 0
    for table in [*(table for table in tables if table in SMALL), *(["parts"] if marks else [])]:
        only = f"{table}_rows > 0"
        if table == "parts":
            only = f'step IN (SELECT step FROM parts WHERE "table" IN ({marks}))'
        for step, sums in db.execute(f"SELECT step, {table}_sums FROM written WHERE {only} ORDER BY step"):
            checksum = crc32(f"{step} {sums}".encode(), checksum)
    return f"{checksum:08x}"


def quoted(name: str) -> str:
    """Return an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _changed(where: Path, what: str) -> StoreError:
    return StoreError(
        f"{where / CATALOGUE} has changed since it was written: {what}; restore it from a copy of the run."
    )


def _types(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """Return the columns that a table has and their declared types, in the order of their sums."""
    return dict(db.execute(f"SELECT name, type FROM pragma_table_info('{table}')"))


def _columns(db: sqlite3.Connection) -> int:
    """Return a checksum of the names and types of all columns."""
    return crc32(json.dumps([[*_types(db, table).items()] for table in _SCHEMA]).encode())
