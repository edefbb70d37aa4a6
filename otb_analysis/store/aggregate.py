"""Counts, means and variances of the per-token columns, by run, bin of steps and prompt: one SELECT per bin."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from otb_analysis.errors import InputError
from otb_analysis.phases import counted
from otb_analysis.schema import TABLES
from otb_analysis.store.reader import RunStore

NUMBERS = tuple(c.name for c in TABLES["tokens"] if c.dtype == "FLOAT")
"""The columns that are aggregated; those of a run that hold no value are left out."""

_MEASURES = ", ".join(
    f'count("{c}") AS "n {c}", avg("{c}") AS "mean {c}", var_samp("{c}") AS "variance {c}"' for c in NUMBERS
)
# Tokens of one prompt depend on each other: whoever resamples these rows resamples prompts.
QUERY = f"""SELECT coalesce(prompt_id, step || '/' || "group") AS prompt, count(*) AS tokens,
    count(DISTINCT (step, rollout)) AS rollouts, {_MEASURES}
FROM tokens LEFT JOIN (
    SELECT step, "group", any_value(prompt_id) AS prompt_id FROM rollouts GROUP BY step, "group"
) USING (step, "group") WHERE mask GROUP BY 1 ORDER BY 1"""


@dataclass(frozen=True)
class Partition:
    """The steps of one bin of a run."""

    path: Path
    first: int  # Where the bin begins
    last: int  # Its last step, had it all
    steps: tuple[int, ...]  # The complete ones


def partitions(paths: Iterable[Path], width: int) -> list[Partition]:
    """Return the bins of runs, each `width` steps wide and counted from step 0.

    Raises:
        StoreError: A run cannot be read.
    """
    found: list[Partition] = []
    for path in paths:
        steps = RunStore(path).complete_steps()
        for first in dict.fromkeys(step // width * width for step in steps):
            inside = tuple(step for step in steps if first <= step < first + width)
            found.append(Partition(path.resolve(), first, first + width - 1, inside))
    return found


def aggregate_partition(partition: Partition, memory_limit: str = "256MB") -> pd.DataFrame:
    """Return one row per prompt and column: run, ends of the bin, prompt, tokens, rollouts, column, n, mean, variance.

    Args:
        memory_limit: What DuckDB may hold, as it writes it.

    Raises:
        StoreError: A part is broken or missing.
    """
    wide: Any = RunStore(partition.path, memory_limit=memory_limit).sql(QUERY, steps=partition.steps)
    ends = {"run": partition.path.name, "first_step": partition.first, "last_step": partition.last}
    parts = [
        pd.DataFrame(
            ends | {name: wide[name] for name in ("prompt", "tokens", "rollouts")} | {"column": column}
            | {measure: wide[f"{measure} {column}"] for measure in ("n", "mean", "variance")}
        )
        for column in NUMBERS
        if int(wide[f"n {column}"].sum())
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def aggregate(found: Sequence[Partition]) -> pd.DataFrame:
    """Return the rows of all partitions.

    Raises:
        InputError: None has a token of the policy.
    """
    some = [table for one in counted(found, "bin") if len(table := aggregate_partition(one))]
    if not some:
        raise InputError("none of these runs has tokens of the policy; name runs of otb train or otb score.")
    return pd.concat(some, ignore_index=True)
