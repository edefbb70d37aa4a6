"""From each process's rollouts to the step's: whatever the formulas couple is put together before any is computed.

Groups may span processes, so estimators, shapings and aggregations see all rollouts on every process, and each process
then keeps its own rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import Rewards
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.training.runtime.processes import Processes, widened
from otb_analysis.types import Float, Int, LogitStats


@dataclass(frozen=True)
class GatheredRollouts:
    """What one process, or all together, know of a step's rollouts before the table; made by the loop.

    Attributes:
        rollouts: The rollouts, n of them; groups are numbered over all processes.
        rewards: What the task paid for them.
        stats: Forward statistics [n, T].
        reference: log π_ref in nats [n, T], or None.
    """

    rollouts: Rollouts
    rewards: Rewards
    stats: LogitStats
    reference: Float | None

    def gathered(self, processes: Processes) -> "GatheredRollouts":
        """Return the shares of all processes as one, in the order of their ranks."""
        parts = processes.gather(self)
        return parts[0] if len(parts) == 1 else _joined(parts)


def shard_rows(columns: Mapping[str, object], processes: Processes, n_rollouts: int) -> dict[str, object]:
    """Return the rows of this process's rollouts.

    Args:
        columns: Columns with `rollout`, the rollout's number in the step, among them.
        processes: Whose rows.
        n_rollouts: Rollouts of the step.
    """
    if processes.size == 1:
        return dict(columns)
    keep = np.flatnonzero(np.isin(columns["rollout"], processes.shard(np.arange(n_rollouts))))  # pyright: ignore
    return {name: x[keep] if isinstance(x, np.ndarray) else [x[i] for i in keep] for name, x in columns.items()}  # pyright: ignore[reportIndexIssue]


def shared_norms(
    instrument: GradientMeasurer, processes: Processes, rollouts: Rollouts, groups: Int
) -> TokenMeasurements:
    """Return exact norms of some groups, each measured by one process.

    Args:
        instrument: Measures.
        processes: Who takes part.
        rollouts: Those of all processes.
        groups: Which groups.
    """
    own = processes.shard(groups)
    parts = [part for part in processes.gather(instrument.norms(rollouts, own) if len(own) else None) if part]
    return parts[0] if len(parts) == 1 else TokenMeasurements.joined(parts, rollouts.group)


def _joined(parts: Sequence[GatheredRollouts]) -> GatheredRollouts:
    rollouts = Rollouts.concatenate([part.rollouts for part in parts])
    width = rollouts.width

    def tokens(arrays: list[Float]) -> Float:
        return np.concatenate([widened(x, width) for x in arrays])

    names = dict.fromkeys(name for part in parts for name in part.rewards.parts)
    rewards = Rewards(
        by_token=tokens([part.rewards.by_token for part in parts]),
        total=np.concatenate([part.rewards.total for part in parts]),
        parts={
            name: np.concatenate([p.rewards.parts.get(name, np.zeros(len(p.rewards.total))) for p in parts])
            for name in names
        },
    )
    columns: list[dict[str, Any]] = [
        {f.name: getattr(part.stats, f.name) for f in fields(LogitStats)} for part in parts
    ]
    by_name: dict[str, Any] = {
        name: None if x is None else tokens([c[name] for c in columns]) for name, x in columns[0].items()
    }
    reference = [part.reference for part in parts if part.reference is not None]
    return replace(
        parts[0],
        rollouts=rollouts,
        rewards=rewards,
        stats=LogitStats(**by_name),
        reference=tokens(reference) if reference else None,
    )
