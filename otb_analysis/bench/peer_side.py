"""The peer's half of the protocol of `bench.peer`, and the peak memory of a call, for our own processes too.

On a CPU that is the high-water mark of resident memory, which the kernel is told to forget before the call, above what
was resident then; on a GPU the largest allocation above what was allocated. Peers' scripts run in an interpreter that
has nothing of ours, so they load this file by its path; it needs torch alone.
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def say(facts: dict[str, Any]) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def take_turns(run: Callable[[], object], device: str) -> None:
    """Run once per line on the input and say how long it took, until a GPU's queue was empty."""
    for _ in sys.stdin:
        start = perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        say({"seconds": perf_counter() - start})


def peak(run: Callable[[], object], device: str = "cpu") -> int | None:
    """Run once; return the most bytes held beyond what was held before, None where the kernel does not tell."""
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
    before = forget_peak()
    run()
    return None if before is None else 1024 * max(0, kilobytes("VmHWM") - before)


def forget_peak() -> int | None:
    """Forget the high-water mark; return resident kilobytes, None where the kernel does not allow it."""
    gc.collect()
    # Freed heap goes back to the kernel (glibc only), so that it does not hide what the call will need.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        FORGET.write_text("5")
    except OSError:
        return None
    return kilobytes("VmRSS")


def kilobytes(field: str) -> int:
    """One line of the process's status."""
    return int(next(line for line in STATUS.read_text().splitlines() if line.startswith(field)).split()[1])
