"""Training at one length: what baselines learn from the same start, and how long they last under long steps."""

from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import EstimatorConfig, EvaluateConfig, ObjectiveConfig, OptimizeConfig, TrainConfig
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Tables
from studies.lib.collapse import collapse_step, trailing_mean
from studies.lib.policies import Policy, train_from
from studies.lib.record import training_steps
from studies.lib.seeds import BASE

LEARN = ("rloo", "otb", "otb_loo", "energy_regression", "energy_across_loo", "none")
"""Arms that learn from rollouts of their own policy."""
LAST = {
    "rloo": "rloo", "lowered": "studies.lib.collapse:lowered", "otb": "otb", "raised": "studies.lib.collapse:raised",
}  # fmt: skip
"""Arms that are driven into collapse, as in study 05: rollouts four batches old, and a rate that rises to the end."""

COLUMNS = {"success": "heldout_success", "reward": "reward_mean", "norm": "grad_norm", "clipped": "clipped"}
"""What is read of each step."""


@dataclass(frozen=True)
class Runs:
    """How the runs are made. All start from one policy; the seed draws their prompts and rollouts."""

    seeds: tuple[int, ...] = tuple(range(8))
    learn: tuple[str, ...] = LEARN
    last: tuple[str, ...] = tuple(LAST)
    prompts: int = 16
    group: int = 4
    steps: int = 20
    rate: float = 3e-4
    heldout: int = 96
    last_prompts: int = 8
    last_steps: int = 32
    last_rate: float = 4.8e-3
    staleness: int = 4


FULL_RUNS = Runs()
SMALL_RUNS = Runs(
    seeds=(0, 1), learn=("rloo", "otb"), last=("rloo", "lowered"), prompts=4, steps=2, heldout=16, last_prompts=2,
    last_steps=8, staleness=1,
)  # fmt: skip


def training_cells(teach: Cell, runs: Runs) -> list[Cell]:
    """Return a cell for every arm and seed, seed by seed; they come after the cell that taught the policy."""
    arms = [*(("learn", name) for name in runs.learn), *(("last", name) for name in runs.last)]
    known, ways = {"runs": asdict(runs), **teach.settings}, product(runs.seeds, arms)
    return [Cell(f"{kind}-{arm}-s{k}", {**known, "arm": arm, "seed": k}, after=(teach,)) for k, (kind, arm) in ways]


def run_config(config: TrainConfig, runs: Runs, kind: str, arm: str, seed: int) -> TrainConfig:
    """Return the configuration of a run, from that of its policy."""
    learns = kind == "learn"
    steps, rate = (runs.steps, runs.rate) if learns else (runs.last_steps, runs.last_rate)
    return replace(
        config, seed=seed, measure=BASE.measure, critic=BASE.critic, run=arm,
        estimator=EstimatorConfig(name=arm if learns else LAST[arm]),
        sample=replace(config.sample, prompts=runs.prompts if learns else runs.last_prompts, group_size=runs.group),
        optimize=OptimizeConfig(steps=steps, learning_rate=rate, warmup_steps=0 if learns else steps),
        objective=ObjectiveConfig(staleness=0 if learns else runs.staleness),
        evaluate=EvaluateConfig(every=max(1, steps // 3), prompts=runs.heldout) if learns else BASE.evaluate,
        checkpoint=replace(config.checkpoint, every=0),
    )  # fmt: skip


def run_tables(policy: Policy, config: TrainConfig, key: dict[str, Any], learns: bool, work: Path, bar: Bar) -> Tables:
    """Train a taught policy; return held-out success by step, or the step at which the run collapsed."""
    steps = training_steps(train_from(policy, config, work, bar), **COLUMNS)
    if learns:
        facts = {name: float(np.mean([row[name] for row in steps])) for name in ("norm", "clipped")}
        judged = [row for row in steps if row["success"] is not None]
        return {"learning": [key | {"step": row["step"], "success": row["success"]} | facts for row in judged]}
    reward = np.array([row["reward"] for row in steps])
    mean = trailing_mean(reward)
    ends = {"steps": len(reward), "collapse": collapse_step(reward)}
    return {"lasting": [key | ends | {"best": float(mean.max()), "end": float(mean[-1])}]}
