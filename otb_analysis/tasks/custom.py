"""A custom task: `--task module:attribute` loads it from any module that can be imported here; a package's by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otb_analysis.config import TrainConfig
from otb_analysis.custom import import_attribute, one_line, plugins
from otb_analysis.errors import STOPS, InputError
from otb_analysis.tasks.base import Task

NEEDED = ("name", "alphabet", "prompt", "demonstration", "reply", "reward")


def load_task(config: TrainConfig) -> Task:
    """Import and make the task that `config.task` names.

    The attribute is called with the configuration (a class or a function), or taken as it is when it already is a task.

    Raises:
        InputError: The module cannot be imported, has no such attribute, or the attribute makes no task.
    """
    task: Any = import_attribute("task", config.task)
    if isinstance(task, type) or (_missing(task) and callable(task)):
        task = _called(task, config)
    if missing := _missing(task):
        raise InputError(f"task {config.task!r} has no {missing[0]}; a task has {', '.join(NEEDED)}.")
    return task


def source_file(task: str) -> Path | None:
    """Return the file of the module that a loaded task of one's own came from, or None when it has none."""
    module = plugins("task")[task].module if task in plugins("task") else task.partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None


def _called(make: Callable[[TrainConfig], Any], config: TrainConfig) -> Any:
    try:
        return make(config)
    except STOPS:
        raise
    except Exception as error:  # someone else's code can fail in any way
        raise InputError(
            f"task {config.task!r} cannot be made ({one_line(error)}); it is called with the TrainConfig."
        ) from error


def _missing(task: object) -> list[str]:
    return [name for name in NEEDED if not hasattr(task, name)]
