"""Committed studies read from disk (question, verdict, tables, figures), without running a study's own code."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
from pyarrow import csv

from otb_analysis.errors import StoreError

NAME = re.compile(r"(\d\d)_(\w+)")
ROW = re.compile(r"\| \[(\w+)]\([^)]*\) \| (.+?) \|")
"""A study and its question in the table of all."""
MADE = "\n## How it was made\n"
COST = "cost"

MEASURED, NOT_RUN, BROKEN = "measured", "not run yet", "cannot be read"


@dataclass(frozen=True)
class CommittedStudy:
    """One folder `NN_slug` of studies; made by `committed_studies`, read by the dashboard."""

    folder: Path  # The folder
    title: str  # A few words
    question: str  # One sentence; empty where neither page nor index has it
    verdict: str  # The answer in one line; of a study that cannot be read, why; empty where it was not run
    body: str  # The numbers and how to read them, as Markdown
    command: str  # What runs it
    cost: str  # Minutes, cells, memory and machines in one sentence; empty where it was not run
    state: str  # `measured`, `not run yet` or `cannot be read`
    figures: tuple[Path, ...] = ()  # The SVG files that its page shows, in its order

    @property
    def minutes(self) -> str:
        """The minutes alone, as in `2.9 min`; empty where it was not run."""
        return " ".join(self.cost.split()[:2])


def committed_studies(studies: Path) -> list[CommittedStudy]:
    """Return every study of a folder in the order of their numbers; one that cannot be read says so itself."""
    folders = sorted(p for p in studies.glob("*") if NAME.fullmatch(p.name) and (p / "study.py").is_file())
    questions, page = dict[str, str](), studies / "README.md"
    if folders and not page.is_symlink():  # of a study that was not run, no other page has its question
        with suppress(OSError, ValueError):
            rows = [ROW.match(line) for line in page.read_text(encoding="utf-8").splitlines()]
            questions = {row[1]: row[2] for row in rows if row}
    return [_study(folder, questions.get(folder.name, "")) for folder in folders]


def study_tables(folder: Path) -> list[str]:
    """Return the names of a study's result tables, that of the costs last; none of a folder that is a link out."""
    results = folder / "results"
    paths = [] if _leads_out(folder, results) else results.glob("*.csv")
    return sorted((path.stem for path in paths), key=lambda name: (name == COST, name))


def study_table(folder: Path, name: str) -> pd.DataFrame:
    """Return one result table of a study.

    Raises:
        StoreError: The file is no table, or leads out of the study's folder.
    """
    path = folder / "results" / f"{name}.csv"
    _refuse_link(folder, path)
    try:
        return csv.read_csv(path).to_pandas()
    except (OSError, ValueError) as error:  # ArrowInvalid and text that is no UTF-8 are ValueErrors
        reason = " ".join(str(error).split())
        raise StoreError(f"{path} cannot be read ({reason}); run otb study {folder.name} again.") from error


def study_figure(path: Path) -> str:
    """Return the SVG text of a study's figure.

    Raises:
        StoreError: The file is no SVG, or leads out of the study's folder.
    """
    _refuse_link(path.parent.parent, path)
    try:
        text = path.read_text(encoding="utf-8")
        if not ElementTree.fromstring(text).tag.endswith("svg"):
            raise ValueError("it is another kind of document")
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise StoreError(f"{path} is no picture ({error}); run otb study {path.parts[-3]} --render.") from error
    return text


def _leads_out(folder: Path, path: Path) -> bool:
    """Return whether a path of a study leaves its folder, by a link or by `..`; a folder that is a link does."""
    return not path.resolve().is_relative_to(folder.parent.resolve() / folder.name)


def _refuse_link(folder: Path, path: Path) -> None:
    if _leads_out(folder, path):
        raise StoreError(f"{path} leads out of {folder}; put what it points to there.")


def _study(folder: Path, question: str) -> CommittedStudy:
    number, slug = folder.name.split("_", 1)
    command = f"otb study {folder.name}"
    blank = CommittedStudy(folder, slug.replace("_", " ").capitalize(), question, "", "", command, "", NOT_RUN)
    page = folder / "README.md"
    try:
        _refuse_link(folder, page)
        if not page.exists():
            return blank
        text = page.read_text(encoding="utf-8")
    except StoreError as error:
        return replace(blank, verdict=str(error), state=BROKEN)
    except (OSError, ValueError) as error:
        return replace(blank, verdict=f"{page} cannot be read ({error}); run {command} --render.", state=BROKEN)
    # Take the parts of the page apart as `studies.lib.run` joined them.
    head = f"# {number} · "
    front, _, made = text.partition(MADE)
    title, question, verdict, *rest = [part for part in front.strip().split("\n\n") if part.strip()] + [""] * 3
    if not (title.startswith(head) and verdict.startswith("**Verdict.** ")):
        return replace(blank, verdict=f"{page} is no page of a study; run {command} --render.", state=BROKEN)
    pictures = re.findall(r"^!\[[^]]*]\((results/[\w.-]+\.svg)\)$", front, re.MULTILINE)
    open_rest = (part for part in rest if part and not part.startswith(("![", "<details", "</details")))
    body = "\n\n".join(open_rest)  # the dashboard folds whole sections
    return replace(
        blank, title=title.removeprefix(head), question=question.removeprefix("**Question.** "), body=body,
        verdict=verdict.removeprefix("**Verdict.** "), cost=made.split("```")[-1].strip().partition(" Tables: ")[0],
        state=MEASURED, figures=tuple(folder / name for name in pictures if (folder / name).is_file()),
    )  # fmt: skip
