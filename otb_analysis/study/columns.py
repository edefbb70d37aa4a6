"""Tables as grids of a page, and their columns of intervals as curves."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from otb_analysis.figures.svg import Curve
from otb_analysis.study.record import Rows
from otb_analysis.study.results import distinct, select
from otb_analysis.study.words import markdown_table

Row = Mapping[str, Any]


def grid(rows: Rows, down: str, across: str, words: Callable[[Row], str], head: str = "{}") -> str:
    """Return a Markdown table of rows by two of their columns, each in the order in which its values appear.

    Args:
        rows: At most one per pair of values; a pair without one is left empty.
        down: Column whose values head the lines.
        across: Column whose values head the columns.
        words: What stands in a cell.
        head: Format of a column's heading, as in `{} updates`.
    """
    columns = distinct(rows, across)
    lines = []
    for name in distinct(rows, down):
        cells = [select(rows, **{down: name, across: value}) for value in columns]
        lines.append([str(name), *(words(cell[0]) if cell else "" for cell in cells)])
    return markdown_table([down, *(head.format(value) for value in columns)], lines)


def interval_curve(rows: Rows, x: Callable[[Row], float], name: str, words: str, color: str) -> Curve:
    """Return a curve with its band from rows that hold the columns of `interval_columns`.

    Args:
        rows: One per point.
        x: Where the point stands.
        name: Of the quantity.
        words: Name in the legend.
        color: Hex colour.
    """
    y, low, high = ([known(row[f"{name}{end}"]) for row in rows] for end in ("", "_low", "_high"))
    return Curve([x(row) for row in rows], y, words, low, high, color)


def known(value: float | None) -> float:
    """Return NaN for what is undefined.

    Args:
        value: A number or None.
    """
    return math.nan if value is None else float(value)
