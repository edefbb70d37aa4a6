"""Gather the rollouts of all processes before estimators run.

Groups may span processes, so estimators, shapings and aggregations see all rollouts on every process. Each process then
stores its own rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields

import numpy as np

from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.processes import Processes, widened
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Float, Int, LogitStats


def gather_rollouts(
    processes: Processes, rollouts: Rollouts, stats: LogitStats, reference: Float | None
) -> tuple[Rollouts, LogitStats, Float | None]:
    """Put together what all processes know of a step's rollouts, in the order of their ranks.

    Groups are numbered over all processes. `stats` and `reference`, log π_ref in nats or None, are [n, T].
    """
    shards = processes.gather((rollouts, stats, reference))
    if len(shards) == 1:
        return shards[0]
    all_rollouts, all_stats, references = zip(*shards, strict=True)
    rollouts = Rollouts.concatenate(all_rollouts)

    def tokens(arrays: Iterable[Float]) -> Float:
        return np.concatenate([widened(x, rollouts.width) for x in arrays])

    columns = {field.name: tokens(getattr(s, field.name) for s in all_stats) for field in fields(LogitStats)}
    return rollouts, LogitStats(**columns), None if reference is None else tokens(references)


def shard_rows(columns: Mapping[str, object], processes: Processes, n_rollouts: int) -> dict[str, object]:
    """Return the rows of this process's rollouts; the column `rollout` numbers all `n_rollouts` of the step."""
    if processes.size == 1:
        return dict(columns)
    keep = np.flatnonzero(np.isin(columns["rollout"], processes.shard(np.arange(n_rollouts))))  # pyright: ignore
    return {name: x[keep] if isinstance(x, np.ndarray) else [x[i] for i in keep] for name, x in columns.items()}  # pyright: ignore[reportIndexIssue]


def shared_norms(
    measurer: GradientMeasurer, processes: Processes, rollouts: Rollouts, groups: Int
) -> TokenMeasurements:
    """Return exact norms of some groups, each measured by one process; `rollouts` are those of all processes."""
    shard = processes.shard(groups)
    parts = [part for part in processes.gather(measurer.norms(rollouts, shard) if len(shard) else None) if part]
    return parts[0] if len(parts) == 1 else TokenMeasurements.joined(parts, rollouts.group)
