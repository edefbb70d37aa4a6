"""The arms of the study: ways of spending rollouts, and what one update of each is worth on the same pools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otb_analysis.config import TrainConfig
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, SKY
from otb_analysis.statistics import Update, pooled_statistics, update_ratios
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Gram, Label, Proved
from studies.lib import Tables
from studies.lib.formats import ratio_columns, statistics_columns
from studies.lib.gradients import drawn_groups, estimator_gram, regrouped, scored_table
from studies.lib.pools import proved_of_pool


@dataclass(frozen=True)
class Arm:
    """One way of spending rollouts: an update has `prompts` groups of `group` rollouts.

    An arm that follows another takes its learning rate instead of one of its own.
    """

    words: str
    estimator: str
    prompts: int
    group: int
    color: str
    updates: int
    rates: tuple[float, ...] = ()
    follows: str = ""
    seeds: int = 0  # The first so many seeds; 0 means all

    @property
    def rollouts(self) -> int:
        """Rollouts per update."""
        return self.prompts * self.group


UPDATES = 96
"""Of the small groups; 16 × 32 has an eighth of them at the same number of rollouts."""
SMALL_RATES, LARGE_RATES = (5e-4, 1e-3, 2e-3), (1e-3, 2e-3, 4e-3)
"""Learning rates of the sweep: many small updates, few large ones."""
BLEND = "0.5*otb+0.5*energy_regression"
ARMS = {
    "otb4": Arm("otb, 16 × 4", "otb", 16, 4, ORANGE, UPDATES, SMALL_RATES),
    "rloo4": Arm("rloo, 16 × 4", "rloo", 16, 4, SKY, UPDATES, SMALL_RATES),
    "regression4": Arm("energy_regression, 16 × 4", "energy_regression", 16, 4, GREEN, UPDATES, SMALL_RATES),
    "blend4": Arm("½ otb + ½ energy_regression, 16 × 4", BLEND, 16, 4, PINK, UPDATES, SMALL_RATES),
    "mean32": Arm("group mean, 16 × 32", "group_mean", 16, 32, BLUE, UPDATES // 8, LARGE_RATES),
    "rloo4-wide": Arm("rloo, 128 × 4", "rloo", 128, 4, GREY, UPDATES // 8, LARGE_RATES),
    "mean32-long": Arm("group mean, 16 × 32, as many updates", "group_mean", 16, 32, BLUE, UPDATES, SMALL_RATES),
    "rloo32-long": Arm(
        "rloo, 16 × 32, as many updates", "rloo", 16, 32, AMBER, UPDATES, follows="mean32-long", seeds=4
    ),
}  # fmt: skip
"""Prompts × rollouts of an update. The first four spend 64 rollouts on an update, the others 512; the last two take as
many updates as the first four, and so eight times the rollouts.

The advantages of `rloo` in groups of 32 are 32/31 times the group mean's, which AdamW takes out again: the two arms
differ by what clipping and the sampling of other answers make of that. So `rloo` has few seeds, to show it.
`energy_regression` has the ridge that follows from 16 prompts and remembers nothing: prompts of earlier updates have
another policy's returns.
"""
RIDGE = 1.0
"""Ridge of `energy_regression` at 16 prompts, by the defaults with which the arms ran (results/defaults.csv)."""
RIVALS = ("none", "energy_across_loo", "james_stein_corrected", "value", "batch_mean_loo")
"""Unbiased baselines that do not subtract the group's mean, or not all of it, and were not trained."""
MARGIN = 0.03
"""Non-inferiority: success that small groups may lose against large ones, and still count as no worse."""
CLIPPING = 8.0
"""Norm at which gradients are clipped, chosen by the pilot in studies/LOG.md so that it cuts less than a tenth."""
LABELS: tuple[Label, ...] = (("otb", "proxy"), ("group_mean", "none"), ("rloo", "none"))
PAIRS = (("otb4", "mean32"), ("rloo4", "mean32"), ("otb4", "rloo4"), ("rloo4-wide", "mean32"))
"""Updates that are compared on the same pools. Entries that couple prompts are left out: a pool's groups share them."""
RATIOS = {"variance": "variance", "sf": "sf", "efficiency": "efficiency"}
"""Columns of the ratios."""
SMALL_GROUP, LARGE_GROUP = 4, 32


def pool_tables(starts: Sequence[TrainConfig], prompts: int, rollouts: int, bar: Bar) -> Tables:
    """Return the statistics of small and large groups on the same rollouts, at updates of 64 and of 512 rollouts."""
    grams: dict[int, list[Gram]] = {SMALL_GROUP: [], LARGE_GROUP: []}
    for number, start in enumerate(starts):
        trainer = Trainer.from_config(start)
        pool = drawn_groups(trainer, prompts, rollouts)
        table = scored_table(trainer, pool)
        for n, found in grams.items():
            found.append(estimator_gram(trainer, regrouped(pool, n), table, LABELS))
            bar(number + 1, len(starts), f"pool: start {number}, groups of {n}")
    known = {n: proved_of_pool(LABELS, prompts, n) for n in grams}
    return {
        "pool": [row for n in grams for row in pool_rows(grams[n], n, known[n])],
        "ratios": [ratio_row(grams, known, *pair) for pair in PAIRS],
    }


def pool_rows(grams: Sequence[Gram], n: int, known: Proved) -> list[dict[str, Any]]:
    """Return a row per estimator and update size for groups of n."""
    rows = []
    for rollouts in (64, 512):
        for found in pooled_statistics(grams, n_prompts=rollouts // n, known=known):
            rows.append(
                {"estimator": found.estimator, "size": n, "update": rollouts, "clusters": found.n_clusters}
                | {"c_known": found.c_known}
                | statistics_columns(found)
            )
    return rows


def ratio_row(
    grams: Mapping[int, Sequence[Gram]], known: Mapping[int, Proved], name: str, other: str
) -> dict[str, Any]:
    """Return an arm's update over another arm's, each with its own number of rollouts."""
    updates = [update_of(grams, ARMS[arm]) for arm in (name, other)]
    # c of a mean over the group depends on the group's size, so each arm brings its own
    cs = {one.label: c for one, arm in zip(updates, (name, other), strict=True)
          if (c := known[ARMS[arm].group].projection.get(one.label)) is not None}  # fmt: skip
    both = Proved(cs)
    return {"arm": name, "against": other} | ratio_columns(update_ratios(updates[0], updates[1], known=both), RATIOS)


def update_of(grams: Mapping[int, Sequence[Gram]], arm: Arm) -> Update:
    """Return an arm's update as the pools measure it."""
    (label,) = (label for label in LABELS if label[0] == arm.estimator)
    return Update(grams[arm.group], label, arm.prompts)
