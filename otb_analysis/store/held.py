"""Small columns in memory, each part read once: DuckDB takes a second to open 2,000 parts, for every query again.

`steps` is held whole, `rollouts` without its texts.
"""

import base64
import json
import math
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.schema import TABLES
from otb_analysis.store import checksum
from otb_analysis.store.checksum import Sealed, read_sealed
from otb_analysis.store.digest import FEW, noted
from otb_analysis.store.encode import ARROW, with_not_finite
from otb_analysis.store.merged import Part
from otb_analysis.store.parts import broken, checked, signature
from otb_analysis.store.views import names_of, read_part, refuse_missing_keys

AT_ONCE = 250
"""Parts whose rows are in memory as lists together."""

MOST_CHUNKS = 64
"""Pieces of a column in memory, one for each time that parts were added, beyond which they are copied into one."""

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

_Columns = dict[str, Any]
"""Lists of values by column; of `steps`, where a part has one row, the values themselves."""


class _Rows:
    """What was read of a table of one run; `at` says where in `table` each part begins, and how many rows it has."""

    def __init__(self, run_dir: Path, name: str, read: Callable[[Part, str | None], _Columns | pa.Table]) -> None:
        self.run_dir, self.name, self.read, self.lock = run_dir, name, read, threading.Lock()
        self.table = pa.table({})
        self.at: dict[Part, tuple[int, int]] = {}

    def of(self, parts: list[Part]) -> pa.Table:
        with self.lock:
            held = list(self.at)
            if parts[: len(held)] != held:  # most often they are, and comparing the same objects takes no time
                if len(set(held) - set(parts)) > len(parts):  # most of it was written again
                    self.table, self.at = pa.table({}), {}
                self._read([part for part in parts if part not in self.at])
                places = [self.at[part] for part in parts]
                if len(places) < len(self.at) or places != sorted(places):
                    rows = [i for first, n in places for i in range(first, first + n)]
                    chosen = self.table.take(pa.array(rows, pa.int64()))
                    # A run that went back, or was read in pieces, goes on from these.
                    if len(places) == len(self.at) or self._replaced(parts):
                        ends = list(accumulate(n for _, n in places))
                        self.table = chosen
                        self.at = {part: (end - n, n) for part, end, (_, n) in zip(parts, ends, places, strict=True)}
                    return chosen
            else:
                self._read(parts[len(held) :])
            return self.table

    def _replaced(self, parts: list[Part]) -> bool:
        """Return whether what is held has rows of files that lie no more under their names."""
        seen = {(part.step, part.rank): part.seen for part in parts}
        return any(
            part.seen is not None and seen.get((part.step, part.rank), part.seen) != part.seen for part in self.at
        )

    def _read(self, parts: list[Part]) -> None:
        texts = noted(self.run_dir, self.name) if len(parts) > FEW else {}
        for first in range(0, len(parts), AT_ONCE):  # lists of numbers take much more memory than columns
            some = parts[first : first + AT_ONCE]
            self._add([(p, self.read(p, _text_for(p, texts.get((p.path.name, *signature(p)[1:]))))) for p in some])

    def _add(self, new: list[tuple[Part, _Columns | pa.Table]]) -> None:
        tables = [self.table] if len(self.table) else []
        for is_text, some in groupby((rows for _, rows in new), lambda rows: isinstance(rows, dict)):
            group: Any = list(some)
            tables += [self._joined(group)] if is_text else group
        start, at = len(self.table), dict[Part, tuple[int, int]]()
        for part, rows in new:
            at[part] = (start, 1 if self.name == "steps" and isinstance(rows, dict) else len(rows["step"]))
            start += at[part][1]
        if new:
            table = _concatenated(tables)
            # Not for each new step: copying all rows takes longer and longer.
            self.table = table.combine_chunks() if table.column(0).num_chunks > MOST_CHUNKS else table
            self.at |= at  # Not before: what cannot be joined must not seem to be there

    def _joined(self, parts: Sequence[_Columns]) -> pa.Table:
        """Return the rows of parts, one after the other; what one lacks is null."""
        names = dict.fromkeys(chain.from_iterable(parts))
        if self.name == "steps":  # one row each
            columns = {name: [part.get(name) for part in parts] for name in names}
        else:
            absent = [[None] * len(part["step"]) for part in parts]
            lists = {name: [part.get(name, none) for part, none in zip(parts, absent, strict=True)] for name in names}
            columns = {name: list(chain.from_iterable(values)) for name, values in lists.items()}
        return pa.table({name: _array(values, _TYPES[self.name].get(name)) for name, values in columns.items()})


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    """Return a column; one beyond the schema whose values are of several kinds becomes text, as DuckDB has it."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if kind is not None:
            raise
        return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())


def _concatenated(tables: Sequence[pa.Table]) -> pa.Table:
    """Return tables one after the other; a column that is text in one and not in another becomes text."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        texts = {field.name for table in tables for field in table.schema if pa.types.is_string(field.type)}
        schemas = [[f.with_type(pa.string()) if f.name in texts else f for f in table.schema] for table in tables]
        alike = [table.cast(pa.schema(fields)) for table, fields in zip(tables, schemas, strict=True)]
        return pa.concat_tables(alike, promote_options="permissive")


def step_rows(run_dir: Path, parts: list[Part]) -> pa.Table:
    """Return the rows of parts of `steps`, in their order; those that were read before are not read again.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    return _steps(run_dir).of(parts)


def step_frame(run_dir: Path, parts: list[Part], columns: Sequence[str] | None) -> pd.DataFrame:
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


def rollout_rows(run_dir: Path, parts: list[Part]) -> pa.Table | None:
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
    return _Rows(run_dir, "steps", _read_step)


@lru_cache(maxsize=4)
def _rollouts(run_dir: Path) -> _Rows:
    return _Rows(run_dir, "rollouts", _read_light)


def _read_step(part: Part, text: str | None) -> _Columns | pa.Table:
    text = _text_of_footer(part, checksum.ROW) if text is None else text
    if text:
        row = json.loads(text)
        bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        return {"not_finite": ", ".join(bad), **row} if bad else row  # as earlier versions did not say
    checked(part)
    try:
        rows = pq.ParquetFile(pa.BufferReader(part.path.read_bytes())).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    refuse_missing_keys("steps", part, rows.column_names)
    return with_not_finite(rows if part.whole else rows.filter(pc.field("step").isin(list(part.steps))))


def _read_light(part: Part, text: str | None) -> _Columns | pa.Table:
    text = _text_of_footer(part, checksum.LIGHT) if text is None else text
    columns = json.loads(zlib.decompress(base64.b64decode(text))) if text and part.whole else {}
    return columns if "step" in columns else read_part("rollouts", part, only=LIGHT)


def _text_for(part: Part, one: tuple[Sealed, str] | None) -> str | None:
    """Return a text of a part's footer that its digest has; None where the part has to be opened for it."""
    return one[1] if one and (not part.checksum or part.checksum == one[0].checksum) else None


def _text_of_footer(part: Part, key: str) -> str:
    """Return a text of a part's footer, once all its bytes are right."""
    try:
        one = read_sealed(signature(part, now=True), key)
    except OSError as error:
        raise broken(part, error) from error
    return _text_for(part, one) or ""  # one of another step's part is refused where its columns are read
