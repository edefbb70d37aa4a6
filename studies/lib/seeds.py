"""Arms of a training study compared seed by seed: arms of a seed share its start and its prompts."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from otb_analysis.config import (
    ChainSumConfig,
    CriticConfig,
    EvaluateConfig,
    GraphPathConfig,
    MeasureConfig,
    Schedule,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.training.warm_start import warm_started
from studies.lib.formats import column
from studies.lib.record import Rows, distinct, select

MODEL = SmallModelConfig(layers=2, width=64, feed_forward=160)
FORWARD_ONLY = MeasureConfig(exact=Schedule())
BASE = TrainConfig(
    small_model=MODEL, measure=FORWARD_ONLY, critic=CriticConfig(enabled=False), evaluate=EvaluateConfig(every=0),
)  # fmt: skip
"""What the studies train, with nothing beside it."""
QUICK_TASK = ChainSumConfig(terms_min=2, terms_max=2, largest=10)
QUICK_START = WarmStartConfig(success_low=0.05, success_high=0.95, check_prompts=64)
"""Task of the quick settings. It trains in seconds; little is learned."""
QUICK_MODEL = SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=64)
QUICK_TAUGHT = WarmStartConfig(success_low=0.2, success_high=1.0, check_prompts=64)
"""The policies of the quick settings whose rollouts are measured token by token."""


def started(config: TrainConfig, work: Path) -> TrainConfig:
    """Return a configuration whose model is its supervised start; starts are kept beside `work` for all cells.

    Raises:
        InputError: The step budget ran out below the band.
    """
    return replace(config, model=str(warm_started(config, work.parent / "warm")))


def taught_config(task: str, start: WarmStartConfig, quick: bool) -> TrainConfig:
    """Return the configuration of a small policy that stops at a supervised start."""
    if not quick:
        return TrainConfig(task=task, small_model=MODEL, warm_start=start)
    return TrainConfig(
        task=task, small_model=QUICK_MODEL, warm_start=QUICK_TAUGHT, chain_sum=ChainSumConfig(terms_max=2, largest=10),
        graph_path=GraphPathConfig(nodes=4, edges=4, distance_min=1),
    )  # fmt: skip


def by_seed(rows: Rows, name: str) -> dict[int, float]:
    """Return a column by seed."""
    return {row["seed"]: row[name] for row in rows}


def mean_by_seed(rows: Rows, name: str) -> dict[int, float]:
    """Return the mean of a column, where it is known, over the rows of each seed."""
    return {seed: float(np.mean(column(select(rows, seed=seed), name))) for seed in distinct(rows, "seed")}


def best_rate(sweep: Rows, name: str) -> float:
    """Return the learning rate with the best mean of a column over the seeds of a sweep."""
    means = {rate: np.mean([row[name] for row in select(sweep, rate=rate)]) for rate in distinct(sweep, "rate")}
    return max(means, key=lambda rate: means[rate])


def later_success(rows: Rows) -> dict[int, float]:
    """Return each seed's mean held-out success over an arm's evaluations after the first one."""
    return mean_by_seed([row for row in rows if row["step"] > 0], "success")


def steps_survived(rows: Rows) -> dict[int, float]:
    """Return the steps that each seed of an arm lasted, all of them where it never collapsed."""
    return {row["seed"]: float(row["steps"] if row["collapse"] is None else row["collapse"]) for row in rows}


def paired_difference(arm: dict[int, float], base: dict[int, float], quantity: str) -> Interval | None:
    """Return the mean of arm − base over the seeds that both have, with Student's interval; None without a seed."""
    return seed_mean([arm[seed] - base[seed] for seed in arm if seed in base], quantity)
