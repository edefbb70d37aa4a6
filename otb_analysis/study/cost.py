"""What a cell took: minutes, memory, machine."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from otb_analysis.study.cache import Finished
from otb_analysis.study.record import Cell, Rows, Value

COST = "cost"
"""Name of the table that every study has."""
CPU, STATUS, FORGET = Path("/proc/cpuinfo"), Path("/proc/self/status"), Path("/proc/self/clear_refs")


def cost_rows(cells: Sequence[Cell], results: Sequence[Finished]) -> list[dict[str, Value]]:
    """Return what each cell took."""
    return [
        {
            "cell": cell.name,
            "minutes": round(one.minutes, 2),
            "processor_minutes": None if one.processor_minutes is None else round(one.processor_minutes, 2),
            "peak_mib": one.peak_mib,
            "machine": one.machine,
        }
        for cell, one in zip(cells, results, strict=True)
    ]


def minutes_words(cost: Rows) -> str:
    """Return the minutes of all cells together, as in `83 min of processor time (120 min by the clock)`.

    Where a cell has no processor time, only the clock is told.
    """
    clock = _minutes(sum(row["minutes"] for row in cost))
    processor = [row["processor_minutes"] for row in cost if row.get("processor_minutes") is not None]
    if len(processor) < len(cost):
        return clock
    return f"{_minutes(sum(processor))} of processor time ({clock} by the clock)"


def _minutes(minutes: float) -> str:
    return f"{minutes:.1f} min" if minutes < 10 else f"{minutes:.0f} min"


def machine_words() -> str:
    """Return the machine in words: cores that this process may use, their kind, memory of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cores} core{'s' * (cores > 1)} of {_processor()}, {memory:.0f} GiB of memory"


def forget_peak_memory() -> None:
    """Ask the system to measure the most memory held from now on, where it can."""
    if os.access(FORGET, os.W_OK):
        FORGET.write_text("5")


def peak_memory_mib() -> int | None:
    """Return the most memory that this process held since `forget_peak_memory`, in MiB, where the system tells."""
    if not STATUS.exists():
        return None
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024)


def _processor() -> str:
    lines = CPU.read_text().splitlines() if CPU.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
