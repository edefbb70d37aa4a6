"""What is asked of rollouts: by a filter and in an order, or by a query that somebody typed.

A filter may hold a condition, such as `reward == 0 and tokens > 200`: Python's grammar, read and never run. Only
comparisons, `and`, `or`, `not`, arithmetic, numbers, texts and names of columns are taken; Arrow compares.

A query is answered in a process of its own, since DuckDB does not count the memory of values it computes:
`SELECT repeat('x', 1000000) FROM range(2048)` takes 7 GB under a limit of 256 MB, and nothing interrupts it.
"""

import ast
import operator
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from threading import Timer
from typing import Any, BinaryIO, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from otb_analysis.errors import STOPS, InputError, StoreError, nearest
from otb_analysis.store.reader import RunStore

ASKED_SECONDS, ASKED_ROWS, ASKED_MEGABYTES, ASKED_MEMORY = 20, 100_000, 20, "256MB"
"""Bounds of a query that somebody typed: on the page Rollouts, or behind `otb query`."""
ASKED_PROCESS = 2_000_000_000
"""Bytes of data that the process of such a query may have; DuckDB keeps most within `ASKED_MEMORY`."""
STARTED, SENT = 60, 2
"""Seconds in which the process may start; and in which it may send its answer, beside those of the query."""

BINS, REWARD_BINS = 60, 10
"""Most columns of the histogram, and rows where the rewards are no few numbers."""

FEW = 12
"""Different rewards up to which each is a row of its own."""

AS_SAMPLED, DISAGREEING = "oldest steps first", "prompts whose answers disagree first"
UP, DOWN = "ascending", "descending"
ORDERS = {
    AS_SAMPLED: {"step": UP}, "newest steps first": {"step": DOWN}, DISAGREEING: {"spread": DOWN, "step": DOWN},
    "highest rewards first": {"reward": DOWN}, "lowest rewards first": {"reward": UP},
    "longest first": {"length": DOWN}, "shortest first": {"length": UP},
}  # fmt: skip
"""What rollouts are sorted by, before step and rollout; `spread` is that of the rewards of a rollout's group."""
SHORT = {"tokens": "length"}
"""Names that a condition may have beside the columns."""
LONGEST, MOST = 60, 1_000
"""Characters of a condition that an error repeats, and that it may have: Arrow overflows the stack where it is deep."""
COMPARED = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
COUNTED = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    # Arrow divides whole numbers without a rest, and its operator refuses a zero.
    ast.Div: lambda a, b: pc.divide(pc.scalar(1.0) * a, b),  # pyright: ignore[reportAttributeAccessIssue]
}  # fmt: skip


@dataclass(frozen=True)
class RolloutFilter:
    """What is asked of rollouts; ends of a range belong to it, and None asks nothing."""

    steps: tuple[int, int] | None = None
    reward: tuple[float, float] | None = None
    finish_reasons: Sequence[str] = field(default_factory=tuple)
    equal: bool | None = None  # True: of groups with equal rewards; False: of the others
    where: str = ""  # A condition over the columns, such as `reward == 0 and tokens > 200`
    text: str = ""  # In the prompt or the completion, upper and lower case alike

    def rows(self, store: RunStore, columns: Sequence[str]) -> pa.Table:
        """Return columns of the rollouts that are asked for, by step; `spread` is how their group's rewards disagree.

        Raises:
            InputError: The condition is none, or names what is no column.
            StoreError: The rows are not those that were written.
        """
        steps = None if self.steps is None else range(self.steps[0], self.steps[1] + 1)
        known = SHORT | {name: name for name in rollout_columns(store)} if self.where else {}
        asked = {"reward": ("reward",), "finish_reasons": ("finish_reason",)}
        asked |= {"equal": ("group", "reward"), "text": ("prompt", "completion")}
        needed = [n for field, names in asked.items() if getattr(self, field) not in (None, (), "") for n in names]
        needed += [known[name] for name in named_columns(self.where) if name in known]
        needed += ["group", "reward"] * ("spread" in columns)
        rows = store.rows("rollouts", [n for n in dict.fromkeys(["step", *columns, *needed]) if n != "spread"], steps)
        if self.equal is not None or "spread" in columns:  # first: a group is equal in all its rollouts
            rewards: Any = rows.select(["step", "group", "reward"]).to_pandas().groupby(["step", "group"])["reward"]
            whole = rewards.transform("count") == rewards.transform("size")
            equal = whole & (rewards.transform("min") == rewards.transform("max"))
            spread = rewards.transform("std", ddof=0).where(whole & ~equal, equal.map({True: 0.0, False: None}))
            rows = rows.append_column("spread", pa.array(spread, pa.float64(), from_pandas=True))
            if self.equal is not None:
                rows = rows.filter(pa.array((equal == self.equal).to_numpy()))
        if self.where:
            rows = rows_where(rows, self.where, known)
        if self.reward is not None:
            rows = rows.filter((pc.field("reward") >= self.reward[0]) & (pc.field("reward") <= self.reward[1]))
        if self.finish_reasons:
            rows = rows.filter(pc.field("finish_reason").isin(list(self.finish_reasons)))
        if self.text:
            options = pc.MatchSubstringOptions(self.text, ignore_case=True)
            matches = [pc.call_function("match_substring", [rows[name]], options) for name in ("prompt", "completion")]
            rows = rows.filter(pc.call_function("or", [one.fill_null(False) for one in matches]))
        return rows


def named_columns(text: str) -> list[str]:
    """Return the names that a condition holds; none where it cannot be read."""
    try:
        return [node.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Name)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def rows_where(rows: pa.Table, text: str, columns: Mapping[str, str]) -> pa.Table:
    """Return the rows that meet a condition; one about a missing value is not met.

    Args:
        text: The condition; `0 < reward < 1` and `reward_form / turns > 0.5` are some.
        columns: The names that it may hold, and the column of the rows that each stands for.

    Raises:
        InputError: It is no such condition, holds an unknown name, or compares what cannot be compared.
    """
    how = f"join comparisons such as reward == 0 by and, or, not; the columns are {', '.join(columns)}."
    asked = repr(text if len(text) <= LONGEST else f"{text[:LONGEST]} …")
    if len(text) > MOST:
        raise InputError(f"the condition {asked} has {len(text):,} characters, of {MOST:,} at most; {how}")
    try:
        return rows.filter(_expression(ast.parse(text.strip(), mode="eval").body, columns))
    except InputError as error:
        raise InputError(f"the condition {asked} has {error} {how}") from None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError, pa.ArrowException) as error:
        raise InputError(f"the condition {asked} cannot be asked of rollouts; {how}") from error


def _expression(node: ast.AST, columns: Mapping[str, str]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=values):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            return reduce(join, (_expression(value, columns) for value in values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_expression(operand, columns)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.scalar(-1) * _expression(operand, columns)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COUNTED:
            return COUNTED[type(op)](_expression(left, columns), _expression(right, columns))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARED for op in ops):
            sides = [_expression(side, columns) for side in (left, *others)]
            pairs = zip(ops, sides, sides[1:], strict=False)
            return reduce(operator.and_, (COMPARED[type(op)](a, b) for op, a, b in pairs))
        case ast.Name(id=name) if name in columns:
            return pc.field(columns[name])
        case ast.Constant(value=str() | int() | float() as value):
            return pc.scalar(value)
    raise InputError(f"{ast.unparse(node)[:LONGEST]!r} in it, which is no column, number, text or comparison;")


def rollout_columns(store: RunStore) -> list[str]:
    """Return the columns that rollouts can be asked for: those of the schema, then the parts of the reward and others.

    Raises:
        StoreError: The catalogue cannot be read.
    """
    return store.rows("rollouts", steps=[]).column_names


def find_rollouts(
    store: RunStore, asked: RolloutFilter, most: int = 500, order: str = AS_SAMPLED
) -> tuple[pd.DataFrame, int]:
    """Return the first `most` rollouts that are asked for, in one of `ORDERS`, and how many there are.

    Raises:
        InputError: The order is unknown, or the condition is none.
        StoreError: The rows are not those that were written.
    """
    if order not in ORDERS:
        raise InputError(f"order is {order!r}; {nearest(order, ORDERS)}")
    keys = ORDERS[order] | {name: UP for name in ("step", "rollout") if name not in ORDERS[order]}
    rows = asked.rows(store, ["rollout", *keys])
    first = rows.sort_by(list(keys.items())).slice(0, most).select(["step", "rollout"]).to_pandas()
    return first.merge(store.rollouts_df(first["step"].unique().tolist()), on=["step", "rollout"]), len(rows)


def reward_histogram(store: RunStore, asked: RolloutFilter) -> pd.DataFrame:
    """Return counts of the rollouts that are asked for, by `step` and finite `reward`, each the lower end of its bin.

    Steps are put together to at most `BINS`; rewards to `REWARD_BINS` bins where there are more than `FEW` of them.
    `width` is that of a bin of steps, `height` that of a bin of rewards, 0 where each reward has a row.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    rows = asked.rows(store, ["reward"])
    step = rows["step"].to_numpy()
    reward = pc.call_function("cast", [rows["reward"]], pc.CastOptions.safe(pa.float64())).to_numpy()
    step, reward = step[np.isfinite(reward)], reward[np.isfinite(reward)]
    width, height = 1, 0.0
    if len(step):
        width = -(-int(step.max() - step.min() + 1) // BINS)
        step = step.min() + (step - step.min()) // width * width
    if len(np.unique(reward)) > FEW:
        low, height = reward.min(), (reward.max() - reward.min()) / REWARD_BINS
        reward = low + height * np.minimum(REWARD_BINS - 1, np.floor((reward - low) / height))
    bins: Any = pd.DataFrame({"step": step, "reward": reward, "n": 1})
    return bins.groupby(["step", "reward"], as_index=False).sum().assign(width=width, height=height)


def facts_of_rollouts(store: RunStore) -> dict[str, Any]:
    """Return the ends of what rollouts can be asked for; None where there are no rollouts.

    `first` and `last` step, `low` and `high` finite reward, `short` and `long` length, most `turns`, `lost` rollouts
    whose reward is NaN or infinite, and all finish `reasons`.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    rows = store.rows("rollouts", ["step", "length", "turns", "reward", "finish_reason"])
    reward = rows["reward"].drop_null().to_numpy()
    finite = reward[np.isfinite(reward)]
    ends = {name: pc.call_function("min_max", [rows[name]]).as_py() for name in ("step", "length", "turns")}
    return {
        "first": ends["step"]["min"], "last": ends["step"]["max"],
        "short": ends["length"]["min"], "long": ends["length"]["max"], "turns": ends["turns"]["max"] or 1,
        "low": float(finite.min()) if len(finite) else None, "high": float(finite.max()) if len(finite) else None,
        "lost": len(reward) - len(finite),
        "reasons": sorted(rows["finish_reason"].drop_null().unique().to_pylist()),
    }  # fmt: skip


def asked_sql(run_dir: Path | str, query: str, seconds: float = ASKED_SECONDS) -> pd.DataFrame:
    """Return the answer to one SELECT over a run, as `RunStore.sql` does, within the bounds of `ASKED_…`.

    The answer holds 100,000 rows and 20 MB at most. The process has 2 GB for its data where the system can limit that.

    Raises:
        InputError: The query is not one SELECT, cannot be run, takes longer than allowed, or its answer is larger.
        StoreError: A part is broken or lacks a key column, or the answer needs more memory than allowed.
    """
    command = [sys.executable, "-c", f"from {__name__} import answer; answer()", str(run_dir), str(seconds)]
    too_large = StoreError(
        f"the query on {run_dir} needs more memory than allowed; ask for fewer steps or columns, or for shorter texts."
    )
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere) as process:
        late = Timer(STARTED, process.kill)
        late.start()
        ready = cast(BinaryIO, process.stdout).read(1)  # from now on the query's time counts
        late.cancel()
        try:
            sent, _ = process.communicate(query.encode(errors="replace"), timeout=seconds + SENT)
            reply: Any = pickle.loads(sent) if ready and process.returncode == 0 else too_large  # written by `answer`
        except subprocess.TimeoutExpired:
            process.kill()
            reply = InputError(
                f"the query on {run_dir} took longer than {seconds:g} s and was ended; ask for fewer steps or columns."
            )
    if isinstance(reply, MemoryError):
        raise too_large
    if isinstance(reply, Exception):
        raise reply
    return reply


def answer() -> None:
    """Write the answer to the query on standard input, or the error, in the process that `asked_sql` starts."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no `resource`, macOS refuses the limit
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (ASKED_PROCESS, ASKED_PROCESS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(b".")  # it is ready
    sys.stdout.buffer.flush()
    query = sys.stdin.buffer.read().decode()
    try:
        store = RunStore(sys.argv[1], memory_limit=ASKED_MEMORY)
        reply: Any = store.sql(query, seconds=float(sys.argv[2]), rows=ASKED_ROWS, megabytes=ASKED_MEGABYTES)
    except (*STOPS, MemoryError) as error:
        reply = error
    sys.stdout.buffer.write(pickle.dumps(reply))
