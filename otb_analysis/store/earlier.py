"""Runs of the layout before the catalogue: a Parquet file for each step, table and process, checksums in their footers.

They are read by making a catalogue of them in memory. A run that goes on, or is compacted, keeps it as its run.sqlite.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otb_analysis.atomic import atomic_file
from otb_analysis.errors import StoreError
from otb_analysis.schema import SCHEMA_VERSION, TABLES
from otb_analysis.store import catalogue
from otb_analysis.store.catalogue import SMALL
from otb_analysis.store.encode import with_not_finite
from otb_analysis.store.layout import CATALOGUE, refused_link
from otb_analysis.store.parts import Part, as_rows, described, remove_unlisted
from otb_analysis.store.runfile import read_run_file, write_run_file

_PART = re.compile(r"part-(\d+)-r(\d+)\.parquet", re.ASCII)
_MERGED = re.compile(r"merged-(\d+)-(\d+)\.parquet", re.ASCII)
_CHECKSUM = b"otb_crc32\x18\x08"  # a key of the footer as Thrift writes it: then comes a text of 8 bytes
MOST_STEPS = 1_000_000
"""Steps of a file beyond which its list is wrong: each takes memory before a row is read."""


def is_earlier(run_dir: Path) -> bool:
    """Return whether a run has this layout.

    Raises:
        StoreError: Its run.json cannot be read.
    """
    return read_run_file(run_dir)["schema_version"] == 1


def upgrade(run_dir: Path) -> None:
    """Give a run of this layout the catalogue that it is read by; others stay as they are.

    Raises:
        StoreError: A file is broken or missing; nothing was changed.
        OSError: The disk refuses.
        sqlite3.Error: The same.
    """
    if not is_earlier(run_dir):
        return
    db = catalogue_of(run_dir)
    with atomic_file(run_dir / CATALOGUE) as file, closing(sqlite3.connect(file.name)) as copy:
        db.backup(copy)
    info = {name: value for name, value in read_run_file(run_dir).items() if name != "compacted"}
    write_run_file(run_dir, info | {"schema_version": SCHEMA_VERSION})  # from now on the catalogue counts
    remove_unlisted(run_dir, {file for (file,) in db.execute("SELECT DISTINCT file FROM parts")})
    for digest in run_dir.glob("*.digest"):
        digest.unlink()


def catalogue_of(run_dir: Path) -> sqlite3.Connection:
    """Return a catalogue, in memory, of a run of this layout.

    Raises:
        StoreError: A file is broken, missing, or not the one that its step was written with.
    """
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    catalogue.make(db)
    files = sorted(_files(run_dir), key=lambda one: (one.step, one.path.parent.name, one.path.name))
    db.execute("BEGIN")
    for step, of_step in groupby(files, lambda one: one.step):
        small, parts = dict[str, list[pa.Table]](), list[Part]()
        for one in of_step:
            table, rows = one.path.parent.name, one.rows()
            if table in SMALL:
                small.setdefault(table, []).append(with_not_finite(rows) if table == "steps" else rows)
            else:
                parts.append(described(step, table, f"{table}/{one.path.name}", rows, one.crc32))
        joined = {table: pa.concat_tables(some, promote_options="permissive") for table, some in small.items()}
        catalogue.add_step(db, step, joined | {"parts": as_rows(parts)})
    db.execute("COMMIT")
    return db


@dataclass(frozen=True)
class _File:
    """A file that was checked, and one of its steps."""

    step: int
    path: Path
    content: pa.Table
    crc32: int

    def rows(self) -> pa.Table:
        """Return the rows of the step, without columns that hold nothing where others say it is one row each."""
        rows = self.content
        return rows if _PART.fullmatch(self.path.name) else rows.filter(pc.field("step") == self.step)


def _files(run_dir: Path) -> Iterator[_File]:
    """Yield the files of complete steps: those with a part of `steps`, or in a merged file of it."""
    merged = dict[str, set[int]]()
    for table, path, steps, checksum in _merged(run_dir, read_run_file(run_dir).get("compacted") or {}):
        content, found, _ = _checked(path, checksum)
        merged.setdefault(table, set()).update(steps)
        for step in steps:
            yield _File(step, path, content, found)
    named = dict[int, dict[str, dict[str, str]]]()
    for path, step in _parts(run_dir, "steps"):
        if step not in merged.get("steps", ()):
            content, found, metadata = _checked(path, "")
            named[step] = json.loads(metadata.get(b"otb_parts", b"{}"))
            yield _File(step, path, content, found)
    for table in TABLES:
        there = [(path, step) for path, step in _parts(run_dir, table) if table != "steps" and step in named]
        missing = {(step, name) for step, said in named.items() for name in said.get(table, ())}
        missing -= {(step, path.name) for path, step in there}
        if missing:
            step, name = min(missing)
            raise StoreError(
                f"{run_dir / table / name} is missing, though step {step} was written with it; restore it, or delete "
                f"{run_dir / 'steps' / f'part-{step:08d}-r0.parquet'} to read the run without step {step}."
            )
        for path, step in there:
            content, found, _ = _checked(path, named[step].get(table, {}).get(path.name, ""))
            yield _File(step, path, content, found)


def _parts(run_dir: Path, table: str) -> list[tuple[Path, int]]:
    folder = run_dir / table
    if folder.is_symlink():
        raise refused_link(folder)
    found = [(path, match) for path in folder.glob("*.parquet") if (match := _PART.fullmatch(path.name))]
    return sorted((path, int(match[1])) for path, match in found)


def _checked(path: Path, checksum: str) -> tuple[pa.Table, int, Mapping[bytes, bytes]]:
    """Return the rows of a file, the CRC-32 of its bytes and the metadata of its footer, once it is the right one."""
    if path.is_symlink():
        raise refused_link(path)
    try:
        content = path.read_bytes()
        blank, at = bytearray(content), content.rfind(_CHECKSUM) + len(_CHECKSUM)
        if at >= len(_CHECKSUM):
            blank[at : at + 8] = b"00000000"
            said, found = content[at : at + 8], f"{crc32(blank, crc32(f'{path.parent.name}/{path.name}'.encode())):08x}"
            if said != found.encode():
                raise OSError("its checksum differs, so it has changed since it was written")
            if checksum not in ("", found):
                raise OSError("it is another file than its step was written with")
        file = pq.ParquetFile(pa.BufferReader(content))
        rows = file.read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        why = (getattr(error, "strerror", None) or str(error)).splitlines()[0].rstrip(".")
        raise StoreError(f"{path} is broken ({why}); restore it from a copy, or write the run again.") from error
    for column in TABLES[path.parent.name]:
        if column.key and column.name not in rows.column_names:
            raise StoreError(
                f"{path} has no key column {column.name!r}, so its rows cannot be assigned to a step or rollout; "
                "restore it from a copy, or write the run again."
            )
    return rows.replace_schema_metadata(None), crc32(content), file.schema_arrow.metadata or {}


def _merged(run_dir: Path, listed: Any) -> Iterator[tuple[str, Path, list[int], str]]:
    """Yield table, file, steps and checksum of what run.json lists of a compacted run.

    Raises:
        StoreError: It lists what is no file of this run, or steps that a file cannot hold or that two hold.
    """
    try:
        for table, files in listed.items():
            seen = set[int]()
            for one in files:
                ends, match = [(int(first), int(last)) for first, last in one["steps"]], _MERGED.fullmatch(one["file"])
                if table not in TABLES or match is None or sum(last - first for first, last in ends) > MOST_STEPS:
                    raise ValueError(f"{table}/{one['file']}"[:80])
                steps = [step for first, last in ends for step in range(first, last + 1)]
                inside = all(int(match[1]) <= step <= int(match[2]) for step in steps)
                if not inside or not steps or len(set(steps)) < len(steps) or seen & set(steps):
                    raise ValueError(f"{table}/{one['file']} cannot hold steps {str(one['steps'])[:40]} here")
                seen |= set(steps)
                yield table, run_dir / table / one["file"], steps, str(one["checksum"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{run_dir / 'run.json'} lists under 'compacted' what is no part of this run ({error}); restore it from a "
            "copy of the run."
        ) from error
