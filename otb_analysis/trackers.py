"""Numbers, tables and traces for trackio, wandb, mlflow and tensorboard, each through its own package."""

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.errors import InputError, nearest
from otb_analysis.extras import require

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Names of trackers, which are those of their packages."""

PROJECT = "otb-analysis"
"""Name of the project, for trackers that have projects."""

Tables = Mapping[str, Mapping[str, Any] | pd.DataFrame]
"""Tables by name, each a data frame or its columns."""

TABLES_EVERY = 10
"""Steps between two tables of a training; TRL's trainers log as often by default."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that do not exist.

    Raises:
        InputError: The first of them, with the nearest one that does.
    """
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"trackers holds {name!r}; {nearest(name, TRACKERS)}")


TRACED = ("prompt", "completion")
"""A table with these columns holds rollouts: each is a trace as well, where a tracker has them."""


def send(name: str, numbers: Mapping[str, float], tables: Tables, step: int | None, writer: Any = None) -> None:
    """Send to the run of a tracker that this process has begun, whoever began it.

    Args:
        name: One of `TRACKERS`.
        numbers: Scalars by name.
        tables: Their names and columns.
        step: Of both; None lets the tracker count.
        writer: Tensorboard's, whose package knows no current run.

    Raises:
        Exception: Whatever the tracker raises where it is down.
    """
    frames = {key: pd.DataFrame(columns) for key, columns in tables.items()}
    if name == "tensorboard":
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        for key, table in frames.items():
            rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
            cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
            writer.add_text(key, "\n".join(f"| {' | '.join(row)} |" for row in cells), step)
        writer.flush()
    elif name == "mlflow":
        mlflow = import_module(name)
        mlflow.log_metrics(dict(numbers), step=step)
        for key, table in frames.items():  # a file for each step: mlflow reads and writes all of one to add rows
            mlflow.log_table(table, f"{key}/{step or 0:06d}.json")
        for key, prompt, completion, about in _traces(frames):
            with mlflow.start_span(key, attributes=about | {"step": step}) as span:
                span.set_inputs(prompt)
                span.set_outputs(completion)
    else:
        tracker = import_module(name)
        wrapped: dict[str, Any] = {key: tracker.Table(dataframe=table) for key, table in frames.items()}
        traces = _traces(frames) if name == "trackio" and hasattr(tracker, "Trace") else ()  # older ones have none
        for key, prompt, completion, about in traces:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            wrapped[key] = tracker.Trace(messages=messages, metadata=about)
        tracker.log({**numbers, **wrapped}, step=step)


def _traces(tables: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield each rollout that a table holds: its name, prompt, completion, and what else stands there."""
    for key, table in tables.items():
        for k, row in enumerate(table.to_dict("records") if set(TRACED) <= set(table) else ()):
            about = {str(name): value for name, value in row.items() if name not in TRACED}
            yield f"{key}/{k}", row["prompt"], row["completion"], about


class Trackers:
    """The trackers of one run; their failures stop here. `running` holds those that started, by name."""

    def __init__(self, names: Sequence[str], run_dir: Path, first: int = 0, kind: str = ""):
        """Start trackers, with their files in the run's directory.

        `first` is the first step that will be logged: TensorBoard drops what it holds of this step and later ones.
        `kind` ends the name of the run, for what is not its training.
        """
        self.names = tuple(dict.fromkeys(names))
        self.running: dict[str, Any] = {}
        self._warned: set[str] = set()
        for name in self.names:
            self._attempt(name, "start", partial(self._start, name, run_dir, first, kind))

    def _start(self, name: str, run_dir: Path, first: int, kind: str) -> None:
        require(name, f"the tracker {name!r}")
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter  # of an extra

            self.running[name] = SummaryWriter(str(run_dir / f"{name}{kind}"), purge_step=first or None)
        elif name == "mlflow":
            mlflow = import_module(name)
            mlflow.set_experiment(PROJECT)
            self.running[name] = mlflow.start_run(run_name=run_dir.name + kind)
        else:
            place = {"dir": str(run_dir)} if name == "wandb" else {}
            self.running[name] = import_module(name).init(project=PROJECT, name=run_dir.name + kind, **place)

    def log(self, step: int, scalars: Mapping[str, object], tables: Tables | None = None) -> int | None:
        """Log a step's finite numbers and tables; return how many trackers failed to take them, None without trackers.

        Booleans count as 0 and 1.
        """
        if not self.names:
            return None
        numbers = {
            name: float(value)
            for name, value in scalars.items()
            if isinstance(value, Real | np.bool_) and math.isfinite(value)
        }
        done = [
            self._attempt(name, f"log step {step}", partial(send, name, numbers, tables or {}, step, writer))
            for name, writer in self.running.items()
        ]
        return len(self.names) - sum(done)

    def close(self) -> None:
        """Let every tracker write what it still holds."""
        for name, run in self.running.items():
            ends = {"tensorboard": "close", "mlflow": "end_run"}
            owner = import_module(name) if name == "mlflow" else run
            self._attempt(name, "finish", getattr(owner, ends.get(name, "finish")))

    def _attempt(self, name: str, what: str, run: Callable[[], object]) -> bool:
        """Return whether something worked; any failure of a tracker stops here and becomes one warning."""
        try:
            with redirect_stdout(sys.stderr):  # stdout may be JSON
                run()
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
                warnings.warn(
                    f"tracker {name} could not {what} ({reason}); all else goes on, and the run keeps the numbers.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return False
        return True
