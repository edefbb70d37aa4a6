"""What one update of each arm is worth, from pools of rollouts cut into small and into large groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from otb_analysis.config import TrainConfig
from otb_analysis.estimators import estimate
from otb_analysis.statistics import Update, pooled_statistics, update_ratios
from otb_analysis.study import Tables
from otb_analysis.study.formats import ratio_columns, statistics_columns
from otb_analysis.study.gradients import Weighed, drawn, prompt_gram, regrouped, scored
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Gram

from .arms import ARMS, LABELS, LARGE_GROUP, PAIRS, REFERENCE, SMALL_GROUP, Arm

PROMPTS_FROM, POOL = 1_000_000, 1
"""Index of the first prompt that is measured, beyond those trained on; seed of the sampling."""


def pool_tables(starts: Sequence[TrainConfig], prompts: int, rollouts: int, bar: Bar) -> Tables:
    """Return the statistics of small and large groups on the same rollouts, at updates of 64 and of 512 rollouts."""
    grams: dict[int, list[Gram]] = {SMALL_GROUP: [], LARGE_GROUP: []}
    for number, start in enumerate(starts):
        trainer = Trainer.from_config(start)
        pool = drawn(trainer, PROMPTS_FROM, prompts, rollouts, POOL)
        table = scored(trainer, pool)
        for n, found in grams.items():
            cut = regrouped(pool, n)
            inputs = replace(table.inputs(table.stats.energy), group=cut.group)
            advantage = {label: estimate(label[0], inputs).advantage for label in LABELS}
            found.append(prompt_gram(trainer.model, [Weighed(cut, advantage)]))
            bar(number + 1, len(starts), f"pool: start {number}, groups of {n}")
    return {
        "pool": [row for n in grams for row in pool_rows(grams[n], n)],
        "ratios": [ratio_row(grams, *pair) for pair in PAIRS],
    }


def pool_rows(grams: Sequence[Gram], n: int) -> list[dict[str, Any]]:
    """Return a row per estimator and update size for groups of n."""
    rows = []
    for rollouts in (64, 512):
        for found in pooled_statistics(grams, REFERENCE, rollouts // n):
            rows.append(
                {"estimator": found.estimator, "size": n, "update": rollouts, "clusters": found.n_clusters}
                | statistics_columns(found)
            )
    return rows


def ratio_row(grams: Mapping[int, Sequence[Gram]], name: str, other: str) -> dict[str, Any]:
    """Return an arm's update over another arm's, each with its own number of rollouts."""
    above, below = (update_of(grams, ARMS[arm]) for arm in (name, other))
    return {"arm": name, "against": other} | ratio_columns(update_ratios(above, below, REFERENCE))


def update_of(grams: Mapping[int, Sequence[Gram]], arm: Arm) -> Update:
    """Return an arm's update as the pools measure it."""
    (label,) = (label for label in LABELS if label[0] == arm.estimator)
    return Update(grams[arm.group], label, arm.prompts)
