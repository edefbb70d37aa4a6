"""Finished cells and what they took: one JSON file each, named after all that the result depends on."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis import __version__
from otb_analysis.atomic import atomic_file
from otb_analysis.devices import device_of, words_of
from otb_analysis.errors import StoreError
from studies.lib.record import Cell, Rows, Tables, Value

COST, ARRAYS = "cost", "arrays.npz"
"""Name of the table that every study has, and of the file that a cell may leave to others."""
CPU, STATUS, FORGET = Path("/proc/cpuinfo"), Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Finished:
    """A cell's result and what it took; processor time is the fairer cost where the machine is shared."""

    tables: Tables  # What the study measured
    minutes: float  # By the clock
    peak_mib: int | None  # The most memory that the process held meanwhile; None where the system does not tell
    machine: str  # In words
    processor_minutes: float  # Of this process, all its threads together
    # Default options of estimators meanwhile, by name; empty in cells that were kept before they were recorded
    defaults: Mapping[str, str] = field(default_factory=dict)

    def cost(self, cell: str) -> dict[str, Value]:
        """Return the row of the cost table."""
        return {
            "cell": cell,
            "minutes": round(self.minutes, 2),
            "processor_minutes": round(self.processor_minutes, 2),
            "peak_mib": self.peak_mib,
            "machine": self.machine,
        }


class CellCache:
    """The finished cells of one study and the directories in which its cells work, in runs/studies/NN_slug."""

    def __init__(self, path: Path):
        self.path = path

    def work(self, cell: Cell) -> Path:
        """Return the directory in which a cell works, whether it exists or not."""
        return self.path / "cells" / f"{cell.name}-{_digest(cell)}"

    def file(self, cell: Cell) -> Path:
        """Return the file in which a finished cell is kept, whether it exists or not."""
        return self.path / "results" / f"{cell.name}-{_digest(cell)}.json"

    def load(self, cell: Cell) -> Finished | None:
        """Return a finished cell, or None when it is not.

        Raises:
            StoreError: Its file cannot be read.
        """
        path = self.file(cell)
        if not path.exists():
            return None
        try:
            return Finished(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{path} cannot be read ({error}); delete it, and the cell is measured again.") from error

    def keep_arrays(self, cell: Cell, finished: Finished) -> None:
        """Keep a finished cell.

        Raises:
            StoreError: The disk refuses.
        """
        path = self.file(cell)
        text = json.dumps(asdict(finished), indent=1, allow_nan=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise StoreError(
                f"cannot keep {path} ({error.strerror}); free some space or pass another --out."
            ) from error


def keep_arrays(work: Path, **arrays: Any) -> None:
    """Keep arrays in the directory of a cell, for the cells that come after it."""
    with (work / ARRAYS).open("wb") as file:
        np.savez(file, **arrays)


def kept_file(cell: Cell, work: Path, name: str = ARRAYS) -> Path:
    """Return a file that another cell left in its directory; `work` is the directory of the cell that asks.

    Raises:
        StoreError: It is missing.
    """
    path = work.with_name(f"{cell.name}-{_digest(cell)}") / name
    if not path.exists():
        raise StoreError(f"{path} is missing; delete {work.parent.parent}, and it is measured again.")
    return path


def joined_tables(results: Sequence[Finished]) -> dict[str, list[Mapping[str, Value]]]:
    """Return the tables of all cells one below the other, in the cells' order."""
    names = dict.fromkeys(name for one in results for name in one.tables)
    return {name: [row for one in results for row in one.tables.get(name, ())] for name in names}


def minutes_words(cost: Rows) -> str:
    """Return the minutes of all cells together, as in `83 min of processor time (120 min by the clock)`."""
    clock, processor = (_minutes(sum(row[name] for row in cost)) for name in ("minutes", "processor_minutes"))
    return f"{processor} of processor time ({clock} by the clock)"


def _minutes(minutes: float) -> str:
    return f"{minutes:.1f} min" if minutes < 10 else f"{minutes:.0f} min"


def machine_words() -> str:
    """Return the machine in words: cores that this process may use, their kind, memory, where models run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = device_of()
    beside = "" if device.type == "cpu" else f", models on {words_of(device)}"
    return f"{cores} core{'s' * (cores > 1)} of {_processor()}, {memory:.0f} GiB of memory{beside}"


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


def _digest(cell: Cell) -> str:
    facts: dict[str, object] = {"settings": cell.settings, "version": __version__}
    if cell.after:
        facts["after"] = [[other.name, _digest(other)] for other in cell.after]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
