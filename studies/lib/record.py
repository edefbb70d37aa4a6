"""What a study is: `STUDY` in `studies/NN_slug/study.py`, found and loaded by its path, so nothing shared names one."""

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from otb_analysis.errors import InputError
from otb_analysis.training.runtime.progress import Bar

FOLDER, FILE, DERIVED = "studies", "study.py", "derived.py"
NAME = re.compile(r"(\d\d)_(\w+)")
Value = float | int | str | bool | None
Tables = Mapping[str, Sequence[Mapping[str, Value]]]
"""Rows of each table by the table's name, as a cell measures them."""
Row = Mapping[str, Any]
Rows = Sequence[Row]
"""Rows of a table as they were read; which column holds what, the study knows that wrote it."""


@dataclass(frozen=True)
class Cell:
    """The unit of work that is never done twice; made by a study, kept by `cache`.

    A cell may come after others of its study and read their tables: a comparison at the learning rate that a sweep
    chose. It depends on all that they depend on.
    """

    name: str  # Unique in its study; lower-case letters, digits and dashes
    settings: Mapping[str, Any]  # All that its result depends on, in JSON's types; a change makes it another cell
    after: tuple["Cell", ...] = ()
    given: Tables = field(default_factory=dict)  # Their tables, one below the other; filled in when it is measured


def nothing(tables: Mapping[str, Rows]) -> Mapping[str, Any]:
    """Return nothing beside the tables."""
    return {}


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
    measure: Callable[[Cell, Path, Bar], Tables]  # (cell, empty directory of its own, progress) → rows; on one thread
    # Tables → what the template needs beyond them: differences over seeds, tests, functions for its cells
    numbers: Callable[[Mapping[str, Rows]], Mapping[str, Any]] = nothing
    # Tables → SVG text by file name; the page shows them in this order, below the verdict
    figures: Callable[[Mapping[str, Rows]], Mapping[str, str]] = nothing
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
        if name in (folder.name, slug) or (name.isdigit() and int(name) == int(number)):
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
    names = _names(package, FILE)
    study = names.get("STUDY")
    if not isinstance(study, Study):
        raise InputError(f"{folder / FILE} defines no STUDY; assign a studies.lib.Study to that name.")
    derived = _names(package, DERIVED) if (folder / DERIVED).is_file() else {}
    told = {name: derived[name] for name in ("numbers", "figures") if name in derived}
    return replace(study, names=names | derived, **told)


def _names(package: ModuleType, file: str) -> dict[str, Any]:
    """Return what a file of a study defines or imports under a public name."""
    module = importlib.import_module(f"{package.__name__}.{Path(file).stem}")
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}
