"""How a trainer's loss weighs tokens, and how many rollouts it aggregates at once: as told, or as the run says."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHOLE = sys.maxsize
"""Rollouts of a micro-batch where the whole batch is aggregated at once."""
TRL = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}
"""TRL's loss types. `dapo` divides by the tokens of the whole batch, the others aggregate each micro-batch alone."""


@dataclass(frozen=True)
class TrainerLoss:
    """What is known of a trainer's loss."""

    aggregation: str = ""  # A key of AGGREGATIONS, empty where not known
    micro_batch: int | None = None  # Rollouts that it aggregates at once; None where not known
    constant: int = 1024  # C of `constant`


def trainer_loss(config: Mapping[str, Any], aggregation: str = "", micro_batch: int = 0) -> TrainerLoss:
    """Return what was told of the trainer's loss, and for the rest what the run's configuration says.

    Args:
        config: A run of `otb train` names the aggregation and aggregates an update at once; one of `OTBGRPOTrainer` has
            TRL's settings; one of `otb audit` what it was told.
        aggregation: As told, empty where nothing was.
        micro_batch: Likewise, 0 where nothing was.
    """
    recorded = TrainerLoss(str(config.get("aggregation") or ""), int(config.get("accumulate") or 0) or None)
    objective, trl = config.get("objective"), config.get("trl")
    if isinstance(objective, Mapping):
        options = objective.get("aggregation_options")
        length = int(options.get("length", 1024)) if isinstance(options, Mapping) else 1024
        recorded = TrainerLoss(str(objective.get("aggregation") or ""), WHOLE, length)
    elif isinstance(trl, Mapping):
        kind, rows = str(trl.get("loss_type")), trl.get("per_device_train_batch_size")
        sample = config.get("sample")
        limit = int(sample.get("max_new_tokens") or 1024) if isinstance(sample, Mapping) else 1024
        recorded = TrainerLoss(TRL.get(kind, ""), WHOLE if kind == "dapo" else rows, limit)
    return TrainerLoss(aggregation or recorded.aggregation, micro_batch or recorded.micro_batch, recorded.constant)
