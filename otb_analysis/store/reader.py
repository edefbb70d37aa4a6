"""Reading a run: frames, read-only SQL, the arrays of one step; each answer sees the steps complete at that moment."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property, wraps
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.schema import TABLES
from otb_analysis.store import catalogue, earlier, parts
from otb_analysis.store.catalogue import SMALL, quoted, transaction
from otb_analysis.store.gram import PRODUCT_TEXTS, frame_of, rebuild_gram, reduced_gram, whole_gram
from otb_analysis.store.layout import CATALOGUE, find_run
from otb_analysis.store.liveness import standing
from otb_analysis.store.parts import Part, check, listed, read_step
from otb_analysis.store.query import check_read_only, checked_limit, first_rows, interrupted_after, open_locked, refused
from otb_analysis.store.runfile import read_run_file
from otb_analysis.store.token_arrays import TOKEN_COLUMNS, TokenArrays, rebuild_token_arrays
from otb_analysis.types import Gram, Label

_ASKED_WRONG = (
    duckdb.BinderException, duckdb.CatalogException, duckdb.ConversionException, duckdb.ParserException,
    duckdb.PermissionException,
)  # fmt: skip
"""The query is at fault for certain; behind any other error there may be files that were exchanged meanwhile."""

LIGHT = ("step", "group", "rollout", "prompt_id", "reward", "length", "turns", "finish_reason")
"""The columns of `rollouts` without its texts."""

WHOLE = "all"
"""The scope of a run that measured the gradient of all parameters; those of unlike scopes do not compare."""

Steps = Sequence[int] | None
Names = Sequence[str] | None
Truth = Label | frozenset[Label]
Parameters = Sequence[object] | Mapping[str, object] | None
P = ParamSpec("P")
R = TypeVar("R")


def again_if_changed(
    read: Callable[Concatenate["RunStore", P], R],
) -> Callable[Concatenate["RunStore", P], R]:
    """Read again what failed while files were exchanged: by compaction, or by a run that went back some steps."""

    @wraps(read)
    def reading(store: "RunStore", *args: P.args, **options: P.kwargs) -> R:
        before = store.changes
        try:
            return read(store, *args, **options)
        except StoreError:
            if store.changes == before:
                raise
        return read(store, *args, **options)

    return reading


class RunStore:
    """Reads one run, also while it is being written; safe to share between threads."""

    def __init__(self, path: str | Path, *, memory_limit: str = "1GB") -> None:
        """Open a run.

        Args:
            memory_limit: What one query may hold in memory, as DuckDB writes it.

        Raises:
            InputError: There is no such run, or the limit is no amount of memory.
            StoreError: Its run.json or its catalogue is missing, broken or newer than this version.
        """
        self.path = find_run(Path(path))
        self._memory_limit = checked_limit(memory_limit)
        self._lock, self._earlier = threading.RLock(), None
        self.complete_steps()

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        """Opened by the first query: a list of many runs needs none."""
        return open_locked(self.path, self._memory_limit)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """Yield the catalogue as it is at this moment; that of a run of the earlier layout is made from its files."""
        if not earlier.is_earlier(self.path):
            with transaction(self.path) as db:
                yield db
            return
        with self._lock:
            if self._earlier is None:
                self._earlier = earlier.catalogue_of(self.path)
            yield self._earlier

    @property
    def info(self) -> dict[str, object]:
        """What run.json says now: config, seed, git, packages, status, reason and more."""
        return read_run_file(self.path)

    @property
    def standing(self) -> tuple[str, str]:
        """Status as it is now, and why: `stopped` where run.json says running but the process is known to be gone."""
        return standing(self.info, f"{last_heard(self.path, self.info):%Y-%m-%d %H:%M} UTC")

    @property
    def changes(self) -> tuple[int, ...]:
        """A number that grows with every change of the run, as a tuple; empty where the catalogue cannot be read."""
        try:
            with self._reading() as db:
                return db.execute("SELECT changes FROM totals").fetchone() or ()
        except StoreError:
            return ()

    def complete_steps(self) -> list[int]:
        """Return the steps that can be read, in order.

        Raises:
            StoreError: The run has lost some of them.
        """
        before = self.info
        with self._reading() as db:
            steps = catalogue.written_steps(db, self.path)
        ended: Any = before.get("steps")
        wrong = before.get("status") == "complete" and ended and ended["number"] != len(steps)
        if wrong and self.info == before:  # otherwise it went on meanwhile
            raise StoreError(
                f"{self.path} has {len(steps)} steps, but it ended with {ended['number']}; restore it from a copy."
            )
        return steps

    def written(self, *tables: str) -> str:
        """Return a text that changes when a complete step of these tables is added or written again.

        Raises:
            StoreError: The catalogue cannot be read.
        """
        with self._reading() as db:
            return catalogue.stamp(db, tables)

    @again_if_changed
    def steps_with(self, table: str, column: str) -> list[int]:
        """Return the complete steps that hold any value in a column of a table, in order; no Parquet file is opened.

        Raises:
            StoreError: The catalogue has changed.
        """
        with self._reading() as db:
            if table not in SMALL:
                found = {part.step for part in listed(db, self.path, table) if column in part.recorded.split(",")}
                return sorted(found)
            if column not in catalogue.column_names(db, table):
                return []
            rows = catalogue.read(db, self.path, table, columns=["step", column]).table
        return sorted(set(rows["step"].filter(rows[column].is_valid()).to_pylist()))

    def rows(self, table: str, columns: Names = None, steps: Steps = None) -> pa.Table:
        """Return columns of a small table (steps, rollouts, gradients, sampling) as Arrow, by step.

        Raises:
            StoreError: The rows are not those that were written.
        """
        with self._reading() as db:
            return catalogue.read(db, self.path, table, _whole_numbers(steps), columns).table

    @again_if_changed
    def frame(
        self,
        table: str,
        steps: Steps = None,
        columns: Names = None,
        where: str | None = None,
        params: Parameters = None,
    ) -> pd.DataFrame:
        """Return the rows of a table, by step.

        Args:
            steps: Only these steps; None means all complete ones.
            where: An SQL condition over the columns, with `?` or `$name` for `params`.

        Raises:
            InputError: A column is unknown (the nearest is named) or the condition cannot be run.
            StoreError: A file is broken or missing, or rows have changed.
        """
        chosen = "*" if columns is None else ", ".join(map(quoted, columns))
        # The line break ends a comment in the condition.
        condition = "" if where is None else f" WHERE ({where}\n)"
        needed = {table: columns} if columns is not None and where is None else {table: None}
        return self._run(f"SELECT {chosen} FROM {table}{condition}", params, needed, steps, asked=columns)

    def tokens_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per completion token; see `frame`."""
        return self.frame("tokens", steps, columns, where, params)

    def rollouts_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per rollout; see `frame`."""
        return self.frame("rollouts", steps, columns, where, params)

    def steps_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per step; see `frame`."""
        return self.frame("steps", steps, columns, where, params)

    def gradients_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per measured step and estimator; see `frame`."""
        return self.frame("gradients", steps, columns, where, params)

    @again_if_changed
    def sql(
        self,
        query: str,
        params: Parameters = None,
        *,
        steps: Steps = None,
        seconds: float | None = None,
        rows: int | None = None,
        megabytes: float | None = None,
        texts: bool = True,
    ) -> pd.DataFrame:
        """Return the answer to one SELECT over the views, one per table of the schema.

        Args:
            query: One SELECT in DuckDB's SQL; it can reach no file outside this run's directory and change nothing.
            steps: The views hold only these steps, and no file of others is opened; None means all complete ones.
            seconds: How long it may take; None means as long as it needs.
            rows: Most rows of the answer, which is read no further; None means all, whatever memory they take.
            megabytes: Most millions of bytes of what is read of the answer; None means any number.
            texts: False leaves prompts, answers and parts of rewards of `rollouts` out, which is faster.

        Raises:
            InputError: The query is not one SELECT, cannot be run, takes longer than allowed, or its answer is larger.
            StoreError: A file is broken or missing, or the answer needs more memory than allowed.
        """
        tables = [table for table in TABLES if re.search(rf"\b{table}\b", query, re.IGNORECASE)]
        needed = {table: LIGHT if table == "rollouts" and not texts else None for table in tables}
        return self._run(query, params, needed, steps, seconds, rows, megabytes)

    @again_if_changed
    def grams(self, steps: Steps = None) -> dict[int, Gram]:
        """Return the Gram matrices of all measured steps, in order: 8·(M·P)² bytes each, so ask for few steps.

        Prompts carry their `prompt_id` where the rollouts were stored with it.

        Raises:
            StoreError: A file is broken or missing.
        """
        found = self._read_products("grams", steps)
        prompts = self._prompts(list(found))
        return {step: rebuild_gram(frame_of(rows), prompts[step]) for step, rows in found.items()}

    def stored_labels(self) -> list[Label]:
        """Return (estimator, energy source) of every row of `gradients`, each once.

        Raises:
            StoreError: The rows are not those that were written.
        """
        rows = self.rows("gradients", ["estimator", "energy_source"])
        return list(dict.fromkeys(zip(*(column.to_pylist() for column in rows.columns), strict=True)))

    @again_if_changed
    def reduced_grams(self, references: Sequence[Truth], steps: Steps = None) -> dict[int, Gram]:
        """Return of each measured step what comparing its estimators with these references needs.

        A step takes 8·M·P²·(1 + references) bytes. It was derived when the step was written, with rloo and with what is
        proved to stand for ∇J; for other references the step's Gram matrix is read.

        Args:
            references: What will stand for ∇J: an estimator, or several whose mean does; a step uses those it has.

        Raises:
            StoreError: A file is broken or missing.
        """
        found: dict[int, Gram] = {step: reduced_gram(one) for step, _, one in self._products(steps) if not _}
        wanting = [step for step, gram in found.items() if not all(map(gram.stands, references))]
        wanting += [step for step in self._measured("grams", steps) if step not in found]
        for step in wanting:  # one at a time: each is tens of MB
            found |= {step: gram.reduced(references) for step, gram in self.grams([step]).items()}
        return {step: found[step] for step in sorted(found)}

    @again_if_changed
    def subgroup_grams(self, steps: Steps = None) -> dict[int, dict[int, Gram]]:
        """Return the Gram matrices of smaller groups, by size and then by step; empty where none were measured.

        Raises:
            StoreError: A file is broken or missing.
        """
        grams: dict[int, dict[int, Gram]] = {}
        for step, size, packed in self._products(steps):
            if size:
                grams.setdefault(size, {})[step] = whole_gram(packed)
        known = {step for of_size in grams.values() for step in of_size}
        others = [step for step in self._measured("subgroups", steps) if step not in known]
        prompts = self._prompts(others)
        for step, rows in self._read_products("subgroups", others).items():
            for size, some in frame_of(rows).groupby("size"):
                grams.setdefault(int(str(size)), {})[step] = rebuild_gram(some, prompts[step])
        return {size: {step: grams[size][step] for step in sorted(grams[size])} for size in sorted(grams)}

    def token_arrays(self, step: int, group: int | None = None) -> TokenArrays:
        """Return one step's tokens, or those of one prompt, as [N, T] arrays: any estimator can be computed again.

        Raises:
            InputError: The step is not complete, or there is no such step.
            StoreError: A file is broken or missing, or the mask was not stored.
        """
        steps = self.complete_steps()
        if step not in steps:
            known = f"steps {steps[0]} to {steps[-1]} are there" if steps else "no step is complete yet"
            raise InputError(f"step {step} of {self.path} cannot be read; {known}.")
        where, params = (None, None) if group is None else ('"group" = ?', [group])
        tokens = self.tokens_df([step], list(TOKEN_COLUMNS), where, params)
        rollouts = self.rollouts_df([step], ["group", "rollout", "score_norm_sq"], where, params)
        return rebuild_token_arrays(f"step {step} of {self.path}", tokens, rollouts)

    def _measured(self, table: str, steps: Steps) -> list[int]:
        with self._reading() as db:
            return list(dict.fromkeys(part.step for part in listed(db, self.path, table, _whole_numbers(steps))))

    def _products(self, steps: Steps) -> list[tuple[int, int, bytes]]:
        """Return step, size of smaller groups (0: whole ones) and numbers of what was derived at each measured step."""
        with self._reading() as db:
            return catalogue.products(db, _whole_numbers(steps))

    def _read_products(self, table: str, steps: Steps) -> dict[int, pa.Table]:
        """Return the rows of `grams` or `subgroups` of each step that has any."""
        with self._reading() as db:
            some = listed(db, self.path, table, _whole_numbers(steps))
        found: dict[int, list[pa.Table]] = {}
        for part in some:
            found.setdefault(part.step, []).append(read_step(self.path, part, PRODUCT_TEXTS))
        joined = {step: pa.concat_tables(tables, promote_options="default") for step, tables in found.items()}
        return {step: rows for step, rows in joined.items() if len(rows)}

    def _prompts(self, steps: Sequence[int]) -> dict[int, dict[int, object]]:
        """Return the name of each group's prompt, by step."""
        prompts: dict[int, dict[int, object]] = {step: {} for step in steps}
        if steps:
            rows = self.rows("rollouts", ["step", "group", "prompt_id"], steps)
            for step, group, name in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                if name is not None:
                    prompts[step][group] = name
        return prompts

    def _run(
        self,
        query: str,
        params: Parameters,
        tables: Mapping[str, Names],
        steps: Steps = None,
        seconds: float | None = None,
        rows: int | None = None,
        megabytes: float | None = None,
        asked: Names = None,
    ) -> pd.DataFrame:
        """Run a query over views of tables, of which some columns are needed, or all (None)."""
        with self._connection.cursor() as cursor, interrupted_after(seconds, cursor):
            try:
                check_read_only(cursor, query)
                for view, source in self._sources(cursor, tables, steps, asked).items():
                    # Temporary views belong to the cursor, so threads do not meet and no list of files grows old.
                    cursor.execute(f"CREATE TEMP VIEW {view} AS {source}")
                answer = first_rows(cursor.execute(query, params), rows, megabytes)
                if answer is None:
                    raise InputError(
                        f"the answer of {self.path} is larger than {megabytes:g} MB; ask for fewer rows or columns, or "
                        "for the beginning of a text, as in left(completion, 1000)."
                    )
                return answer
            except duckdb.InterruptException as error:
                raise InputError(
                    f"the query on {self.path} took longer than {seconds:g} s and was ended; ask for fewer steps or "
                    "columns, or ask from Python, where RunStore.sql has no limit."
                ) from error
            except duckdb.OutOfMemoryException as error:
                raise StoreError(
                    f"the query on {self.path} needs more memory than allowed; ask for fewer steps or columns, "
                    "or open the run with a larger memory_limit."
                ) from error
            except _ASKED_WRONG as error:
                raise refused(error) from error
            except duckdb.IOException as error:  # a file went between looking and reading
                raise StoreError(f"{self.path} cannot be read ({str(error).splitlines()[0]}); try again.") from error
            except duckdb.Error as error:
                raise refused(error) from error

    def _sources(
        self, cursor: duckdb.DuckDBPyConnection, tables: Mapping[str, Names], steps: Steps, asked: Names
    ) -> dict[str, str]:
        """Return a SELECT for each view, all of one moment: over rows of the catalogue, or over Parquet files."""
        sources, files, only = dict[str, str](), list[Part](), _whole_numbers(steps)
        with self._reading() as db:
            for table, columns in tables.items():
                some = [] if table in SMALL else listed(db, self.path, table, only)
                known = catalogue.column_names(db, table) if table in SMALL else parts.column_names(table, some)
                for name in asked or ():
                    if name not in known:
                        raise InputError(f"{table} has no column {name!r}; {nearest(name, known)}")
                if table in SMALL:
                    cursor.register(f"_{table}", catalogue.read(db, self.path, table, only, columns).table)
                    sources[table] = f"SELECT * FROM _{table}"
                else:
                    sources[table], files = parts.select(self.path, table, some), [*files, *some]
        check(self.path, files)
        return sources


def last_heard(run_dir: Path, info: Mapping[str, object]) -> datetime:
    """Return when a run was last written to."""
    times = [path.stat().st_mtime for name in (CATALOGUE, "steps") if (path := run_dir / name).exists()]
    with suppress(ValueError):
        times.append(datetime.fromisoformat(str(info.get("updated"))).timestamp())
    return datetime.fromtimestamp(max(times, default=0), UTC)


def scope_of(store: RunStore) -> str:
    """Return whose parameters' gradient a run measured, as its configuration says; all where it does not say."""
    config: Any = store.info.get("config") or {}
    measure = config.get("measure")
    return str(measure.get("scope", WHOLE)) if isinstance(measure, dict) else WHOLE


def unlike_scopes(stores: Mapping[str, RunStore]) -> str:
    """Return which two runs measured gradients of other parameters, for a remedy to follow; empty where none did."""
    scopes = {name: scope_of(store) for name, store in stores.items()}
    for name, scope in scopes.items():
        first, of_first = next(iter(scopes.items()))
        if scope != of_first:
            return f"{first} measured gradients of scope {of_first!r} but {name} of {scope!r}, which do not compare"
    return ""


def _whole_numbers(steps: Steps) -> list[int] | None:
    return None if steps is None else [int(step) for step in np.unique(np.asarray(steps))]
