"""Verifiable tasks, by name."""

from pathlib import Path

from otb_analysis.config import TrainConfig
from otb_analysis.custom import is_custom, plugins
from otb_analysis.errors import InputError, nearest
from otb_analysis.tasks.base import Prompt, Split, Task, Turn
from otb_analysis.tasks.calculator import Calculator
from otb_analysis.tasks.chain_sum import ChainSum
from otb_analysis.tasks.counting import Counting
from otb_analysis.tasks.custom import load_task, source_file
from otb_analysis.tasks.graph_path import GraphPath
from otb_analysis.tasks.math_jsonl import MathJsonl
from otb_analysis.tasks.reasoning_gym import ReasoningGym


def _calculator(config: TrainConfig) -> Calculator:
    """Make the calculator; refuse a turn limit at which its longest prompts cannot be solved."""
    task = Calculator(config.calculator, config.seed)
    if task.turns_needed > config.sample.max_turns:
        raise InputError(
            f"sample.max_turns is {config.sample.max_turns} but calculator.operations_max="
            f"{config.calculator.operations_max} takes {task.turns_needed} turns; raise the one or lower the other."
        )
    return task


TASKS = {
    "chain_sum": lambda config: ChainSum(config.chain_sum, config.seed),
    "calculator": _calculator,
    "counting": lambda config: Counting(config.counting, config.seed),
    "graph_path": lambda config: GraphPath(config.graph_path, config.seed),
    "math_jsonl": lambda config: MathJsonl(config.math_jsonl, config.seed),
    "reasoning_gym": lambda config: ReasoningGym(config.reasoning_gym, config.seed),
}
"""Name → constructor from a TrainConfig; the task's own settings are the section of the same name."""


def make_task(config: TrainConfig) -> Task:
    """Build the configured task: one of the catalogue, one that a package registers, or one by module:attribute.

    Raises:
        InputError: No task has that name, or its settings are impossible.
    """
    if config.task in TASKS:
        return TASKS[config.task](config)
    if is_custom("task", config.task):
        return load_task(config)
    hint = nearest(config.task, [*TASKS, *plugins("task")])
    raise InputError(f"task {config.task!r} does not exist; {hint} Your own is named module:attribute.")


def task_files(config: TrainConfig) -> list[Path]:
    """Return the files whose content the task depends on beside its configuration; what is cached is keyed by them."""
    if config.task not in TASKS:
        file = source_file(config.task)
        return [] if file is None else [file]
    if config.task == "math_jsonl":
        return [Path(name) for name in (config.math_jsonl.train, config.math_jsonl.heldout) if name]
    return []


__all__ = [
    "TASKS",
    "Calculator",
    "ChainSum",
    "Counting",
    "GraphPath",
    "MathJsonl",
    "Prompt",
    "ReasoningGym",
    "Split",
    "Task",
    "Turn",
    "make_task",
    "task_files",
]
