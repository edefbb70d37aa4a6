"""How much fits."""

import os
from pathlib import Path

import torch

from otb_analysis.errors import InputError

_LIMIT, _USED = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))


def memory_bytes(device: torch.device) -> int:
    """All memory of a device, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on a device, or on this machine within the limit of its container."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = memory_bytes(device)
    try:
        available = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        free = min(free, 1024 * int(available.split()[1]))
        # "max" where there is no limit, which `int` refuses.
        free = min(free, int(_LIMIT.read_text()) - int(_USED.read_text()))
    except (OSError, StopIteration, ValueError):
        pass  # a system that does not tell
    return free


def gibibytes(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.3g} GiB"


def refuse_beyond(name: str, needed: int, device: torch.device) -> None:
    """Raise where something of a size does not fit in what is free."""
    if needed > free_bytes(device):
        raise InputError(
            f"{name} take {gibibytes(needed)} but {gibibytes(free_bytes(device))} of {gibibytes(memory_bytes(device))} "
            "are free; free some or measure on a machine with more memory."
        )


def refuse_more_than_fit(name: str, count: int, each: int, device: torch.device) -> None:
    """Raise where `count` things of `each` bytes exceed the memory; the sentence says how many fit."""
    fit = memory_bytes(device) // each
    if count > fit:
        raise InputError(
            f"{name} is {count} but the memory of this machine holds {fit} of them ({each:,} bytes each); "
            f"pass at most {fit}."
        )
