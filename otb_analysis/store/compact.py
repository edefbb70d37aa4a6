"""A run that has ended as one Parquet file per table, which pandas, DuckDB or Ray read without this package.

The files of large tables replace those of single steps; those of small tables are copies of the catalogue, for others
and for reading whole tables, where they fit its sums.
New files are written first, their bytes and number of rows compared with what was written; then the catalogue names
them, in one transaction; then the old ones go. So readers go on meanwhile, and a killed run is whole either way.
"""

import json
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.atomic import atomic_file
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import advance, ahead, count_to
from otb_analysis.schema import TABLES
from otb_analysis.store import catalogue, earlier
from otb_analysis.store.catalogue import ARROW, LARGE, SMALL, transaction
from otb_analysis.store.gram import GRAM_TEXTS
from otb_analysis.store.layout import find_run, live_status, other_writer, read_run_file
from otb_analysis.store.parts import (
    ROW_GROUP,
    Part,
    as_rows,
    check,
    checksum_of,
    listed,
    named_types,
    parquet_options,
    read_step,
    remove_unlisted,
)


@dataclass(eq=False)
class _Summed:
    """A file that is written, with the CRC-32 of all bytes that went into it."""

    _file: BinaryIO
    crc: int = 0

    def __getattr__(self, name: str) -> Any:
        """Do else what the file does."""
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        """Write bytes."""
        self.crc = crc32(data, self.crc)
        return self._file.write(data)


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    steps: int  # Of the run
    parts: int  # Files of large tables before
    files: int  # Parquet files after
    bytes_before: int
    bytes_after: int


def compact(path: Path) -> Compacted:
    """Make a run that has ended one Parquet file per table.

    Raises:
        InputError: There is no such run, or a process writes it.
        StoreError: A file is broken or missing, or the disk refuses; the run is as it was.
    """
    run_dir = find_run(path)
    info = read_run_file(run_dir)
    if (pid := other_writer(info)) or live_status(info)[0] == "running":
        by = f"process {pid}" if pid else "a process that is running"
        raise InputError(f"{run_dir} is being written by {by}; compact it once it has ended.")
    try:
        earlier.upgrade(run_dir)
        return merge(run_dir)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"cannot compact {run_dir} ({getattr(error, 'strerror', None) or error}); its steps stay readable, free "
            "some space and compact it again."
        ) from error


def merge(run_dir: Path) -> Compacted:
    """Do the same for the run's own writer; what the disk refuses is an OSError or a sqlite3.Error."""
    with transaction(run_dir, write=True) as db:
        steps = catalogue.written_steps(db, run_dir)
        whole = {table: {part.file for part in listed(db, run_dir, table)} == {f"{table}.parquet"} for table in LARGE}
        # A file that the catalogue names is never written over: killed before the transaction below, the run needs it.
        separate(db, run_dir, [table for table in LARGE if not whole[table]])
        before = listed(db, run_dir)
        (changes,) = db.execute("SELECT changes FROM totals").fetchone()
        small = {table: catalogue.read(db, run_dir, table) for table in SMALL}
    old = {part.file for part in before}
    size = sum((run_dir / file).stat().st_size for file in old)
    of_table = {table: [part for part in before if part.table == table] for table in LARGE}
    due = {table: parts for table, parts in of_table.items() if parts and not whole[table]}
    count_to(sum(map(len, due.values())), "file")
    try:
        of_table |= {table: _merged(run_dir, table, parts) for table, parts in due.items()}
        with transaction(run_dir, write=True) as db:
            if db.execute("SELECT changes FROM totals").fetchone() != (changes,):
                raise StoreError(f"{run_dir} was changed by another process while it was compacted; compact it again.")
            if due:
                catalogue.replace_parts(db, as_rows([part for parts in of_table.values() for part in parts]))
        for table, rows in small.items():
            if len(rows):
                with atomic_file(run_dir / f"{table}.parquet") as file, pq.ParquetWriter(file, rows.schema) as writer:
                    writer.write_table(rows, row_group_size=ROW_GROUP)
    finally:
        with transaction(run_dir) as db:
            keep = {part.file for part in listed(db, run_dir)}
        with suppress(OSError):
            remove_unlisted(run_dir, keep | {f"{table}.parquet" for table, rows in small.items() if len(rows)})
    after = sorted(run_dir.glob("*.parquet"))
    return Compacted(len(steps), len(old), len(after), size, sum(path.stat().st_size for path in after))


def separate(db: sqlite3.Connection, run_dir: Path, tables: Collection[str] = LARGE) -> None:
    """Give the files of a run that ended other names, since the run goes on: its next end writes them anew."""
    before = listed(db, run_dir)
    aside = dict[str, str]()
    for part in before:
        if part.file != f"{part.table}.parquet" or part.table not in tables or part.file in aside:
            continue
        aside[part.file] = name = f"{part.table}/upto-{part.crc32:010d}.parquet"
        if not (run_dir / name).exists():
            (run_dir / part.table).mkdir(exist_ok=True)
            try:
                os.link(run_dir / part.file, run_dir / name)
            except OSError:  # a file system without links
                with (run_dir / part.file).open("rb") as file, atomic_file(run_dir / name) as copy:
                    shutil.copyfileobj(file, copy)
    if aside:
        renamed = [replace(part, file=aside.get(part.file, part.file)) for part in before]
        catalogue.replace_parts(db, as_rows(renamed))


def _merged(run_dir: Path, table: str, parts: Sequence[Part]) -> list[Part]:
    """Write all rows of a table into one file, and return what the catalogue is to say.

    Raises:
        StoreError: A part has changed, or the file is not what was written.
    """
    # Columns of all parts: those of the schema as it has them today, the others as they were written.
    one_of = {part.fields: part for part in reversed(parts)}
    schemas = [read_step(run_dir, part).schema.remove_metadata() for part in reversed(one_of.values())]
    today = {c.name: ARROW[c.dtype] for c in TABLES[table]}
    joined = pa.unify_schemas(schemas, promote_options="permissive")
    schema = pa.schema([field.with_type(today.get(field.name, field.type)) for field in joined])
    coded = pa.dictionary(pa.int32(), pa.string())  # texts as they are written, in half the time; the file has texts
    texts = {*GRAM_TEXTS} & today.keys()
    written = pa.schema([field.with_type(coded) if field.name in texts else field for field in schema])
    path = run_dir / f"{table}.parquet"
    with atomic_file(path) as file:
        summed = _Summed(file)
        with pq.ParquetWriter(summed, written, store_schema=not texts, **parquet_options(written)) as writer:
            for rows in ahead(_row_groups(run_dir, parts, written)):
                writer.write_table(rows.unify_dictionaries(), row_group_size=ROW_GROUP)
    status, due = path.stat(), sum(part.rows for part in parts)
    there = checksum_of(path, status.st_ino, status.st_mtime_ns, status.st_size)
    if there != summed.crc or pq.read_metadata(path).num_rows != due:
        raise StoreError(f"{path} would not hold the {due} rows of its parts; nothing was changed, please report it.")
    merged = list[Part]()
    for step, of_step in groupby(parts, lambda part: part.step):
        some = list(of_step)
        recorded = ",".join(dict.fromkeys(name for part in some for name in part.recorded.split(",")))
        rows = sum(part.rows for part in some)
        merged.append(Part(step, table, path.name, rows, summed.crc, named_types(schema), recorded))
    return merged


def _row_groups(run_dir: Path, parts: Sequence[Part], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of whole steps, at most `ROW_GROUP` of several steps, so that one step is found and read alone."""
    waiting, size = list[pa.Table](), 0
    coded = [field.name for field in schema if pa.types.is_dictionary(field.type)]
    for alone, of_file in groupby(parts, lambda part: part.step if part.alone else part.file):
        some = list(of_file)
        if isinstance(alone, int):
            read = list[pa.Table]()
            for part in some:  # without columns of the schema that are null throughout: reading these takes as long
                null = {c.name for c in TABLES[part.table]} - set(part.recorded.split(","))
                filled = [name for name in json.loads(part.fields) if name not in null]
                read.append(read_step(run_dir, part, coded, filled))
            pieces = iter([pa.concat_tables(read, promote_options="default")])
        else:  # piece by piece, since it holds many steps
            check(run_dir, some)
            file, steps = pq.ParquetFile(run_dir / some[0].file), [part.step for part in some]
            groups = (file.read_row_group(group, use_threads=False) for group in range(file.num_row_groups))
            pieces = (rows.filter(pc.field("step").isin(steps)) for rows in groups)
        for piece in pieces:
            columns = [
                piece[c.name].cast(c.type) if c.name in piece.column_names else pa.nulls(len(piece), c.type)
                for c in schema
            ]
            if waiting and size + len(piece) > ROW_GROUP:
                yield pa.concat_tables(waiting)
                waiting, size = [], 0
            waiting.append(pa.table(columns, schema=schema))
            size += len(piece)
        advance(len(some))
    if waiting:
        yield pa.concat_tables(waiting)
