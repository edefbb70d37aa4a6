"""What a study is, its tables, and its finished cells: `STUDY` in `studies/NN_slug/study.py`, found by its path."""

import csv
import hashlib
import importlib
import json
import os
import pickle
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
from pyarrow import csv as reader

from otb_analysis import __version__
from otb_analysis.atomic import atomic_file
from otb_analysis.devices import device_of, words_of
from otb_analysis.errors import InputError, StoreError
from otb_analysis.store import RunStore
from otb_analysis.training.runtime import Bar

FOLDER, FILE, DERIVED = "studies", "study.py", "derived.py"
NAME = re.compile(r"(\d\d)_(\w+)")
COST, DEFAULTS = "cost", "defaults"
"""Names of the table that every study has, and of that of a study which names an estimator with options."""
ARRAYS, DRAWN = "arrays.npz", "drawn.pickle"
"""Names of the files that a cell may leave to others."""
CPU, STATUS, FORGET = Path("/proc/cpuinfo"), Path("/proc/self/status"), Path("/proc/self/clear_refs")
Value = float | int | str | bool | None
Tables = Mapping[str, Sequence[Mapping[str, Value]]]
"""Rows of each table by the table's name, as a cell measures them."""
Row = Mapping[str, Any]
Rows = Sequence[Row]
"""Rows of a table as they were read; which column holds what, the study knows that wrote it."""


@dataclass(frozen=True)
class Cell:
    """The unit of work that is never done twice; made by a study, kept by `CellCache`.

    A cell may come after others of its study and read their tables: a comparison at the learning rate that a sweep
    chose. It depends on all that they depend on.
    """

    name: str  # Unique in its study; lower-case letters, digits and dashes
    settings: Mapping[str, Any]  # All that its result depends on, in JSON's types; a change makes it another cell
    after: tuple["Cell", ...] = ()
    given: Tables = field(default_factory=dict)  # Their tables, one below the other; filled in when it is measured


@dataclass(frozen=True)
class Study:
    """A question and how it is answered.

    `numbers` and `figures` see the tables as read from the result files and nothing else, so that the page can be made
    again from what is committed. Both are left out where `derived.py` beside `study.py` defines them. `names` is filled
    in when the study is loaded.
    """

    title: str  # A few words
    question: str  # One sentence
    cells: Sequence[Cell]  # The full setting, whose results are committed
    quick: Sequence[Cell]  # The same work at constants that take less than two minutes on two cores
    measure: Callable[[Cell, Path, Bar], Tables]  # (cell, empty directory of its own, progress) → rows
    # Cells of the full setting that the committed results can do without; the page names those that are missing
    later: Sequence[Cell] = ()
    threads: int = 1  # Of PyTorch; models as small as those of most studies gain nothing from a second
    # Tables → what the template needs beyond them: differences over seeds, tests, functions for its cells
    numbers: Callable[[Mapping[str, Rows]], Mapping[str, Any]] = lambda tables: {}
    # Tables → SVG text by file name; the page shows them in this order, below the verdict
    figures: Callable[[Mapping[str, Rows]], Mapping[str, str]] = lambda tables: {}
    # Constants and functions of `study.py` and `derived.py`, which the template may use
    names: Mapping[str, Any] = field(default_factory=dict)


def find_studies_folder(start: Path = Path()) -> Path:
    """Return `studies/` of a directory or, where that holds no study, of this clone."""
    return start / FOLDER if study_folders(start / FOLDER) else Path(__file__).parent.parent


def study_folders(studies: Path) -> list[Path]:
    """Return the folders NN_slug of studies, in the order of their numbers."""
    return sorted(path.parent for path in studies.glob(f"*/{FILE}") if NAME.fullmatch(path.parent.name))


def find_study(name: str, studies: Path) -> Path:
    """Return a study's folder by its name (`00_training`), number (`00`, `0`) or slug (`training`).

    Raises:
        InputError: No study is called that; the sentence lists those there are.
    """
    folders = study_folders(studies)
    for folder in folders:
        number, slug = folder.name.split("_", 1)
        if name in (folder.name, slug, number, number.removeprefix("0")):
            return folder
    asked = f"study {name!r} does not exist" if name else "otb study needs the name of a study"
    raise InputError(f"{asked}; those there are: {', '.join(folder.name for folder in folders) or 'none'}.")


def load_study(folder: Path) -> Study:
    """Run a study's file and return its `STUDY`, with `numbers` and `figures` of `derived.py` where there is one.

    The files of a study import one another relatively: `from .study import …`.

    Raises:
        InputError: The file defines no `STUDY`.
    """
    package = ModuleType(f"study_{folder.name}")
    package.__path__ = [str(folder)]
    for name in [name for name in sys.modules if name == package.__name__ or name.startswith(f"{package.__name__}.")]:
        del sys.modules[name]
    sys.modules[package.__name__] = package
    importlib.invalidate_caches()
    names, derived = (
        vars(importlib.import_module(f"{package.__name__}.{Path(file).stem}")) if (folder / file).is_file() else {}
        for file in (FILE, DERIVED)
    )
    study = names.get("STUDY")
    if not isinstance(study, Study):
        raise InputError(f"{folder / FILE} defines no STUDY; assign a studies.lib.Study to that name.")
    told = {name: derived[name] for name in ("numbers", "figures") if name in derived}
    public = {name: value for name, value in (names | derived).items() if not name.startswith("_")}
    return replace(study, names=public, **told)


def write_tables(folder: Path, tables: Tables) -> None:
    """Write each table as folder/NAME.csv: floats with every digit they need to come back, None as nothing.

    Raises:
        StoreError: The disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in tables.items():
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                columns = dict.fromkeys(column for row in rows for column in row)
                writer = csv.DictWriter(file, list(columns), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    except OSError as error:
        raise StoreError(f"cannot write the tables to {folder} ({error.strerror}); pass another --out.") from error


def read_tables(folder: Path) -> dict[str, Rows]:
    """Return the rows of a study's tables by name; empty when it has no results.

    Raises:
        StoreError: A file is no table.
    """
    tables: dict[str, Rows] = {}
    for path in sorted(folder.glob("*.csv")):
        try:
            tables[path.stem] = reader.read_csv(path).to_pylist()
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise StoreError(f"{path} cannot be read ({error}); run the study again.") from error
    return tables


class Gathered(dict[str, list[Row]]):
    """Tables that a cell fills bit by bit."""

    def add(self, key: Row, **tables: Rows) -> "Gathered":
        """Add rows to tables, each behind the columns of a key; return the tables."""
        for name, rows in tables.items():
            self.setdefault(name, []).extend({**key, **row} for row in rows)
        return self


def training_steps(run: Path, **columns: str) -> list[dict[str, Any]]:
    """Return a row per step of a run with these columns, NAME = SQL over its table `steps`; None for no number."""
    shown = ", ".join(f"{sql} AS {name}" for name, sql in columns.items())
    rows = RunStore(run).sql(f"SELECT step, {shown} FROM steps ORDER BY step").to_dict("records")
    return [{str(name): None if value != value else value for name, value in row.items()} for row in rows]


def select(rows: Rows, **values: Any) -> Rows:
    """Return the rows whose columns have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def distinct(rows: Rows, column: str) -> list[Any]:
    """Return the values of a column, each once, in the order in which they appear."""
    return list(dict.fromkeys(row[column] for row in rows))


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

    def cost(self, cell: Cell) -> dict[str, Value]:
        """Return the row of the cost table, which says what `committed_cells` needs to find the cell again."""
        minutes = {"minutes": round(self.minutes, 2), "processor_minutes": round(self.processor_minutes, 2)}
        rows = " ".join(f"{name}:{len(rows)}" for name, rows in self.tables.items())
        known = {"peak_mib": self.peak_mib, "machine": self.machine, "digest": digest_of(cell), "rows": rows}
        return {"cell": cell.name, **minutes, **known}


def committed_cells(tables: Mapping[str, Rows]) -> dict[tuple[str, str], Finished]:
    """Return the cells that the tables of a study were joined from, by name and digest; none where they do not tell.

    So what one machine has measured is not measured again on another.
    """
    cells, taken = dict[tuple[str, str], Finished](), Counter[str]()
    defaults = dict[str, dict[str, str]]()
    for row in tables.get(DEFAULTS, ()):
        for name in row["tables"].split():
            if defaults.setdefault(name, {}).setdefault(row["estimator"], row["defaults"]) != row["defaults"]:
                return {}  # its cells had different ones, and nothing tells which had which
    for row in tables.get(COST, ()):
        if not row.get("digest"):
            return {}
        of_cell = dict[str, Rows]()
        for name, count in (part.split(":") for part in (row["rows"] or "").split()):
            of_cell[name] = tables.get(name, ())[taken[name] : taken[name] + int(count)]
            taken[name] += int(count)
        took = row["minutes"], row["peak_mib"], row["machine"], row["processor_minutes"]
        known = {estimator: words for name in of_cell for estimator, words in defaults.get(name, {}).items()}
        cells[row["cell"], row["digest"]] = Finished(of_cell, *took, known)
    return cells if all(len(tables.get(name, ())) == count for name, count in taken.items()) else {}


class CellCache:
    """The finished cells of one study and the directories in which its cells work, in runs/studies/NN_slug.

    Args:
        committed: Finished cells by name and digest, known from tables alone; what they left to others is not there.
    """

    def __init__(self, path: Path, committed: Mapping[tuple[str, str], Finished] | None = None):
        self.path, self.committed = path, committed or {}

    def work(self, cell: Cell) -> Path:
        """Return the directory in which a cell works, whether it exists or not."""
        return self.path / "cells" / f"{cell.name}-{digest_of(cell)}"

    def file(self, cell: Cell) -> Path:
        """Return the file in which a finished cell is kept, whether it exists or not."""
        return self.path / "results" / f"{cell.name}-{digest_of(cell)}.json"

    def load(self, cell: Cell) -> Finished | None:
        """Return a finished cell, or None when it is not.

        A committed cell counts only where those it came after were not measured anew here: other machines round
        otherwise, so that it rests on another result than theirs.

        Raises:
            StoreError: Its file cannot be read.
        """
        path = self.file(cell)
        if not path.exists():
            anew = any(self.file(other).exists() or self.load(other) is None for other in cell.after)
            return None if anew else self.committed.get((cell.name, digest_of(cell)))
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
            words = "free some space or pass another --out"
            raise StoreError(f"cannot keep {path} ({error.strerror}); {words}.") from error


def keep_arrays(work: Path, **arrays: Any) -> None:
    """Keep arrays in the directory of a cell, for the cells that come after it."""
    with (work / ARRAYS).open("wb") as file:
        np.savez(file, **arrays)


def kept_file(cell: Cell, work: Path, name: str = ARRAYS) -> Path:
    """Return a file that another cell left in its directory; `work` is the directory of the cell that asks.

    Raises:
        StoreError: It is missing.
    """
    path = work.with_name(f"{cell.name}-{digest_of(cell)}") / name
    if not path.exists():
        raise StoreError(f"{path} is missing; delete {work.parent.parent}, and it is measured again.")
    return path


def keep_pickle(work: Path, value: Any, name: str = DRAWN) -> None:
    """Keep objects in the directory of a cell, for the cells that come after it."""
    (work / name).write_bytes(pickle.dumps(value))


def kept_pickle(cell: Cell, work: Path, name: str = DRAWN) -> Any:
    """Return objects that another cell kept; `work` is the directory of the cell that asks.

    Raises:
        StoreError: They are missing.
    """
    return pickle.loads(kept_file(cell, work, name).read_bytes())


def joined_tables(results: Sequence[Finished]) -> dict[str, list[Mapping[str, Value]]]:
    """Return the tables of all cells one below the other, in the cells' order."""
    names = dict.fromkeys(name for one in results for name in one.tables)
    return {name: [row for one in results for row in one.tables.get(name, ())] for name in names}


def minutes_words(cost: Rows) -> str:
    """Return the minutes of all cells together, as in `83 min of processor time (120 min by the clock)`."""
    totals = [sum(row[name] for row in cost) for name in ("minutes", "processor_minutes")]
    clock, processor = (f"{minutes:.{1 if minutes < 10 else 0}f} min" for minutes in totals)
    return f"{processor} of processor time ({clock} by the clock)"


def machine_words() -> str:
    """Return the machine in words: cores that this process may use, their kind, memory, where models run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kinds = re.findall(r"^model name\s*: (.*)", CPU.read_text() if CPU.exists() else "", re.MULTILINE)
    kind = kinds[0].strip() if kinds else platform.processor() or platform.machine()
    device = device_of()
    beside = "" if device.type == "cpu" else f", models on {words_of(device)}"
    return f"{cores} core{'s' * (cores > 1)} of {kind}, {memory:.0f} GiB of memory{beside}"


def forget_peak_memory() -> None:
    """Ask the system to measure the most memory held from now on, where it can."""
    if os.access(FORGET, os.W_OK):
        FORGET.write_text("5")


def peak_memory_mib() -> int | None:
    """Return the most memory that this process held since `forget_peak_memory`, in MiB, where the system tells."""
    peak = re.search(r"^VmHWM:\s*(\d+)", STATUS.read_text() if STATUS.exists() else "", re.MULTILINE)
    return peak and round(int(peak[1]) / 1024)


def digest_of(cell: Cell) -> str:
    """Return what a cell is known by: a digest of its settings, of the cells it comes after, and of the version."""
    facts: dict[str, object] = {"settings": cell.settings, "version": __version__}
    if cell.after:
        facts["after"] = [[other.name, digest_of(other)] for other in cell.after]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
