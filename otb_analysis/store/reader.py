"""Reading a run: frames, read-only SQL, the arrays of one step; each answer sees the steps complete at that moment."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.schema import TABLES
from otb_analysis.store.gram import product_rows, read_gram, rebuild_gram
from otb_analysis.store.held import LIGHT, MANY, rollout_rows, step_frame, step_rows
from otb_analysis.store.layout import find_run
from otb_analysis.store.liveness import standing
from otb_analysis.store.merged import Part
from otb_analysis.store.parts import again_if_changed, by_step, checked, complete_steps, signature, visible_parts
from otb_analysis.store.query import check_read_only, checked_limit, first_rows, interrupted_after, open_locked, refused
from otb_analysis.store.runfile import read_run_file
from otb_analysis.store.token_arrays import TOKEN_COLUMNS, TokenArrays, rebuild_token_arrays
from otb_analysis.store.views import broken_part, column_names, quoted, select, select_from
from otb_analysis.types import Gram, Label

_ASKED_WRONG = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ConversionException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
"""The query is at fault for certain; behind any other error there may be a broken part, and all are read to find it."""

FEW = 16
"""Gram matrices that are read one after the other: two at a time take 40 MB more, and pay for themselves only then."""

WHOLE = "all"
"""The scope of a run that measured the gradient of all parameters; those of unlike scopes do not compare."""

Steps = Sequence[int] | None
Names = Sequence[str] | None
Truth = Label | frozenset[Label]
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
        self._memory_limit = checked_limit(memory_limit)
        self._reduced: dict[tuple[object, ...], Gram] = {}
        self._labels: dict[int, dict[Label, None]] = {}

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        """Opened by the first query: a list of many runs needs none."""
        return open_locked(self.path, self._memory_limit)

    @property
    def info(self) -> dict[str, object]:
        """What run.json says now: config, seed, git, packages, status, reason and more."""
        return read_run_file(self.path)

    @property
    @again_if_changed
    def standing(self) -> tuple[str, str]:
        """Status as it is now, and why: `stopped` where run.json says running but the process is known to be gone."""
        info = self.info
        times = [signature(part)[1] / 1e9 for part in visible_parts(self.path, ["steps"])["steps"][-1:]]
        heard = datetime.fromtimestamp(times[0], UTC).strftime("%Y-%m-%d %H:%M UTC") if times else info.get("updated")
        return standing(info, str(heard or ""))

    def complete_steps(self) -> list[int]:
        """Return the steps that can be read, in order."""
        return complete_steps(self.path)

    @again_if_changed
    def written(self, *tables: str) -> str:
        """Return a text that changes when a complete step of these tables is added or written again.

        Raises:
            StoreError: A part is broken or missing.
        """
        parts = visible_parts(self.path, tables)
        return f"{hash(tuple((part, part.steps) for table in tables for part in parts[table])):x}"

    @again_if_changed
    def steps_with(self, table: str, column: str) -> list[int]:
        """Return the complete steps that hold any value in a column of a table, in order.

        No part of this table is opened for it but those of earlier versions and merged ones.

        Raises:
            StoreError: A part is broken, missing or lacks a key column.
        """
        parts = visible_parts(self.path, [table])[table]
        said = [part.recorded or checked(part).recorded for part in parts]
        holding = {text for text in set(said) if column in text.split(",")}
        found = {step for part, text in zip(parts, said, strict=True) if text in holding for step in part.steps}
        unsaid = [step for part, text in zip(parts, said, strict=True) if not text for step in part.steps]
        if unsaid:
            query = f"SELECT DISTINCT step FROM {table} WHERE {quoted(column)} IS NOT NULL"
            found |= {int(step) for step in self.sql(query, steps=unsaid)["step"]}
        return sorted(found)

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
            StoreError: A part is broken or lacks a key column.
        """
        parts = visible_parts(self.path, [table], steps)
        known = column_names(table, parts[table]) if columns is not None else []
        for name in columns or ():
            if name not in known:
                raise InputError(f"{table} has no column {name!r}; {nearest(name, known)}")
        if table == "steps" and steps is None and where is None:
            return step_frame(self.path, parts[table], columns)
        chosen = "*" if columns is None else ", ".join(map(quoted, columns))
        # The line break ends a comment in the condition.
        condition = "" if where is None else f" WHERE ({where}\n)"
        texts = columns is None or where is not None or not set(columns) <= set(LIGHT)
        return self._run(f"SELECT {chosen} FROM {table}{condition}", params, parts, texts=texts)

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
            steps: The views hold only these steps, and no part of another is opened; None means all complete ones.
            seconds: How long it may take; None means as long as it needs.
            rows: Most rows of the answer, which is read no further; None means all, whatever memory they take.
            megabytes: Most millions of bytes of what is read of the answer; None means any number.
            texts: False leaves prompts, answers and parts of rewards of `rollouts` out. The other columns of many parts
                are then held in memory, so that the next query opens only new parts.

        Raises:
            InputError: The query is not one SELECT, cannot be run, takes longer than allowed, or its answer is larger.
            StoreError: A part is broken or lacks a key column, or the answer needs more memory than allowed.
        """
        # A view costs a look at every part, so only tables that the text mentions get one.
        tables = [table for table in TABLES if re.search(rf"\b{table}\b", query, re.IGNORECASE)]
        return self._run(query, params, visible_parts(self.path, tables, steps), seconds, rows, megabytes, texts)

    @again_if_changed
    def grams(self, steps: Steps = None) -> dict[int, Gram]:
        """Return the Gram matrices of all measured steps, in order: 8·(M·P)² bytes each, so ask for few steps.

        Prompts carry their `prompt_id` where the rollouts were stored with it.

        Raises:
            StoreError: A part is broken or lacks a key column.
        """
        return self._read_grams(self._parts_by_step("grams", steps))

    @again_if_changed
    def stored_labels(self) -> list[Label]:
        """Return (estimator, energy source) of every row of `gradients`, each once; a second call reads new steps only.

        Raises:
            StoreError: A part is broken or lacks a key column.
        """
        known, steps = self._labels, self.steps_with("gradients", "estimator")
        if not known.keys() <= set(steps):  # it went back some steps
            known = {}
        found = dict(known)
        if new := [step for step in steps if step not in known]:
            rows = self.gradients_df(new, ["step", "estimator", "energy_source"])
            for step, name, source in rows.itertuples(index=False, name=None):
                found.setdefault(int(step), {})[str(name), str(source)] = None
        self._labels = found
        return list({label: None for step in sorted(found) for label in found[step]})

    @again_if_changed
    def reduced_grams(self, references: Sequence[Truth], steps: Steps = None) -> dict[int, Gram]:
        """Return of each measured step what comparing its estimators with these references needs.

        A step takes 8·M·P²·(1 + references) bytes. A second call with the same references reads only what is new.

        Args:
            references: What will stand for ∇J: an estimator, or several whose mean does; a step uses those it has.

        Raises:
            StoreError: A part is broken or lacks a key column.
        """
        parts = self._parts_by_step("grams", steps)
        keys = {step: (step, tuple(references), *map(signature, some)) for step, some in parts.items()}
        new = {step: some for step, some in parts.items() if keys[step] not in self._reduced}
        read = self._read_grams(new, tuple(references))
        held = self._reduced | {keys[step]: gram for step, gram in read.items()}
        grams = {step: held[key] for step, key in keys.items() if key in held}
        self._reduced = held if steps is not None else {keys[step]: gram for step, gram in grams.items()}
        return grams

    @again_if_changed
    def subgroup_grams(self, steps: Steps = None) -> dict[int, dict[int, Gram]]:
        """Return the Gram matrices of smaller groups, by size and then by step; empty where none were measured.

        Raises:
            StoreError: A part is broken or lacks a key column.
        """
        parts, grams = self._parts_by_step("subgroups", steps), dict[int, dict[int, Gram]]()
        prompts = self._prompts(list(parts))
        for step, some in parts.items():
            for size, rows in product_rows("subgroups", some).groupby("size"):
                grams.setdefault(int(str(size)), {})[step] = rebuild_gram(rows, prompts[step])
        return {size: grams[size] for size in sorted(grams)}

    def token_arrays(self, step: int, group: int | None = None) -> TokenArrays:
        """Return one step's tokens, or those of one prompt, as [N, T] arrays: any estimator can be computed again.

        Raises:
            InputError: The step is not complete, or there is no such step.
            StoreError: A part is broken or lacks a key column, or the mask was not stored.
        """
        steps = self.complete_steps()
        if step not in steps:
            known = f"steps {steps[0]} to {steps[-1]} are there" if steps else "no step is complete yet"
            raise InputError(f"step {step} of {self.path} cannot be read; {known}.")
        where, params = (None, None) if group is None else ('"group" = ?', [group])
        tokens = self.tokens_df([step], list(TOKEN_COLUMNS), where, params)
        rollouts = self.rollouts_df([step], ["group", "rollout", "score_norm_sq"], where, params)
        return rebuild_token_arrays(f"step {step} of {self.path}", tokens, rollouts)

    def _parts_by_step(self, table: str, steps: Steps) -> dict[int, list[Part]]:
        return by_step(visible_parts(self.path, [table], steps)[table])

    def _read_grams(
        self, parts: Mapping[int, Sequence[Part]], references: Sequence[Truth] | None = None
    ) -> dict[int, Gram]:
        """Return the Gram matrices of steps that have one, or what references need of them; two are read at a time."""
        if not parts:
            return {}
        prompts, (first, *others) = self._prompts(list(parts)), parts
        # The first step tells the order of all: the others read their products alone, a tenth of the memory.
        read = [read_gram(parts[first], prompts[first], references)]
        with ThreadPoolExecutor(1 + (len(others) > FEW)) as pool:  # most of the work is Arrow's and NumPy's
            read += pool.map(lambda step: read_gram(parts[step], prompts[step], references), others)
        return {step: gram for step, gram in zip(parts, read, strict=True) if gram is not None}

    def _prompts(self, steps: Sequence[int]) -> dict[int, dict[int, object]]:
        """Return the name of each group's prompt, by step."""
        prompts: dict[int, dict[int, object]] = {step: {} for step in steps}
        if steps:
            names = 'SELECT step, "group", arg_max(prompt_id, rollout) FROM rollouts'
            query = f"{names} WHERE prompt_id IS NOT NULL GROUP BY ALL"
            for step, group, prompt in self.sql(query, steps=steps).itertuples(index=False):
                prompts[step][group] = prompt
        return prompts

    def _rows(self, cursor: duckdb.DuckDBPyConnection, table: str, parts: list[Part], texts: bool) -> str:
        """Return a SELECT of a table's rows, over files or over what is held of them in memory."""
        light = table == "rollouts" and not texts
        rows: pa.Table | None = None
        if len(parts) > MANY and (light or table == "steps"):
            rows = rollout_rows(self.path, parts) if light else step_rows(self.path, parts)
        if rows is None:
            source = select(table, parts)
        else:
            cursor.register(f"_held_{table}", rows)
            source = select_from(table, rows.column_names, f"_held_{table}")
        # Without the other columns, so that they are unknown rather than null.
        return f"SELECT {', '.join(map(quoted, LIGHT))} FROM ({source})" if light else source

    def _run(
        self,
        query: str,
        params: Parameters,
        tables: Mapping[str, list[Part]],
        seconds: float | None = None,
        rows: int | None = None,
        megabytes: float | None = None,
        texts: bool = True,
    ) -> pd.DataFrame:
        with self._connection.cursor() as cursor, interrupted_after(seconds, cursor):
            try:
                check_read_only(cursor, query)
                for table, parts in tables.items():
                    # Temporary views belong to the cursor, so threads do not meet and no list of parts grows old.
                    cursor.execute(f"CREATE TEMP VIEW {table} AS {self._rows(cursor, table, parts, texts)}")
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
            except duckdb.Error as error:
                broken = broken_part([part for parts in tables.values() for part in parts])
                raise broken or refused(error) from error


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
