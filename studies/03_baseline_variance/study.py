"""Every baseline on the same rollouts: variance and efficiency, by group size, size of the update, task and prompts.

A policy's rollouts are drawn, measured token by token (exact norms, and a count sketch of every score) and then
compared: any estimator on any cut into groups is a sum of vectors.
"""

from dataclasses import asdict, replace
from pathlib import Path

from otb_analysis.config import WarmStartConfig
from otb_analysis.training.runtime.progress import Bar
from studies.lib import Cell, Study, Tables
from studies.lib.seeds import taught_config

from . import compare, pool

SETTINGS = {
    "chain_sum": ("chain_sum", WarmStartConfig(success_low=0.35, success_high=0.60)),
    "chain_sum_high": ("chain_sum", WarmStartConfig(success_low=0.65, success_high=0.85)),
    "graph_path": ("graph_path", WarmStartConfig(success_low=0.35, success_high=0.60)),
}
"""Task and how far its policy was taught."""


def cells(size: pool.Size, compared: compare.Size, quick: bool) -> list[Cell]:
    """Return what each policy draws, its two pools, and what is compared on them."""
    made = list[Cell]()
    for name in SETTINGS:
        config = taught_config(*SETTINGS[name], quick)
        policy = {"task": config.task, "task_settings": asdict(getattr(config, config.task)), "policy": name}
        learner = {"model": asdict(config.small_model), "start": asdict(config.warm_start), "quick": quick}
        drawn = {**policy, **learner, **asdict(replace(size, buckets=0)), **pool.CONSTANTS}
        draw = Cell(f"draw-{name}", drawn)
        kinds = [Cell(f"{k}-{name}", {**drawn, "buckets": size.buckets}, after=(draw,)) for k in pool.KINDS]
        against = {**drawn, **asdict(compared), **compare.CONSTANTS}
        made += [draw, *kinds, Cell(f"compare-{name}", against, after=(draw, *kinds))]
    return made


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Draw, measure or compare the rollouts of a policy."""
    quick = cell.settings["quick"]
    size, config = pool.SMALL if quick else pool.FULL, taught_config(*SETTINGS[cell.settings["policy"]], quick)
    kind = cell.name.partition("-")[0]
    if kind == "draw":
        return pool.drawn(cell, size, config, work, bar)
    if kind in pool.KINDS:
        return pool.measured(cell, size, config, work, bar)
    return compare.comparison(cell, compare.SMALL if quick else compare.FULL, work, bar)


STUDY = Study(
    title="Baselines and variance",
    question="Which baseline makes the policy gradient calmer at equal progress, in which groups, on which prompts?",
    cells=cells(pool.FULL, compare.FULL, quick=False),
    quick=cells(pool.SMALL, compare.SMALL, quick=True),
    measure=measure,
)
