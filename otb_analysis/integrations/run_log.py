"""A run of our store, written by somebody else's trainer. Observing never breaks training: an error is a warning."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from otb_analysis.config import MeasureConfig, Schedule, section
from otb_analysis.errors import InputError
from otb_analysis.store import RunWriter, StepTables
from otb_analysis.store.layout import check_run_name, read_run_file


@dataclass(frozen=True)
class RecordConfig:
    """Where a trainer's run is kept, and what is measured of it beside the forward pass."""

    run: str = ""  # Name of the run's directory; by default that of the trainer's output directory.
    root: Path = Path("runs")  # Directory that holds the runs.
    if_exists: Literal["error", "replace", "resume"] = "error"
    """What to do when the run exists: refuse, begin anew, or go on; resume replaces the steps that are done again."""
    measure: MeasureConfig = field(default_factory=lambda: MeasureConfig(exact=Schedule(every=0, prompts=8)))


class RunLog:
    """Writes a trainer's steps from its main process."""

    def __init__(self, record: RecordConfig, default: str, config: Mapping[str, Any]):
        """Refuse what cannot work; nothing is written before the first step.

        Raises:
            InputError: The run exists, or its name is none.
        """
        self.record, self.config = record, config
        self.path = Path(record.root) / check_run_name(record.run or default)
        self._writer: RunWriter | None = None
        self._kept: tuple[int, StepTables] | None = None
        self._told = False
        if record.if_exists == "error" and self.path.exists():
            raise InputError(
                f"run {self.path.name!r} already exists in {self.path.parent}; name another run, or set if_exists to "
                "replace or resume."
            )

    def keep(self, step: int, tables: Callable[[], StepTables]) -> None:
        """Make what is stored of a step, before its updates; where that fails, warn and go on without it."""
        try:
            self._kept = step, tables()
        except Exception as error:
            self._warn(step, error)

    def release(self, scalars: Mapping[str, object]) -> None:
        """Write the step that was kept, with scalars of its updates; where that fails, warn and go on without it."""
        if self._kept is None:
            return
        (step, tables), self._kept = self._kept, None
        try:
            if self._writer is None and self.record.if_exists == "resume" and self.path.exists():
                kept, now = section(read_run_file(self.path), "config"), self.config.get("not_plain")
                if kept.get("plain_sampling") and now:
                    raise InputError(
                        f"run {self.path.name!r} was sampled plainly before, but now {now}; name another run."
                    )
                self._writer = RunWriter.resume(self.path, step)
            elif self._writer is None:
                again = "replace" if self.record.if_exists == "replace" else "error"
                self._writer = RunWriter.create(self.path.parent, self.path.name, self.config, if_exists=again)
            self._writer.write_step(step, replace(tables, steps={**tables.steps, **scalars}))
        except Exception as error:
            self._warn(step, error)

    @contextmanager
    def training(self, scalars: Callable[[], Mapping[str, object]]) -> Iterator[None]:
        """Record how the training inside ended, behind its last step, which gets `scalars`."""
        status: Literal["complete", "failed"] = "failed"
        reason = ""
        try:
            yield
            status = "complete"
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        finally:
            self.release(scalars())
            self.finish(status, reason)

    def finish(self, status: Literal["complete", "failed"], reason: str = "") -> None:
        """Record how training ended; where that fails, nothing happens."""
        if self._writer is not None:
            with suppress(Exception):
                self._writer.finish(status, reason)

    def _warn(self, step: int, error: Exception) -> None:
        if not self._told:
            tell(f"step {step} is missing from the run {self.path}, training goes on; told once: {error}")
        self._told = True


def tell(message: str) -> None:
    """Warn; where warnings are errors, log, since observing never breaks training."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logging.getLogger(__name__).warning(message)
