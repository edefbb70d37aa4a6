"""Compaction: the parts of many steps become few files with the same rows; nothing is removed before they are checked.

Readers go on meanwhile. The merged files are written first, where no reader looks; then run.json lists them, in one
exchange; then the parts go. Killed before the exchange the run is what it was, killed after it the parts that are left
count no more. Either way the next compaction, or the next writer, removes what is left over.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.atomic import atomic_file
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import advance, count_to
from otb_analysis.schema import TABLES
from otb_analysis.store.checksum import BLANK, CHECKSUM, stamp
from otb_analysis.store.digest import forget
from otb_analysis.store.encode import ARROW
from otb_analysis.store.layout import MERGED, find_run, merged_path
from otb_analysis.store.liveness import other_writer, standing, this_process
from otb_analysis.store.merged import COMPACTED, Part, ranges
from otb_analysis.store.parts import broken, checked, remove_unlisted, visible_parts
from otb_analysis.store.runfile import read_run_file, write_run_file
from otb_analysis.store.views import refuse_missing_keys
from otb_analysis.store.writer import ROW_GROUP, parquet_options

COMPACTING = "compacting"
"""The key in run.json that names the process which compacts the run."""
FILE_BYTES = 64 << 20
"""Bytes of parts after which a merged file is complete: it is held in memory until then."""

T = TypeVar("T")


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    steps: int  # Steps whose parts were merged
    parts: int  # Files before
    files: int  # Files after
    bytes_before: int
    bytes_after: int


def compact(path: Path) -> Compacted:
    """Merge the parts of a run's complete steps into few files; steps that were merged before stay as they are.

    Raises:
        InputError: There is no such run, or a process writes or compacts it.
        StoreError: A part is broken or missing, or the disk refuses; the run is as it was.
    """
    run_dir = find_run(path)
    info = {name: value for name, value in read_run_file(run_dir).items() if name != COMPACTING}
    _refuse_writer(run_dir)
    visible = visible_parts(run_dir, TABLES)
    loose = {table: [p for p in parts if not MERGED.fullmatch(p.path.name)] for table, parts in visible.items()}
    before = [part.path for parts in loose.values() for part in parts]
    sizes = sum(file.stat().st_size for file in before)
    count_to(len(before), "file")
    try:
        write_run_file(run_dir, info | {COMPACTING: this_process()})
        mine = read_run_file(run_dir)
        remove_unlisted(run_dir)
        new = {table: [_write(run_dir, table, some) for some in _by_file(parts)] for table, parts in loose.items()}
        if read_run_file(run_dir) != mine:
            raise StoreError(f"{run_dir} was changed by another process while it was compacted; compact it again.")
        listed: Any = info.get(COMPACTED, {})
        files = {table: [*listed.get(table, ()), *entries] for table, entries in new.items()}
        write_run_file(run_dir, info | {COMPACTED: files})
        remove_unlisted(run_dir)
        forget(run_dir)
    except OSError as error:
        with suppress(OSError, StoreError):
            remove_unlisted(run_dir)
            write_run_file(run_dir, info)
        raise StoreError(
            f"cannot compact {run_dir} ({error.strerror or error}); its steps stay readable, free some space and "
            "compact it again."
        ) from error
    merged = [run_dir / table / str(entry["file"]) for table, entries in new.items() for entry in entries]
    return Compacted(len(loose["steps"]), len(before), len(merged), sizes, sum(f.stat().st_size for f in merged))


def _refuse_writer(run_dir: Path) -> None:
    info = read_run_file(run_dir)
    pid = other_writer(info)
    if pid or standing(info)[0] == "running":
        by = f"process {pid}" if pid else f"a process of {platform.node()}"
        raise InputError(f"{run_dir} is being written by {by}; compact it once it has ended.")


def _by_file(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts of one merged file after the other; a step is never cut."""
    some, size = list[Part](), 0
    for _, of_step in groupby(parts, lambda part: part.step):
        more = list(of_step)
        if some and size >= FILE_BYTES:
            yield some
            some, size = [], 0
        some += more
        size += sum(part.path.stat().st_size for part in more)
    if some:
        yield some


def _write(run_dir: Path, table: str, parts: Sequence[Part]) -> dict[str, object]:
    """Write one merged file, compare it with the parts row by row, and return what run.json says of it."""
    steps = sorted({part.step for part in parts})
    path = merged_path(run_dir, table, steps[0], steps[-1])
    schema = _schema(table, parts)
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, schema, **parquet_options(schema, len(parts))) as writer:
        for rows in _row_groups(table, parts, schema):
            writer.write_table(rows, row_group_size=ROW_GROUP)
        writer.add_key_value_metadata({CHECKSUM: BLANK.decode()})
    content, checksum = stamp(path, memoryview(buffer.getvalue()))
    del buffer
    _compare(path, content, _row_groups(table, parts, schema))
    with atomic_file(path) as file:
        file.write(content)
    advance(len(parts))
    return {"file": path.name, "checksum": checksum, "steps": ranges(steps)}


def _schema(table: str, parts: Sequence[Part]) -> pa.Schema:
    """Return the columns of all parts: those of the schema as it has them today, the others as they were written."""
    found = dict.fromkeys(_read(table, part, pq.read_schema) for part in parts)
    joined = pa.unify_schemas([schema.remove_metadata() for schema in found], promote_options="permissive")
    today = {c.name: ARROW[c.dtype] for c in TABLES[table]}
    return pa.schema([field.with_type(today.get(field.name, field.type)) for field in joined])


def _row_groups(table: str, parts: Sequence[Part], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of whole steps, at most `ROW_GROUP` of several steps, so that one step is found and read alone."""
    some, size = list[pa.Table](), 0
    for _, of_step in groupby(parts, lambda part: part.step):
        more = [_with_columns(_read(table, part, _rows_of), schema) for part in of_step]
        rows = sum(map(len, more))
        if some and size + rows > ROW_GROUP:
            yield pa.concat_tables(some)
            some, size = [], 0
        some += more
        size += rows
    yield pa.concat_tables(some)


def _read(table: str, part: Part, read: Callable[[Path], T]) -> T:
    checked(part)
    try:
        refuse_missing_keys(table, part, pq.read_schema(part.path).names)
        return read(part.path)
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error


def _rows_of(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read(use_threads=False)


def _with_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with all columns of a schema; what they lack is null."""
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _compare(path: Path, content: bytes, written: Iterator[pa.Table]) -> None:
    """Refuse a merged file whose rows are not those of its parts, to the last bit.

    Raises:
        StoreError: They are not; nothing was removed.
    """
    file, at = pq.ParquetFile(pa.BufferReader(content)), 0
    for rows in written:
        groups = list(range(at, at + max(1, -(-len(rows) // ROW_GROUP))))
        if not _bits(file.read_row_groups(groups, use_threads=False)).equals(_bits(rows)):
            raise StoreError(f"{path} would not hold the rows of its parts; nothing was changed, please report this.")
        at = groups[-1] + 1


def _bits(rows: pa.Table) -> pa.Table:
    """Return rows with floats as the integers of their bits, since NaN equals nothing."""
    as_bits = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}
    columns = [c.combine_chunks().view(as_bits[c.type]) if c.type in as_bits else c for c in rows.columns]
    return pa.table(columns, names=rows.column_names)
