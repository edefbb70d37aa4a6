"""Counts, means and variances of the per-token columns, by run, bin of steps and prompt: one SELECT per bin.

A bin of a run is a partition of its own, so nothing is merged afterwards: Ray's workers run the very SELECT that DuckDB
runs alone, each on the parts of its steps.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from otb_analysis.errors import InputError
from otb_analysis.extras import require
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
    """Return the rows of all partitions, one after the other in this process."""
    return _joined(aggregate_partition(one) for one in counted(found, "bin"))


def aggregate_on_ray(found: Sequence[Partition], workers: int) -> pd.DataFrame:
    """Return the same from Ray: from the cluster that RAY_ADDRESS names, which sees the same files, or on this machine.

    On this machine Ray listens on the loopback interface only, unless it was imported before.

    Args:
        workers: Processes on this machine; a cluster has its own.

    Raises:
        InputError: Ray is not installed.
        StoreError: A part is broken or missing.
    """
    require("ray", "otb aggregate --ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = "RAY_ADDRESS" in os.environ
    if not cluster:  # Else Ray listens on every address of this machine, whatever it is told. It reads this once.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray  # pyright: ignore[reportMissingImports]

    local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="error", **({} if cluster else local))
    try:
        task = ray.remote(aggregate_partition)
        waiting = [task.remote(one) for one in found]
        return _joined(ray.get(one) for one in counted(waiting, "bin"))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        ray.shutdown()


def _joined(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    some = [table for table in tables if len(table)]
    if not some:
        raise InputError("none of these runs has tokens of the policy; name runs of otb train or otb score.")
    return pd.concat(some, ignore_index=True)
