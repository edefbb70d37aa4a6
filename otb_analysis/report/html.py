"""A document as one HTML file that loads nothing: plotly.js inside it once, figures as JSON, text escaped."""

from html import escape
from typing import Any

import plotly.io

from otb_analysis.figures import for_background
from otb_analysis.figures.theme import FONT
from otb_analysis.report.cells import cell
from otb_analysis.report.document import Document, Formulas, Grid, Part, Picture
from otb_analysis.report.library import packed_library

SHORT = 26
"""Characters up to which a text column is never broken into lines."""

STYLE = f"""
:root {{ color-scheme: light; }}
body {{ font: 15px/1.55 {FONT}; color: #1B2229; background: #FFFFFF; margin: 0 auto;
  max-width: 1180px; padding: 32px; }}
h1 {{ font-size: 26px; margin: 0 0 4px; }} h2 {{ font-size: 20px; margin: 44px 0 10px; overflow-wrap: anywhere; }}
.note, figcaption, caption {{ color: #5A636D; font-size: 13px; text-align: left; }}
code, pre {{ font: 13px ui-monospace, monospace; background: #F2F4F6; border-radius: 4px; }}
code {{ padding: 1px 5px; }}
pre {{ padding: 10px 12px; overflow-x: auto; }}
figure {{ margin: 18px 0; }} .scroll {{ overflow-x: auto; margin: 14px 0; }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }}
caption {{ padding: 0 0 6px; }}
th, td {{ padding: 4px 12px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #E3E6EA; }}
th {{ font-weight: 600; white-space: nowrap; }} td.n, th.n {{ text-align: right; white-space: nowrap; }}
td.k {{ white-space: nowrap; }}
nav ol {{ columns: 2; padding-left: 20px; font-size: 14px; }} dt {{ font-weight: 600; }} dd {{ margin: 0 0 8px; }}
"""


def to_html(document: Document) -> str:
    """Return the file's text."""
    titles = [escape(section.title) for section in document.sections]
    contents = "".join(f'<li><a href="#s{i}">{title}</a></li>' for i, title in enumerate(titles))
    body = "".join(
        f'<section><h2 id="s{i}">{titles[i]}</h2>{"".join(map(_part, section.parts))}</section>'
        for i, section in enumerate(document.sections)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(document.title)}</title><style>{STYLE}</style>{packed_library()}</head>\n"
        f'<body><h1>{escape(document.title)}</h1><p class="note">{escape(document.note)}</p>'
        f"<pre>{escape(document.command)}</pre><nav><ol>{contents}</ol></nav>\n{body}</body></html>\n"
    )


def _part(part: Part) -> str:
    if isinstance(part, Grid):
        return _table(part)
    if isinstance(part, Picture):
        return _figure(part)
    if isinstance(part, Formulas):
        rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(formula)}</dd>" for name, formula in part.rows)
        return f"<details><summary>Formulas</summary><dl>{rows}</dl></details>"
    return f"<p>{escape(part)}</p>"


def _figure(part: Picture) -> str:
    # Fonts differ from machine to machine, and a label must not be cut.
    figure = for_background(part.figure, dark=False).update_yaxes(automargin=True)
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in part.name)
    layout: Any = figure.layout
    room = layout.height or 450  # kept free until the figure is drawn, so that links into the page hold
    box = f'<div id="f-{name}" class="plot" style="min-height:{room}px"></div>'
    numbers = plotly.io.to_json(figure)  # with every < escaped, so that no text ends the element
    drawn = f'{box}<script type="application/json">{numbers}</script>'
    return f"<figure>{drawn}<figcaption>{escape(part.caption)}</figcaption></figure>"


def _table(part: Grid) -> str:
    texts = [[cell(value) for value in part.frame.iloc[:, i]] for i in range(part.frame.shape[1])]
    numeric = [str(dtype) not in ("object", "str", "string") for dtype in part.frame.dtypes]
    short = [max(map(len, column), default=0) <= SHORT for column in texts]
    classes = [' class="n"' if n else ' class="k"' if k else "" for n, k in zip(numeric, short, strict=True)]
    head = "".join(f"<th{c}>{escape(str(name))}</th>" for name, c in zip(part.frame, classes, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{c}>{escape(text)}</td>" for text, c in zip(row, classes, strict=True)) + "</tr>"
        for row in zip(*texts, strict=True)
    )
    return (
        f'<div class="scroll"><table><caption>{escape(part.caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
