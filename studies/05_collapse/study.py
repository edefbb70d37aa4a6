"""Training made to collapse: rollouts of an old policy, no correction for it, and steps that grow until it breaks.

The learning rate rises linearly from 0, so that every run begins calmly and the step at which it breaks says how long
a step it bears. Every estimator meets the same conditions from the same supervised starts. What is asked: how many
steps each survives, whether shorter steps alone would have done as well, which detector saw it coming, and who held the
fatal gradient. `calm` shares the starts, but neither old rollouts nor long steps: what a detector calls there is a
false alarm. Two arms meet the same conditions on longer chains.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from otb_analysis.config import (
    ChainSumConfig,
    EstimatorConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.config.measuring import AttributionSchedule
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK
from otb_analysis.statistics import pooled_statistics
from otb_analysis.store import RunStore
from otb_analysis.study import Cell, Study, Tables, select
from otb_analysis.study.formats import statistics_columns
from otb_analysis.study.gradients import drawn, estimator_gram, scored
from otb_analysis.study.seeds import BASE, FORWARD_ONLY, QUICK_START, QUICK_TASK, held_projection, started
from otb_analysis.training.loop import train
from otb_analysis.training.resume import plain_config
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.training.setup import Trainer

from .runs import RULE, run_tables


@dataclass(frozen=True)
class Arm:
    """A way to train, with its colour in the figure."""

    estimator: str
    color: str
    calm: bool = False
    long: bool = False


ARMS = {
    "rloo": Arm("rloo", BLUE),
    "scaled": Arm("rloo", GREY),
    "otb": Arm("otb", ORANGE),
    "otb_loo": Arm("otb_loo", AMBER),
    "sequence_optimal_loo": Arm("sequence_optimal_loo", GREEN),
    "rloo_long": Arm("rloo", BLUE, long=True),
    "otb_long": Arm("otb", ORANGE, long=True),
    "calm": Arm("rloo", PINK, calm=True),
}
"""`scaled` is `rloo` with steps c times as long, c the projection of `otb`."""
AGAINST = "rloo"
LABELS = (("otb", "proxy"), ("rloo", "none"))
CALM_RATE = 3e-4
"""Constant, of the arm without old rollouts."""
LONG = ChainSumConfig(terms_min=4, terms_max=6)
"""The other arms add 2 to 4 terms."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    arms: tuple[str, ...] = tuple(ARMS)
    long_seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    steps: int = 100
    attribute_every: int = 2
    pool_prompts: int = 64
    pool_seeds: tuple[int, ...] = (0, 1, 2)


FULL = Size()
SMALL = Size(
    seeds=(0, 1), arms=("rloo", "scaled", "otb", "calm"), steps=15, attribute_every=4, pool_prompts=4, pool_seeds=(0,)
)  # fmt: skip
CONFIG = replace(
    BASE,
    sample=SampleConfig(prompts=8, group_size=8),
    objective=ObjectiveConfig(staleness=4),
    warm_start=WarmStartConfig(success_low=0.6, success_high=0.85),
    optimize=OptimizeConfig(learning_rate=4e-3),
)
QUICK_RATE = 5e-2
QUICK_SAMPLE = SampleConfig(prompts=4, group_size=4)


def config_of(seed: int, size: Size, quick: bool, arm: Arm) -> TrainConfig:
    """Return the settings of an arm but for its estimator and for what `scaled` takes from c."""
    every = 0 if arm.calm or arm.long else size.attribute_every
    measured = replace(FORWARD_ONLY, attribution=AttributionSchedule(every=every))
    rising = replace(CONFIG.optimize, steps=size.steps, warmup_steps=size.steps)
    config = replace(CONFIG, seed=seed, measure=measured, optimize=rising)
    config = replace(config, checkpoint=replace(config.checkpoint, every=0))
    if arm.long:
        config = replace(config, chain_sum=LONG)
    if quick:
        fast = replace(rising, learning_rate=QUICK_RATE)
        config = replace(config, chain_sum=QUICK_TASK, warm_start=QUICK_START, optimize=fast, sample=QUICK_SAMPLE)
    if not arm.calm:
        return config
    low = replace(config.optimize, learning_rate=CALM_RATE, warmup_steps=0)
    return replace(config, optimize=low, objective=replace(config.objective, staleness=0))


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return the pool that gives c, and one cell per arm and seed, seed by seed."""
    common: dict[str, object] = {"quick": quick, "size": asdict(size), "rule": RULE}

    def settings(seed: int, name: str) -> dict[str, object]:
        return {**common, "config": plain_config(config_of(seed, size, quick, ARMS[name]))}

    pool = Cell("projection", settings(0, AGAINST))
    runs = [
        Cell(
            f"{name}-s{seed}",
            {**settings(seed, name), "arm": name, "estimator": ARMS[name].estimator, "seed": seed},
            after=(pool,) if name == "scaled" else (),
        )
        for seed in size.seeds
        for name in size.arms
        if seed in size.long_seeds or not ARMS[name].long
    ]
    return [pool, *runs]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Measure the projection of `otb` at the starts, or let one arm of a seed run into its end."""
    quick = cell.settings["quick"]
    size = SMALL if quick else FULL
    if cell.name == "projection":
        return {"projection": projection_rows(size, quick, work, bar)}
    name, seed = cell.settings["arm"], cell.settings["seed"]
    config = started(config_of(seed, size, quick, ARMS[name]), work)
    if name == "scaled":
        (otb,) = select(cell.given["projection"], estimator="otb")
        shorter = config.optimize.learning_rate * held_projection(otb["projection"])
        config = replace(config, optimize=replace(config.optimize, learning_rate=shorter))
    estimator = EstimatorConfig(name=ARMS[name].estimator)
    store = RunStore(train(replace(config, root=work, run=name, estimator=estimator), bar))
    return run_tables({"arm": name, "seed": seed}, config.optimize.learning_rate, store)


def projection_rows(size: Size, quick: bool, work: Path, bar: Bar) -> list[dict[str, Any]]:
    """Return the projection of `otb` on groups of 8 of the supervised starts' rollouts, with its interval."""
    grams = []
    for seed in size.pool_seeds:
        trainer = Trainer.from_config(started(config_of(seed, size, quick, ARMS[AGAINST]), work))
        rollouts = drawn(trainer, size.pool_prompts, CONFIG.sample.group_size)
        grams.append(estimator_gram(trainer, rollouts, scored(trainer, rollouts), LABELS))
    return [
        {"estimator": row.estimator, "clusters": row.n_clusters} | statistics_columns(row, "projection")
        for row in pooled_statistics(grams)
    ]


STUDY = Study(
    title="Collapse",
    question="When old rollouts and long steps drive training into collapse, does `otb` last longer than leave-one-out "
    "means, longer than shorter steps alone explain, and who sees it coming?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
