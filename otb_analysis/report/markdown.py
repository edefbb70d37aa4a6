"""A document as Markdown: the same tables, curves as SVG files beside it, a sentence for every other figure."""

import re
from importlib.util import find_spec

from otb_analysis.figures.numbers import cell
from otb_analysis.figures.svg import curves_svg
from otb_analysis.report.document import Document, Formulas, Grid, Part, Picture


def to_markdown(document: Document, folder: str) -> tuple[str, dict[str, str]]:
    """Return the page, and its pictures by file name."""
    pictures: dict[str, str] = {}
    parts = [f"# {_text(document.title)}", _text(document.note), f"```\n{document.command}\n```"]
    for section in document.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [_part(part, folder, pictures) for part in section.parts]
    return "\n\n".join(parts) + "\n", pictures


def _part(part: Part, folder: str, pictures: dict[str, str]) -> str:
    if isinstance(part, Grid):
        return grid_text(part)
    if isinstance(part, Formulas):
        return "\n".join(f"- **{_text(name)}**: {_text(formula)}" for name, formula in part.rows)
    if isinstance(part, Picture):
        return _picture(part, folder, pictures)
    return _text(part)


def _picture(part: Picture, folder: str, pictures: dict[str, str]) -> str:
    if part.curves is None or find_spec("matplotlib") is None:  # a base install reports without pictures
        return f"*{_text(part.caption)} The figure is in the HTML form of this report and on the dashboard.*"
    name = re.sub(r"[^\w-]", "-", part.name) + ".svg"
    pictures[name] = curves_svg(part.curves)
    return f"![{_text(part.name)}]({folder}/{name})\n\n*{_text(part.caption)}*"


def grid_text(part: Grid) -> str:
    """Return a table as Markdown, its caption above it."""
    names = [_text(str(name)) for name in part.frame]
    rows = ["| " + " | ".join(_text(cell(x)) for x in row) + " |" for row in part.frame.itertuples(index=False)]
    return "\n".join([_text(part.caption), "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names), *rows])


def _text(text: str) -> str:
    """Return text that Markdown shows as it is; a run's name or a token is never markup."""
    return re.sub(r"([\\`*_\[\]<>|~$])", r"\\\1", " ".join(text.split()))
