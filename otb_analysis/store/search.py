"""Rollouts of a run by what is asked of them, and how their rewards spread over the steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

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


def _asked(asked: RolloutFilter) -> tuple[str, list[object]]:
    """Return the rows that are asked for as SQL, and its parameters."""
    condition, values = asked.condition()
    return f"SELECT * FROM (SELECT *, {EQUAL} AS equal FROM rollouts) WHERE {condition}", values


def find_rollouts(store: RunStore, asked: RolloutFilter, most: int = 500) -> tuple[pd.DataFrame, int]:
    """Return the first `most` rollouts that are asked for, in order of steps, and how many there are.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    rows, values = _asked(asked)
    first = f"""WITH asked AS MATERIALIZED (SELECT step, rollout FROM ({rows}))
        SELECT step, (SELECT count(*) FROM asked) AS n FROM asked ORDER BY step, rollout LIMIT {most}"""
    places = store.sql(first, values, steps=asked.every_step, texts=bool(asked.text))
    # Texts are read of these steps only.
    table = store.sql(f"{rows} ORDER BY step, rollout LIMIT {most}", values, steps=sorted(set(places["step"])))
    return table, int(places["n"].iloc[0]) if len(places) else 0


def reward_histogram(store: RunStore, asked: RolloutFilter) -> pd.DataFrame:
    """Return counts of the rollouts that are asked for, by `step` and finite `reward`, each the lower end of its bin.

    Steps are put together to at most `BINS`; rewards to `REWARD_BINS` bins where there are more than `FEW` of them.
    `width` is that of a bin of steps, `height` that of a bin of rewards, 0 where each reward has a row.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    rows, values = _asked(asked)
    return store.sql(
        f"""WITH asked AS MATERIALIZED (SELECT step, reward FROM ({rows}) WHERE isfinite(reward)), ends AS (
            SELECT min(step) AS first, greatest(1, ceil((max(step) - min(step) + 1) / {BINS})) AS width,
                min(reward) AS low, CASE WHEN count(DISTINCT reward) <= {FEW} THEN 0.0
                ELSE (max(reward) - min(reward)) / {REWARD_BINS} END AS height FROM asked)
        SELECT CAST(first + width * floor((step - first) / width) AS BIGINT) AS step,
            CASE WHEN height = 0 THEN reward
            ELSE low + height * least({REWARD_BINS - 1}, floor((reward - low) / height)) END AS reward,
            count(*) AS n, any_value(CAST(width AS BIGINT)) AS width, any_value(height) AS height
        FROM asked, ends GROUP BY ALL ORDER BY ALL""",
        values,
        steps=asked.every_step,
        texts=bool(asked.text),
    )


def facts_of_rollouts(store: RunStore) -> dict[str, Any]:
    """Return the ends of what rollouts can be asked for; None where there are no rollouts.

    `first` and `last` step, `low` and `high` finite reward, `short` and `long` length, most `turns`, `lost` rollouts
    whose reward is NaN or infinite, and all finish `reasons`.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    query = """SELECT min(step) AS first, max(step) AS last, min(length) AS short, max(length) AS long,
        min(reward) FILTER (WHERE isfinite(reward)) AS low, max(reward) FILTER (WHERE isfinite(reward)) AS high,
        count(*) FILTER (WHERE NOT isfinite(reward)) AS lost, coalesce(max(turns), 1) AS turns,
        coalesce(list(DISTINCT finish_reason), []) AS reasons FROM rollouts"""
    facts: Any = store.sql(query, texts=False).iloc[0]
    whole = {name: None if pd.isna(facts[name]) else int(facts[name]) for name in ("first", "last", "short", "long")}
    parts = {name: None if pd.isna(facts[name]) else float(facts[name]) for name in ("low", "high")}
    named = [] if whole["first"] is None else sorted(str(reason) for reason in facts["reasons"] if reason is not None)
    return whole | parts | {name: int(facts[name]) for name in ("turns", "lost")} | {"reasons": named}
