"""Arms of a training study compared seed by seed: arms of a seed share its start and its prompts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from otb_analysis.config import ChainSumConfig, TrainConfig, WarmStartConfig
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study.record import Rows
from otb_analysis.study.results import distinct, select
from otb_analysis.training.warm_start import warm_started

QUICK_TASK = ChainSumConfig(terms_min=2, terms_max=2, largest=10)
QUICK_START = WarmStartConfig(success_low=0.05, success_high=0.95, check_prompts=64)
"""Task of the quick settings. It trains in seconds; little is learned."""


def started(config: TrainConfig, work: Path) -> TrainConfig:
    """Return a configuration whose model is its supervised start, which all cells of a study share.

    Args:
        config: Seed, task, sizes and the band of the start's success.
        work: The cell's directory; starts are kept beside it.

    Raises:
        InputError: The step budget ran out below the band.
    """
    return replace(config, model=str(warm_started(config, work.parent / "warm")))


def later_success(rows: Rows) -> dict[int, float]:
    """Return each seed's mean held-out success over the evaluations after the first, which no update preceded.

    Args:
        rows: Of one arm, with `seed`, `step` and `success`.
    """
    later = [row for row in rows if row["step"] > 0]
    return {
        seed: float(np.mean([row["success"] for row in select(later, seed=seed)])) for seed in distinct(later, "seed")
    }


def paired_difference(own: dict[int, float], base: dict[int, float], quantity: str) -> Interval | None:
    """Return the mean over seeds of own − base with Student's interval; None without a seed.

    Args:
        own: By seed.
        base: By seed, of at least those.
        quantity: What the numbers are, for warnings.
    """
    return seed_mean([own[seed] - base[seed] for seed in own], quantity)


def difference_words(found: Interval | None, scale: float = 1.0, digits: int = 0) -> str:
    """Return a difference with its sign and interval, as in `+3.1 (-0.4 to +6.6)`; a dash where there is none.

    Args:
        found: The difference.
        scale: What it is multiplied by: 100 for points.
        digits: Behind the point.
    """
    if found is None:
        return "–"
    ends = (found.estimate, found.low, found.high)
    estimate, low, high = ("" if x is None else f"{scale * x:+.{digits}f}" for x in ends)
    return f"{estimate} ({low} to {high})" if low and high else estimate


def final_success(rows: Rows) -> Sequence[float]:
    """Return each seed's last held-out success.

    Args:
        rows: Of one arm, with `step` and `success`; all seeds have the same steps.
    """
    last = max(row["step"] for row in rows)
    return [row["success"] for row in rows if row["step"] == last]
