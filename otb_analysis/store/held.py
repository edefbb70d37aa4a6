"""Small columns in memory, each part read once: DuckDB takes a second to open 2,000 parts, for every query again.

`steps` is held whole, `rollouts` without its texts.
"""

import base64
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.schema import TABLES
from otb_analysis.store import checksum
from otb_analysis.store.checksum import read_sealed
from otb_analysis.store.encode import ARROW
from otb_analysis.store.parts import Part, broken, signature
from otb_analysis.store.views import names_of, read_part, refuse_missing_keys

AT_ONCE = 250
"""Parts whose rows are in memory as lists together."""

MANY = 64
"""Parts up to which DuckDB reads them from the disk."""

MOST_ROWS = 2_000_000
"""Rollouts, about, beyond which DuckDB reads them from the disk, too: as many take 130 MB."""

LIGHT = ("step", "group", "rollout", "prompt_id", "reward", "length", "turns", "finish_reason")
"""The columns of `rollouts` that are held."""

_TYPES = {table: {c.name: ARROW[c.dtype] for c in TABLES[table]} for table in ("steps", "rollouts")}
_NULLABLE: dict[pa.DataType, Any] = {
    pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype(),
}  # fmt: skip
_PLAIN = (pa.int64(), pa.float64(), pa.string(), pa.bool_())

_MOST_TEXT = 1 << 16
"""Characters of a footer beyond which reading the columns themselves is as fast."""

_Columns = dict[str, list[Any]]


class _Rows:
    """What was read of a table of one run; `at` says where in `table` each part begins, and how many rows it has."""

    def __init__(self, name: str, read: Callable[[Part], _Columns | pa.Table]) -> None:
        self.name, self.read, self.lock = name, read, threading.Lock()
        self.table = pa.table({})
        self.at: dict[tuple[object, ...], tuple[int, int]] = {}

    def of(self, parts: Sequence[Part]) -> pa.Table:
        keys = [(*signature(part), part.steps) for part in parts]
        with self.lock:
            if len(self.at.keys() - set(keys)) > len(keys):  # most of it was written again
                self.table, self.at = pa.table({}), {}
            new = [(key, part) for key, part in zip(keys, parts, strict=True) if key not in self.at]
            for first in range(0, len(new), AT_ONCE):  # lists of numbers take much more memory than columns
                self._add([(key, self.read(part)) for key, part in new[first : first + AT_ONCE]])
            places = [self.at[key] for key in keys]
            if sum(n for _, n in places) == len(self.table) and places == sorted(places):
                return self.table
            return self.table.take(pa.array([i for first, n in places for i in range(first, first + n)], pa.int64()))

    def _add(self, new: Sequence[tuple[tuple[object, ...], _Columns | pa.Table]]) -> None:
        tables = [self.table] if len(self.table) else []
        for is_text, some in groupby((rows for _, rows in new), lambda rows: isinstance(rows, dict)):
            group: Any = list(some)
            tables += [self._joined(group)] if is_text else group
        start = len(self.table)
        for key, rows in new:
            self.at[key] = (start, len(rows["step"]))
            start += self.at[key][1]
        if new:
            self.table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()

    def _joined(self, parts: Sequence[_Columns]) -> pa.Table:
        """Return the rows of parts, one after the other; what one lacks is null."""
        types = {name: kind for name, kind in _TYPES[self.name].items() if self.name == "steps" or name in LIGHT}
        absent = [[None] * len(part["step"]) for part in parts]
        columns = {}
        for name in types | dict.fromkeys(name for part in parts for name in part):
            values = [part.get(name, none) for part, none in zip(parts, absent, strict=True)]
            columns[name] = pa.array(list(chain.from_iterable(values)), types.get(name))
        return pa.table(columns)


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
    types = _TYPES["steps"]
    names = names_of("steps", rows.column_names) if columns is None else list(columns)
    for name in set(names) - set(rows.column_names):
        rows = rows.append_column(name, pa.nulls(len(rows), types[name]))
    chosen = rows.select(names)
    chosen = chosen.cast(pa.schema([(field.name, types.get(field.name, field.type)) for field in chosen.schema]))
    nullable = [name for name in names if chosen[name].null_count]
    frames = chosen.drop_columns(nullable).to_pandas(), chosen.select(nullable).to_pandas(types_mapper=_NULLABLE.get)
    frame = pd.concat(frames, axis=1).reindex(columns=names)
    empty = [
        name for name in nullable if pa.types.is_string(chosen[name].type) and chosen[name].null_count == len(chosen)
    ]
    return frame.assign(**dict.fromkeys(empty, np.full(len(frame), None)))


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


def light_text(rows: pa.Table) -> str:
    """Return the columns `LIGHT` of a part's rollouts as compressed JSON; empty where that is long."""
    columns = {name: rows[name] for name in LIGHT}
    text = json.dumps({name: values.to_pylist() for name, values in columns.items() if values.null_count < len(rows)})
    return base64.b64encode(zlib.compress(text.encode(), 1)).decode() if len(text) <= _MOST_TEXT else ""


@lru_cache(maxsize=64)
def _steps(run_dir: Path) -> _Rows:
    return _Rows("steps", _read_step)


@lru_cache(maxsize=4)
def _rollouts(run_dir: Path) -> _Rows:
    return _Rows("rollouts", _read_light)


def _read_step(part: Part) -> _Columns | pa.Table:
    text = _said(part, checksum.ROW)
    if text:
        return {name: [value] for name, value in json.loads(text).items()}
    try:
        rows = pq.ParquetFile(pa.BufferReader(part.path.read_bytes())).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    refuse_missing_keys("steps", part, rows.column_names)
    return rows if part.whole else rows.filter(pc.field("step").isin(list(part.steps)))


def _read_light(part: Part) -> _Columns | pa.Table:
    text = _said(part, checksum.LIGHT) if part.whole else ""
    return json.loads(zlib.decompress(base64.b64decode(text))) if text else read_part("rollouts", part, only=LIGHT)


def _said(part: Part, key: str) -> str:
    """Return a text of a part's footer, once all its bytes are right."""
    try:
        sealed, text = read_sealed(signature(part), key)
    except OSError as error:
        raise broken(part, error) from error
    return text if not part.checksum or part.checksum == sealed.checksum else ""  # else `read_part` refuses it
