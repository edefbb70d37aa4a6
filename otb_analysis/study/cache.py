"""Finished cells: one JSON file each, which appears by rename, named after all that the result depends on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from otb_analysis import __version__
from otb_analysis.errors import StoreError
from otb_analysis.store.atomic import atomic_file
from otb_analysis.study.record import Cell, Tables, Value


@dataclass(frozen=True)
class Finished:
    """A cell's result and what it took.

    Attributes:
        tables: What the study measured.
        minutes: By the clock.
        peak_mib: The most memory that the process held meanwhile, in MiB; None where the system does not tell.
        machine: Where, in words.
        processor_minutes: Of this process, all its threads together; None where it was not measured. The fairer cost
            where the machine is shared.
    """

    tables: Tables
    minutes: float
    peak_mib: int | None
    machine: str
    processor_minutes: float | None = None


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

    def keep(self, cell: Cell, finished: Finished) -> None:
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


def joined(results: Sequence[Finished]) -> dict[str, list[Mapping[str, Value]]]:
    """Return the tables of all cells one below the other, in the cells' order."""
    names = dict.fromkeys(name for one in results for name in one.tables)
    return {name: [row for one in results for row in one.tables.get(name, ())] for name in names}


def _digest(cell: Cell) -> str:
    facts: dict[str, object] = {"settings": cell.settings, "version": __version__}
    if cell.after:
        facts["after"] = [[other.name, _digest(other)] for other in cell.after]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
