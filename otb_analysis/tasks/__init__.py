"""Verifiable tasks, by name."""

from otb_analysis.config import TrainConfig
from otb_analysis.errors import InputError, nearest
from otb_analysis.tasks.base import Prompt, Split, Task, Turn
from otb_analysis.tasks.chain_sum import ChainSum

TASKS = {
    "chain_sum": lambda config: ChainSum(config.chain_sum, config.seed),
}
"""Name → constructor from a TrainConfig; the task's own settings are the section of the same name."""


def make_task(config: TrainConfig) -> Task:
    """Build the configured task.

    Raises:
        InputError: No task has that name, or its settings are impossible.
    """
    if config.task not in TASKS:
        raise InputError(f"task {config.task!r} does not exist; {nearest(config.task, TASKS)}")
    return TASKS[config.task](config)


__all__ = ["TASKS", "ChainSum", "Prompt", "Split", "Task", "Turn", "make_task"]
