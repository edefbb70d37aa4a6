"""One SELECT per table that makes many parts of different ages look like one table of today's schema."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.encode import ARROW
from otb_analysis.store.parts import Part, broken, checked, ranges, signature, without


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
    return _names(table, {name: None for part in parts for name in _checked_columns(table, part)})


def select(table: str, parts: Sequence[Part]) -> str:
    """Return a SELECT over the parts with every column of the schema; what no part has reads as null.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    present = {name: None for part in parts for name in _checked_columns(table, part)}
    return select_from(table, present, _source(parts))


def select_from(table: str, present: Collection[str], source: str) -> str:
    """Return a SELECT over a source that has these columns, with every column of the schema."""
    dtypes = {c.name: c.dtype for c in TABLES[table]}
    columns = [
        f"CAST({quoted(name) if name in present else 'NULL'} AS {dtypes[name]}) AS {quoted(name)}"
        if name in dtypes
        else quoted(name)
        for name in _names(table, present)
    ]
    return f"SELECT {', '.join(columns)} FROM {source}"


def read_part(table: str, part: Part, categories: Sequence[str] = ()) -> pa.Table:
    """Return the schema's columns of one part, those it lacks null; texts named in `categories` as codes.

    Raises:
        StoreError: The part is broken or lacks a key column.
    """
    present = _checked_columns(table, part)
    wanted = [c.name for c in TABLES[table] if c.name in present]
    try:
        # From memory and in one thread: reading by pieces, or handing columns over, takes several times as long.
        source = pa.BufferReader(part.path.read_bytes()) if part.whole else pa.memory_map(str(part.path))
        file = pq.ParquetFile(source, read_dictionary=list(categories))
        rows = file.read_row_groups(_groups(file.metadata, part), wanted, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    if not part.whole:
        rows = rows.filter(pc.field("step").isin(list(part.steps)))
    for c in TABLES[table]:
        if c.name not in present:
            rows = rows.append_column(c.name, pa.nulls(len(rows), ARROW[c.dtype]))
    return rows


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


def _names(table: str, present: Iterable[str]) -> list[str]:
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
    # Without hive_partitioning=false a directory named a=b above the run would become a column.
    return f"read_parquet([{files}], union_by_name=true, hive_partitioning=false)"


def _groups(metadata: pq.FileMetaData, part: Part) -> list[int]:
    """Return the row groups of a file that hold the steps of a part."""
    groups = range(metadata.num_row_groups)
    if part.whole:
        return list(groups)
    place = metadata.schema.names.index("step")
    ends = [metadata.row_group(i).column(place).statistics for i in groups]
    return [i for i in groups if any(_between(ends[i], step) for step in part.steps)]


def _between(ends: pq.Statistics | None, step: int) -> bool:
    return ends is None or not ends.has_min_max or ends.min <= step <= ends.max


def _checked_columns(table: str, part: Part) -> tuple[str, ...]:
    checked(part)
    try:
        names = _columns_of(*signature(part))
    except (pa.ArrowException, OSError) as error:
        raise broken(part, error) from error
    refuse_missing_keys(table, part, names)
    return names


@lru_cache(maxsize=200_000)
def _columns_of(path: Path, mtime_ns: int, size: int) -> tuple[str, ...]:
    """Return a file's columns; one that is replaced has another time or size."""
    return _shared(tuple(pq.read_schema(path).names))


@lru_cache(maxsize=1_000)
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the same names as before: thousands of files have the same columns."""
    return names
