"""Training the real model with four baselines: a sweep of rates, seeds at the best one, and held-out success."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

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
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.sampling import sample
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.loop import heldout_columns, train
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Float
from studies.lib import Cell, Tables, rounded
from studies.lib.policies import pretrained
from studies.lib.record import training_steps
from studies.lib.seeds import best_rate

ARMS = ("rloo", "otb", "energy_regression", "none")
MEMORY = {"energy_regression": {"memory": 0.9}}
"""Options of the arms: eight prompts are too few for a regression with eight features, so earlier steps count too."""
SUMS = ReasoningGymConfig(
    name=("chain_sum",), config=('{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}',), shots=1
)
"""What is trained: sums of two or three digits. Tasks with one frequent answer are soon answered by it alone."""
MODEL, AGAINST = "smollm2", "rloo"
LORA = LoraConfig(rank=16)

COLUMNS = {"reward": "reward_mean", "grad_norm": "grad_norm", "clipped": "CAST(clipped AS DOUBLE)",
           "entropy": "entropy_mean", "length": "length_mean"}  # fmt: skip
"""What is kept of each update, by its name in a run's `steps`."""
AT_ONCE = 64
"""Held-out prompts that are answered together."""


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    arms: tuple[str, ...] = ARMS
    seeds: tuple[int, ...] = tuple(range(8))
    rates: tuple[float, ...] = (2e-4, 4e-4, 8e-4)
    sweep_seeds: tuple[int, ...] = (100, 101, 102)
    sweep_steps: int = 10
    steps: int = 16
    prompts: int = 8
    group_size: int = 4
    tokens: int = 16
    heldout: int = 1000  # Prompts, all different; of `SUMS` there are 436 or 437
    answers: int = 3  # To each of them
    precision: Literal["float32", "bfloat16"] = "float32"


FULL = Size()
SMALL = Size(
    arms=("rloo", "none"), seeds=(0, 1), rates=(1e-3, 3e-3), sweep_seeds=(100,), sweep_steps=2, steps=2, prompts=4,
    heldout=8, answers=2,
)  # fmt: skip


def config_of(size: Size, arm: str, rate: float, seed: int, start: TrainConfig | None = None) -> TrainConfig:
    """Return the configuration of a run, from SmolLM2 or from another start."""
    start = start or TrainConfig(model=MODEL, task="reasoning_gym", reasoning_gym=SUMS, lora=LORA)
    return replace(
        start, seed=seed,
        sample=SampleConfig(prompts=size.prompts, group_size=size.group_size, max_new_tokens=size.tokens),
        estimator=EstimatorConfig(name=arm, options={k: str(v) for k, v in MEMORY.get(arm, {}).items()}),
        optimize=OptimizeConfig(steps=size.steps, learning_rate=rate, precision=size.precision),
        critic=CriticConfig(enabled=False), measure=MeasureConfig(exact=Schedule()),
        evaluate=EvaluateConfig(every=0), checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip


def cells(size: Size, common: Mapping[str, Any]) -> list[Cell]:
    """Return success before training, the sweep of each arm, and its seeds at the rate that was best."""
    constants = {**common, "size": asdict(size), "task": asdict(SUMS), "lora": asdict(LORA)}
    made = [Cell("untrained", {**constants, "arm": ""})]
    for arm in size.arms:
        facts, name = {**constants, "arm": arm, "options": MEMORY.get(arm, {})}, arm.replace("_", "-")
        sweep = Cell(f"sweep-{name}", facts)
        runs = [Cell(f"run-{name}-s{seed}", {**facts, "seed": seed}, after=(sweep,)) for seed in size.seeds]
        made += [sweep, *runs]
    return made


def measure(cell: Cell, size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Tables:
    """Answer held-out prompts without training, sweep an arm's learning rate, or train it at the one that was best."""
    arm, seed = cell.settings["arm"], cell.settings.get("seed", 0)
    if not arm:
        config = config_of(size, AGAINST, size.rates[0], seed, start)
        return {"untrained": [heldout(config, config.model, size)]}
    if "seed" not in cell.settings:
        short, sweep = replace(size, steps=size.sweep_steps), []
        for rate, other in product(size.rates, size.sweep_seeds):
            path = trained(config_of(short, arm, rate, other, start), work, bar)
            reward = float(np.mean([row["reward"] for row in training_steps(path, **COLUMNS)]))
            sweep.append({"arm": arm, "rate": rate, "seed": other, "reward": reward})
            shutil.rmtree(path)  # a model takes half a gigabyte
        return {"sweep": sweep}
    rate = best_rate(cell.given["sweep"], "reward")
    config, key = config_of(size, arm, rate, seed, start), {"arm": arm, "seed": seed, "rate": rate}
    path = trained(config, work, bar)
    success = heldout(config, str(path / "model"), size)
    rows = [
        key | {"step": int(row["step"])} | {name: rounded(row[name]) for name in COLUMNS}
        for row in training_steps(path, **COLUMNS)
    ]
    shutil.rmtree(path / "model")
    return {"training": rows, "heldout": [key | success]}


def trained(config: TrainConfig, work: Path, bar: Bar) -> Path:
    """Train, and return where the run and its model are."""
    name = f"{config.estimator.name}-{config.optimize.learning_rate:g}-{config.seed}"
    return train(replace(config, root=work, run=name), bar)


def heldout(config: TrainConfig, model: str, size: Size) -> dict[str, Any]:
    """Return the success of a model on held-out prompts, several answers to each, with an interval over prompts.

    Not by the run's own evaluation, which also takes place before the first update, the same for all arms.
    """
    policy = pretrained(replace(config, model=model))
    generator = TransformersGenerator(policy.model, policy.tokenizer)
    prompts, rewards = distinct_prompts(policy.task, "heldout", size.heldout), list[Float]()
    torch.manual_seed(config.seed)
    for first in range(0, len(prompts), AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        group = np.repeat(np.arange(len(some)), size.answers)
        rollouts = sample(generator, policy.tokenizer, policy.task, some, config.sample, group)
        rewards.append(compute_rewards(policy.task, rollouts).rewards().sum(axis=1))
    judged = heldout_columns(np.concatenate(rewards).reshape(len(prompts), size.answers), config.evaluate.threshold)
    facts = {
        f"success{end}": rounded(cast("float | None", judged[f"heldout_success{end}"])) for end in ("", "_low", "_high")
    }
    return {"prompts": len(prompts), "answers": size.answers} | facts
