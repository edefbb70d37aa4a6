"""The one writer of a run: each step's parts appear whole or not at all, the `steps` part last."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.atomic import atomic_file, atomic_folder
from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.checksum import (
    BLANK,
    CHECKSUM,
    COLUMNS,
    LIGHT,
    PARTS,
    RECORDED,
    ROW,
    SCHEMA,
    stamp,
    written_about,
)
from otb_analysis.store.digest import TEXTS, note
from otb_analysis.store.encode import Columns, encode, with_not_finite
from otb_analysis.store.held import light_text, row_text
from otb_analysis.store.layout import RUN_FILE, check_run_name, find_run, is_run, part_path
from otb_analysis.store.liveness import other_writer, this_process
from otb_analysis.store.merged import COMPACTED, last_merged_step, merged_before
from otb_analysis.store.parts import loose_parts, remove_unlisted
from otb_analysis.store.runfile import RESERVE, git_state, new_run, now, read_run_file, write_reserve, write_run_file

ROW_GROUP = 100_000


@dataclass(frozen=True)
class StepTables:
    """Everything one process writes about one step; made by `training`, read by `RunWriter`.

    Each table is a DataFrame or a dict of columns (lists, arrays, masked arrays); `schema` says which there are.
    None entries and masked ones are null: not measured. NaN stays NaN.
    """

    tokens: Columns | None = None  # One row per completion token
    rollouts: Columns | None = None  # One row per rollout
    steps: Mapping[str, object] = field(default_factory=dict)  # The step's scalars; only rank 0's are written
    gradients: Columns | None = None  # One row per estimator, when the step was measured
    grams: Columns | None = None  # Inner products of group gradients (`gram_rows`), when the step was measured
    subgroups: Columns | None = None  # The same of smaller groups cut from them (`subgroup_rows`)
    sampling: Columns | None = None  # Sums of the sampling check


class RunWriter:
    """Writes one run; `create` makes it, `write_step` adds a step, `finish` says how it ended.

    Several processes may write one run: rank 0 owns run.json and the `steps` parts, and must write a step after
    the others have written theirs, since the `steps` part is what makes a step visible. Other ranks
    use the constructor.
    """

    def __init__(self, path: Path, rank: int = 0, size: int = 1) -> None:
        self.path = path
        self.rank = rank
        self.size = size  # Processes that write parts of the same steps
        self._last_step: int | None = None

    @classmethod
    def create(
        cls,
        root: str | Path,
        run: str,
        config: Mapping[str, object],
        *,
        if_exists: Literal["error", "replace"] = "error",
        machine: Mapping[str, object] | None = None,
    ) -> "RunWriter":
        """Make the run's directory and its run.json, and return its writer.

        Args:
            config: Its whole configuration, nested; `seed` is repeated at the top of run.json.
            if_exists: What to do with a run of that name: refuse, or delete it first.
            machine: Where its model runs, and in which arithmetic it is measured.

        Raises:
            InputError: The name is no directory name, a directory of that name exists, or the run to be replaced is
                being written by another process.
            StoreError: The directory cannot be made.
        """
        path = Path(root) / check_run_name(run)
        try:
            _clear(path, if_exists)
            with atomic_folder(path, replace=False) as draft:
                write_run_file(draft, new_run(run, config) | ({"machine": dict(machine)} if machine else {}))
                write_reserve(draft)
        except OSError as error:
            raise StoreError(
                f"cannot make {path} ({_why(error)}); make its parent writable or pass another."
            ) from error
        return cls(path)

    @classmethod
    def resume(cls, path: Path, from_step: int, machine: Mapping[str, object] | None = None) -> "RunWriter":
        """Return the writer of a run that goes on: the steps from `from_step` on are removed, whole or half written.

        Raises:
            InputError: There is no such run, or another process is writing it.
            StoreError: Its files cannot be read or removed.
        """
        try:
            _refuse_second_writer(find_run(path))
            _remove_from(path, from_step)
            info = read_run_file(path) | {
                "status": "running", "reason": "", "updated": now(), "process": this_process()
            }  # fmt: skip
            earlier = info.get("resumed")
            again = {"at": now(), "from_step": from_step, "git": git_state(), "machine": machine}
            write_run_file(path, info | {"resumed": [*(earlier if isinstance(earlier, list) else []), again]})
            write_reserve(path)
        except OSError as error:
            raise StoreError(f"cannot continue {path} ({_why(error)}); free some space or make it writable.") from error
        return cls(path)

    def write_step(self, step: int, tables: StepTables) -> None:
        """Write all parts of one step; readers see it once its `steps` part is there.

        A step that is written again replaces what this rank wrote of it.

        Raises:
            InputError: Columns do not fit the schema; nothing is written.
            StoreError: The disk refuses; the parts of this step are removed, earlier steps stay readable.
        """
        encoded = self._encode(step, tables)
        if step <= last_merged_step(self.path):
            raise InputError(
                f"step {step} of {self.path} is in a compacted file and cannot be written again; go on after it, or "
                "begin anew."
            )
        try:
            self._remove(step)
            self._write_parts(step, encoded)
        except OSError as error:
            with suppress(OSError):
                self._remove(step)
            raise StoreError(self._failure(step, error)) from error
        self._last_step = step

    def finish(self, status: Literal["complete", "failed"] = "complete", reason: str = "") -> None:
        """Record in run.json how the run ended; ranks other than 0 have nothing to record.

        Raises:
            StoreError: run.json cannot be read or written.
        """
        if self.rank:
            return
        info = read_run_file(self.path) | {"status": status, "reason": reason, "updated": now()}
        try:
            (self.path / RESERVE).unlink(missing_ok=True)
            write_run_file(self.path, info)
        except OSError as error:
            raise StoreError(
                f"cannot record in {self.path} that the run is {status} ({_why(error)}); its steps are readable, "
                "free some space, set the status in run.json and delete its checksum."
            ) from error

    def _encode(self, step: int, tables: StepTables) -> dict[str, pa.Table]:
        written = {name: getattr(tables, name) for name in TABLES if name != "steps"}
        encoded = {name: encode(name, step, columns) for name, columns in written.items() if columns is not None}
        # The dict's order is the order on disk: `steps` makes the step visible, so it comes last.
        scalars = {"step": [step]} | {name: [value] for name, value in tables.steps.items()}
        return encoded | ({} if self.rank else {"steps": with_not_finite(encode("steps", step, scalars))})

    def _write_parts(self, step: int, tables: dict[str, pa.Table]) -> None:
        """Write all, then let them appear in their order: what is synchronised together waits for the disk once."""
        written: dict[Path, bytes] = {}
        sums, held = self._of_others(step)
        for table, rows in tables.items():
            path = part_path(self.path, table, step, self.rank)
            said = {LIGHT: light_text(rows)} if table == "rollouts" else {}
            if table == "steps":
                said = {PARTS: json.dumps(sums), COLUMNS: json.dumps(held), ROW: row_text(rows)}
            said[RECORDED] = ",".join(name for name in rows.column_names if rows[name].null_count < len(rows))
            written[path], checksum = stamp(path, parquet_bytes(rows, said))
            sums.setdefault(table, {})[path.name] = checksum
            held.setdefault(table, {})[path.name] = said[RECORDED]
        with ExitStack() as appearing:  # closes in reverse order, so `steps` is entered first and appears last
            for path, content in reversed(written.items()):
                path.parent.mkdir(exist_ok=True)
                file = appearing.enter_context(atomic_file(path))
                file.write(content)
                file.flush()
        for path in written:
            if path.parent.name in TEXTS:
                note(self.path, path.parent.name, self.rank, path)

    def _of_others(self, step: int) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
        """Return checksum and recorded columns of the parts that other processes wrote of this step, table → name."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        paths = [part_path(self.path, table, step, rank) for table in TABLES for rank in others]
        sums, held = dict[str, dict[str, str]](), dict[str, dict[str, str]]()
        for path in filter(Path.exists, paths):
            checksum, recorded = written_about(path)
            sums.setdefault(path.parent.name, {})[path.name] = checksum
            held.setdefault(path.parent.name, {})[path.name] = recorded
        return sums, held

    def _remove(self, step: int) -> None:
        paths = [part_path(self.path, table, step, self.rank) for table in dict.fromkeys(("steps", *TABLES))]
        there = [path for path in paths if path.exists()]
        for path in there:  # `steps` first: from then on the step is invisible
            path.unlink(missing_ok=True)
        if there:  # readers that know them look at all files again
            os.utime(self.path / RUN_FILE)

    def _failure(self, step: int, error: OSError) -> str:
        last = self._last_step
        kept = "no earlier step was written" if last is None else f"steps up to {last} are complete and readable"
        return (
            f"cannot write step {step} to {self.path} ({_why(error)}); {kept}; free some space or repair the "
            "directory, then run again under another name or with replace."
        )


def parquet_bytes(rows: pa.Table, metadata: Mapping[str, str]) -> memoryview:
    """Return a table as the bytes of a Parquet file that has a place for its checksum."""
    part = pa.BufferOutputStream()  # a part has hundreds of pieces, each a call of Python into a file
    with pq.ParquetWriter(part, rows.schema, **parquet_options(rows.schema, len(rows))) as writer:
        writer.write_table(rows, row_group_size=ROW_GROUP)
        schema = f"{crc32(str(rows.schema).encode()):08x}"
        writer.add_key_value_metadata({**metadata, SCHEMA: schema, CHECKSUM: BLANK.decode()})
    return memoryview(part.getvalue())


def parquet_options(schema: pa.Schema, rows: int) -> dict[str, Any]:
    """Return how a table of so many rows is written."""
    floats = [c.name for c in schema if pa.types.is_floating(c.type)]
    others = [c.name for c in schema if c.name not in floats]
    return {
        # A compressor begins anew in every column, which is most of the time of a part of one row.
        "compression": "zstd" if rows > 1 else "none",
        "use_byte_stream_split": floats,
        "use_dictionary": others,
        # Parquet's minimum and maximum leave NaN out, and DuckDB concludes from them that there is none.
        "write_statistics": others,
    }


def _clear(path: Path, if_exists: str) -> None:
    """Make room for a run, or say why that must not be done."""
    if not os.path.lexists(path):
        return
    if if_exists != "replace":
        raise InputError(f"run {path.name!r} already exists in {path.parent}; choose another run name, or replace it.")
    empty = path.is_dir() and not any(path.iterdir())
    if path.is_symlink() or not (is_run(path) or empty):
        raise InputError(f"{path} exists and is no run, so it will not be replaced; choose another run name.")
    with suppress(StoreError):  # a broken run may be replaced
        _refuse_second_writer(path)
    # Renamed first, so that no reader ever sees half a run.
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    path.rename(old)
    shutil.rmtree(old)


def _refuse_second_writer(path: Path) -> None:
    """Refuse to touch a run while another process writes it: the two would replace each other's steps."""
    if pid := other_writer(read_run_file(path)):
        raise InputError(f"run {path.name!r} is being written by process {pid}; end it first, or choose another name.")


def _remove_from(path: Path, step: int) -> None:
    """Remove what lies at or after a step: the `steps` parts first, so that no reader sees half of one."""
    info = read_run_file(path)
    if last_merged_step(path) >= step:
        write_run_file(path, info | {COMPACTED: merged_before(info, step)})
    for table in dict.fromkeys(("steps", *TABLES)):
        for part in loose_parts(path, table):
            if part.step >= step:
                part.path.unlink(missing_ok=True)
    remove_unlisted(path)
    for left in path.glob(".*.tmp"):  # what a killed process had begun
        left.unlink(missing_ok=True)
    for left in path.glob(".model.*"):
        shutil.rmtree(left)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
