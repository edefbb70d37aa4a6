"""Pictures and tables of committed pages: curves as SVG files, made without a browser, the same to the byte."""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from otb_analysis.extras import require
from otb_analysis.figures.curves import CurvesInfo
from otb_analysis.figures.styles import BLUE, GREY, GRID, INK, PAPER, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, LEGEND = 380, 250, 26
"""Pixels of a panel, its titles and axes included, and of a row of the legend."""
INCH = 96
"""Pixels of an inch, as SVG defines it."""
GLYPH = 0.6
"""Width of a letter over its size, on the safe side."""
LOOK: dict[Any, Any] = {
    "svg.hashsalt": "otb-analysis",  # the names of clipped parts are random without it
    "svg.fonttype": "none",  # text stays text: small, searchable, and the reader's own font
    "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "text.color": INK, "axes.labelcolor": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "axes.xmargin": 0.02, "grid.color": GRID, "ytick.major.size": 0, "axes.labelsize": 9,
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "legend.frameon": False,
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One line; with `low` and `high` a band around it, or bars where it is drawn as points."""

    x: Sequence[float]
    y: Sequence[float]
    name: str = ""  # In the legend; curves of one name share an entry, those without a name have none
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    color: str = BLUE
    width: float = 2.0  # Of the line in pixels; 0 draws points with bars instead
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    note: str
    x_label: str
    curves: Sequence[Curve]
    rules: Sequence[tuple[float, str]] = ()  # (height, words) of horizontal dashed lines
    y_range: tuple[float, float] | None = None
    percent: bool = False  # Whether heights are shares, written in percent


def svg(panels: Sequence[Panel], columns: int = 2) -> str:
    """Return a picture of panels, row by row, with one legend below them.

    Raises:
        InputError: Matplotlib is not installed.
    """
    require("matplotlib", "pictures in SVG files")
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context(LOOK):
        figure(panels, columns).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", file.getvalue())  # a hundredth of a pixel is enough
    # Without the head, which names a file elsewhere; a path on one line.
    return re.sub(r"\s*\n\s*(?![\s<])", " ", text[text.index("<svg") :])


def figure(panels: Sequence[Panel], columns: int = 2) -> "Figure":
    """Return the same as a figure of Matplotlib's."""
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows, width = math.ceil(len(panels) / columns), columns * WIDTH
    named: dict[str, Any] = {}
    longest = max((len(curve.name) for panel in panels for curve in panel.curves), default=0)
    across = max(1, int(width // (60 + 12 * GLYPH * longest)))
    entries = len({curve.name for panel in panels for curve in panel.curves if curve.name})
    height = rows * HEIGHT + LEGEND * max(1, math.ceil(entries / across))
    drawn = Figure(figsize=(width / INCH, height / INCH), layout="constrained")
    for place, panel in enumerate(panels):
        named |= _draw(drawn.add_subplot(rows, columns, place + 1), panel)
    if named:
        drawn.legend(list(named.values()), list(named), loc="outside lower left", ncols=across)
    return drawn


def _draw(axes: "Axes", panel: Panel) -> dict[str, Any]:
    """Draw one panel and return what stands for each name in the legend."""
    from matplotlib.ticker import MaxNLocator

    named = {}
    for curve in panel.curves:
        ends = [np.asarray(curve.y if end is None else end, float) for end in (curve.low, curve.high)]
        known = np.isfinite(ends[0] + ends[1]) & (curve.low is not None)
        x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
        low, high = (np.where(known, end, y) for end in ends)
        if curve.width:
            (line,) = axes.plot(x, y, color=curve.color, lw=0.75 * curve.width, ls="--" if curve.dashed else "-")
            axes.fill_between(x[known], low[known], high[known], color=curve.color, alpha=0.16, lw=0)
        else:
            line = axes.errorbar(x, y, [y - low, high - y], fmt="o", ms=5, elinewidth=1.2, color=curve.color)
        if curve.name:
            named[curve.name] = line
    room = 0.75 * (WIDTH - 60) / GLYPH
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    size = min(9.5, room / max(1, len(panel.title)))
    axes.annotate(panel.title, (0, 1), xytext=(0, 19), fontsize=size, fontweight="bold", **above)
    axes.annotate(
        panel.note, (0, 1), xytext=(0, 7), fontsize=min(8, room / max(1, len(panel.note))), color=GREY, **above
    )
    axes.set_xlabel(panel.x_label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if panel.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    if panel.y_range is not None:
        axes.set_ylim(panel.y_range)
    for level, words in panel.rules:
        axes.axhline(level, color=GREY, lw=0.8, ls="--")
        axes.annotate(
            words, (1, level), xytext=(0, 2), textcoords="offset points", xycoords=axes.get_yaxis_transform(),
            ha="right", fontsize=8, color=GREY, bbox={"facecolor": PAPER, "lw": 0, "pad": 0.5, "alpha": 0.7},
        )  # fmt: skip
    return named


def curves_svg(info: CurvesInfo) -> str:
    """Return training curves as an SVG file, three panels in a row; panels without a curve are left out."""
    drawn = [
        Panel(
            quantity.title, quantity.line, "step",
            [Curve(c.step.tolist(), c.smooth.tolist(), c.run, color=info.styles[c.run].color,
                   dashed=info.styles[c.run].dash != "solid") for c in curves],
            y_range=(0.0, 1.0) if quantity.share else None,
        )
        for quantity, curves in zip(info.quantities, info.curves, strict=True) if curves
    ]  # fmt: skip
    return svg(drawn, columns=3)


def results_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return a result table with the two ends of every interval as one column of text behind its estimate.

    Columns `x`, `x_low`, `x_high` become `x` and `x, interval`; bare `low`, `high` belong to the column before them.
    Numbers stay numbers, so that a column sorts by its estimate; backticks around names, which Markdown reads as code,
    are left out.
    """
    columns: dict[str, Any] = {}
    names = [str(name) for name in table.columns]
    for place, name in enumerate(names):
        if name.endswith("low") and (high := name[: -len("low")] + "high") in names:
            of = name.removesuffix("_low") if name != "low" else names[max(place - 1, 0)]
            ends = table[[name, high]].apply(pd.to_numeric, errors="coerce").astype(float).to_numpy()
            spans = [None if np.isnan(two).any() else " to ".join(map(number, two)) for two in ends]
            columns[f"{of}, interval"] = pd.Series(spans, index=table.index, dtype="string")
        elif not (name.endswith("high") and name[: -len("high")] + "low" in names):
            columns[name] = table[name]
    shown = pd.DataFrame(columns).rename(columns=lambda name: name.replace("`", ""))
    return shown.replace("`", "", regex=True)
