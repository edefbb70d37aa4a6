"""Reading a run: frames, read-only SQL, the arrays of one step; each answer sees the steps complete at that moment."""

import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.schema import TABLES
from otb_analysis.store.gram import PRODUCT_TEXTS, rebuild_gram
from otb_analysis.store.layout import Part, complete_steps, find_run, parts_of, visible_parts
from otb_analysis.store.liveness import standing
from otb_analysis.store.runfile import read_run_file
from otb_analysis.store.token_arrays import TOKEN_COLUMNS, TokenArrays, rebuild_token_arrays
from otb_analysis.store.views import broken_part, column_names, literal, quoted, select
from otb_analysis.types import Gram

_ASKED_WRONG = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ConversionException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
"""The query is at fault for certain; behind any other error there may be a broken part, and all are read to find it."""

WHOLE = "all"
"""The scope of a run that measured the gradient of all parameters; those of unlike scopes do not compare."""

AT_ONCE = 8
"""Steps whose rows of `grams`, which take several times the memory of the matrices, are read by one query."""

Steps = Sequence[int] | None
Names = Sequence[str] | None
Parameters = Sequence[object] | Mapping[str, object] | None


class RunStore:
    """Reads one run, also while it is being written; safe to share between threads."""

    def __init__(self, path: str | Path, *, memory_limit: str = "1GB") -> None:
        """Open a run.

        Args:
            memory_limit: What one query may hold in memory, as DuckDB writes it.

        Raises:
            InputError: There is no such run, or the limit is no amount of memory.
            StoreError: Its run.json is missing, broken or newer than this version.
        """
        self.path = find_run(Path(path))
        read_run_file(self.path)
        self._connection = _open_locked(self.path, memory_limit)

    @property
    def info(self) -> dict[str, object]:
        """What run.json says now: config, seed, git, packages, status, reason and more."""
        return read_run_file(self.path)

    @property
    def standing(self) -> tuple[str, str]:
        """Status as it is now, and why: `stopped` where run.json says running but the process is known to be gone."""
        info = self.info
        times = [part.path.stat().st_mtime for part in parts_of(self.path, "steps")[-1:]]
        heard = datetime.fromtimestamp(times[0], UTC).strftime("%Y-%m-%d %H:%M UTC") if times else info.get("updated")
        return standing(info, str(heard or ""))

    def complete_steps(self) -> list[int]:
        """Return the steps that can be read, in order."""
        return complete_steps(self.path)

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
            StoreError: A part is broken or lacks a key column.
        """
        parts = visible_parts(self.path, [table], steps)
        known = column_names(table, parts[table]) if columns is not None else []
        for name in columns or ():
            if name not in known:
                raise InputError(f"{table} has no column {name!r}; {nearest(name, known)}")
        chosen = "*" if columns is None else ", ".join(map(quoted, columns))
        # The line break ends a comment in the condition.
        condition = "" if where is None else f" WHERE ({where}\n)"
        return self._run(f"SELECT {chosen} FROM {table}{condition}", params, parts)

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

    def sql(self, query: str, params: Parameters = None) -> pd.DataFrame:
        """Return the answer to one SELECT over the views, one per table of the schema.

        Args:
            query: One SELECT in DuckDB's SQL; it can reach no file outside this run's directory and change nothing.

        Raises:
            InputError: The query is not one SELECT, or cannot be run.
            StoreError: A part is broken or lacks a key column, or the answer needs more memory than allowed.
        """
        # A view costs a look at every part, so only tables that the text mentions get one.
        tables = [table for table in TABLES if table in query.lower()]
        return self._run(query, params, visible_parts(self.path, tables))

    def grams(self, steps: Steps = None) -> dict[int, Gram]:
        """Return the Gram matrices of all measured steps, in order, from the rows of a few steps at a time.

        Prompts carry their `prompt_id` where the rollouts were stored with it.

        Raises:
            StoreError: A part is broken or lacks a key column.
        """
        parts = visible_parts(self.path, ["grams"], steps)
        rows = self._run("SELECT DISTINCT step FROM grams ORDER BY step", None, parts)
        measured, grams = rows["step"].astype(int).tolist(), dict[int, Gram]()
        for first in range(0, len(measured), AT_ONCE):
            grams |= self._rebuilt(self._products("grams", measured[first : first + AT_ONCE]))
        return grams

    def subgroup_grams(self, steps: Steps = None) -> dict[int, dict[int, Gram]]:
        """Return the Gram matrices of smaller groups, by size and then by step; empty where none were measured.

        Raises:
            StoreError: A part is broken or lacks a key column.
        """
        rows = self._products("subgroups", steps)
        return {int(str(size)): self._rebuilt(part) for size, part in rows.groupby("size")}

    def _products(self, table: str, steps: Steps) -> pd.DataFrame:
        """Return the rows of `grams` or `subgroups`, their texts as categories.

        A step has half a million of them, and pandas takes a second for each million texts but none for codes.
        """
        query = f"SELECT * FROM {table}"
        return self._run(query, None, visible_parts(self.path, [table], steps), categories=PRODUCT_TEXTS)

    def _rebuilt(self, rows: pd.DataFrame) -> dict[int, Gram]:
        """Return the Gram matrix of every step among the rows of `grams` or of one size of `subgroups`."""
        by_step = {int(str(step)): part for step, part in rows.groupby("step")}
        named = self.rollouts_df(list(by_step), ["step", "group", "prompt_id"], "prompt_id IS NOT NULL")
        prompts: dict[int, dict[int, object]] = {step: {} for step in by_step}
        for step, group, prompt in zip(named["step"], named["group"], named["prompt_id"], strict=True):
            prompts[step][group] = prompt
        return {step: rebuild_gram(part, prompts[step]) for step, part in by_step.items()}

    def token_arrays(self, step: int) -> TokenArrays:
        """Return one step's tokens as [N, T] arrays, from which any estimator can be computed again.

        Raises:
            InputError: The step is not complete, or there is no such step.
            StoreError: A part is broken or lacks a key column, or the mask was not stored.
        """
        steps = self.complete_steps()
        if step not in steps:
            known = f"steps {steps[0]} to {steps[-1]} are there" if steps else "no step is complete yet"
            raise InputError(f"step {step} of {self.path} cannot be read; {known}.")
        tokens = self.tokens_df([step], list(TOKEN_COLUMNS))
        rollouts = self.rollouts_df([step], ["group", "rollout", "score_norm_sq"])
        return rebuild_token_arrays(f"step {step} of {self.path}", tokens, rollouts)

    def _run(
        self, query: str, params: Parameters, tables: Mapping[str, Sequence[Part]], categories: Sequence[str] = ()
    ) -> pd.DataFrame:
        with self._connection.cursor() as cursor:
            try:
                _check_read_only(cursor, query)
                for table, parts in tables.items():
                    # Temporary views belong to the cursor, so threads do not meet and no list of parts grows old.
                    cursor.execute(f"CREATE TEMP VIEW {table} AS {select(table, parts)}")
                if categories:
                    return cursor.sql(query, params=params).to_arrow_table().to_pandas(categories=list(categories))
                return cursor.execute(query, params).df()
            except duckdb.OutOfMemoryException as error:
                raise StoreError(
                    f"the query on {self.path} needs more memory than allowed; ask for fewer steps or columns, "
                    "or open the run with a larger memory_limit."
                ) from error
            except _ASKED_WRONG as error:
                raise _refused(error) from error
            except duckdb.Error as error:
                broken = broken_part([part for parts in tables.values() for part in parts])
                raise broken or _refused(error) from error


def scope_of(store: RunStore) -> str:
    """Return whose parameters' gradient a run measured, as its configuration says; all where it does not say."""
    config: Any = store.info.get("config") or {}
    measure = config.get("measure")
    return str(measure.get("scope", WHOLE)) if isinstance(measure, dict) else WHOLE


def unlike_scopes(stores: Sequence[RunStore]) -> str:
    """Return which two runs measured gradients of other parameters, for a remedy to follow; empty where none did."""
    for other in stores[1:]:
        first, second = scope_of(stores[0]), scope_of(other)
        if second != first:
            names = (stores[0].path.name, other.path.name)
            return (
                f"{names[0]} measured gradients of scope {first!r} but {names[1]} of {second!r}, which do not compare"
            )
    return ""


def _open_locked(run_dir: Path, memory_limit: str) -> duckdb.DuckDBPyConnection:
    """Return a connection that can read this run's directory and no other file, and whose settings are final."""
    connection = duckdb.connect()
    try:
        connection.execute(f"SET memory_limit={literal(memory_limit)}")
    except duckdb.Error as error:
        raise InputError(f"memory_limit is {memory_limit!r}; pass an amount such as '256MB' or '1GB'.") from error
    connection.execute(f"SET temp_directory={literal(str(Path(tempfile.gettempdir()) / 'otb-analysis-spill'))}")
    # A SELECT could otherwise name any data frame in the memory of the caller.
    connection.execute("SET python_enable_replacements=false")
    connection.execute(f"SET allowed_directories=[{literal(str(run_dir))}]")
    connection.execute("SET enable_external_access=false")
    connection.execute("SET lock_configuration=true")
    return connection


def _check_read_only(cursor: duckdb.DuckDBPyConnection, query: str) -> None:
    statements = cursor.extract_statements(query)
    if [s.type for s in statements] != [duckdb.StatementType.SELECT]:
        kinds = ", ".join(s.type.name for s in statements) or "nothing"
        raise InputError(f"a run is read-only, but the query holds {kinds}; pass one SELECT.")


def _refused(error: Exception) -> InputError:
    # DuckDB's second paragraph repeats the query with a caret.
    reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".!")
    return InputError(f"the query cannot be run ({reason}); correct it, or see the columns with DESCRIBE tokens.")
