"""The main job in one command: one warm start, two instrumented trainings on the same prompts, one comparison."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from time import monotonic

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from otb_analysis.config import (
    AttributionSchedule,
    DemoConfig,
    EstimatorConfig,
    MeasureConfig,
    OptimizeConfig,
    Schedule,
    TrainConfig,
)
from otb_analysis.errors import STOPS, InputError, StoreError
from otb_analysis.models import quiet_loading
from otb_analysis.store import RunStore
from otb_analysis.training.loop import train
from otb_analysis.training.progress import Bar
from otb_analysis.training.resume import plain_config
from otb_analysis.training.warm_start import warm_started

ESTIMATORS_COMPARED = ("group_mean", "otb")
STEPS = 61
MEASURED_EVERY = 15
LEARNING_RATE = 3e-4


def demo_configs(config: DemoConfig) -> list[TrainConfig]:
    """Return the two runs of the demo: they differ in the estimator and in nothing else."""
    return [
        TrainConfig(
            run=f"demo-{name}-s{config.seed}",
            root=config.root,
            if_exists="replace",
            seed=config.seed,
            estimator=EstimatorConfig(name=name),
            optimize=OptimizeConfig(steps=STEPS, learning_rate=LEARNING_RATE),
            measure=MeasureConfig(
                exact=Schedule(every=MEASURED_EVERY, prompts=0),
                attribution=AttributionSchedule(every=MEASURED_EVERY),
            ),
        )
        for name in ESTIMATORS_COMPARED
    ]


def run_demo(config: DemoConfig, console: Console) -> list[Path]:
    """Make what is missing and return the runs' directories; complete runs of the same configuration are reused.

    Raises:
        InputError, StoreError, NonFiniteError: What stopped one of the two trainings.
    """
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread, and loses to a busy machine
    configs = demo_configs(config)
    missing = [c for c in configs if not is_complete(c)]
    for reused in (c for c in configs if c not in missing):
        console.print(f"[dim]{reused.run_name} is complete in {config.root}; reused[/dim]")
    if missing:
        with progress_bars(console) as bars:
            task = bars.add_task("warm start", total=1.0)
            warm_started(
                missing[0], lambda done, total, text: bars.update(task, completed=done, total=total, description=text)
            )
            bars.update(task, completed=1.0, total=1.0, description="warm start: done")
            train_together(missing, bars)
    return [c.root / c.run_name for c in configs]


def is_complete(config: TrainConfig) -> bool:
    """Return True when the run exists, ended well, and was made with this very configuration."""
    path = config.root / config.run_name
    if not path.is_dir():
        return False
    try:
        info = RunStore(path).info
    except (InputError, StoreError):
        return False
    stored = info.get("config")
    same = isinstance(stored, dict) and _what(stored) == _what(plain_config(config))
    return same and info.get("status") == "complete"


def _what(config: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name not in PLACE}


PLACE = ("root", "if_exists")
"""Fields that say where a run lies, not what it is."""


def train_together(configs: Sequence[TrainConfig], bars: Progress) -> None:
    """Train each configuration in a process of its own, one thread each, showing a bar for each.

    Raises:
        InputError, StoreError, NonFiniteError: What stopped a run; the others are stopped too.
    """
    context = multiprocessing.get_context("spawn")
    news: Queue = context.Queue()
    threads = max(1, (os.cpu_count() or 1) // len(configs))
    tasks = {c.run_name: bars.add_task(c.run_name, total=c.optimize.steps) for c in configs}
    workers = [context.Process(target=_work, args=(c, threads, news), daemon=True) for c in configs]
    for worker in workers:
        worker.start()
    try:
        _watch(workers, news, bars, tasks)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(config: TrainConfig, threads: int, news: Queue) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGTERM, _interrupt)
    torch.set_num_threads(threads)
    quiet_loading()
    try:
        train(config, lambda done, total, text: news.put((config.run_name, done, total, text)))
        news.put((config.run_name, None))
    except STOPS as error:
        news.put((config.run_name, error))
    except KeyboardInterrupt:
        sys.exit(1)  # the run has recorded that it was interrupted
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to record: the parent may end it on its way out


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


LAST_WORDS = 2.0
"""Seconds in which what a worker said before it ended is still on its way."""


def _watch(workers: Sequence, news: Queue, bars: Progress, tasks: dict[str, TaskID]) -> None:
    """Draw what the workers report until all have ended; raise what one of them reports as its end."""
    running: set[str] = set(tasks)
    died: dict[str, float] = {}
    while running:
        for run, worker in zip(tasks, workers, strict=True):
            if (
                run in running
                and not worker.is_alive()
                and monotonic() - died.setdefault(run, monotonic()) > LAST_WORDS
            ):
                raise StoreError(f"training {run} ended without a word; run it with otb train.")
        try:
            run, *report = news.get(timeout=0.5)
        except Empty:
            continue
        if len(report) == 3:
            done, total, text = report
            bars.update(tasks[run], completed=done, total=total, description=text)
        elif report[0] is None:
            running.discard(run)
        else:
            raise report[0]


def drawn(bars: Progress, task: TaskID) -> Bar:
    """Return the function that draws progress on one of the bars."""
    return lambda done, total, text: bars.update(task, completed=done, total=total, description=text)


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Show progress bars with elapsed times."""
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bars:
        yield bars
