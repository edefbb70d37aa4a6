"""The rows of `steps` in memory: parts of one row each are read once, where DuckDB takes a second for each 1,000."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.store.parts import Part, broken, checked, signature
from otb_analysis.store.views import refuse_missing_keys

MANY = 64
"""Parts up to which DuckDB reads them from the disk."""


class _Rows:
    """What was read of one run; `at` says where in `table` each part begins, and how many rows it has."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.table = pa.table({})
        self.at: dict[tuple[object, ...], tuple[int, int]] = {}

    def of(self, parts: Sequence[Part]) -> pa.Table:
        keys = [(*signature(part), part.steps) for part in parts]
        with self.lock:
            if len(self.at.keys() - set(keys)) > len(keys):  # most of it was written again
                self.table, self.at = pa.table({}), {}
            new = {key: _read(part) for key, part in zip(keys, parts, strict=True) if key not in self.at}
            start = len(self.table)
            if new:
                some = [self.table, *new.values()] if start else list(new.values())
                self.table = pa.concat_tables(some, promote_options="permissive").combine_chunks()
            for key, rows in new.items():
                self.at[key] = (start, len(rows))
                start += len(rows)
            places = [self.at[key] for key in keys]
            if places and sum(n for _, n in places) == len(self.table) and places == sorted(places):
                return self.table
            return self.table.take(pa.array([i for first, n in places for i in range(first, first + n)], pa.int64()))


def step_rows(run_dir: Path, parts: Sequence[Part]) -> pa.Table:
    """Return the rows of parts of `steps`, in their order; those that were read before are not read again.

    Raises:
        StoreError: A part is broken.
    """
    return _rows(run_dir).of(parts)


@lru_cache(maxsize=64)
def _rows(run_dir: Path) -> _Rows:
    return _Rows()


def _read(part: Part) -> pa.Table:
    checked(part)
    try:
        rows = pq.ParquetFile(pa.BufferReader(part.path.read_bytes())).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    refuse_missing_keys("steps", part, rows.column_names)
    return rows if part.whole else rows.filter(pc.field("step").isin(list(part.steps)))
