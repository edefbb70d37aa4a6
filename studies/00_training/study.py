"""Real runs of the trainer on one core: from a supervised start to a policy that solves its task, a few seeds a task.

Each task's settings are a file beside this one, as `otb train --config` takes it; seeds differ in initial weights,
demonstrations, training and held-out prompts, and sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time

from otb_analysis.commands.cli import from_toml
from otb_analysis.config import CalculatorConfig, TrainConfig, plain_config
from otb_analysis.training.loop import train
from otb_analysis.training.runtime import Bar
from otb_analysis.training.warm_start import warm_started
from studies.lib import Cell, Study, Tables
from studies.lib.record import training_steps
from studies.lib.seeds import QUICK_MODEL, QUICK_START, QUICK_TASK

HERE = Path(__file__).parent
SEEDS = {"chain_sum": (0, 1, 2), "calculator": (0, 1, 2)}
QUICK_SEEDS = {"chain_sum": (0, 1), "calculator": (0, 1)}
HELDOUT = {"success": "heldout_success", "low": "heldout_success_low", "high": "heldout_success_high"}
"""Columns of the learning curve: held-out success with its interval over prompts."""
QUICK_STEPS, QUICK_PROMPTS = 4, 32


def config_of(task: str, seed: int, quick: bool) -> TrainConfig:
    """Return a run's configuration."""
    config = replace(from_toml(TrainConfig, HERE / f"{task}.toml"), seed=seed, run=f"{task}-s{seed}")
    if not quick:
        return config
    return replace(
        config, chain_sum=QUICK_TASK,
        calculator=CalculatorConfig(operations_min=1, operations_max=1, largest=9), small_model=QUICK_MODEL,
        warm_start=QUICK_START, optimize=replace(config.optimize, steps=QUICK_STEPS),
        evaluate=replace(config.evaluate, every=QUICK_STEPS - 1, prompts=QUICK_PROMPTS),
    )  # fmt: skip


def cells(seeds: Mapping[str, Sequence[int]], quick: bool) -> list[Cell]:
    """Return one cell per task and seed."""
    made = list[Cell]()
    for task, seed in ((task, seed) for task, numbers in seeds.items() for seed in numbers):
        known = {"task": task, "seed": seed, "quick": quick, "config": plain_config(config_of(task, seed, quick))}
        made.append(Cell(f"{task}-s{seed}", known))
    return made


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Make the supervised start, train from it, and read the run's learning curve."""
    config = config_of(cell.settings["task"], cell.settings["seed"], cell.settings["quick"])
    began = process_time()
    start = warm_started(config, work / "warm")
    trained_from = process_time()
    path = train(replace(config, root=work, model=str(start)), bar)
    ended = process_time()
    curve = [row for row in training_steps(path, **HELDOUT) if row["success"] is not None]
    facts = {
        "steps": config.optimize.steps,
        "rollouts": config.sample.prompts * config.sample.group_size * config.optimize.steps,
        "heldout_prompts": config.evaluate.prompts, "heldout_samples": config.evaluate.samples,
        "minutes_warm_start": round((trained_from - began) / 60, 2),
        "minutes_training": round((ended - trained_from) / 60, 2),
    }  # fmt: skip
    key = {"task": config.task, "seed": config.seed}
    return {"runs": [{"cell": cell.name} | key | facts], "curves": [key | row for row in curve]}


STUDY = Study(
    title="Training",
    question="Does the trainer take `chain_sum` from about 40 % to at least 75 % held-out success, and `calculator` to "
    "at least 80 %, in less than 20 minutes a seed on a small machine?",
    cells=cells(SEEDS, quick=False),
    quick=cells(QUICK_SEEDS, quick=True),
    measure=measure,
)
