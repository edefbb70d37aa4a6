"""Numbers as a study's page writes them, and the machine in words."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from otb_analysis.errors import InputError

CPU, STATUS, FORGET = Path("/proc/cpuinfo"), Path("/proc/self/status"), Path("/proc/self/clear_refs")


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column flush left, the others right.

    Args:
        headers: Of the columns.
        rows: Cells as text.

    Raises:
        InputError: A row has more or fewer cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise InputError(
                f"a row has {len(row)} cells but there are {len(headers)} headers; pass one cell for each."
            )
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(value: float, digits: int = 0) -> str:
    """Return a share in percent, as in `41 %`.

    Args:
        value: From 0 to 1.
        digits: Behind the point.
    """
    return f"{100 * value:.{digits}f} %"


def with_interval(value: float, low: float | None, high: float | None, digits: int = 1) -> str:
    """Return a share and its interval in percent, as in `41.2 % (36.1–46.5)`; without one, the share alone.

    Args:
        value: From 0 to 1.
        low: Lower end of the interval.
        high: Upper end.
        digits: Behind the point.
    """
    if low is None or high is None or low != low or high != high:
        return share(value, digits)
    return f"{share(value, digits)} ({100 * low:.{digits}f}–{100 * high:.{digits}f})"


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
    names = [line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpu_lines() -> list[str]:
    return CPU.read_text().splitlines() if CPU.exists() else []
