"""The one writer of a run: Parquet files first, then one transaction that makes the step visible."""

import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.atomic import atomic_file, atomic_folder
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import note, phase
from otb_analysis.schema import TABLES
from otb_analysis.store import catalogue, earlier
from otb_analysis.store.catalogue import LARGE, SMALL, transaction
from otb_analysis.store.compact import merge, separate
from otb_analysis.store.encode import Columns, encode, with_not_finite
from otb_analysis.store.gram import derived
from otb_analysis.store.layout import CATALOGUE, check_run_name, find_run, is_run, part_path
from otb_analysis.store.liveness import other_writer, this_process
from otb_analysis.store.parts import Part, as_rows, described, listed, parquet_bytes, remove_unlisted
from otb_analysis.store.runfile import RESERVE, git_state, new_run, now, read_run_file, write_reserve, write_run_file


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

    Several processes may write one run: rank 0 owns run.json and the catalogue, and must write a step after the
    others have written theirs, since its transaction is what makes a step visible. Other ranks use the constructor.
    """

    def __init__(self, path: Path, rank: int = 0, size: int = 1) -> None:
        self.path = path
        self.rank = rank
        self.size = size  # Processes that write parts of the same steps
        self._last_step: int | None = None
        self._known: set[int] | None = None  # Steps that are there, once the first one is written

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
        """Make the run's directory, its run.json and its catalogue, and return its writer.

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
                with closing(sqlite3.connect(draft / CATALOGUE, isolation_level=None)) as db:
                    catalogue.make(db)
        except (OSError, sqlite3.Error) as error:
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
            earlier.upgrade(path)
            with transaction(path) as db:
                steps, _ = catalogue.written_steps(db, path), listed(db, path)
            info = read_run_file(path) | {
                "status": "running", "reason": "", "updated": now(), "process": this_process(), "steps": None
            }  # fmt: skip
            before = info.get("resumed")
            again = {"at": now(), "from_step": from_step, "git": git_state(), "machine": machine}
            # First, since it says with how many steps the run ended.
            write_run_file(path, info | {"resumed": [*(before if isinstance(before, list) else []), again]})
            with transaction(path, write=True) as db:
                catalogue.remove_steps(db, [step for step in steps if step >= from_step])
                separate(db, path)
                keep = {part.file for part in listed(db, path)}
            remove_unlisted(path, keep)
            write_reserve(path)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot continue {path} ({_why(error)}); free some space or make it writable.") from error
        return cls(path)

    def write_step(self, step: int, tables: StepTables) -> None:
        """Write one step; readers see it once rank 0 has written it. A step that is written again is replaced.

        Raises:
            InputError: Columns do not fit the schema; nothing is written.
            StoreError: The disk refuses; what was written of this step is removed, earlier steps stay readable.
        """
        encoded = self._encode(step, tables)
        written = list[Path]()
        try:
            if self.rank:  # rank 0 lists these files, and puts small tables into the catalogue
                for table, rows in encoded.items():
                    self._write(step, table, rows, written)
                return
            if self._known is None:
                with transaction(self.path) as db:
                    self._known = set(catalogue.written_steps(db, self.path))
            if step in self._known:
                self._remove(step)
            of_others = list(self._of_others(step))
            parts = [self._write(step, table, encoded[table], written) for table in LARGE if table in encoded]
            parts += [described(step, table, name, rows, sum) for table, name, rows, sum in of_others if table in LARGE]
            small = {table: rows for table, rows in encoded.items() if table in SMALL}
            for table, _, rows, _ in of_others:
                if table in SMALL:
                    joined = [small[table], rows] if table in small else [rows]
                    small[table] = pa.concat_tables(joined, promote_options="default")
            config: Any = read_run_file(self.path).get("config") or {}
            products = list(derived(config, encoded | small))
            with transaction(self.path, write=True) as db:
                catalogue.add_step(db, step, small | {"parts": as_rows(parts)})
                catalogue.add_products(db, step, products)
            for table, name, _, _ in of_others:
                if table in SMALL:
                    with suppress(OSError):  # the step is whole already
                        (self.path / name).unlink()
        except (OSError, sqlite3.Error, InputError) as error:
            for path in written:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            if isinstance(error, InputError):
                raise
            raise StoreError(self._failure(step, error)) from error
        self._known.add(step)
        self._last_step = step

    def finish(self, status: Literal["complete", "failed"] = "complete", reason: str = "") -> None:
        """Record in run.json how the run ended; a complete one becomes one Parquet file per table.

        Ranks other than 0 have nothing to record.

        Raises:
            StoreError: run.json or the catalogue cannot be read or written.
        """
        if self.rank:
            return
        with transaction(self.path) as db:
            steps = catalogue.written_steps(db, self.path)
        ended = {"number": len(steps), "first": steps[0], "last": steps[-1]} if steps else {"number": 0}
        info = read_run_file(self.path) | {"status": status, "reason": reason, "updated": now(), "steps": ended}
        try:
            (self.path / RESERVE).unlink(missing_ok=True)
            write_run_file(self.path, info)
        except OSError as error:
            raise StoreError(
                f"cannot record in {self.path} that the run is {status} ({_why(error)}); its steps are readable, "
                "free some space, set the status in run.json and delete its checksum."
            ) from error
        if status == "complete":
            try:
                with phase("one file for each table"):
                    merge(self.path)
            except (StoreError, OSError, sqlite3.Error) as error:  # the run is whole as it is
                note(f"{self.path} keeps a file for each step ({error}); otb compact tries again.")

    def _encode(self, step: int, tables: StepTables) -> dict[str, pa.Table]:
        written = {name: getattr(tables, name) for name in TABLES if name != "steps"}
        encoded = {name: encode(name, step, columns) for name, columns in written.items() if columns is not None}
        scalars = {"step": [step]} | {name: [value] for name, value in tables.steps.items()}
        return encoded | ({} if self.rank else {"steps": with_not_finite(encode("steps", step, scalars))})

    def _write(self, step: int, table: str, rows: pa.Table, written: list[Path]) -> Part:
        """Write the Parquet file of a table, and return what the catalogue is to say of it."""
        path, content = part_path(self.path, table, step, self.rank), parquet_bytes(rows)
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as file:
            written.append(path)
            file.write(content)
        return described(step, table, f"{table}/{path.name}", rows, crc32(content))

    def _of_others(self, step: int) -> Iterator[tuple[str, str, pa.Table, int]]:
        """Yield table, file, rows and checksum of what other processes wrote of this step."""
        for table in TABLES:
            for rank in range(1, self.size):
                path = part_path(self.path, table, step, rank)
                if path.exists():
                    content = path.read_bytes()
                    yield table, f"{table}/{path.name}", pq.read_table(pa.BufferReader(content)), crc32(content)

    def _remove(self, step: int) -> None:
        """Remove a step that is there already, so that no reader sees half of it."""
        with transaction(self.path, write=True) as db:
            if db.execute("SELECT 1 FROM written WHERE step = ?", [step]).fetchone() is None:
                return
            gone = [part for part in listed(db, self.path, steps=[step]) if part.alone]
            catalogue.remove_steps(db, [step])
        mine = f"-r{self.rank}.parquet"  # others have written theirs anew
        for part in gone:
            if part.file.endswith(mine):
                (self.path / part.file).unlink(missing_ok=True)

    def _failure(self, step: int, error: Exception) -> str:
        last = self._last_step
        kept = "no earlier step was written" if last is None else f"steps up to {last} are complete and readable"
        return (
            f"cannot write step {step} to {self.path} ({_why(error)}); {kept}; free some space or repair the "
            "directory, then run again under another name or with replace."
        )


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


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
