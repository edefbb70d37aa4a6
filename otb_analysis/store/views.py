"""One SELECT per table that makes many parts of different ages look like one table of today's schema."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.encode import ARROW
from otb_analysis.store.merged import Part, ranges
from otb_analysis.store.parts import broken, checked, signature, without


def quoted(name: str) -> str:
    """Return an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def column_names(table: str, parts: Sequence[Part]) -> list[str]:
    """Return the columns of a table: the schema's in its order, then the extra ones of these parts.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    return names_of(table, _checked_columns(table, parts))


def select(table: str, parts: Sequence[Part]) -> str:
    """Return a SELECT over the parts with every column of the schema; what no part has reads as null.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    return select_from(table, _checked_columns(table, parts), _source(parts))


def select_from(table: str, present: Collection[str], source: str) -> str:
    """Return a SELECT over a source that has these columns, with every column of the schema."""
    dtypes = {c.name: c.dtype for c in TABLES[table]}
    columns = [
        f"CAST({quoted(name) if name in present else 'NULL'} AS {dtypes[name]}) AS {quoted(name)}"
        if name in dtypes
        else quoted(name)
        for name in names_of(table, present)
    ]
    return f"SELECT {', '.join(columns)} FROM {source}"


@dataclass(frozen=True)
class Opened:
    """A part whose bytes were checked, ready to be read; made by `opened`."""

    part: Part
    source: pa.NativeFile
    file: pq.ParquetFile


def opened(part: Part, categories: Sequence[str] = ()) -> Opened:
    """Open a part; texts named in `categories` will be read as codes.

    Raises:
        StoreError: The part is broken.
    """
    checked(part)
    try:
        # Reading by pieces, or handing columns over, takes several times as long.
        source = pa.BufferReader(part.path.read_bytes()) if part.whole else pa.memory_map(str(part.path))
        return Opened(part, source, pq.ParquetFile(source, read_dictionary=list(categories)))
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error


def read_part(table: str, part: Part, categories: Sequence[str] = (), only: Collection[str] | None = None) -> pa.Table:
    """Return the schema's columns of one part, or some, those it lacks null; texts named in `categories` as codes.

    Raises:
        StoreError: The part is broken or lacks a key column.
    """
    return read_opened(table, opened(part, categories), only)


def read_opened(table: str, one: Opened, only: Collection[str] | None = None) -> pa.Table:
    """Return the same of a part that is open."""
    part, file = one.part, one.file
    present = _checked_columns(table, [part])
    asked = [c for c in TABLES[table] if only is None or c.name in only]
    wanted = [c.name for c in asked if c.name in present]
    try:
        groups, alone = _groups(file.metadata, part)
        rows = file.read_row_groups(groups, wanted, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    if not alone:
        rows = rows.filter(pc.field("step").isin(list(part.steps)))
    for c in asked:
        if c.name not in present:
            rows = rows.append_column(c.name, pa.nulls(len(rows), ARROW[c.dtype]))
    return rows


def written_columns(one: Opened, names: Collection[str]) -> bytes | None:
    """Return a digest of some columns of a part as they lie on disk; None where other steps lie among them."""
    metadata = one.file.metadata
    groups, alone = _groups(metadata, one.part)
    names = set(names) & set(metadata.schema.names)  # a part of an earlier version lacks some
    found, digest = 0, sha256()
    for chunk in (metadata.row_group(i).column(j) for i in groups for j in range(metadata.num_columns)):
        if chunk.path_in_schema in names:
            one.source.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
            digest.update(f"{chunk.path_in_schema} {chunk.compression} {chunk.encodings} {chunk.num_values} ".encode())
            digest.update(one.source.read_buffer(chunk.total_compressed_size))
            found += 1
    return digest.digest() if alone and groups and found == len(groups) * len(names) else None


def refuse_missing_keys(table: str, part: Part, names: Collection[str]) -> None:
    """Refuse a part that has not all key columns.

    Raises:
        StoreError: It has not; the sentence names the first one.
    """
    for column in TABLES[table]:
        if column.key and column.name not in names:
            raise StoreError(
                f"{part.path} has no key column {column.name!r}, so its rows cannot be assigned to a step or rollout; "
                f"{without(part)}, or write the run again."
            )


def broken_part(parts: Sequence[Part]) -> StoreError | None:
    """Read parts to the end and return the sentence about the first that cannot be read, or None."""
    for part in parts:
        try:
            checked(part)
            pq.ParquetFile(part.path).read()
        except StoreError as error:
            return error
        except (pa.ArrowException, OSError) as error:
            return broken(part, error)
    return None


def names_of(table: str, present: Iterable[str]) -> list[str]:
    """Return the schema's columns of a table in its order, then those of these that it does not have."""
    return list(dict.fromkeys(c.name for c in TABLES[table]) | dict.fromkeys(present))


def _source(parts: Sequence[Part]) -> str:
    sources = []
    for whole, some in groupby(parts, lambda part: part.whole):
        if whole:
            sources.append(_scan(list(some)))
            continue
        # Each with its own steps: a file may still hold some that were written again, in another file.
        for part in some:
            held = (f"step BETWEEN {first} AND {last}" for first, last in ranges(part.steps))
            sources.append(f"(SELECT * FROM {_scan([part])} WHERE {' OR '.join(held)})")
    if len(sources) < 2:
        return sources[0] if sources else "(SELECT 1) WHERE false"
    return f"({' UNION ALL BY NAME '.join(f'SELECT * FROM {source}' for source in sources)})"


def _scan(parts: Sequence[Part]) -> str:
    files = ", ".join(literal(str(part.path)) for part in parts)
    alike = len({id(_schema_of(part)) for part in parts}) == 1  # opening each file for its columns takes half the time
    # Without hive_partitioning=false a directory named a=b above the run would become a column.
    return f"read_parquet([{files}], union_by_name={not alike}, hive_partitioning=false)"


def _groups(metadata: pq.FileMetaData, part: Part) -> tuple[list[int], bool]:
    """Return the row groups of a file that hold the steps of a part, and whether they hold no other."""
    groups = range(metadata.num_row_groups)
    if part.whole:
        return list(groups), True
    place = metadata.schema.names.index("step")
    ends = [metadata.row_group(i).column(place).statistics for i in groups]
    held = [(s.min, s.max) if s is not None and s.has_min_max else (0, 1 << 62) for s in ends]
    found = [i for i in groups if any(held[i][0] <= step <= held[i][1] for step in part.steps)]
    return found, all(held[i][0] == held[i][1] for i in found)


def _checked_columns(table: str, parts: Sequence[Part]) -> list[str]:
    """Return the columns that any of these parts has; most often all have the same, which are looked at once."""
    first: dict[pa.Schema, Part] = {}
    for part in parts:
        first.setdefault(_schema_of(part), part)
    for schema, part in first.items():
        refuse_missing_keys(table, part, schema.names)
    return list(dict.fromkeys(name for schema in first for name in schema.names))


def _schema_of(part: Part) -> pa.Schema:
    said = checked(part).schema
    if said in _SCHEMAS:
        return _SCHEMAS[said]
    try:
        schema = _read_schema(*signature(part, now=True))
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    return _SCHEMAS.setdefault(said, schema) if said else schema


@lru_cache(maxsize=200_000)
def _read_schema(path: Path, mtime_ns: int, size: int) -> pa.Schema:
    """Return a file's columns; one that is replaced has another time or size."""
    schema = pq.read_schema(path).remove_metadata()
    return _SCHEMAS.setdefault(str(schema), schema)  # thousands of files share one


_SCHEMAS: dict[str, pa.Schema] = {}
"""Columns by what a part says of them, and by their names and types."""
