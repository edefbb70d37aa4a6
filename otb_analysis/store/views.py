"""One SELECT per table that makes many parts of different ages look like one table of today's schema."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.checksum import check_part
from otb_analysis.store.encode import ARROW
from otb_analysis.store.layout import Part


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
    names = dict.fromkeys(c.name for c in TABLES[table])
    for part in parts:
        names |= dict.fromkeys(_checked_columns(table, part))
    return list(names)


def select(table: str, parts: Sequence[Part]) -> str:
    """Return a SELECT over the parts with every column of the schema; what no part has reads as null.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    present = {name for part in parts for name in _checked_columns(table, part)}
    dtypes = {c.name: c.dtype for c in TABLES[table]}
    columns = [
        f"CAST({quoted(name) if name in present else 'NULL'} AS {dtypes[name]}) AS {quoted(name)}"
        if name in dtypes
        else quoted(name)
        for name in column_names(table, parts)
    ]
    return f"SELECT {', '.join(columns)} FROM {_source(parts)}"


def read_part(table: str, part: Part, categories: Sequence[str] = ()) -> pa.Table:
    """Return the schema's columns of one part, those it lacks null; texts named in `categories` as codes.

    Raises:
        StoreError: The part is broken or lacks a key column.
    """
    present = _checked_columns(table, part)
    wanted = [c.name for c in TABLES[table] if c.name in present]
    try:
        # From bytes and in one thread: reading by pieces, or handing columns over, takes several times as long.
        file = pq.ParquetFile(pa.BufferReader(part.path.read_bytes()), read_dictionary=list(categories))
        rows = file.read(wanted, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _broken(part.path, error) from error
    for c in TABLES[table]:
        if c.name not in present:
            rows = rows.append_column(c.name, pa.nulls(len(rows), ARROW[c.dtype]))
    return rows


def signature(part: Part) -> tuple[Path, int, int]:
    """Return what changes when a part is written again.

    Raises:
        StoreError: It is gone.
    """
    try:
        status = part.path.stat()
    except OSError as error:
        raise _broken(part.path, error) from error
    return part.path, status.st_mtime_ns, status.st_size


def broken_part(parts: Sequence[Part]) -> StoreError | None:
    """Read parts to the end and return the sentence about the first that cannot be read, or None."""
    for part in parts:
        try:
            check_part(part.path)
            pq.ParquetFile(part.path).read()
        except (pa.ArrowException, OSError) as error:
            return _broken(part.path, error)
    return None


def _source(parts: Sequence[Part]) -> str:
    if not parts:
        return "(SELECT 1) WHERE false"
    files = ", ".join(literal(str(part.path)) for part in parts)
    # Without hive_partitioning=false a directory named a=b above the run would become a column.
    return f"read_parquet([{files}], union_by_name=true, hive_partitioning=false)"


def _checked_columns(table: str, part: Part) -> tuple[str, ...]:
    try:
        names = _columns_of(*signature(part))
    except (pa.ArrowException, OSError) as error:
        raise _broken(part.path, error) from error
    for column in TABLES[table]:
        if column.key and column.name not in names:
            raise StoreError(
                f"{part.path} has no key column {column.name!r}, so its rows cannot be assigned to a step or rollout; "
                "delete it or write the run again."
            )
    return names


@lru_cache(maxsize=200_000)
def _columns_of(path: Path, mtime_ns: int, size: int) -> tuple[str, ...]:
    """Return a file's columns once its checksum is right; one that is replaced has another time or size."""
    check_part(path)
    return tuple(pq.read_schema(path).names)


def _broken(path: Path, error: Exception) -> StoreError:
    why = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
    return StoreError(f"{path} is broken ({why}); delete it to read the rest, or write the run again.")
