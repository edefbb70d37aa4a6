"""A document as one HTML file that loads nothing: plotly.js inside it once if it is needed, text escaped."""

from pathlib import Path
from typing import Any

import plotly.io
from jinja2 import Environment
from plotly.offline import get_plotlyjs

from otb_analysis.figures.numbers import cell
from otb_analysis.figures.theme import CONFIG, FONT, for_background
from otb_analysis.report.document import Document, Grid, Picture

SHORT = 32
"""Characters up to which a text column is never broken into lines."""


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
