"""What a study is: `STUDY` in `studies/NN_slug/study.py`, told by `report` in `page.py` beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otb_analysis.errors import InputError
from otb_analysis.training.runtime.progress import Bar

Value = float | int | str | bool | None
Tables = Mapping[str, Sequence[Mapping[str, Value]]]
"""Rows of each table by the table's name, as a cell measures them."""
Rows = Sequence[Mapping[str, Any]]
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


@dataclass(frozen=True)
class Findings:
    """What a study says about its tables; made by `Study.report`, read by the pages.

    Attributes:
        verdict: The answer in one line.
        body: The numbers, as Markdown below the verdict.
        figures: SVG text by file name; the page shows them in this order, below the verdict.
    """

    verdict: str
    body: str
    figures: Mapping[str, str] = field(default_factory=dict)


def untold(tables: Mapping[str, Rows]) -> Findings:
    """Stand in for a page that nobody wrote.

    Raises:
        InputError: Always.
    """
    raise InputError(f"a study of {', '.join(tables)} has no report; define it in a page.py beside its study.py.")


@dataclass(frozen=True)
class Study:
    """A question and how it is answered.

    Attributes:
        title: A few words.
        question: One sentence.
        cells: The full setting, whose results are committed.
        quick: The same work at constants that take less than two minutes on two cores.
        measure: (cell, empty directory of its own, progress) → rows.
        report: Tables as read from the result files → what they say. It reads nothing else, so that the page can be
            made again from what is committed. Left out where `page.py` beside `study.py` defines it.
    """

    title: str
    question: str
    cells: Sequence[Cell]
    quick: Sequence[Cell]
    measure: Callable[[Cell, Path, Bar], Tables]
    report: Callable[[Mapping[str, Rows]], Findings] = untold
