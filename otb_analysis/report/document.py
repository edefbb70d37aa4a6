"""What a report is made of, sections of sentences, tables, pictures and formulas, and its forms.

The terminal shows sentences and tables. Markdown has curves as SVG files beside it and a sentence for every other
figure. HTML is one file that loads nothing: plotly.js is inside it once if it is needed, and text is escaped.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment
from plotly.offline import get_plotlyjs
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from otb_analysis.figures.curves import CurvesInfo
from otb_analysis.figures.styles import CONFIG, FONT, cell, for_background
from otb_analysis.figures.svg import curves_svg

SHORT = 32
"""Characters up to which a text column is never broken into lines."""


@dataclass(frozen=True)
class Grid:
    """A table with what it shows in a sentence; cells are text already, or numbers that `number` writes."""

    caption: str
    frame: pd.DataFrame
    title: str = ""
    texts: tuple[str, ...] = ()  # Columns of words, on the left; the first one always is
    folds: tuple[str, ...] = ()  # Columns of long sentences


@dataclass(frozen=True)
class Picture:
    """A figure with its caption; `curves` are the same numbers where the form without a browser can draw them."""

    name: str
    caption: str
    figure: go.Figure
    curves: CurvesInfo | None = None


@dataclass(frozen=True)
class Formulas:
    """Definitions: (name, formula) pairs."""

    rows: tuple[tuple[str, str], ...]


Part = str | Grid | Picture | Formulas


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, in order."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    command: str
    note: str
    sections: tuple[Section, ...]


def printed(sections: Iterable[Section | Part]) -> list[Table | str]:
    """Return the sentences and tables of some sections, or of parts alone; pictures and formulas are for files."""
    parts = [part for one in sections for part in (one.parts if isinstance(one, Section) else (one,))]
    return [grid_table(part) if isinstance(part, Grid) else part for part in parts if isinstance(part, Grid | str)]


def grid_table(grid: Grid) -> Table:
    """Return a grid as a table; whatever a cell holds is shown as text, and a run's name in the title is no markup."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(grid.title, "table.title"), title_justify="left",
        caption=grid.caption, caption_justify="left",
    )  # fmt: skip
    for place, name in enumerate(map(str, grid.frame)):
        left = not place or name in (*grid.texts, *grid.folds)
        folds = name in grid.folds
        table.add_column(
            name, justify="left" if left else "right", no_wrap=not folds, overflow="fold" if folds else "ellipsis"
        )
    for row in grid.frame.itertuples(index=False):
        table.add_row(*(Text(cell(value)) for value in row))
    return table


def to_markdown(document: Document, folder: str) -> tuple[str, dict[str, str]]:
    """Return the page, and its pictures by file name."""
    pictures: dict[str, str] = {}
    parts = [f"# {plain(document.title)}", plain(document.note), f"```\n{document.command}\n```"]
    for section in document.sections:
        parts.append(f"## {plain(section.title)}")
        for part in section.parts:
            if isinstance(part, Grid):
                parts.append(grid_text(part))
            elif isinstance(part, Formulas):
                parts.append("\n".join(f"- **{plain(name)}**: {plain(formula)}" for name, formula in part.rows))
            elif isinstance(part, str):
                parts.append("  \n".join(map(plain, part.split("\n"))))  # two blanks: a new line
            elif part.curves is None or find_spec("matplotlib") is None:  # a base install reports without pictures
                elsewhere = "The figure is in the HTML form of this report and on the dashboard."
                parts.append(f"*{plain(part.caption)} {elsewhere}*")
            else:
                name = re.sub(r"[^\w-]", "-", part.name) + ".svg"
                pictures[name] = curves_svg(part.curves)
                parts.append(f"![{plain(part.name)}]({folder}/{name})\n\n*{plain(part.caption)}*")
    return "\n\n".join(parts) + "\n", pictures


def grid_text(part: Grid) -> str:
    """Return a table as Markdown, its caption above it."""
    names = [plain(str(name)) for name in part.frame]
    rows = ["| " + " | ".join(plain(cell(x)) for x in row) + " |" for row in part.frame.itertuples(index=False)]
    caption = "  \n".join(map(plain, part.caption.split("\n")))
    return "\n".join([caption, "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names), *rows])


def plain(text: str) -> str:
    """Return text that Markdown shows as it is; a run's name or a token is never markup."""
    return re.sub(r"([\\`*_\[\]<>|~$])", r"\\\1", " ".join(text.split()))


def to_html(document: Document) -> str:
    """Return the file's text."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.tests["grid"] = lambda part: isinstance(part, Grid)
    environment.tests["picture"] = lambda part: isinstance(part, Picture)
    environment.filters |= {"columns": _columns, "drawn": _drawn}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    pictures = any(isinstance(part, Picture) for section in document.sections for part in section.parts)
    # 4.8 MB: plotly's Python package has no smaller bundle.
    return template.render(document=document, font=FONT, library=get_plotlyjs() if pictures else "")


def _columns(grid: Grid) -> list[dict[str, Any]]:
    """Each column's name, its cells as text, and its kind: n(umbers), k(ept on one line), or empty for long text."""
    columns = []
    for name, values in grid.frame.items():
        texts = [cell(value) for value in values]
        numeric = str(values.dtype) not in ("object", "str", "string")
        short = max(map(len, texts), default=0) <= SHORT
        columns.append({"name": str(name), "texts": texts, "kind": "n" if numeric else "k" if short else ""})
    return columns


def _drawn(picture: Picture) -> str:
    # Fonts differ from machine to machine, and a label must not be cut.
    figure = for_background(picture.figure, dark=False).update_yaxes(automargin=True)
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in picture.name)
    # `to_html` escapes every < of the figure's text, so that none ends the script.
    return plotly.io.to_html(figure, config=CONFIG, include_plotlyjs=False, full_html=False, div_id=f"f-{name}")
