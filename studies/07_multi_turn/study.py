"""Baselines where the policy calls a tool: tool tokens lie between its own, and rollouts differ in their turns.

Every estimator on the same rollouts of a calculator policy, after its supervised start and after some training; then
short trainings that differ in nothing but the estimator. Starts are early: a policy that is wrong more often has more
gradient, and takes different numbers of turns. Where an estimator is proved unbiased its c is 1 and is not estimated,
so that variance at equal progress is the variance and needs no ∇J.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    CalculatorConfig,
    EstimatorConfig,
    EvaluateConfig,
    OptimizeConfig,
    SampleConfig,
    TrainConfig,
    WarmStartConfig,
    plain_config,
)
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.measurement.table import TokenTable
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import gradient_noise_scale, paired_ratios, pooled_statistics, weight_statistics
from otb_analysis.training.loop import train, train_step
from otb_analysis.training.runtime import Bar
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Gram
from studies.lib import Cell, Study, Tables
from studies.lib.formats import interval_columns, ratio_columns, rounded, statistics_columns
from studies.lib.pools import pooled_grams, proved_of_pool
from studies.lib.record import Gathered, training_steps
from studies.lib.seeds import BASE, QUICK_MODEL, QUICK_START, started

COMPARED = (
    "none", "group_mean", "grpo", "rloo", "opo", "opo_loo", "trloo", "tempo_loo", "sequence_optimal",
    "sequence_optimal_loo", "otb_carry", "otb_carry_loo", "otb_turn", "otb_turn_loo", "token_optimal",
    "token_optimal_loo",
)  # fmt: skip
"""What takes masks with gaps, looks at one prompt at a time and needs nothing beyond a forward pass."""
TRAINED = {"train": ("rloo", "trloo", "otb_turn", "otb_turn_loo"), "rivals": ("energy_regression", "none")}
"""What a cell of a seed trains, by the beginning of its name: the second came later."""
STAGES = {"start": "after the supervised start", "trained": "after {steps} steps of training"}
RATIOS = {"variance_ratio": "variance", "sf_ratio": "sf", "efficiency_ratio": "efficiency"}
"""Columns of the ratios to `rloo`."""
UPDATE_PROMPTS = 16
"""Prompts of the update that efficiency is stated for: as in the training runs."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...] = (0, 1, 2)
    prompts: int = 96
    pool: int = 8
    sizes: tuple[int, ...] = (4, 8)
    steps: int = 12
    train_seeds: tuple[int, ...] = tuple(range(8))
    train_steps: int = 40
    heldout: int = 192


FULL = Size()
SMALL = Size(
    seeds=(0,), prompts=20, pool=4, sizes=(2, 4), steps=1, train_seeds=(0, 1), train_steps=2, heldout=32
)  # fmt: skip
CONFIG = replace(
    BASE, task="calculator", sample=SampleConfig(prompts=UPDATE_PROMPTS, group_size=8),
    estimator=EstimatorConfig(name="rloo"), optimize=OptimizeConfig(steps=1000, learning_rate=1e-3),
    warm_start=WarmStartConfig(success_low=0.15, success_high=0.35),
)  # fmt: skip
QUICK_TASK = CalculatorConfig(operations_min=1, operations_max=1, largest=9)


def config_of(seed: int, quick: bool) -> TrainConfig:
    """Return the configuration from which a seed's policies come."""
    config = replace(CONFIG, seed=seed)
    return replace(config, small_model=QUICK_MODEL, calculator=QUICK_TASK, warm_start=QUICK_START) if quick else config


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return one cell per stage at which rollouts are pooled, and one per seed of the trainings of each kind."""
    common = {"quick": quick, "size": asdict(size), "compared": list(COMPARED), "proved": True}
    made = [Cell(f"pool-{stage}", common | {"config": plain_config(config_of(0, quick))}) for stage in STAGES]
    for (kind, names), seed in product(TRAINED.items(), size.train_seeds):
        settings = {"trained": list(names), "seed": seed, "config": plain_config(config_of(seed, quick))}
        made.append(Cell(f"{kind}-s{seed}", common | settings))
    return made


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Pool rollouts of every seed's policy, or train a seed under every estimator."""
    quick = cell.settings["quick"]
    size = SMALL if quick else FULL
    if "trained" in cell.settings:
        return {"curves": curves(cell.settings["trained"], cell.settings["seed"], size, quick, (work, bar))}
    return pool_tables(cell.name.removeprefix("pool-"), size, quick, work, bar)


def pool_tables(stage: str, size: Size, quick: bool, work: Path, bar: Bar) -> Tables:
    """Return statistics of every estimator at every group size over all seeds' prompts, and what the rollouts are."""
    grams: dict[int, list[Gram]] = {n: [] for n in size.sizes}
    labels = [(name, "proxy" if ESTIMATORS[name].reads_energy else "none") for name in COMPARED]
    facts = []
    for number, seed in enumerate(size.seeds):
        trainer = Trainer.from_config(started(config_of(seed, quick), work))
        for step in range(size.steps if stage == "trained" else 0):
            train_step(trainer, step)
        rollouts, table, by_size = pooled_grams(trainer, size.prompts, size.pool, size.sizes, labels)
        facts.append({"stage": stage, "seed": seed, "steps": size.steps} | rollout_facts(rollouts, table))
        for n, gram in by_size.items():
            grams[n].append(gram)
        bar(number + 1, len(size.seeds), f"{stage}: seed {seed}")
    tables = Gathered({"rollouts": facts})
    for n, measured in grams.items():
        at: dict[str, Any] = {"n_prompts": UPDATE_PROMPTS, "known": proved_of_pool(labels, UPDATE_PROMPTS, n)}
        pairs, rows = {p.estimator: p for p in paired_ratios(measured, **at)}, []
        for one in pooled_statistics(measured, **at):
            row = {"estimator": one.estimator, "clusters": one.n_clusters}
            row |= {"c_known": one.c_known, "bias": rounded(one.relative_bias)}
            row |= {"rollout_equivalents": rounded(one.rollout_equivalents), "rollouts": one.n_rollouts}
            rows.append(row | statistics_columns(one) | ratio_columns(pairs.get(one.estimator), RATIOS))
        scale = interval_columns("noise_scale", gradient_noise_scale(measured, ("rloo", "none"), at["known"]))
        signal = {"prompts": sum(gram.n_prompts for gram in measured) * n // size.pool} | scale
        tables.add({"stage": stage, "size": n}, signal=[signal], estimators=rows)
    return tables


def rollout_facts(rollouts: Rollouts, table: TokenTable) -> dict[str, float | None]:
    """Return what matters to a baseline about a pool: success, turns, tool tokens, corr(W_T, R)."""
    energy = np.where(table.mask, table.stats.energy, 0)
    weights = weight_statistics(energy, table.mask, table.total_reward, table.group)
    turns = np.array([len(turns) for turns in rollouts.turns])
    spread = [np.ptp(turns[rollouts.group == g]) > 0 for g in range(len(rollouts.prompts))]
    known_corr = weights.total_reward_corr[np.isfinite(weights.total_reward_corr)]
    means = {"success": table.total_reward, "turns": turns, "turns_differ": spread, "policy_tokens": table.mask.sum(1)}
    return {name: float(np.mean(x)) for name, x in means.items()} | {
        "tool_share": float(1 - table.mask.sum() / table.present.sum()),
        "corr_median": float(np.median(known_corr)) if known_corr.size else None,
        "corr_pooled": weights.pooled_total_reward_corr,
    }


def curves(names: Sequence[str], seed: int, size: Size, quick: bool, how: tuple[Path, Bar]) -> list[dict[str, Any]]:
    """Train a seed under estimators from the same start on the same prompts; return held-out success."""
    work, bar = how
    config = started(config_of(seed, quick), work)
    judged = EvaluateConfig(every=max(1, size.train_steps // 4), prompts=size.heldout, samples=2)
    plan, off = replace(config.optimize, steps=size.train_steps), replace(config.checkpoint, every=0)
    config = replace(config, optimize=plan, evaluate=judged, checkpoint=off)
    rows = []
    for name in names:
        path = train(replace(config, root=work, run=name, estimator=EstimatorConfig(name=name)), bar)
        steps = training_steps(path, success="heldout_success", norm="grad_norm")
        norms = np.array([row["norm"] for row in steps])
        facts = {"clip_fraction": float(np.mean(norms > config.optimize.max_grad_norm)), "norm": float(norms.mean())}
        points = ({"step": row["step"], "success": row["success"]} for row in steps if row["success"] is not None)
        rows += [{"seed": seed, "estimator": name} | point | facts for point in points]
    return rows


STUDY = Study(
    title="Many turns",
    question="Where the policy calls a tool and tool tokens are masked, are the estimators for turns, `otb_turn` and "
    "`trloo`, better than the rest on the same rollouts, and in training, beside `energy_regression` and no baseline?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
