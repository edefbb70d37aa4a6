"""Scalars of every step to TensorBoard, wandb or trackio, through accelerate's trackers.

A tracker that fails gives one warning and a counted gap; it never stops a run.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from otb_analysis.errors import InputError, nearest
from otb_analysis.extras import require

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

TRACKERS = ("tensorboard", "wandb", "trackio")
"""Names of trackers, which are those of their packages."""

PROJECT = "otb-analysis"
"""Name of the project, for trackers that have projects."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that do not exist or whose packages are missing.

    Raises:
        InputError: The first of them, with its remedy.
    """
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"trackers holds {name!r}; {nearest(name, TRACKERS)}")
        for module in ("accelerate", name):
            require(module, f"the tracker {name!r}")


class Trackers:
    """The trackers of one run; their failures stop here. `running` holds those that started, by name."""

    def __init__(self, names: Sequence[str], run_dir: Path, first: int = 0):
        """Start trackers, with their files in the run's directory.

        `first` is the first step that will be logged: TensorBoard drops what it holds of this step and later ones.
        """
        self.names = tuple(dict.fromkeys(names))
        self.running: dict[str, GeneralTracker] = {}
        self._warned: set[str] = set()
        for name in self.names:
            self._attempt(name, "start", lambda name=name: self._start(name, run_dir, first))

    def _start(self, name: str, run_dir: Path, first: int) -> None:
        tracker = _make(name, run_dir, first)
        tracker.start()
        self.running[name] = tracker

    def log(self, step: int, scalars: Mapping[str, object]) -> int | None:
        """Log a step's finite numbers; return how many trackers failed to take them, or None without trackers."""
        if not self.names:
            return None
        numbers = finite_numbers(scalars)
        done = [
            self._attempt(name, f"log step {step}", lambda tracker=tracker: tracker.log(numbers, step=step))
            for name, tracker in self.running.items()
        ]
        return len(self.names) - sum(done)

    def close(self) -> None:
        """Let every tracker write what it still holds."""
        for name, tracker in self.running.items():
            self._attempt(name, "finish", tracker.finish)

    def _attempt(self, name: str, what: str, run: Callable[[], object]) -> bool:
        """Return whether something worked; any failure of a tracker stops here and becomes one warning."""
        try:
            run()
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                reason = str(error).split("\n")[0] or type(error).__name__
                warnings.warn(
                    f"tracker {name} could not {what} ({reason}); the run goes on, and its steps are in the store.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return False
        return True


def finite_numbers(scalars: Mapping[str, object]) -> dict[str, float]:
    """Return the scalars that are finite numbers; booleans count as 0 and 1."""
    numbers = {name: float(value) for name, value in scalars.items() if isinstance(value, Real | np.bool_)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _make(name: str, run_dir: Path, first: int) -> "GeneralTracker":
    from accelerate import tracking  # an extra, and half a second to import

    if name == "tensorboard":
        purge = {"purge_step": first} if first else {}
        return tracking.TensorBoardTracker("tensorboard", run_dir, **purge)
    if name == "wandb":
        return tracking.WandBTracker(PROJECT, name=run_dir.name, dir=str(run_dir))
    return tracking.TrackioTracker(PROJECT, name=run_dir.name)
