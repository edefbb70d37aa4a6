"""Training the real model with four baselines: a sweep of rates per arm, then seeds at the best and at a common one."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    CheckpointConfig,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    LoraConfig,
    MeasureConfig,
    OptimizeConfig,
    ReasoningGymConfig,
    SampleConfig,
    Schedule,
    TrainConfig,
)
from otb_analysis.training.loop import train
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Tables, rounded
from studies.lib.record import training_steps
from studies.lib.seeds import best_rate

ARMS = ("rloo", "otb", "energy_regression", "none")
MEMORY = {"energy_regression": {"memory": 0.9}}
"""Options of the arms: eight prompts are too few for a regression with eight features, so earlier steps count too."""
SUMS = ReasoningGymConfig(
    name=("chain_sum",), config=('{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}',), shots=1
)
"""What is trained: sums of two or three digits. Tasks with one frequent answer are soon answered by it alone."""
MODEL = "smollm2"
LORA = LoraConfig(rank=16)

COLUMNS = {
    "reward": "reward_mean", "heldout": "heldout_success", "heldout_low": "heldout_success_low",
    "heldout_high": "heldout_success_high", "grad_norm": "grad_norm", "clipped": "CAST(clipped AS DOUBLE)",
    "entropy": "entropy_mean", "length": "length_mean",
}  # fmt: skip
"""What is kept of each update, by its name in a run's `steps`."""


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    arms: tuple[str, ...] = ARMS
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    sweep_seeds: tuple[int, ...] = (100,)
    sweep_steps: int = 20
    steps: int = 60
    prompts: int = 8
    group_size: int = 4
    tokens: int = 16
    heldout: int = 96


FULL = Size()
SMALL = Size(arms=("rloo", "none"), seeds=(0, 1), rates=(1e-3, 3e-3), sweep_steps=2, steps=2, prompts=4, heldout=8)


def config_of(size: Size, arm: str, rate: float, seed: int, start: TrainConfig | None = None) -> TrainConfig:
    """Return the configuration of a run, from SmolLM2 or from another start."""
    start = start or TrainConfig(model=MODEL, task="reasoning_gym", reasoning_gym=SUMS, lora=LORA)
    return replace(
        start, seed=seed,
        sample=SampleConfig(prompts=size.prompts, group_size=size.group_size, max_new_tokens=size.tokens),
        estimator=EstimatorConfig(name=arm, options={k: str(v) for k, v in MEMORY.get(arm, {}).items()}),
        optimize=OptimizeConfig(steps=size.steps, learning_rate=rate, precision="bfloat16"),
        critic=CriticConfig(enabled=False), measure=MeasureConfig(exact=Schedule()),
        evaluate=EvaluateConfig(every=size.steps, prompts=size.heldout), checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip


def cells(size: Size, common: Mapping[str, Any]) -> list[Cell]:
    """Return the sweep of each arm, its seeds at the rate that was best, and at the middle rate, the same for all."""
    constants = {**common, "size": asdict(size), "task": asdict(SUMS), "lora": asdict(LORA)}
    made = []
    for arm in size.arms:
        facts = {**constants, "arm": arm, "options": MEMORY.get(arm, {})}
        sweep = Cell(f"sweep-{arm.replace('_', '-')}", facts)
        made.append(sweep)
        for seed in size.seeds:
            run = Cell(f"run-{arm.replace('_', '-')}-s{seed}", {**facts, "seed": seed}, after=(sweep,))
            common = {**facts, "seed": seed, "rate": size.rates[1]}
            made += [run, Cell(f"common-{arm.replace('_', '-')}-s{seed}", common, after=(run,))]
    return made


def measure(cell: Cell, size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Tables:
    """Sweep an arm's learning rate, or train it at the one that was best."""
    arm = cell.settings["arm"]
    if "seed" not in cell.settings:
        short = replace(size, steps=size.sweep_steps)
        sweep = []
        for rate, seed in product(size.rates, size.sweep_seeds):
            rewards = [row["reward"] for row in trained(config_of(short, arm, rate, seed, start), work, 0, bar)]
            sweep.append({"arm": arm, "rate": rate, "seed": seed, "reward": float(np.mean(rewards))})
        return {"sweep": sweep}
    if "rate" not in cell.settings:
        table, rate = "training", best_rate(cell.given["sweep"], "reward")
    elif cell.given["training"][0]["rate"] == cell.settings["rate"]:
        return {"common_rate": cell.given["training"]}
    else:
        table, rate = "common_rate", cell.settings["rate"]
    seed = cell.settings["seed"]
    rows = trained(config_of(size, arm, rate, seed, start), work, size.heldout, bar)
    return {table: [{"arm": arm, "seed": seed, "rate": rate} | row for row in rows]}


def trained(config: TrainConfig, work: Path, heldout: int, bar: Bar) -> list[dict[str, Any]]:
    """Train; return a row per update, with held-out success where it was evaluated."""
    every = config.evaluate if heldout else replace(config.evaluate, every=0)
    name = f"{config.estimator.name}-{config.optimize.learning_rate:g}-{config.seed}"
    path = train(replace(config, evaluate=every, root=work, run=name), bar)
    shutil.rmtree(path / "model")  # half a gigabyte each
    rows = training_steps(path, **COLUMNS)
    return [{"step": row["step"]} | {name: rounded(row[name]) for name in COLUMNS} for row in rows]
