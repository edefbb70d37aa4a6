"""Reading a run: frames, read-only SQL, the arrays of one step; each answer sees the steps complete at that moment."""

import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property, wraps
from itertools import groupby
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import catalogue, earlier, parts
from otb_analysis.store.catalogue import SMALL, last_written, quoted, transaction
from otb_analysis.store.gram import GRAM_TEXTS, rebuild_grams, unpacked
from otb_analysis.store.layout import CATALOGUE, find_run, live_status, read_run_file
from otb_analysis.store.parts import Part, check, listed, literal, read_step
from otb_analysis.store.token_arrays import TOKEN_COLUMNS, TokenArrays, rebuild_token_arrays
from otb_analysis.types import Gram, Label

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
            memory_limit: What one query may hold in memory, as DuckDB writes it; the first one refuses what is none.

        Raises:
            InputError: There is no such run.
            StoreError: Its run.json or its catalogue is missing, broken or newer than this version.
        """
        self.path = find_run(Path(path))
        self._memory_limit = memory_limit
        self._lock, self._earlier = threading.RLock(), None
        self.complete_steps()

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        """Opened by the first query: reads this run's directory and no other file; its settings are final."""
        connection = duckdb.connect()
        try:
            connection.execute(f"SET memory_limit={literal(self._memory_limit)}")
        except duckdb.Error as error:
            raise InputError(f"memory_limit is {self._memory_limit!r}; pass an amount as '256MB' or '1GB'.") from error
        connection.execute(f"SET temp_directory={literal(str(Path(tempfile.gettempdir()) / 'otb-analysis-spill'))}")
        # A SELECT could otherwise name any data frame in the memory of the caller.
        connection.execute("SET python_enable_replacements=false")
        connection.execute(f"SET allowed_directories=[{literal(str(self.path))}]")
        connection.execute("SET enable_external_access=false")
        connection.execute("SET lock_configuration=true")
        return connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """Yield the catalogue as it is at this moment; that of a run of the earlier layout is made from its files."""
        if self.info["schema_version"] != earlier.VERSION:
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
    def live_status(self) -> tuple[str, str]:
        """Status as it is now, and why: `stopped` where run.json says running but the process is known to be gone."""
        return live_status(self.info, f"{self.last_heard:%Y-%m-%d %H:%M} UTC")

    @property
    def last_heard(self) -> datetime:
        """When the run was last written to, in UTC, by its own clock; its files' time where it kept none."""
        info, times = self.info, list[float]()
        with suppress(ValueError):
            times.append(datetime.fromisoformat(str(info.get("updated"))).timestamp())
        if not times or info.get("status") == "running":
            written = 0
            with suppress(StoreError), transaction(self.path) as db:
                written = last_written(db)
            times += (
                [written]
                if written
                else [path.stat().st_mtime for name in (CATALOGUE, "steps") if (path := self.path / name).exists()]
            )
        return datetime.fromtimestamp(max(times, default=0), UTC)

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
        before: Any = self.info
        with self._reading() as db:
            steps = catalogue.written_steps(db, self.path)
        ended = before.get("steps") if before.get("status") == "complete" else None
        if ended and (n := ended["number"]) != len(steps) and self.info == before:  # otherwise it went on meanwhile
            raise StoreError(f"{self.path} has {len(steps)} steps, but it ended with {n}; restore it from a copy.")
        return steps

    def change_token(self, *tables: str) -> str:
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
                rows = catalogue.read(db, self.path, "parts", None, ["step", "table", "recorded"])
                texts = [text for text in rows["recorded"].unique().to_pylist() if column in (text or "").split(",")]
                chosen = (pc.field("table") == table) & pc.field("recorded").isin(pa.array(texts, pa.string()))
                return sorted(set(rows.filter(chosen)["step"].to_pylist()))
            if column not in catalogue.column_names(db, table):
                return []
            rows = catalogue.read(db, self.path, table, columns=["step", column])
        return sorted(set(rows["step"].filter(rows[column].is_valid()).to_pylist()))

    def rows(self, table: str, columns: Names = None, steps: Steps = None) -> pa.Table:
        """Return columns of a small table (steps, rollouts, gradients, sampling) as Arrow, by step.

        Raises:
            InputError: A column is unknown; the nearest is named.
            StoreError: The rows are not those that were written.
        """
        with self._reading() as db:
            return catalogue.read(db, self.path, table, steps, columns)

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
        if where is None and table in SMALL:
            rows = self.rows(table, columns, steps)
            # As DuckDB gives them, in a third of its time: whole numbers and flags stay such beside nulls.
            nullable = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}
            pairs = zip(rows.column_names, rows.columns, strict=True)
            return pd.DataFrame({n: c.to_pandas(types_mapper=nullable.get if c.null_count else None) for n, c in pairs})
        chosen = "*" if columns is None else ", ".join(map(quoted, columns))
        # The line break ends a comment in the condition.
        condition = "" if where is None else f" WHERE ({where}\n)"
        query = f"SELECT {chosen} FROM {table}{condition}"
        with self._cursor(query) as cursor:
            self._make_views(cursor, {table: columns}, steps)
            return cursor.execute(query, params).df()

    def tokens_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per completion token; see `frame`, which says what is raised."""
        return self.frame("tokens", steps, columns, where, params)

    def rollouts_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per rollout; see `frame`, which says what is raised."""
        return self.frame("rollouts", steps, columns, where, params)

    def steps_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per step; see `frame`, which says what is raised."""
        return self.frame("steps", steps, columns, where, params)

    def gradients_df(
        self, steps: Steps = None, columns: Names = None, where: str | None = None, params: Parameters = None
    ) -> pd.DataFrame:
        """Return one row per measured step and estimator; see `frame`, which says what is raised."""
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
    ) -> pd.DataFrame:
        """Return the answer to one SELECT over the views, one per table of the schema.

        Args:
            query: One SELECT in DuckDB's SQL; it can reach no file outside this run's directory and change nothing.
            steps: The views hold only these steps, and no file of others is opened; None means all complete ones.
            seconds: How long it may take; None means as long as it needs.
            rows: Most rows of the answer, which is read no further; None means all, whatever memory they take.
            megabytes: Most millions of bytes of what is read of the answer; None means any number.

        Raises:
            InputError: The query is not one SELECT, cannot be run, takes longer than allowed, or its answer is larger.
            StoreError: A file is broken or missing, or the answer needs more memory than allowed.
        """
        named = [table for table in TABLES if re.search(rf"\b{table}\b", query, re.IGNORECASE)]
        with self._cursor(query, seconds) as cursor:
            self._make_views(cursor, dict.fromkeys(named), steps)
            answer = cursor.execute(query, params)
            if rows is None and megabytes is None:
                return answer.df()
            chunks, size = list[pd.DataFrame](), 0
            while not chunks or (len(chunks[-1]) and (rows is None or sum(map(len, chunks)) < rows)):
                chunks.append(answer.fetch_df_chunk())
                size += 0 if megabytes is None else sum(_size(column) for _, column in chunks[-1].items())
                if megabytes is not None and size > 1e6 * megabytes:
                    raise InputError(
                        f"the answer of {self.path} is larger than {megabytes:g} MB; ask for fewer rows or columns, or "
                        "for the beginning of a text, as in left(completion, 1000)."
                    )
        whole = pd.concat(chunks[:-1] if len(chunks) > 1 and not len(chunks[-1]) else chunks, ignore_index=True)
        return whole if rows is None else whole.head(rows)

    @contextmanager
    def _cursor(self, query: str, seconds: float | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
        """Yield a cursor for one SELECT, interrupted after some seconds; whatever it refuses is one sentence."""
        with self._connection.cursor() as cursor:
            timer = threading.Timer(0 if seconds is None else seconds, cursor.interrupt)
            if seconds is not None:
                timer.start()
            try:
                kinds = [statement.type for statement in cursor.extract_statements(query)]
                if kinds != [duckdb.StatementType.SELECT]:
                    names = ", ".join(kind.name for kind in kinds) or "nothing"
                    raise InputError(f"a run is read-only, but the query holds {names}; pass one SELECT.")
                yield cursor
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
            except duckdb.IOException as error:  # a file went between looking and reading
                raise StoreError(f"{self.path} cannot be read ({str(error).splitlines()[0]}); try again.") from error
            except duckdb.Error as error:
                # DuckDB's second paragraph repeats the query with a caret.
                reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".!")
                raise InputError(
                    f"the query cannot be run ({reason}); correct it, or see the columns with DESCRIBE tokens."
                ) from error
            finally:
                if seconds is not None:
                    timer.cancel()
                    timer.join()  # the cursor is closed next, and must not be interrupted then

    def _make_views(
        self,
        cursor: duckdb.DuckDBPyConnection,
        tables: Mapping[str, Names],
        steps: Steps,
    ) -> None:
        """Make views of tables, all of one moment: over rows of the catalogue, or over Parquet files.

        Args:
            tables: Columns of each table that must be there; a view has all.
        """
        sources, files = dict[str, str](), list[Part]()
        with self._reading() as db:
            for table, columns in tables.items():
                some = [] if table in SMALL else listed(db, self.path, table, steps)
                known = catalogue.column_names(db, table) if table in SMALL else parts.column_names(table, some)
                catalogue.check_names(table, columns or (), known)
                if table in SMALL:
                    cursor.register(f"_{table}", catalogue.read(db, self.path, table, steps))
                    sources[table] = f"SELECT * FROM _{table}"
                else:
                    sources[table], files = parts.select(self.path, table, some), [*files, *some]
        check(self.path, files)
        for view, source in sources.items():
            # Temporary views belong to the cursor, so threads do not meet and no list of files grows old.
            cursor.execute(f"CREATE TEMP VIEW {view} AS {source}")

    @again_if_changed
    def grams(self, steps: Steps = None) -> dict[int, Gram]:
        """Return the Gram matrices of all measured steps, in order: 8·(M·P)² bytes each, so ask for few steps.

        Prompts carry their `prompt_id` where the rollouts were stored with it.

        Raises:
            StoreError: A file is broken or missing.
        """
        return {step: gram for step, _, gram in self._rebuilt("grams", steps)}

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
        with self._reading() as db:
            measured = {part.step for part in listed(db, self.path, "grams", steps)}
            grams = {step: unpacked(packed) for step, _, packed in catalogue.products(db, steps, whole=True)}
        fitting = {step for step, gram in grams.items() if all(map(gram.stands, references))}
        for step in sorted((measured | set(grams)) - fitting):  # one at a time: each is tens of MB
            grams |= {step: gram.reduced(references) for step, gram in self.grams([step]).items()}
        return {step: grams[step] for step in sorted(grams)}

    @again_if_changed
    def subgroup_grams(self, steps: Steps = None) -> dict[int, dict[int, Gram]]:
        """Return the Gram matrices of smaller groups, by size and then by step; empty where none were measured.

        Raises:
            StoreError: A file is broken or missing.
        """
        with self._reading() as db:
            measured = {part.step for part in listed(db, self.path, "subgroups", steps)}
            entries = [
                (step, size, unpacked(packed)) for step, size, packed in catalogue.products(db, steps, whole=False)
            ]
        if missing := measured - {step for step, *_ in entries}:
            entries += self._rebuilt("subgroups", sorted(missing))
        grams: dict[int, dict[int, Gram]] = {}
        for step, size, gram in sorted(entries, key=lambda one: (one[1], one[0])):
            grams.setdefault(size, {})[step] = gram
        return grams

    def _rebuilt(self, table: str, steps: Steps) -> Iterator[tuple[int, int, Gram]]:
        """Yield step, size (0: whole groups) and matrix of what the files of `grams` or `subgroups` hold."""
        with self._reading() as db:
            files, names = listed(db, self.path, table, steps), ["step", "group", "prompt_id"]
            rows = catalogue.read(db, self.path, "rollouts", {part.step for part in files}, names)
        for step, of_step in groupby(files, lambda part: part.step):
            read = [read_step(self.path, part, GRAM_TEXTS) for part in of_step]
            for size, gram in rebuild_grams(read, rows.filter(pc.field("step") == step)):
                yield step, size, gram

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


def _size(values: Any) -> int:
    """Return about how many bytes values take, with all that they hold: a cell may be a list of texts."""
    if isinstance(values, dict):
        return _size([*values, *values.values()])
    if isinstance(values, list | tuple) or str(getattr(values, "dtype", "")) == "object":
        return 8 + sum(map(_size, values))
    return len(values) if isinstance(values, str | bytes | bytearray) else int(getattr(values, "nbytes", 8))
