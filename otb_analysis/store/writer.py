"""The one writer of a run: Parquet files first, then one transaction that makes the step visible."""

import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.atomic import atomic_file, atomic_folder
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import note, phase
from otb_analysis.schema import TABLES
from otb_analysis.store import catalogue, earlier
from otb_analysis.store.catalogue import ARROW, LARGE, SMALL, transaction
from otb_analysis.store.compact import merge, separate
from otb_analysis.store.gram import derived
from otb_analysis.store.layout import (
    CATALOGUE,
    RESERVE,
    check_run_name,
    find_run,
    git_state,
    is_run,
    new_run,
    now,
    other_writer,
    read_run_file,
    this_process,
    write_reserve,
    write_run_file,
)
from otb_analysis.store.parts import ROW_GROUP, Part, as_rows, described, listed, parquet_options, remove_unlisted

Columns = Mapping[str, object] | pd.DataFrame
"""Column name → values: a list, an array, a masked array or a Series, one value per row."""


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

    def encoded(self, step: int) -> dict[str, pa.Table]:
        """Return each table that is there in the schema's order and dtypes.

        Raises:
            InputError: Columns do not fit the schema.
        """
        columns: dict[str, Columns | None] = {name: getattr(self, name) for name in TABLES}
        columns["steps"] = {"step": [step]} | {name: [value] for name, value in self.steps.items()}
        return {name: _encoded(name, step, some) for name, some in columns.items() if some is not None}

    @classmethod
    def decoded(cls, rows: Mapping[str, pa.Table]) -> "StepTables":
        """Return tables that were encoded: written, they are the same."""
        tables = {name: dict(zip(some.column_names, some.columns, strict=True)) for name, some in rows.items()}
        return cls(**tables | {"steps": {name: values[0] for name, values in tables["steps"].items()}})


@dataclass(eq=False)
class RunWriter:
    """Writes one run; `create` makes it, `write_step` adds a step, `finish` says how it ended.

    Several processes may write one run: rank 0 owns run.json and the catalogue, and must write a step after the
    others have written theirs, since its transaction is what makes a step visible. Other ranks use the constructor.
    """

    path: Path
    rank: int = 0
    size: int = 1  # Processes that write parts of the same steps
    _last_step: int | None = field(default=None, init=False)
    _process: object = field(default=None, init=False)  # Who writes it, as run.json says; None where nobody is known

    @cached_property
    def _steps(self) -> set[int]:
        """Steps that are there; asked once, since nobody else adds any."""
        with transaction(self.path) as db:
            return set(catalogue.written_steps(db, self.path))

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
            if os.path.lexists(path):
                if if_exists != "replace":
                    taken = f"run {run!r} already exists in {path.parent}"
                    raise InputError(f"{taken}; choose another run name, or replace it.")
                empty = path.is_dir() and not any(path.iterdir())
                if path.is_symlink() or not (is_run(path) or empty):
                    taken = f"{path} exists and is no run, so it will not be replaced"
                    raise InputError(f"{taken}; choose another run name.")
                with suppress(StoreError):  # a broken run may be replaced
                    _refuse_second_writer(path)
                # Renamed first, so that no reader ever sees half a run.
                old = path.with_name(f".{path.name}.{os.getpid()}.old")
                path.rename(old)
                shutil.rmtree(old)
            with atomic_folder(path, replace=False) as draft:
                write_run_file(draft, new_run(run, config) | ({"machine": dict(machine)} if machine else {}))
                write_reserve(draft)
                with closing(sqlite3.connect(draft / CATALOGUE, isolation_level=None)) as db:
                    catalogue.make(db)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot make {path} ({_why(error)}); pass a writable parent.") from error
        return cls._opened(path)

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
        return cls._opened(path)

    @classmethod
    def _opened(cls, path: Path) -> "RunWriter":
        writer = cls(path)
        writer._process = read_run_file(path).get("process")
        return writer

    def _info(self) -> dict[str, object]:
        """Return run.json, unless another process, maybe on another machine, has gone on with the run since."""
        info: dict[str, Any] = read_run_file(self.path)
        if self._process not in (None, other := info.get("process")):
            pid, host = (other.get(name) if isinstance(other, Mapping) else "?" for name in ("pid", "host"))
            who = f"process {pid} on {host}, which went on with it"
            raise StoreError(f"{self.path} is written by {who}; end that one, then resume.")
        return info

    def write_step(self, step: int, tables: StepTables, others: Sequence[str] | None = None) -> list[str]:
        """Write one step, and return its files; readers see it once rank 0 has written it.

        A step that is written again is replaced.

        Args:
            others: For rank 0, the files that other ranks wrote of this step; by default those that are there.

        Raises:
            InputError: Columns do not fit the schema; nothing is written.
            StoreError: The disk refuses, another rank's file is not there, or another process has gone on with the run;
                what was written of this step is removed, earlier steps stay readable.
        """
        config: Any = {} if self.rank else self._info().get("config") or {}
        rows = {name: some for name, some in tables.encoded(step).items() if not (self.rank and name == "steps")}
        written, of_others = list[Path](), list[Path]()
        try:
            if self.rank:  # rank 0 lists these files, and puts small tables into the catalogue
                return [self._write(step, table, rows[table], written).file for table in rows]
            if step in self._steps:
                self._remove(step)
            parts = [self._write(step, table, rows[table], written) for table in LARGE if table in rows]
            every = [f"{table}/part-{step:08d}-r{rank}.parquet" for table in TABLES for rank in range(1, self.size)]
            for file in [file for file in every if (self.path / file).exists()] if others is None else others:
                table, path = file.split("/")[0], self.path / file
                if not path.exists():
                    raise FileNotFoundError(
                        f"another process wrote {file}, which is not there: all must see one folder"
                    )
                content = path.read_bytes()
                other = pq.read_table(pa.BufferReader(content))
                if table in LARGE:
                    parts.append(described(step, table, file, other, crc32(content)))
                    continue
                both = [rows[table], other] if table in rows else [other]
                rows[table] = pa.concat_tables(both, promote_options="default")
                of_others.append(path)
            products = list(derived(config, rows))
            with transaction(self.path, write=True) as db:
                small = {table: rows[table] for table in SMALL if table in rows}
                catalogue.add_step(db, step, small | {"parts": as_rows(parts)})
                catalogue.add_products(db, step, products)
        except (OSError, sqlite3.Error, InputError) as error:
            for path in written:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            if isinstance(error, InputError):
                raise
            last = self._last_step
            kept = "no earlier step was written" if last is None else f"steps up to {last} are complete and readable"
            raise StoreError(
                f"cannot write step {step} to {self.path} ({_why(error)}); {kept}; free some space or repair the "
                "directory, then run again under another name or with replace."
            ) from error
        for path in of_others:
            with suppress(OSError):  # the step is whole already
                path.unlink()
        self._steps.add(step)
        self._last_step = step
        return [part.file for part in parts]

    def finish(
        self,
        status: Literal["complete", "failed"] = "complete",
        reason: str = "",
        *,
        merged: bool = True,
        machine: Mapping[str, object] | None = None,
    ) -> None:
        """Record in run.json how the run ended; a complete one becomes one Parquet file per table if `merged`.

        `machine` says anew where its model ran, if others than the first joined in. Ranks other than 0 have nothing to
        record.

        Raises:
            StoreError: run.json or the catalogue cannot be read or written.
        """
        if self.rank:
            return
        with transaction(self.path) as db:
            steps = catalogue.written_steps(db, self.path)
        ended = {"number": len(steps), "first": steps[0], "last": steps[-1]} if steps else {"number": 0}
        info = self._info() | {"status": status, "reason": reason, "updated": now(), "steps": ended}
        info |= {"machine": dict(machine)} if machine else {}
        try:
            (self.path / RESERVE).unlink(missing_ok=True)
            write_run_file(self.path, info)
        except OSError as error:
            raise StoreError(
                f"cannot record in {self.path} that the run is {status} ({_why(error)}); its steps are readable, "
                "free some space, set the status in run.json and delete its checksum."
            ) from error
        if status == "complete" and merged:
            try:
                with phase("one file for each table"):
                    merge(self.path)
            except (StoreError, OSError, sqlite3.Error) as error:  # the run is whole as it is
                note(f"{self.path} keeps a file for each step ({error}); otb compact tries again.")

    def _write(self, step: int, table: str, rows: pa.Table, written: list[Path]) -> Part:
        """Write the Parquet file of a table, and return what the catalogue is to say of it.

        A column of the schema that is not there is written as null throughout, so that all files are alike.
        """
        given = dict(zip(rows.column_names, rows.columns, strict=True))
        rows = pa.table({c.name: pa.nulls(len(rows), ARROW[c.dtype]) for c in TABLES[table]} | given)
        buffer = pa.BufferOutputStream()  # a file has hundreds of pieces, each a call of Python otherwise
        pq.write_table(rows, buffer, ROW_GROUP, **parquet_options(rows.schema, lasting=False))
        content, path = buffer.getvalue().to_pybytes(), self.path / table / f"part-{step:08d}-r{self.rank}.parquet"
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as file:
            written.append(path)
            file.write(content)
        return described(step, table, f"{table}/{path.name}", rows, crc32(content))

    def _remove(self, step: int) -> None:
        """Remove a step that is there already, so that no reader sees half of it."""
        with transaction(self.path, write=True) as db:
            gone = [part for part in listed(db, self.path, steps=[step]) if part.alone]
            catalogue.remove_steps(db, [step])
        mine = f"-r{self.rank}.parquet"  # others have written theirs anew
        for part in gone:
            if part.file.endswith(mine):
                (self.path / part.file).unlink(missing_ok=True)


def _encoded(table: str, step: int, columns: Columns) -> pa.Table:
    """Return the rows of one step as an Arrow table in the schema's order and dtypes.

    None and masked entries become null and mean *not measured*; NaN stays NaN. `step` may be left out; columns beyond
    the schema are kept as they are.

    Raises:
        InputError: A key column is missing or holds a null, lengths differ, or values do not fit the dtype.
    """
    kinds, arrays = {c.name: c.dtype for c in TABLES[table]}, dict[str, pa.Array]()
    for key in columns:
        name = str(key)
        try:
            # from_pandas=False: otherwise Arrow reads every measured NaN as "not measured".
            array: Any = columns[key]  # pa.array would take what is chunked apart, a Python object a value
            array = array if isinstance(array, pa.ChunkedArray) else pa.array(array, from_pandas=False)
            array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
            kind = ARROW[kinds[name]] if name in kinds else array.type
            arrays[name] = array if array.type == kind else array.cast(kind)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"column {name!r} of {table} cannot be stored as {kinds.get(name, 'an Arrow column')} ({reason}); "
                "pass one value of that type per row, None where it was not measured."
            ) from error
    first = next(iter(arrays), "")
    n_rows = len(arrays[first]) if arrays else 0
    for other, array in arrays.items():
        if len(array) != n_rows:
            raise InputError(
                f"column {first!r} of {table} has {n_rows} rows but {other!r} has {len(array)}; pass columns of one "
                "length."
            )
    arrays.setdefault("step", pa.array(np.full(n_rows, step, dtype=np.int64)))
    for name in [c.name for c in TABLES[table] if c.key]:
        if name not in arrays:
            raise InputError(f"{table} of step {step} has no key column {name!r}; pass it, one value per row.")
        if arrays[name].null_count:
            raise InputError(f"key column {name!r} of {table} has nulls in step {step}; pass a value in every row.")
    steps = arrays["step"].to_numpy()
    if (steps != step).any():
        wrong = steps[steps != step][0]
        raise InputError(f"column 'step' of {table} holds {wrong} but step {step} is being written; leave it out.")
    return pa.table({name: arrays[name] for name in [*(name for name in kinds if name in arrays), *arrays]})


def _refuse_second_writer(path: Path) -> None:
    """Refuse to touch a run while another process writes it: the two would replace each other's steps."""
    if pid := other_writer(read_run_file(path)):
        raise InputError(f"run {path.name!r} is being written by process {pid}; end it first, or choose another name.")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
