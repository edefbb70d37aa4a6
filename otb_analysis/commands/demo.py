"""The main job in one command: two instrumented trainings from one policy on the same prompts, and one comparison."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from rich.console import Console

from otb_analysis.commands.screen import reported, shown
from otb_analysis.config import (
    AttributionSchedule,
    DemoConfig,
    EstimatorConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    TrainConfig,
    plain_config,
)
from otb_analysis.devices import device_of
from otb_analysis.errors import STOPS, InputError, Interrupted, StoreError
from otb_analysis.phases import OPEN, Phase, note, phase
from otb_analysis.rollouts.models import quiet_loading
from otb_analysis.store import RunStore
from otb_analysis.training.loop import train

ESTIMATORS_COMPARED = ("group_mean", "otb")
STEPS, PROMPTS = 31, 32
LEARNING_RATE = 5e-4
PATIENCE = 30.0
"""Seconds after which a training that was told to end is ended: as long as it may take to record that it was."""
MEASURED_EVERY, ATTRIBUTED_EVERY = 3, 15
"""Both runs measure the same steps, where they answer the same prompts, so that their own updates compare too."""


def demo_configs(config: DemoConfig) -> list[TrainConfig]:
    """Return the two runs of the demo: they differ in the estimator alone."""
    measure = MeasureConfig(exact=Schedule(MEASURED_EVERY), attribution=AttributionSchedule(ATTRIBUTED_EVERY))
    shared = TrainConfig(
        root=config.root, if_exists="replace", model="demo", seed=config.seed, device=config.device, measure=measure,
        sample=SampleConfig(prompts=PROMPTS), optimize=OptimizeConfig(steps=STEPS, learning_rate=LEARNING_RATE),
    )  # fmt: skip
    return [
        replace(shared, run=f"demo-{name}-s{config.seed}", estimator=EstimatorConfig(name=name))
        for name in ESTIMATORS_COMPARED
    ]


def run_demo(config: DemoConfig, console: Console | None = None) -> list[Path]:
    """Make what is missing and return the runs' directories; complete runs of the same configuration are reused.

    Raises:
        InputError, StoreError, NonFiniteError: What stopped one of the two trainings, or a device that is not there.
        Interrupted: Ctrl-C; the sentence says what is kept.
    """
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    device_of(config.device)
    configs = demo_configs(config)
    missing = [c for c in configs if not is_complete(c)]
    workers: dict[str, list[Phase]] = {}
    with shown(console, lambda: [OPEN, *workers.values()]):
        for reused in (c for c in configs if c not in missing):
            note(f"{reused.run_name} is complete in {config.root}; reused.")
        try:
            if missing:
                train_together(missing, workers, config.threads)
        except KeyboardInterrupt:
            done = [c.run_name for c in configs if is_complete(c)]
            begun = [c.run_name for c in configs if c.run_name not in done and (c.root / c.run_name).is_dir()]
            kept = [f"{' and '.join(done)} is complete and kept"] if done else []
            if begun:
                kept.append(f"{' and '.join(begun)} can be read as far as it is, and begins anew with otb demo")
            raise Interrupted(f"stopped; {'; '.join(kept) or 'no run was begun'}.") from None
    return [c.root / c.run_name for c in configs]


def is_complete(config: TrainConfig) -> bool:
    """Return True when the run exists, ended well, and was made with this very configuration, wherever it is stored."""
    try:
        info = RunStore(config.root / config.run_name).info
    except (InputError, StoreError):
        return False
    stored, place = info.get("config"), dict.fromkeys(["root", "if_exists", "device"])
    same = isinstance(stored, dict) and stored | place == plain_config(config) | place
    return same and info.get("status") == "complete"


def train_together(configs: Sequence[TrainConfig], open_phases: dict[str, list[Phase]], threads: int = 1) -> None:
    """Train each configuration in a process of its own.

    Args:
        open_phases: Takes what each run is doing, by its name, for whoever watches.

    Raises:
        InputError, StoreError, NonFiniteError: What stopped a run; the others are stopped too.
    """
    context = multiprocessing.get_context("spawn")
    workers, reports = [], dict[Connection, str]()
    # Ctrl-C reaches every process of the group. Workers start with it ignored, since this process ends them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for config in configs:
        run, (receiver, sender) = config.run_name, context.Pipe(duplex=False)
        open_phases[run] = [Phase(f"{run}: loading PyTorch and transformers")]
        workers.append(context.Process(target=_work, args=(config, threads, sender), daemon=True))
        workers[-1].start()
        sender.close()  # only the worker holds it now, so its end is the end of the pipe
        reports[receiver] = run
    signal.signal(signal.SIGINT, before)
    try:
        while reports:
            ready = wait(list(reports))
            for news, run in [(news, run) for news, run in reports.items() if news in ready]:
                try:
                    report = news.recv()
                except EOFError:
                    raise StoreError(f"training {run} ended without a word; run it with otb train.") from None
                if isinstance(report, Exception):
                    raise report
                if report is None:
                    del reports[news]
                    continue
                open_phases[run], notes = report
                for sentence in notes:
                    note(f"{run}: {sentence}")
    finally:
        for worker in workers:
            worker.terminate()
            worker.join(PATIENCE)
            worker.kill()  # an interrupt that falls into a destructor is lost
            worker.join()


def _work(config: TrainConfig, threads: int, news: Connection) -> None:
    def end_with_parent() -> None:
        """End when the demo does, also when it was killed."""
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)
            os.kill(os.getpid(), signal.SIGKILL)

    # What Ctrl-C does: the run records that it was interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    quiet_loading()
    run = config.run_name
    try:
        with phase(f"{run}: starting") as whole, reported(lambda *report: news.send(report)):
            train(config, whole)
        news.send(None)
    except STOPS as error:
        news.send(error)
    except KeyboardInterrupt:
        sys.exit(1)  # the run has recorded that it was interrupted
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the run is recorded, so the parent may end this process
