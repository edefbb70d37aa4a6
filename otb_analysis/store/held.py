"""Small columns in memory, each part read once: DuckDB takes a second to open 2,000 parts, for every query again.

`steps` is held whole, `rollouts` without its texts.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.schema import TABLES
from otb_analysis.store.checksum import read_sealed
from otb_analysis.store.encode import ARROW
from otb_analysis.store.parts import Part, broken, signature
from otb_analysis.store.views import names_of, read_part, refuse_missing_keys

MANY = 64
"""Parts up to which DuckDB reads them from the disk."""

MOST_ROWS = 2_000_000
"""Rollouts, about, beyond which DuckDB reads them from the disk, too: as many take 130 MB."""

LIGHT = ("step", "group", "rollout", "prompt_id", "reward", "length", "turns", "finish_reason")
"""The columns of `rollouts` that are held."""

_TYPES = {c.name: ARROW[c.dtype] for c in TABLES["steps"]}
_NULLABLE: dict[pa.DataType, Any] = {
    pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype(),
}  # fmt: skip
_PLAIN = (pa.int64(), pa.float64(), pa.string(), pa.bool_())

_Row = dict[str, object]


class _Rows:
    """What was read of one run; `at` says where in `table` each part begins, and how many rows it has."""

    def __init__(self, read: Callable[[Part], _Row | pa.Table]) -> None:
        self.read, self.lock = read, threading.Lock()
        self.table = pa.table({})
        self.at: dict[tuple[object, ...], tuple[int, int]] = {}

    def of(self, parts: Sequence[Part]) -> pa.Table:
        keys = [(*signature(part), part.steps) for part in parts]
        with self.lock:
            if len(self.at.keys() - set(keys)) > len(keys):  # most of it was written again
                self.table, self.at = pa.table({}), {}
            self._add([(key, self.read(part)) for key, part in zip(keys, parts, strict=True) if key not in self.at])
            places = [self.at[key] for key in keys]
            if sum(n for _, n in places) == len(self.table) and places == sorted(places):
                return self.table
            return self.table.take(pa.array([i for first, n in places for i in range(first, first + n)], pa.int64()))

    def _add(self, new: Sequence[tuple[tuple[object, ...], _Row | pa.Table]]) -> None:
        tables = [self.table] if len(self.table) else []
        for is_row, some in groupby((rows for _, rows in new), lambda rows: isinstance(rows, dict)):
            group = list(some)
            tables += [_table(group)] if is_row else group
        start = len(self.table)
        for key, rows in new:
            self.at[key] = (start, 1 if isinstance(rows, dict) else len(rows))
            start += self.at[key][1]
        if new:
            self.table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def step_rows(run_dir: Path, parts: Sequence[Part]) -> pa.Table:
    """Return the rows of parts of `steps`, in their order; those that were read before are not read again.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    return _steps(run_dir).of(parts)


def step_frame(run_dir: Path, parts: Sequence[Part], columns: Sequence[str] | None) -> pd.DataFrame:
    """Return columns of parts of `steps` as DuckDB would, which takes three times as long; None means all.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    rows = step_rows(run_dir, parts)
    there, frame = set(rows.column_names), {}
    for name in names_of("steps", rows.column_names) if columns is None else columns:
        column = rows[name] if name in there else pa.nulls(len(rows), _TYPES[name])
        column = column.cast(_TYPES.get(name, column.type))
        frame[name] = column.to_pandas(types_mapper=_NULLABLE.get if column.null_count else None)
    return pd.DataFrame(frame)


def rollout_rows(run_dir: Path, parts: Sequence[Part]) -> pa.Table | None:
    """Return the columns `LIGHT` of parts of `rollouts`, as `step_rows` does; None where they are too many to hold.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    first = next((read_part("rollouts", part, only=("step",)) for part in parts), ())
    return None if len(first) * len(parts) > MOST_ROWS else _rollouts(run_dir).of(parts)


def row_text(rows: pa.Table) -> str:
    """Return the one row of a step as JSON without nulls; empty where a value is more than a number, flag or text."""
    plain = all(field.type in _PLAIN or pa.types.is_null(field.type) for field in rows.schema)
    row = {name: value for name, value in rows.to_pylist()[0].items() if value is not None}
    return json.dumps(row) if plain else ""


@lru_cache(maxsize=64)
def _steps(run_dir: Path) -> _Rows:
    return _Rows(_read_step)


@lru_cache(maxsize=4)
def _rollouts(run_dir: Path) -> _Rows:
    return _Rows(lambda part: read_part("rollouts", part, only=LIGHT))


def _read_step(part: Part) -> _Row | pa.Table:
    try:
        _, text = read_sealed(part.path)
        if text:
            return json.loads(text)
        rows = pq.ParquetFile(pa.BufferReader(part.path.read_bytes())).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    refuse_missing_keys("steps", part, rows.column_names)
    return rows if part.whole else rows.filter(pc.field("step").isin(list(part.steps)))


def _table(rows: Sequence[_Row]) -> pa.Table:
    names = dict.fromkeys(_TYPES) | dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows], _TYPES.get(name)) for name in names})
