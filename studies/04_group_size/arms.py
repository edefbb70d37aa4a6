"""The arms of the study: ways of spending rollouts, and what one update of each is worth on the same pools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otb_analysis.config import TrainConfig
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, SKY
from otb_analysis.statistics import Update, pooled_statistics, update_ratios
from otb_analysis.study import Tables
from otb_analysis.study.formats import ratio_columns, statistics_columns
from otb_analysis.study.gradients import drawn, estimator_gram, regrouped, scored
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Gram, Label


@dataclass(frozen=True)
class Arm:
    """One way of spending rollouts: an update has `prompts` groups of `group` rollouts.

    An arm that follows another takes c times its learning rate instead of one of its own, c the projection of `otb`.
    """

    words: str
    estimator: str
    prompts: int
    group: int
    color: str
    follows: str = ""

    @property
    def rollouts(self) -> int:
        """Rollouts per update."""
        return self.prompts * self.group


ARMS = {
    "otb4": Arm("otb, 16 × 4", "otb", 16, 4, ORANGE),
    "rloo4": Arm("rloo, 16 × 4", "rloo", 16, 4, SKY),
    "scaled4": Arm("c·rloo, 16 × 4", "rloo", 16, 4, GREY, follows="otb4"),
    "mean32": Arm("group mean, 16 × 32", "group_mean", 16, 32, BLUE),
    "rloo4-wide": Arm("rloo, 128 × 4", "rloo", 128, 4, GREEN),
    "otb4-wide": Arm("otb, 128 × 4", "otb", 128, 4, AMBER),
}
"""Prompts × rollouts of an update. The last three spend 512 rollouts on an update, the first three 64."""
LABELS: tuple[Label, ...] = (("otb", "proxy"), ("group_mean", "none"), ("rloo", "none"))
PAIRS = (
    ("otb4", "mean32"),
    ("rloo4", "mean32"),
    ("otb4", "rloo4"),
    ("otb4-wide", "mean32"),
    ("rloo4-wide", "mean32"),
    ("otb4-wide", "rloo4-wide"),
)
"""Updates that are compared on the same pools."""
RATIOS = {"variance": "variance", "sf": "sf", "efficiency": "efficiency"}
"""Columns of the ratios."""
SMALL_GROUP, LARGE_GROUP = 4, 32


def pool_tables(starts: Sequence[TrainConfig], prompts: int, rollouts: int, bar: Bar) -> Tables:
    """Return the statistics of small and large groups on the same rollouts, at updates of 64 and of 512 rollouts."""
    grams: dict[int, list[Gram]] = {SMALL_GROUP: [], LARGE_GROUP: []}
    for number, start in enumerate(starts):
        trainer = Trainer.from_config(start)
        pool = drawn(trainer, prompts, rollouts)
        table = scored(trainer, pool)
        for n, found in grams.items():
            found.append(estimator_gram(trainer, regrouped(pool, n), table, LABELS))
            bar(number + 1, len(starts), f"pool: start {number}, groups of {n}")
    return {
        "pool": [row for n in grams for row in pool_rows(grams[n], n)],
        "ratios": [ratio_row(grams, *pair) for pair in PAIRS],
    }


def pool_rows(grams: Sequence[Gram], n: int) -> list[dict[str, Any]]:
    """Return a row per estimator and update size for groups of n."""
    rows = []
    for rollouts in (64, 512):
        for found in pooled_statistics(grams, n_prompts=rollouts // n):
            rows.append(
                {"estimator": found.estimator, "size": n, "update": rollouts, "clusters": found.n_clusters}
                | statistics_columns(found)
            )
    return rows


def ratio_row(grams: Mapping[int, Sequence[Gram]], name: str, other: str) -> dict[str, Any]:
    """Return an arm's update over another arm's, each with its own number of rollouts."""
    above, below = (update_of(grams, ARMS[arm]) for arm in (name, other))
    return {"arm": name, "against": other} | ratio_columns(update_ratios(above, below), RATIOS)


def update_of(grams: Mapping[int, Sequence[Gram]], arm: Arm) -> Update:
    """Return an arm's update as the pools measure it."""
    (label,) = (label for label in LABELS if label[0] == arm.estimator)
    return Update(grams[arm.group], label, arm.prompts)
