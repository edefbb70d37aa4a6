"""Verifiable tasks, by name."""

import sys
from pathlib import Path
from typing import Any

from otb_analysis.config import TrainConfig
from otb_analysis.custom import foreign, import_attribute, is_custom, plugins
from otb_analysis.errors import InputError, nearest
from otb_analysis.tasks.base import Prompt, Split, Task, Turn
from otb_analysis.tasks.calculator import Calculator
from otb_analysis.tasks.math_jsonl import MathJsonl
from otb_analysis.tasks.reasoning_gym import ReasoningGym
from otb_analysis.tasks.running_total import RunningTotal
from otb_analysis.tasks.small import ChainSum, Counting, GraphPath

NEEDED = ("name", "alphabet", "prompt", "demonstration", "reply", "reward")
"""What a task of one's own must have."""


def _enough_turns(task: Calculator | RunningTotal, config: TrainConfig) -> Task:
    """Return a task of several turns; refuse a turn limit at which its longest prompts cannot be solved."""
    if task.turns_needed > config.sample.max_turns:
        raise InputError(
            f"sample.max_turns is {config.sample.max_turns} but {task.name} takes {task.turns_needed} turns with these "
            "settings; raise the one or make the problems shorter."
        )
    return task


TASKS = {
    "chain_sum": lambda config: ChainSum(config.chain_sum, config.seed),
    "calculator": lambda config: _enough_turns(Calculator(config.calculator, config.seed), config),
    "counting": lambda config: Counting(config.counting, config.seed),
    "graph_path": lambda config: GraphPath(config.graph_path, config.seed),
    "running_total": lambda config: _enough_turns(RunningTotal(config.running_total, config.seed), config),
    "math_jsonl": lambda config: MathJsonl(config.math_jsonl, config.seed),
    "reasoning_gym": lambda config: ReasoningGym(config.reasoning_gym, config.seed),
}
"""Name → constructor from a TrainConfig; the task's own settings are the section of the same name."""


def make_task(config: TrainConfig) -> Task:
    """Build the configured task: one of the catalogue, one that a package registers, or one by module:attribute.

    What is named is called with the configuration (a class or a function), or taken as it is when it already is a task.

    Raises:
        InputError: No task has that name, its settings are impossible, its module cannot be imported, or what it names
            makes no task.
    """
    name = config.task
    if name in TASKS:
        return TASKS[name](config)
    if not is_custom("task", name):
        hint = nearest(name, [*TASKS, *plugins("task")])
        raise InputError(f"task {name!r} does not exist; {hint} Your own is named module:attribute.")
    named: Any = import_attribute("task", name)
    task: Any = named
    if isinstance(named, type) or (callable(named) and not all(hasattr(named, part) for part in NEEDED)):
        with foreign(f"task {name!r} cannot be made", "it is called with the TrainConfig."):
            task = named(config)
    if missing := [part for part in NEEDED if not hasattr(task, part)]:
        raise InputError(f"task {name!r} has no {missing[0]}; a task has {', '.join(NEEDED)}.")
    return task


def task_files(config: TrainConfig) -> list[Path]:
    """Return the files whose content the task depends on beside its configuration; what is cached is keyed by them."""
    if config.task == "math_jsonl":
        return [Path(name) for name in (config.math_jsonl.train, config.math_jsonl.heldout) if name]
    if config.task in TASKS:
        return []
    registered = plugins("task")
    module = registered[config.task].module if config.task in registered else config.task.partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    return [Path(file)] if file else []


__all__ = [
    "TASKS",
    "Calculator",
    "ChainSum",
    "Counting",
    "GraphPath",
    "MathJsonl",
    "Prompt",
    "ReasoningGym",
    "RunningTotal",
    "Split",
    "Task",
    "Turn",
    "make_task",
    "task_files",
]
