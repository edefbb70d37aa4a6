"""Runs of the layout before the catalogue: a Parquet file for each step, table and process, checksums in their footers.

They are read by making a catalogue of them in memory. A run that goes on, or is compacted, keeps it as its run.sqlite.
"""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
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
from otb_analysis.store.gram import derived
from otb_analysis.store.layout import CATALOGUE, read_run_file, refused_link, write_run_file
from otb_analysis.store.parts import Part, as_rows, listed, named_types, read_step, remove_unlisted

_PART = re.compile(r"part-(\d+)-r(\d+)\.parquet", re.ASCII)
_MERGED = re.compile(r"merged-(\d+)-(\d+)\.parquet", re.ASCII)
_CHECKSUM = b"otb_crc32\x18\x08"  # a key of the footer as Thrift writes it: then comes a text of 8 bytes
VERSION = 1
"""The schema_version of runs of this layout."""
MOST_STEPS = 1_000_000
"""Steps of a file beyond which its list is wrong: each takes memory before a row is read."""


def upgrade(run_dir: Path) -> None:
    """Give a run of this layout the catalogue that it is read by; others stay as they are.

    Raises:
        StoreError: A file is broken or missing; nothing was changed.
        OSError: The disk refuses.
        sqlite3.Error: The same.
    """
    if read_run_file(run_dir)["schema_version"] != VERSION:
        return
    db = catalogue_of(run_dir)
    with atomic_file(run_dir / CATALOGUE) as file, closing(sqlite3.connect(file.name, isolation_level=None)) as copy:
        db.backup(copy)
        config: Any = read_run_file(run_dir).get("config") or {}
        for step in catalogue.written_steps(copy, run_dir):
            parts: dict[str, list[pa.Table]] = {"grams": [], "subgroups": []}
            for part in listed(copy, run_dir, steps=[step]):
                if part.table in parts:
                    parts[part.table].append(read_step(run_dir, part))
            tables = {name: pa.concat_tables(some, promote_options="default") for name, some in parts.items() if some}
            tables["rollouts"] = catalogue.read(copy, run_dir, "rollouts", [step], ["group", "prompt_id"])
            catalogue.add_products(copy, step, derived(config, tables))
    info = {name: value for name, value in read_run_file(run_dir).items() if name != "compacted"}
    write_run_file(run_dir, info | {"schema_version": SCHEMA_VERSION})  # from now on the catalogue counts
    remove_unlisted(run_dir, {file for (file,) in db.execute("SELECT DISTINCT file FROM parts")})
    for digest in run_dir.glob("*.digest"):
        digest.unlink()


def catalogue_of(run_dir: Path) -> sqlite3.Connection:
    """Return a catalogue, in memory, of a run of this layout; that of before while its files are the same.

    Raises:
        StoreError: A file is broken, missing, or not the one that its step was written with.
    """
    paths = (run_dir / "run.json", *(run_dir / table for table in TABLES))
    return _catalogue_of(run_dir, tuple(path.stat().st_mtime_ns for path in paths if path.exists()))


# Thousands of small files of a run of this layout take seconds to read, and every question to it asks for them.
@lru_cache(maxsize=4)
def _catalogue_of(run_dir: Path, times: tuple[int, ...]) -> sqlite3.Connection:
    steps = dict[int, list[tuple[Path, Part | pa.Table]]]()
    for path, of_file in _files(run_dir):
        for step, content in of_file.items():
            steps.setdefault(step, []).append((path, content))
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    catalogue.make(db)
    db.execute("BEGIN")
    for step in sorted(steps):
        some = sorted(steps[step], key=lambda one: one[0])
        tables = {"parts": as_rows(content for _, content in some if isinstance(content, Part))}
        for table in SMALL:
            rows = [one for path, one in some if path.parent.name == table and isinstance(one, pa.Table)]
            if rows:
                tables[table] = pa.concat_tables(rows, promote_options="permissive")
        catalogue.add_step(db, step, tables)
    db.execute("COMMIT")
    return db


def _files(run_dir: Path) -> Iterator[tuple[Path, Mapping[int, Part | pa.Table]]]:
    """Yield the files of complete steps (with a part of `steps`, or in a merged file of it), and what each step has."""
    merged = {table: set[int]() for table in TABLES}
    for path, steps, checksum in _merged(run_dir, read_run_file(run_dir).get("compacted") or {}):
        merged[path.parent.name].update(steps)
        yield path, _checked(path, steps, checksum)[0]
    named = dict[int, dict[str, dict[str, str]]]()
    for table in ("steps", *(table for table in TABLES if table != "steps")):
        if (run_dir / table).is_symlink():
            raise refused_link(run_dir / table)
        matches = [(path, _PART.fullmatch(path.name)) for path in (run_dir / table).glob("*.parquet")]
        there = sorted((path, int(match[1])) for path, match in matches if match)
        if table == "steps":
            for path, step in there:
                if step not in merged["steps"]:
                    content, metadata = _checked(path, [step], "")
                    named[step] = json.loads(metadata.get(b"otb_parts", b"{}"))
                    yield path, content
            continue
        missing = {(step, name) for step, files in named.items() for name in files.get(table, ())}
        missing -= {(step, path.name) for path, step in there}
        if missing:
            step, name = min(missing)
            raise StoreError(
                f"{run_dir / table / name} is missing, though step {step} was written with it; restore it, or delete "
                f"{run_dir / 'steps' / f'part-{step:08d}-r0.parquet'} to read the run without step {step}."
            )
        for path, step in there:
            if step in named:
                yield path, _checked(path, [step], named[step].get(table, {}).get(path.name, ""))[0]


def _checked(
    path: Path, steps: Sequence[int], checksum: str
) -> tuple[Mapping[int, Part | pa.Table], Mapping[bytes, bytes]]:
    """Return what a file has of each step, once it is the right one, and the metadata of its footer.

    It is compared with the checksum in its footer, if it has one, and with the one that its step names.
    Of a small table these are its rows, of a large one where they lie.
    """
    if path.is_symlink():
        raise refused_link(path)
    table, alone = path.parent.name, _PART.fullmatch(path.name) is not None
    try:
        content = path.read_bytes()
        at = content.rfind(_CHECKSUM) + len(_CHECKSUM)
        if at >= len(_CHECKSUM):
            blank = b"".join((content[:at], b"00000000", content[at + 8 :]))
            computed = f"{crc32(blank, crc32(f'{table}/{path.name}'.encode())):08x}"
            if content[at : at + 8] != computed.encode():
                raise OSError("its checksum differs, so it has changed since it was written")
            if checksum not in ("", computed):
                raise OSError("it is another file than its step was written with")
        file = pq.ParquetFile(pa.BufferReader(content))
        names = file.schema_arrow.names
        for column in TABLES[table]:
            if column.key and column.name not in names:
                raise OSError(f"it has no key column {column.name!r}, so its rows belong to no step or rollout")
        metadata = file.metadata.metadata or {}
        if table in SMALL:
            rows = file.read(use_threads=False).replace_schema_metadata(None)
            return {step: rows if alone else rows.filter(pc.field("step") == step) for step in steps}, metadata
        counts = {steps[0]: file.metadata.num_rows} if alone else Counter(file.read(["step"])["step"].to_pylist())
        recorded = metadata.get(b"otb_recorded", b"").decode()
        if not recorded:  # of versions that did not say it; one column after the other, since files may be large
            recorded = ",".join(name for name in names if file.read([name])[name].null_count < file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        why = (getattr(error, "strerror", None) or str(error)).splitlines()[0].rstrip(".")
        raise StoreError(f"{path} is broken ({why}); restore it from a copy, or write the run again.") from error
    part = Part(0, table, f"{table}/{path.name}", 0, crc32(content), named_types(file.schema_arrow), recorded)
    return {step: replace(part, step=step, rows=counts[step]) for step in steps}, metadata


def _merged(run_dir: Path, named: Any) -> Iterator[tuple[Path, list[int], str]]:
    """Yield path, steps and checksum of each file that run.json lists of a compacted run.

    Raises:
        StoreError: It lists what is no file of this run, or steps that a file cannot hold or that two hold.
    """
    try:
        for table, files in named.items():
            seen = set[int]()
            if table not in TABLES:
                raise ValueError(f"there is no table {table!r:.80}")
            for one in files:
                ends, match = [(int(first), int(last)) for first, last in one["steps"]], _MERGED.fullmatch(one["file"])
                if match is None or sum(last - first for first, last in ends) > MOST_STEPS:
                    raise ValueError(f"{table}/{one['file']}"[:80])
                steps = [step for first, last in ends for step in range(first, last + 1)]
                inside = all(int(match[1]) <= step <= int(match[2]) for step in steps)
                if not inside or not steps or len(set(steps)) < len(steps) or seen & set(steps):
                    raise ValueError(f"{table}/{one['file']} cannot hold steps {str(one['steps'])[:40]} here")
                seen |= set(steps)
                yield run_dir / table / one["file"], steps, str(one["checksum"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{run_dir / 'run.json'} lists under 'compacted' what is no part of this run ({error}); restore it from a "
            "copy of the run."
        ) from error
