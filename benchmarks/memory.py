"""Calls in a fresh process that does nothing else, where the peak of memory is theirs."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from otb_analysis.rollouts.models import quiet_loading

R = TypeVar("R")


def in_fresh_process(call: Callable[..., R], *args: object) -> R | None:
    """Return the result of a call; None if it failed or its process was ended, for want of memory for example."""
    with ProcessPoolExecutor(1, get_context("spawn"), quiet_loading) as pool:
        try:
            return pool.submit(call, *args).result()
        except (RuntimeError, MemoryError):  # torch's errors and a broken pool are RuntimeErrors
            return None
