"""Small groups with the optimal token baseline against large groups with the mean, at the same number of rollouts.

First on the same pools of rollouts: raw variance, SF and efficiency of an update. Then in training: arms are compared
after the same number of rollouts, or after the same number of updates, each at the learning rate that was best for it
on seeds that the comparison does not use. Clipping cuts less than a tenth of the steps (a pilot chose the norm).
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import EstimatorConfig, EvaluateConfig, OptimizeConfig, SampleConfig, TrainConfig, plain_config
from otb_analysis.training.loop import train
from otb_analysis.training.runtime.progress import Bar
from studies.lib import Cell, Study, Tables
from studies.lib.results import training_steps
from studies.lib.seeds import BASE, QUICK_START, QUICK_TASK, best_rate, started

from .arms import ARMS, CLIPPING, LABELS, MARGIN, PAIRS, UPDATES, Arm, pool_tables

COLUMNS = {"success": "heldout_success", "grad_norm": "grad_norm", "clipped": "CAST(clipped AS DOUBLE)"}
COLUMNS |= {name: name for name in ("n_tokens", "n_rollouts")}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...] = tuple(range(12))
    sweep_seeds: tuple[int, ...] = (100, 101)
    arms: tuple[str, ...] = tuple(ARMS)
    updates: int = UPDATES
    evaluations: int = 6
    heldout: int = 128
    pool_prompts: int = 48
    pool: int = 64
    pool_seeds: tuple[int, ...] = (0, 1, 2)


FULL = Size()
SMALL = Size(
    seeds=(0, 1), sweep_seeds=(100,), arms=("otb4", "rloo4", "regression4", "mean32", "mean32-long"), updates=16,
    evaluations=2, heldout=24, pool_prompts=18, pool=64, pool_seeds=(0,),
)  # fmt: skip


def base_config(seed: int, quick: bool) -> TrainConfig:
    """Return what all arms of a seed share: task, model and supervised start."""
    config = replace(BASE, seed=seed, evaluate=EvaluateConfig())
    return replace(config, chain_sum=QUICK_TASK, warm_start=QUICK_START) if quick else config


def arm_config(arm: Arm, rate: float, size: Size, config: TrainConfig) -> TrainConfig:
    """Return a run's configuration: its share of the updates, evaluations at equal rollouts or equal updates."""
    steps = arm.updates * size.updates // UPDATES
    return replace(
        config,
        sample=SampleConfig(prompts=arm.prompts, group_size=arm.group),
        estimator=EstimatorConfig(name=arm.estimator),
        optimize=OptimizeConfig(steps=steps, learning_rate=rate, max_grad_norm=CLIPPING),
        evaluate=EvaluateConfig(every=max(1, steps // size.evaluations), prompts=size.heldout, samples=2),
        checkpoint=replace(config.checkpoint, every=0),
    )


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return the pools, the sweep of each arm that has one, and the comparison, which comes after both."""
    common = {
        "quick": quick,
        "size": asdict(size),
        "clipping": CLIPPING,
        "margin": MARGIN,
        "config": plain_config(base_config(0, quick)),
    }
    arms = {name: asdict(ARMS[name]) for name in size.arms}
    pairs = [[asdict(ARMS[name]) for name in pair] for pair in PAIRS]
    pool = Cell("pool", common | {"labels": [list(label) for label in LABELS], "pairs": pairs})
    sweeps = {
        name: Cell(f"sweep-{name}", common | {"arm": name, "facts": facts})
        for name, facts in arms.items()
        if not ARMS[name].follows
    }
    runs = [
        Cell(
            f"run-{name}-s{seed}",
            common | {"arm": name, "facts": facts, "seed": seed},
            after=(sweeps[ARMS[name].follows or name],),
        )
        for number, seed in enumerate(size.seeds)
        for name, facts in arms.items()
        if not ARMS[name].seeds or number < ARMS[name].seeds
    ]
    return [pool, *sweeps.values(), *runs]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Measure pools, sweep an arm's learning rate, or train an arm at the chosen one."""
    quick = cell.settings["quick"]
    size = SMALL if quick else FULL
    if cell.name == "pool":
        starts = [started(base_config(seed, quick), work) for seed in size.pool_seeds]
        return pool_tables(starts, size.pool_prompts, size.pool, bar)
    name = cell.settings["arm"]
    if cell.name.startswith("sweep"):
        plan = [(rate, seed) for rate in ARMS[name].rates for seed in size.sweep_seeds]
        return {"sweep": [swept(name, rate, seed, size, (quick, work, bar)) for rate, seed in plan]}
    rate = best_rate(cell.given["sweep"], "mean")
    return {"curves": trained(name, rate, cell.settings["seed"], size, (quick, work, bar))}


def swept(name: str, rate: float, seed: int, size: Size, how: tuple[bool, Path, Bar]) -> dict[str, Any]:
    """Return an arm's mean held-out success at one learning rate."""
    curve = trained(name, rate, seed, size, how)
    after = [row["success"] for row in curve if row["step"] > 0]
    return {"arm": name, "rate": rate, "seed": seed, "mean": float(np.mean(after)), "final": after[-1]}


def trained(name: str, rate: float, seed: int, size: Size, how: tuple[bool, Path, Bar]) -> list[dict[str, Any]]:
    """Train an arm from the seed's start; return held-out success by rollouts and tokens sampled so far."""
    quick, work, bar = how
    config = arm_config(ARMS[name], rate, size, started(base_config(seed, quick), work))
    path = train(replace(config, root=work, run=f"{name}-{rate:g}-{seed}"), bar)
    steps, rows = training_steps(path, **COLUMNS), []
    facts = {column: float(np.mean([row[column] for row in steps])) for column in ("clipped", "grad_norm")}
    before = {"n_tokens": 0, "n_rollouts": 0}  # without the step's own update
    for row in steps:
        if row["success"] is not None:
            key = {"arm": name, "seed": seed, "rate": rate, "step": row["step"], "success": row["success"]}
            rows.append(key | before | facts)
        before = {column: total + int(row[column]) for column, total in before.items()}
    return rows


STUDY = Study(
    title="Group size",
    question="Is `otb` in groups of 4 as good as the group mean in groups of 32, after as many rollouts and after as "
    "many updates, and does it, or a baseline from other prompts, learn more than `rloo` in the same groups?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
