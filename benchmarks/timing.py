"""Side-by-side timings: all candidates take turns in every repetition, so that a busy machine slows them alike."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

import torch

from otb_analysis.devices import device_of, synchronize

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
