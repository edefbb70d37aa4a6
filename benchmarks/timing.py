"""How benchmarks measure: candidates that take turns, peers in interpreters of their own, calls in a fresh process."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from time import perf_counter, process_time
from typing import IO, Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.devices import device_of, synchronize
from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.forward import layout_of, sampled_logprobs
from otb_analysis.gradients.batch.inputs import Batch, Rollout, ScoreBatch, prepare
from otb_analysis.rollouts.models import quiet_loading
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.setup import Trainer

CLOCKS: dict[str, Callable[[], float]] = {"wall": perf_counter, "cpu": process_time}
"""The time of day, or the processor's time on this process, which other work can lengthen only a little."""
AT_LEAST = 3
"""Repetitions that a time limit does not cut, as long as no more than twice of it is spent."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the least and the median of its repetitions."""

    minimum: float
    median: float
    repeats: int


def interleaved(
    candidates: Mapping[str, Callable[[], float]], repeats: int, limit: float = math.inf, against: str = ""
) -> dict[str, Timing]:
    """Let candidates take turns; each runs once per call and returns its seconds, as those made by `timed` do.

    No repetition begins after `limit` seconds; the second and third may until twice that. A candidate whose first turn
    took longer than half of the limit has no other turn, except for `against`, with which the others are compared; that
    turn does not count towards the limit.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    start, slow = perf_counter(), dict[str, float]()
    for done in range(repeats):
        if done and perf_counter() - start - sum(slow.values()) > (limit if done >= AT_LEAST else 2 * limit):
            break
        for name, run in candidates.items():
            if name not in slow:
                seconds[name].append(run())
        slow = {name: s[0] for name, s in seconds.items() if name != against and s[0] > limit / 2}
    return {name: Timing(min(s), median(s), len(s)) for name, s in seconds.items() if s}


def timed(
    run: Callable[[], object], device: str = "auto", clock: Callable[[], float] = perf_counter
) -> Callable[[], float]:
    """Wrap a call so that it returns its seconds; a GPU's queue is empty before and after.

    `clock` counts on a CPU: the processor's time says nothing about a GPU's.
    """
    place = device_of(device)
    clock = clock if place.type == "cpu" else perf_counter

    def measure() -> float:
        synchronize(place)
        start = clock()
        run()
        synchronize(place)
        return clock() - start

    return measure


def least_seconds(
    calls: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = process_time
) -> dict[str, float]:
    """Let calls take turns; return the least time of each, of the processor by default."""
    timings = interleaved({name: timed(call, clock=clock) for name, call in calls.items()}, repeats)
    return {name: timing.minimum for name, timing in timings.items()}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch use this many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Peer:
    """A running peer; made by `peer`."""

    facts: Mapping[str, Any]  # What its script printed once it was ready
    process: subprocess.Popen[str]
    errors: IO[str]  # Its stderr, in a file so that it never waits for a reader

    def turn(self) -> float:
        """Let it run once; return the seconds that it measured."""
        return float(self.answer()["seconds"])

    def answer(self) -> Mapping[str, Any]:
        """Let it run once; return its answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the peer has ended; reading its answer raises and says why
            self.process.stdin.write("run\n")
            self.process.stdin.flush()
        return _answer(self.process, self.errors)


@contextmanager
def peer(python: Path, script: Path, spec: Mapping[str, object]) -> Iterator[Peer]:
    """Start a script that imports nothing of ours, with a spec in JSON's types, and end it afterwards.

    Raises:
        InputError: The interpreter does not exist, or the script failed; the sentence ends with its last line.
    """
    command = [str(python), "-P", str(script), json.dumps(dict(spec))]
    with TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            remedy = "pass the Python of the peer's environment"
            raise InputError(f"{python} cannot be run ({error.strerror}); {remedy}.") from error
        try:
            yield Peer(_answer(process, errors), process, errors)
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def _answer(process: subprocess.Popen[str], errors: IO[str]) -> dict[str, Any]:
    """The next line of JSON; whatever else its libraries print is passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    process.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    assert isinstance(process.args, list)
    script, words = Path(str(process.args[2])).name, lines[-1] if lines else "it said nothing"
    raise InputError(f"{script} ended early: {words}; install what its first lines name.")


R = TypeVar("R")


def in_fresh_process(call: Callable[..., R], *args: object) -> R | None:
    """Return the result of a call; None if it failed or its process was ended, for want of memory for example."""
    with ProcessPoolExecutor(1, get_context("spawn"), quiet_loading) as pool:
        try:
            return pool.submit(call, *args).result()
        except (RuntimeError, MemoryError):  # torch's errors and a broken pool are RuntimeErrors
            return None


def run_otb(
    words: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
) -> tuple[dict[str, float], str]:
    """Run `otb` in a process of its own; return its seconds and its most memory in GB, and what it said in one line.

    Raises:
        InputError: It fails.
    """
    command, start = [sys.executable, "-m", "otb_analysis", *words], perf_counter()
    with TemporaryFile("w+", encoding="utf-8") as told:
        process = subprocess.Popen(
            command, env=os.environ | environment, cwd=folder, stdout=told, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)  # the resources of this process alone
        wall = perf_counter() - start
        told.seek(0)
        text = " ".join(told.read().split())
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise InputError(f"otb {words[0]} failed: {text[-500:]}")
    return {"wall": wall, "processor": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024 / 1e9}, text


def sampled_step(config: SampleConfig, model: str = "demo") -> tuple[Trainer, Rollouts]:
    """Return the trainer of a model and the rollouts of its first step, the same at every call.

    Raises:
        InputError: The model cannot be loaded.
    """
    trainer = Trainer.from_config(TrainConfig(model=model, sample=config))
    prompts = draw_prompts(trainer.task, "train", 0, config.prompts)
    group = np.repeat(np.arange(config.prompts), config.group_size)
    torch.manual_seed(0)
    with trainer.policy.sampling():
        return trainer, sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, config, group)


def group_passes(model: PreTrainedModel, rollouts: Rollouts) -> Callable[[], None]:
    """Return a call that takes one forward and one backward pass of every group's rollouts: the yardstick."""
    problem, groups = _by_group(model, rollouts)

    def passes() -> None:
        for own in groups:
            torch.autograd.grad(sampled_logprobs(problem, own).sum(), problem.scope.parameters)

    return passes


def group_forward(model: PreTrainedModel, rollouts: Rollouts) -> Callable[[], None]:
    """Return a call that takes the forward passes of a Gram matrix, which norms of the same rollouts have taken too."""
    problem, groups = _by_group(model, rollouts)

    @torch.no_grad()
    def passes() -> None:
        for own in groups:
            sampled_logprobs(problem, own, layout_of(problem, own))

    return passes


def _by_group(model: PreTrainedModel, rollouts: Rollouts) -> tuple[ScoreBatch, list[tuple[Rollout, ...]]]:
    problem, group = prepare(model, Batch(*rollouts.tensors(model.device)), "all", 1.0), rollouts.group
    return problem, [tuple(r for r in problem.rollouts if group[r.row] == g) for g in np.unique(group)]
