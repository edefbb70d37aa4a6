"""The README of a study and the index of all: templates, filled in from committed tables and from nothing else."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from otb_analysis.errors import InputError
from otb_analysis.store import CommittedStudy, committed_studies
from otb_analysis.store.studies import NOT_RUN
from studies.lib import formats
from studies.lib.cache import COST, minutes_words
from studies.lib.defaults import DEFAULTS, outdated_defaults
from studies.lib.record import Rows, Study, load_study
from studies.lib.results import distinct, read_tables, select

TEMPLATE, FRAME, INDEX = "README.md.j2", "study.md.j2", "index.md.j2"
OUTDATED = "None: the answer that was written here no longer holds in the tables. Read the numbers, and write another."
"""What a template says in place of its verdict where the tables do not bear it out."""


def study_page(
    folder: Path, study: Study, tables: Mapping[str, Rows], quick: bool = False
) -> tuple[str, Mapping[str, str]]:
    """Return the README of a study, and its figures as SVG text by file name.

    `README.md.j2` of the folder fills the blocks `verdict` and `page` of `study.md.j2`. It sees the tables and the
    study's `names` and `numbers`. A quick page leaves the verdict out, which was written for the full setting.

    Raises:
        InputError: The template is missing.
    """
    if not (folder / TEMPLATE).is_file():
        raise InputError(f"{folder} has no {TEMPLATE}; write the page of the study there.")
    figures = study.figures(tables)
    facts = {"study": study, "name": folder.name, "tables": tables, "figures": figures, "quick": quick}
    facts["aged"] = outdated_defaults(tables.get(DEFAULTS, ()))
    seen = dict(study.names) | facts | dict(tables) | dict(study.numbers(tables))
    page = _environment(folder).get_template(TEMPLATE).render(seen)
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n", figures


def index_page(studies: Path) -> str:
    """Return `studies/README.md`: question, verdict, command and cost of every study; of one not yet run, no verdict.

    Each row is as the study's page has it, so that a study whose tables and page part leaves the others be.
    """
    rows = [(one, _question(one), _minutes(one)) for one in committed_studies(studies)]
    return _environment(studies).get_template(INDEX).render(rows=rows, NOT_RUN=NOT_RUN)


def _question(one: CommittedStudy) -> str:
    return load_study(one.folder).question if one.state == NOT_RUN else one.question


def _minutes(one: CommittedStudy) -> str:
    tables = read_tables(one.folder / "results")
    if tables and COST not in tables:
        raise InputError(f"{one.folder}/results has no table {COST}.csv; run {one.command} again.")
    return minutes_words(tables[COST]) if tables and one.state != NOT_RUN else "–"


class _Environment(Environment):
    """Templates in which `row.update` is the column of that name, not the method of a dict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a column, or what Jinja finds."""
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)


def _environment(folder: Path) -> Environment:
    """Return what renders the templates of a folder and those beside this file; an unknown name is an error."""
    environment = _Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    names = ("number", "interval", "percent", "span", "median", "column", "mean")
    environment.filters |= {name: getattr(formats, name) for name in names}
    environment.filters |= {"where": select, "distinct": distinct, "minutes": minutes_words}
    environment.filters |= {"thousands": "{:,}".format, "line": _line}
    environment.tests |= {name: getattr(formats, name) for name in ("above", "below", "spanning")}
    environment.globals |= {"grid": formats.grid, "heads": formats.heads, "outdated": OUTDATED}
    return environment


def _line(text: str) -> str:
    """Return a text that was wrapped as one line."""
    return " ".join(text.split())
