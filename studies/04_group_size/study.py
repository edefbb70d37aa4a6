"""Small groups with the optimal token baseline against large groups with the mean, at the same number of rollouts.

First on the same pools of rollouts: raw variance, SF and efficiency of an update. Then in training: arms are compared
after the same number of rollouts, or after the same number of updates, each at the learning rate that was best for it
on seeds that the comparison does not use. Clipping cuts less than a tenth of the steps (a pilot chose the norm).
Between the baselines of 16 × 4 the question is whether a prediction pays, or not subtracting the group's mean.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    OptimizeConfig,
    SampleConfig,
    TrainConfig,
    plain_config,
)
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, SKY
from otb_analysis.statistics import Update, pooled_statistics, update_ratios
from otb_analysis.training.loop import train
from otb_analysis.training.runtime import Bar
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Gram, Label, Proved
from studies.lib import Cell, Study, Tables
from studies.lib.formats import ratio_columns, statistics_columns
from studies.lib.pools import pooled_grams, proved_of_pool
from studies.lib.record import training_steps
from studies.lib.seeds import BASE, QUICK_MODEL, QUICK_START, QUICK_TASK, best_rate, started

from .worlds import ADVICE, TIE, Worlds, world_rows


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
    "none4": Arm("none, 16 × 4", "none", 16, 4, INK, UPDATES, SMALL_RATES),
    "across4": Arm("energy_across_loo, 16 × 4", "energy_across_loo", 16, 4, AMBER, UPDATES, SMALL_RATES),
    "stein4": Arm("james_stein_corrected, 16 × 4", "james_stein_corrected", 16, 4, BLUE, UPDATES, SMALL_RATES),
    "value4": Arm("value, 16 × 4", "value", 16, 4, GREY, UPDATES, SMALL_RATES),
    "batch4": Arm("batch_mean_loo, 16 × 4", "batch_mean_loo", 16, 4, PALE, UPDATES, SMALL_RATES),
    "mean32": Arm("group mean, 16 × 32", "group_mean", 16, 32, BLUE, UPDATES // 8, LARGE_RATES),
    "rloo4-wide": Arm("rloo, 128 × 4", "rloo", 128, 4, GREY, UPDATES // 8, LARGE_RATES),
    "mean32-long": Arm("group mean, 16 × 32, as many updates", "group_mean", 16, 32, BLUE, UPDATES, SMALL_RATES),
    "rloo32-long": Arm(
        "rloo, 16 × 32, as many updates", "rloo", 16, 32, AMBER, UPDATES, follows="mean32-long", seeds=4
    ),
}  # fmt: skip
"""Prompts × rollouts of an update. The arms of 16 × 4 spend 64 rollouts on an update, the others 512; the last two take
as many updates as those of 16 × 4, and so eight times the rollouts.

The advantages of `rloo` in groups of 32 are 32/31 times the group mean's, which AdamW takes out again: the two arms
differ by what clipping and the sampling of other answers make of that. So `rloo` has few seeds, to show it.
`energy_regression` has the ridge that follows from 16 prompts and remembers nothing: prompts of earlier updates have
another policy's returns.
"""
RIDGE = 1.0
"""Ridge of `energy_regression` at 16 prompts, by the defaults with which the arms ran (results/defaults.csv)."""
RIVALS = ("none4", "batch4", "across4", "stein4", "value4")
"""Arms with unbiased baselines that do not subtract the group's mean, or not all of it, the simplest first."""
CRITIC = CriticConfig(enabled=True)
"""Of `value`: the default one, a two-layer head on the policy's detached hidden states, fitted to the return."""
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
        by_size = pooled_grams(Trainer.from_config(start), prompts, rollouts, tuple(grams), LABELS)[2]
        for n, gram in by_size.items():
            grams[n].append(gram)
        bar(number + 1, len(starts), f"pool: start {number}")
    known = {n: proved_of_pool(LABELS, prompts, n) for n in grams}
    rows, ratios, labels = [], [], {label[0]: label for label in LABELS}
    for n, update in product(grams, (64, 512)):
        for one in pooled_statistics(grams[n], n_prompts=update // n, known=known[n]):
            key = {"estimator": one.estimator, "size": n, "update": update, "clusters": one.n_clusters}
            rows.append(key | {"c_known": one.c_known} | statistics_columns(one))
    for pair in PAIRS:
        arms = [ARMS[name] for name in pair]
        above, below = (Update(grams[arm.group], labels[arm.estimator], arm.prompts) for arm in arms)
        # c of a mean over the group depends on the group's size, so each arm brings its own
        cs = {labels[arm.estimator]: known[arm.group].projection.get(labels[arm.estimator]) for arm in arms}
        both = Proved({label: c for label, c in cs.items() if c is not None})
        columns = ratio_columns(update_ratios(above, below, known=both), RATIOS)
        ratios.append({"arm": pair[0], "against": pair[1]} | columns)
    return {"pool": rows, "ratios": ratios}


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
WORLDS, FEW_WORLDS = Worlds(), Worlds(spreads=(0.0, 2.0), links=(0.0, 1.5), prompts=(8, 16), drawn=256)
SMALL = Size(
    seeds=(0, 1), sweep_seeds=(100,), updates=4, evaluations=2,
    arms=("otb4", "rloo4", "regression4", "none4", "value4", "mean32", "mean32-long"),
    heldout=24, pool_prompts=18, pool=64, pool_seeds=(0,),
)  # fmt: skip


def base_config(seed: int, quick: bool) -> TrainConfig:
    """Return what all arms of a seed share: task, model and supervised start."""
    config = replace(BASE, seed=seed, evaluate=EvaluateConfig())
    return replace(config, small_model=QUICK_MODEL, chain_sum=QUICK_TASK, warm_start=QUICK_START) if quick else config


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return the pools, the sweep of each arm that has one, the comparison, which comes after both, and toy worlds."""
    common = {"quick": quick, "size": asdict(size), "clipping": CLIPPING, "margin": MARGIN}
    common |= {"config": plain_config(base_config(0, quick)), "critic": asdict(CRITIC)}
    arms = {name: asdict(ARMS[name]) for name in size.arms}
    pairs = [[asdict(ARMS[name]) for name in pair] for pair in PAIRS]
    pool = Cell("pool", common | {"labels": [list(label) for label in LABELS], "pairs": pairs})
    settings = {name: common | {"arm": name, "facts": facts} for name, facts in arms.items()}
    sweeps = {name: Cell(f"sweep-{name}", settings[name]) for name in arms if not ARMS[name].follows}
    runs = [
        Cell(f"run-{name}-s{seed}", settings[name] | {"seed": seed}, (sweeps[ARMS[name].follows or name],))
        for number, seed in enumerate(size.seeds) for name in arms if number < (ARMS[name].seeds or len(size.seeds))
    ]  # fmt: skip
    worlds = {"worlds": asdict(FEW_WORLDS if quick else WORLDS), "advice": list(ADVICE), "tie": TIE}
    return [pool, *sweeps.values(), *runs, Cell("worlds", worlds)]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Measure pools, sweep an arm's learning rate, train an arm at the chosen one, or draw toy worlds."""
    if cell.name == "worlds":
        return {"worlds": world_rows(Worlds(**cell.settings["worlds"]))}
    quick = cell.settings["quick"]
    size = SMALL if quick else FULL
    if cell.name == "pool":
        starts = [started(base_config(seed, quick), work) for seed in size.pool_seeds]
        return pool_tables(starts, size.pool_prompts, size.pool, bar)
    name = cell.settings["arm"]
    if cell.name.startswith("sweep"):
        rows = []
        for rate, seed in product(ARMS[name].rates[: 1 if quick else None], size.sweep_seeds):
            curve = trained(name, rate, seed, size, (quick, work, bar))
            after = [row["success"] for row in curve if row["step"] > 0]
            rows.append({"arm": name, "rate": rate, "seed": seed, "mean": float(np.mean(after)), "final": after[-1]})
        return {"sweep": rows}
    rate = best_rate(cell.given["sweep"], "mean")
    return {"curves": trained(name, rate, cell.settings["seed"], size, (quick, work, bar))}


def trained(name: str, rate: float, seed: int, size: Size, how: tuple[bool, Path, Bar]) -> list[dict[str, Any]]:
    """Train an arm from the seed's start; return held-out success by rollouts and tokens sampled so far."""
    quick, work, bar = how
    arm, config = ARMS[name], started(base_config(seed, quick), work)
    count = max(2, arm.updates * size.updates // UPDATES)  # evaluated at equal rollouts or equal updates
    config = replace(
        config, sample=SampleConfig(prompts=arm.prompts, group_size=arm.group),
        estimator=EstimatorConfig(name=arm.estimator), critic=CRITIC if arm.estimator == "value" else config.critic,
        optimize=OptimizeConfig(steps=count, learning_rate=rate, max_grad_norm=CLIPPING),
        evaluate=EvaluateConfig(every=max(1, count // size.evaluations), prompts=size.heldout, samples=2),
        checkpoint=replace(config.checkpoint, every=0), root=work, run=f"{name}-{rate:g}-{seed}",
    )  # fmt: skip
    steps, rows = training_steps(train(config, bar), **COLUMNS), []
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
    "many updates, and what learns most in groups of 4: the group's baseline, that of other prompts, a critic, none?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
