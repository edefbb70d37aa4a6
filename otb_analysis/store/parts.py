"""The Parquet files of a run: one for each step, process and large table, or one for each table once a run has ended.

The catalogue lists them. A file that it does not list is not read, and one that is missing, exchanged or changed by a
bit is a sentence.
"""

import json
import stat
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.atomic import remove_leftovers
from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import catalogue
from otb_analysis.store.catalogue import ARROW, quoted
from otb_analysis.store.layout import PART_FILE, refused_link

ROW_GROUP = 100_000


@dataclass(frozen=True)
class Part:
    """What the catalogue says of one file for one step."""

    step: int
    table: str
    file: str  # Path inside the run, as in `tokens/part-00000003-r0.parquet`
    rows: int  # Of this step
    crc32: int  # Of all bytes
    fields: str  # Columns and their types in Arrow's words, as JSON
    recorded: str  # Columns that hold any value of this step, with commas between

    @property
    def alone(self) -> bool:
        """True when the file holds no other step."""
        return "/part-" in self.file


def listed(db: Any, run_dir: Path, table: str | None = None, steps: Collection[int] | None = None) -> list[Part]:
    """Return the files of a table, or of all, by step; those of several steps come once for each.

    Raises:
        StoreError: The catalogue has changed, or names what can be no file of a run.
    """
    rows = catalogue.read(db, run_dir, "parts", steps, [f.name for f in fields(Part)])
    parts = [Part(**row) for row in rows.to_pylist() if table in (None, row["table"])]
    for part in parts:
        match = PART_FILE.fullmatch(part.file)
        if match is None or part.table not in TABLES or part.table not in (match[1], match[2]):
            raise StoreError(f"{run_dir} lists {part.file!r:.80}, which is no file of it; restore it from a copy.")
    return parts


def as_rows(parts: Iterable[Part]) -> pa.Table:
    """Return parts as rows of the catalogue's table."""
    schema = pa.schema([(c.name, ARROW[c.dtype]) for c in catalogue.PARTS])
    return pa.Table.from_pylist([vars(part) for part in parts], schema)


def described(step: int, table: str, file: str, rows: pa.Table, checksum: int) -> Part:
    """Return what the catalogue says of rows of a step that lie in a file."""
    recorded = ",".join(n for n, c in zip(rows.column_names, rows.columns, strict=True) if c.null_count < len(rows))
    return Part(step, table, file, len(rows), checksum, named_types(rows.schema), recorded)


def named_types(schema: pa.Schema) -> str:
    """Return the columns of a file and their types, as the catalogue keeps them."""
    return json.dumps({field.name: str(field.type) for field in schema})


def check(run_dir: Path, parts: Iterable[Part]) -> None:
    """Compare files with what the catalogue says of them; each is read once in a process, until it changes.

    Raises:
        StoreError: One is missing, a link, or not the one that was written.
    """
    for file, checksum in {part.file: part.crc32 for part in parts}.items():
        path = run_dir / file
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) or path.parent.is_symlink():
                raise refused_link(path)
            computed = checksum_of(path, status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise StoreError(f"{path} {why}, though the run was written with it; restore it from a copy.") from error
        if computed != checksum:
            raise StoreError(f"{path} has changed since it was written (its CRC-32 differs); restore it from a copy.")


# Each question to a run checks its files: reading 200 MB of tokens for each takes longer than most answers.
@lru_cache(maxsize=200_000)
def checksum_of(path: Path, *state: int) -> int:
    """Return the CRC-32 of a file; while its inode, time and size (`state`) are the same, it is read once."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            checksum = crc32(block, checksum)
    return checksum


def column_names(table: str, parts: Iterable[Part]) -> list[str]:
    """Return the columns of a large table: the schema's in its order, then the extra ones of these files."""
    present = (name for text in dict.fromkeys(part.fields for part in parts) for name in json.loads(text))
    return list(dict.fromkeys([*(c.name for c in TABLES[table]), *present]))


def select(run_dir: Path, table: str, parts: Sequence[Part]) -> str:
    """Return a SELECT over files with every column of the schema; what no file has reads as null."""
    present = {name for text in {part.fields for part in parts} for name in json.loads(text)}
    dtypes = {c.name: c.dtype for c in TABLES[table]}
    columns = [
        f"CAST({quoted(name) if name in present else 'NULL'} AS {dtypes[name]}) AS {quoted(name)}"
        if name in dtypes
        else quoted(name)
        for name in column_names(table, parts)
    ]
    together = dict[str, list[Part]]()  # files of one step all at once, and each of several by itself
    for part in sorted(parts, key=lambda part: part.alone):
        together.setdefault("" if part.alone else part.file, []).append(part)
    sources = list[str]()
    for some in together.values():
        paths = ", ".join(literal(str(run_dir / name)) for name in dict.fromkeys(part.file for part in some))
        alike = len({part.fields for part in some}) == 1  # opening each file for its columns takes half the time
        # Without hive_partitioning=false a directory named a=b above the run would become a column.
        source = f"SELECT * FROM read_parquet([{paths}], union_by_name={not alike}, hive_partitioning=false)"
        if not some[0].alone:  # of a run that went back, it still holds steps that were written again elsewhere
            steps = [part.step for part in some]
            source += f" WHERE step BETWEEN {min(steps)} AND {max(steps)}"
            if max(steps) - min(steps) >= len(steps):
                source += f" AND step IN ({', '.join(map(str, steps))})"
        sources.append(source)
    joined = f"({' UNION ALL BY NAME '.join(sources)})" if sources else "(SELECT 1) WHERE false"
    return f"SELECT {', '.join(columns)} FROM {joined}"


def literal(text: str) -> str:
    """Return an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def read_step(run_dir: Path, part: Part, categories: Sequence[str] = (), columns: list[str] | None = None) -> pa.Table:
    """Return a file's rows of one step, all `columns` or some; texts named in `categories` as codes.

    Raises:
        StoreError: It is missing, or not the one that was written.
    """
    check(run_dir, [part])
    try:
        file = pq.ParquetFile(run_dir / part.file, read_dictionary=list(categories))
        if part.alone:
            return file.read(columns, use_threads=False)
        place = file.metadata.schema.names.index("step")
        ends = [file.metadata.row_group(i).column(place).statistics for i in range(file.metadata.num_row_groups)]
        groups = [i for i, one in enumerate(ends) if one is None or one.min <= part.step <= one.max]
        return file.read_row_groups(groups, columns, use_threads=False).filter(pc.field("step") == part.step)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{run_dir / part.file} cannot be read ({error}); restore it from a copy.") from error


def parquet_options(schema: pa.Schema, *, lasting: bool = True) -> dict[str, Any]:
    """Return how a table is written; the file of one step, which is merged with others later, in half the time."""
    floats = [c.name for c in schema if pa.types.is_floating(c.type)]
    others = [c.name for c in schema if c.name not in floats]
    coded = [name for name in others if name != "token_id"]  # of thousands of values a dictionary is no smaller
    # Parquet's minimum and maximum leave NaN out, and DuckDB concludes from them that there is none.
    return {
        "compression": "zstd" if lasting else "snappy", "use_byte_stream_split": floats, "use_dictionary": coded,
        "write_statistics": others if lasting else ["step"],
    }  # fmt: skip


def remove_unlisted(run_dir: Path, keep: Collection[str]) -> None:
    """Remove Parquet files that the catalogue does not list, and what a killed process left half-written.

    Raises:
        OSError: One cannot be removed.
    """
    remove_leftovers(run_dir)
    for table in TABLES:
        folder = run_dir / table
        if folder.is_symlink() or not folder.is_dir():
            continue
        for path in folder.glob("*.parquet"):
            if f"{table}/{path.name}" not in keep:
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    for path in run_dir.glob("*.parquet"):
        if path.name not in keep and path.stem in TABLES:
            path.unlink()
