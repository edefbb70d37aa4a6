"""What a study is: `STUDY` in `studies/NN_slug/study.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otb_analysis.training.runtime.progress import Bar

Value = float | int | str | bool | None
Tables = Mapping[str, Sequence[Mapping[str, Value]]]
"""Rows of each table by the table's name, as a cell measures them."""
Row = Mapping[str, Any]
Rows = Sequence[Row]
"""Rows of a table as they were read; which column holds what, the study knows that wrote it."""


@dataclass(frozen=True)
class Cell:
    """The unit of work that is never done twice; made by a study, kept by `study.cache`.

    Attributes:
        name: Unique in its study; lower-case letters, digits and dashes.
        settings: All that its result depends on, in JSON's types; a change makes it another cell.
        after: Earlier cells of the study whose tables it reads: a comparison at the learning rate that a sweep chose.
            What they depend on, it depends on.
        given: Those tables, one below the other; filled in when it is measured.
    """

    name: str
    settings: Mapping[str, object]
    after: tuple["Cell", ...] = ()
    given: Tables = field(default_factory=dict)


def nothing(tables: Mapping[str, Rows]) -> Mapping[str, Any]:
    """Return nothing beside the tables."""
    return {}


@dataclass(frozen=True)
class Study:
    """A question and how it is answered.

    `numbers` and `figures` see the tables as read from the result files and nothing else, so that the page can be made
    again from what is committed. Both are left out where `derived.py` beside `study.py` defines them. `names` is filled
    in when the study is loaded.

    Attributes:
        title: A few words.
        question: One sentence.
        cells: The full setting, whose results are committed.
        quick: The same work at constants that take less than two minutes on two cores.
        measure: (cell, empty directory of its own, progress) → rows.
        numbers: Tables → what the template needs beyond them: differences over seeds, tests, functions for its cells.
        figures: Tables → SVG text by file name; the page shows them in this order, below the verdict.
        names: Constants and functions of `study.py` and `derived.py`, which the template may use.
    """

    title: str
    question: str
    cells: Sequence[Cell]
    quick: Sequence[Cell]
    measure: Callable[[Cell, Path, Bar], Tables]
    numbers: Callable[[Mapping[str, Rows]], Mapping[str, Any]] = nothing
    figures: Callable[[Mapping[str, Rows]], Mapping[str, str]] = nothing
    names: Mapping[str, Any] = field(default_factory=dict)
