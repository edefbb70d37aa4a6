"""Numbers as a study's page writes them, and the machine in words."""

import os
import platform
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from otb_analysis.errors import InputError
from otb_analysis.statistics import Interval

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


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Return a number with so many significant digits, as a table keeps it; None where it is not finite.

    Args:
        value: Any number, or None.
        digits: Significant ones.
    """
    return float(f"{value:.{digits}g}") if value is not None and isfinite(value) else None


def interval_columns(name: str, found: Interval | None) -> dict[str, float | None]:
    """Return an interval as the columns NAME, NAME_low and NAME_high of a row.

    Args:
        name: What it is of.
        found: The interval, or None where there is none.
    """
    values = (None, None, None) if found is None else (found.estimate, found.low, found.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(rounded, values), strict=True))


def number_words(value: float | None, form: str = ".2f") -> str:
    """Return a number, a dash where there is none, and only its order of magnitude where it has no other meaning.

    Args:
        value: Any number, or None.
        form: How it is written.
    """
    if value is None:
        return "–"
    return format(value, form) if abs(value) < 1000 else (">" if value > 0 else "<−") + "999"


def column_words(row: Mapping[str, Any], name: str, form: str = ".2f") -> str:
    """Return the columns of an interval, as in `1.25 (1.10–1.42)`; without ends, the estimate alone.

    Args:
        row: With the columns of `interval_columns`; a dash where they are missing.
        name: What it is of.
        form: How each number is written.
    """
    if row.get(name) is None or row.get(f"{name}_low") is None:
        return number_words(row.get(name), form)
    return f"{number_words(row[name], form)} ({_from_to(row[f'{name}_low'], row[f'{name}_high'], form)})"


def span_words(values: Sequence[float], form: str = ".2f") -> str:
    """Return the least and the largest value, as in `0.35–0.59`; a dash without any.

    Args:
        values: Numbers.
        form: How each is written.
    """
    return _from_to(min(values), max(values), form) if values else "–"


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


def _from_to(low: float, high: float, form: str) -> str:
    return f"{number_words(low, form)}{' to ' if low < 0 else '–'}{number_words(high, form)}"


def _processor() -> str:
    names = [line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpu_lines() -> list[str]:
    return CPU.read_text().splitlines() if CPU.exists() else []
