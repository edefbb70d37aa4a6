"""Rollouts of a run by what is asked of them, and how their rewards spread over the steps."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.store.merged import Part
from otb_analysis.store.parts import again_if_changed, visible_parts
from otb_analysis.store.reader import RunStore

BINS, REWARD_BINS = 60, 10
"""Most columns of the histogram, and rows where the rewards are no few numbers."""

FEW = 12
"""Different rewards up to which each is a row of its own."""


@dataclass(frozen=True)
class RolloutFilter:
    """What is asked of rollouts; ends of a range belong to it, and None asks nothing."""

    steps: tuple[int, int] | None = None
    reward: tuple[float, float] | None = None
    length: tuple[int, int] | None = None
    finish_reasons: Sequence[str] = field(default_factory=tuple)
    equal: bool | None = None  # True: of groups with equal rewards; False: of the others
    turns: int | None = None  # At least so many turns
    text: str = ""  # In the prompt or the completion, upper and lower case alike

    @property
    def every_step(self) -> range | None:
        """The steps between the ends, so that parts of others are not opened; None for all."""
        return None if self.steps is None else range(self.steps[0], self.steps[1] + 1)

    def condition(self) -> tuple[str, list[object]]:
        """Return an SQL condition over the columns of `rollouts` and `equal`, with its parameters."""
        parts, values = ["true"], list[object]()
        for name in ("steps", "reward", "length"):
            if (ends := getattr(self, name)) is not None:
                parts.append(f"{'step' if name == 'steps' else name} BETWEEN ? AND ?")
                values += list(ends)
        if self.finish_reasons:
            parts.append(f"finish_reason IN ({', '.join('?' * len(self.finish_reasons))})")
            values += list(self.finish_reasons)
        if self.equal is not None:
            parts.append("equal" if self.equal else "NOT equal")
        if self.turns is not None:
            parts.append("turns >= ?")
            values.append(self.turns)
        if self.text:
            parts.append("(contains(lower(prompt), lower(?)) OR contains(lower(completion), lower(?)))")
            values += [self.text, self.text]
        return " AND ".join(parts), values


EQUAL = 'min(reward) OVER (PARTITION BY step, "group") = max(reward) OVER (PARTITION BY step, "group")'

FACTS = """SELECT step, min(length) AS short, max(length) AS long, max(turns) AS turns,
    min(reward) FILTER (WHERE isfinite(reward)) AS low, max(reward) FILTER (WHERE isfinite(reward)) AS high,
    count(*) FILTER (WHERE NOT isfinite(reward)) AS lost,
    list(DISTINCT finish_reason) FILTER (WHERE finish_reason IS NOT NULL) AS reasons
    FROM rollouts GROUP BY step"""


def _asked(asked: RolloutFilter) -> tuple[str, list[object]]:
    """Return the rows that are asked for as SQL, and its parameters."""
    condition, values = asked.condition()
    return f"SELECT * FROM (SELECT *, {EQUAL} AS equal FROM rollouts) WHERE {condition}", values


MOST_KEPT = 250_000
"""Rows of an answer beyond which it is not kept: where most rewards differ, there are as many as rollouts."""


class _Answer:
    """Rows of a query, each of which depends on one step alone, and the parts that were asked for them."""

    def __init__(self) -> None:
        self.lock, self.parts, self.rows = threading.Lock(), list[Part](), pd.DataFrame()


@lru_cache(maxsize=16)
def _kept(run_dir: Path, query: str, values: tuple[object, ...], steps: range | None) -> _Answer:
    return _Answer()


@again_if_changed
def _each_step(
    store: RunStore, query: str, values: Sequence[object] = (), steps: range | None = None, *, texts: bool = False
) -> pd.DataFrame:
    """Return the answer to a query whose rows each depend on one step alone; only new and changed steps are asked."""
    parts = visible_parts(store.path, ["rollouts"], steps)["rollouts"]
    kept = _kept(store.path, query, tuple(values), steps)
    with kept.lock:
        same = _alike(parts, kept.parts)
        ask = {step for part in parts[same:] for step in part.steps}
        rows: Any = kept.rows
        if same < len(kept.parts) or (same and parts[same - 1].step in ask):  # a rank's part may come late
            known = {step for part in parts[:same] for step in part.steps} - ask
            rows = rows[rows["step"].isin(sorted(known))] if same else rows
        if not ask and same:
            return rows  # an older look must not take away what a newer one found
        found = store.sql(query, list(values), steps=sorted(ask) if same else steps, texts=texts)
        new: Any = found[found["step"].isin(sorted(ask))]  # the run may have grown meanwhile
        rows = pd.concat([rows, new], ignore_index=True) if same else new
        if len(rows) <= MOST_KEPT:
            kept.rows, kept.parts = rows, parts
        return rows


def _alike(parts: list[Part], others: list[Part]) -> int:
    """Return with how many of the same parts two lists begin; comparing the same objects takes no time."""
    n = min(len(parts), len(others))
    return n if parts[:n] == others[:n] else next(i for i in range(n) if parts[i] != others[i])


def _counted(store: RunStore, asked: RolloutFilter) -> pd.DataFrame:
    """Return how many rollouts are asked for, by step and reward; of a reward that is null, NaN."""
    rows, values = _asked(asked)
    query = f"SELECT step, CAST(reward AS DOUBLE) AS reward, count(*) AS n FROM ({rows}) GROUP BY ALL"
    return _each_step(store, query, values, asked.every_step, texts=bool(asked.text))


def find_rollouts(store: RunStore, asked: RolloutFilter, most: int = 500) -> tuple[pd.DataFrame, int]:
    """Return the first `most` rollouts that are asked for, in order of steps, and how many there are.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    counts: Any = _counted(store, asked)
    n = counts.groupby("step")["n"].sum()
    first = n.index[n.cumsum() - n < most]  # texts are read of these steps only
    rows, values = _asked(asked)
    table = store.sql(f"{rows} ORDER BY step, rollout LIMIT {most}", values, steps=first.tolist())
    return table, int(n.sum())


def reward_histogram(store: RunStore, asked: RolloutFilter) -> pd.DataFrame:
    """Return counts of the rollouts that are asked for, by `step` and finite `reward`, each the lower end of its bin.

    Steps are put together to at most `BINS`; rewards to `REWARD_BINS` bins where there are more than `FEW` of them.
    `width` is that of a bin of steps, `height` that of a bin of rewards, 0 where each reward has a row.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    counts: Any = _counted(store, asked)
    counts = counts[np.isfinite(counts["reward"])]
    step, reward = counts["step"].to_numpy(), counts["reward"].to_numpy()
    width, height = 1, 0.0
    if len(counts):
        width = -(-int(step.max() - step.min() + 1) // BINS)
        step = step.min() + (step - step.min()) // width * width
    if len(np.unique(reward)) > FEW:
        low, height = reward.min(), (reward.max() - reward.min()) / REWARD_BINS
        reward = low + height * np.minimum(REWARD_BINS - 1, np.floor((reward - low) / height))
    bins: Any = pd.DataFrame({"step": step, "reward": reward, "n": counts["n"].to_numpy()})
    return bins.groupby(["step", "reward"], as_index=False).sum().assign(width=width, height=height)


def facts_of_rollouts(store: RunStore) -> dict[str, Any]:
    """Return the ends of what rollouts can be asked for; None where there are no rollouts.

    `first` and `last` step, `low` and `high` finite reward, `short` and `long` length, most `turns`, `lost` rollouts
    whose reward is NaN or infinite, and all finish `reasons`.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    facts: Any = _each_step(store, FACTS)
    low = facts[["step", "short", "low"]].min()
    high = facts[["step", "long", "high", "turns"]].max()
    ends = {"first": low["step"], "last": high["step"], "short": low["short"], "long": high["long"]}
    rewards = {"low": low["low"], "high": high["high"]}
    return (
        {name: None if pd.isna(end) else int(end) for name, end in ends.items()}
        | {name: None if pd.isna(end) else float(end) for name, end in rewards.items()}
        | {"turns": 1 if pd.isna(high["turns"]) else int(high["turns"]), "lost": int(facts["lost"].sum())}
        | {"reasons": sorted(set(chain.from_iterable(facts["reasons"].dropna())))}
    )
