"""The house style: one colour per estimator family, units on axes, three significant digits, nothing else.

Colours are Okabe and Ito's, which stay apart under the common colour-vision deficiencies; inside a family lightness,
dash and marker separate the members, and a leave-one-out form is the dashed twin of its self-inclusive form.
"""

import colorsys
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from otb_analysis.schema import TABLES

GREY = "#6F7782"
GRID = "rgba(125, 130, 140, 0.18)"
RULE = "rgba(125, 130, 140, 0.75)"
BLUE, ORANGE, GREEN, PINK, AMBER, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#C98A00", "#56B4E9"
TOP, TITLE, GAP = 76, 44, 84
"""Pixels: from the first row of panels to the edge, the part of it that titles take, and between two rows."""

FONT = "Source Sans, 'Source Sans Pro', system-ui, -apple-system, 'Segoe UI', sans-serif"


@dataclass(frozen=True)
class Style:
    """How one estimator or run is drawn everywhere.

    Attributes:
        color: Hex colour.
        dash: Plotly dash name.
        symbol: Plotly marker name.
    """

    color: str
    dash: str = "solid"
    symbol: str = "circle"


ESTIMATOR_STYLES: dict[str, Style] = {
    "none": Style(GREY, "dot", "x"),
    "batch_mean": Style("#00436B", symbol="square"),
    "batch_mean_loo": Style("#00436B", "dash", "square-open"),
    "group_mean": Style(BLUE),
    "rloo": Style(BLUE, "dash", "circle-open"),
    "grpo": Style(SKY, symbol="square"),
    "james_stein": Style(SKY, "dash", "square-open"),
    "opo": Style("#3D5A98", symbol="diamond-tall"),
    "opo_loo": Style("#3D5A98", "dash", "diamond-tall-open"),
    "classic_optimal": Style("#4C6B1F", symbol="triangle-up"),
    "classic_optimal_loo": Style("#4C6B1F", "dash", "triangle-up-open"),
    "sequence_optimal": Style(GREEN, symbol="triangle-up"),
    "sequence_optimal_loo": Style(GREEN, "dash", "triangle-up-open"),
    "otb": Style(ORANGE, symbol="diamond"),
    "otb_loo": Style(ORANGE, "dash", "diamond-open"),
    "otb_carry": Style("#8F3B00", symbol="diamond"),
    "otb_carry_loo": Style("#8F3B00", "dash", "diamond-open"),
    "otb_turn": Style("#F0905A", symbol="diamond"),
    "otb_turn_loo": Style("#F0905A", "dash", "diamond-open"),
    "token_optimal": Style(AMBER, symbol="star"),
    "token_optimal_loo": Style(AMBER, "dash", "star-open"),
    "energy_ema": Style("#8A6A00", symbol="star"),
    "energy_ema_loo": Style("#8A6A00", "dash", "star-open"),
    "position_optimal": Style("#5E4B00", symbol="hexagon"),
    "opob": Style("#7C9440", symbol="triangle-down"),
    "value": Style(PINK, symbol="pentagon"),
    "tvm": Style("#8E4A75", symbol="pentagon"),
    "tempo": Style("#7A5CA8", symbol="hourglass"),
    "tempo_loo": Style("#7A5CA8", "dash", "hourglass-open"),
    "trloo": Style("#2C7FB8", "dash", "cross-open"),
}
FALLBACK_STYLES = (Style("#5B6770"), Style("#93764A"), Style("#5F7F6B"), Style("#86607D"))

CONFIG = {
    "displaylogo": False,
    "showSendToCloud": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg", "scale": 2},
}
"""What every chart is shown with: nothing leaves the page, the camera button writes SVG."""

TEMPLATE = go.layout.Template(
    layout=go.Layout(
        font={"family": FONT, "size": 13},
        title={"font": {"size": 15}, "x": 0, "xanchor": "left"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=[BLUE, ORANGE, GREEN, PINK, AMBER, SKY],
        hoverlabel={"align": "left", "font": {"size": 12}},
        hovermode="closest",
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "title": {"text": ""}},
        margin={"l": 64, "r": 16, "t": 40, "b": 48},
        xaxis={
            "gridcolor": GRID, "zeroline": False, "linecolor": RULE, "showline": True, "ticks": "outside",
            "ticklen": 4, "tickangle": 0, "tickcolor": RULE, "tickfont": {"size": 12}, "title": {"font": {"size": 13}},
        },
        yaxis={
            "gridcolor": GRID, "zeroline": False, "ticks": "", "exponentformat": "power",
            "tickfont": {"size": 12}, "title": {"font": {"size": 13}},
        },
    )
)  # fmt: skip


def estimator_style(name: str) -> Style:
    """Return the colour, dash and marker of an estimator; an unknown name gets a muted style, always the same one.

    Args:
        name: Name in the estimator dictionary.
    """
    return ESTIMATOR_STYLES.get(name, FALLBACK_STYLES[sum(name.encode()) % len(FALLBACK_STYLES)])


def run_styles(estimators: Mapping[str, str]) -> dict[str, Style]:
    """Return one style per run: its training estimator's colour, lightness telling runs of one estimator apart.

    Args:
        estimators: Run name to the name of the estimator that trains it.
    """
    seen: dict[str, int] = {}
    styles = {}
    for run, estimator in estimators.items():
        base = estimator_style(estimator)
        # Dash already tells a leave-one-out form from its twin; only like runs need another shade.
        kind = base.color + base.dash
        earlier = seen.get(kind, 0)
        seen[kind] = earlier + 1
        styles[run] = Style(_shade(base.color, earlier), base.dash, base.symbol)
    return styles


def _shade(color: str, steps: int) -> str:
    """Lighten and darken in turn: 0 keeps the colour, 1 is lighter, 2 darker, 3 lighter still."""
    if steps == 0:
        return color
    hue, light, saturation = colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    sign = 1 if steps % 2 else -1
    light = min(0.8, max(0.15, light + sign * 0.16 * math.ceil(steps / 2)))
    return "#" + "".join(f"{round(255 * c):02X}" for c in colorsys.hls_to_rgb(hue, light, saturation))


def translucent(color: str, alpha: float) -> str:
    """Return a hex colour as `rgba(…)`.

    Args:
        color: Hex colour, `#RRGGBB`.
        alpha: Opacity between 0 and 1.
    """
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"


def number(value: float | int | None) -> str:
    """Return a number with three significant digits, thousands separated; a missing one is an en dash.

    0.012345 → 0.0123, 12345.6 → 12,300, 1.2e-7 → 1.20×10⁻⁷; integers keep all their digits.

    Args:
        value: The number, or None or NaN where there is none.
    """
    if value is None or value != value:
        return "–"
    if value < 0:
        return f"−{number(-value)}"
    if isinstance(value, int) or math.isinf(value):
        return f"{value:,}".replace("inf", "∞")
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    if not -4 <= exponent < 6:
        mantissa = value / 10.0**exponent
        return f"{mantissa:.2f}×10{_power(exponent)}"
    rounded = round(value, 2 - exponent)
    return f"{rounded:,.{max(0, 2 - exponent)}f}"


def axis_title(table: str, column: str, label: str | None = None) -> str:
    """Return an axis title with the unit the schema gives, as in `Mean entropy (nats)`.

    Args:
        table: Table of the column.
        column: Column name; one that is not in the schema has no unit.
        label: What to call it; the column name when left out.
    """
    units = {c.name: c.unit for c in TABLES[table]}
    unit = units.get(column, "")
    name = label or column.replace("_", " ")
    return f"{name} ({unit})" if unit else name


def panels(titles: Sequence[tuple[str, str]], columns: int, *, height: int = 250, shared_x: bool = True) -> go.Figure:
    """Return an empty grid of panels in house style: a title flush left above each, what it measures in a line below.

    The legend stands above the first row and pushes the panels down when it needs several lines.

    Args:
        titles: (title, unit and reading) of each panel, row by row; short enough for a third of a small window.
        columns: Panels per row.
        height: Height of one row in pixels.
        shared_x: Zooming one panel zooms all.
    """
    rows = math.ceil(len(titles) / columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[
            f"{title}<br><span style='font-size:11px;color:{GREY}'>{line}</span>" for title, line in titles
        ],
        shared_xaxes=cast(bool, "all") if shared_x else False,
        horizontal_spacing=0.09 if columns < 3 else 0.07,
        vertical_spacing=GAP / (height * rows) if rows > 1 else 0,
    )
    figure.update_layout(
        template=TEMPLATE, height=height * rows + TOP, margin={"t": TOP, "b": 44, "l": 56, "r": 12},
        legend={"y": 1 + TITLE / (height * rows - 44), "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )  # fmt: skip
    figure.update_xaxes(showticklabels=True)
    layout: Any = figure.layout
    for index, note in enumerate(layout.annotations):
        axis = layout[f"xaxis{index + 1 if index else ''}"]
        note.update(x=axis.domain[0], xanchor="left", align="left", font={"size": 13}, yshift=4)
    return figure


def place(index: int, columns: int) -> dict[str, Any]:
    """Return `row` and `col` of a panel, counted from its index.

    Args:
        index: Panel index, row by row.
        columns: Panels per row.
    """
    return {"row": index // columns + 1, "col": index % columns + 1}


def note_in_panel(figure: go.Figure, text: str, where: Mapping[str, int]) -> None:
    """Say in the middle of an empty panel why it is empty.

    Args:
        figure: From `panels`.
        text: A few words.
        where: From `place`.
    """
    figure.add_annotation(
        text=text, showarrow=False, font={"size": 12, "color": GREY}, xref="x domain", yref="y domain", x=0.5, y=0.5,
        **dict(where),
    )  # fmt: skip


def log_axis(values: ArrayLike, ends: ArrayLike = (), most: int = 8) -> dict[str, Any]:
    """Return a logarithmic axis with readable ticks: decades, or 1–2–5 where the values span less than two.

    It spans all values and, up to a factor of five beyond them, the ends of their intervals: one interval that
    knows next to nothing must not flatten all the others.

    Args:
        values: What is drawn along it; what is not positive has no place on it.
        ends: Ends of the intervals.
        most: Most ticks.
    """
    drawn, reaching = (np.asarray(x, dtype=float) for x in (values, ends))
    drawn, reaching = (x[np.isfinite(x) & (x > 0)] for x in (drawn, reaching))
    if drawn.size == 0:
        return {"type": "log"}
    reaching = np.clip(np.append(reaching, drawn), drawn.min() / 5, drawn.max() * 5)
    low, high = np.log10(reaching.min()), np.log10(reaching.max())
    reach = max(0.06 * (high - low), 0.04)
    low, high = low - reach, high + reach
    decades = range(math.floor(low), math.ceil(high) + 1)
    leads = (1, 1.5, 2, 3, 4, 5, 6, 8) if high - low < 0.7 else (1, 2, 5) if high - low < 2.2 else (1,)
    ticks = [lead * 10.0**k for k in decades for lead in leads if low <= k + math.log10(lead) <= high]
    if len(ticks) < 2:
        ticks = [float(f"{10**at:.2g}") for at in np.linspace(low + reach, high - reach, 3)]
    every = math.ceil(len(ticks) / most)
    # Where 1 is among the ticks it stays: ratios are read against it.
    ticks = ticks[ticks.index(1.0) % every if 1.0 in ticks else 0 :: every]
    text = [number(tick) if 1e-3 <= tick < 1e5 else f"10{_power(round(math.log10(tick)))}" for tick in ticks]
    return {"type": "log", "range": [low, high], "tickvals": ticks, "ticktext": [_short(t) for t in text]}


def _power(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short(text: str) -> str:
    """Drop the zeros that a tick does not need: 0.100 → 0.1, 2.00 → 2."""
    return text.rstrip("0").rstrip(".") if "." in text else text


def step_axis(steps: ArrayLike) -> dict[str, Any]:
    """Return an axis of measured steps: ticks at steps that were measured, room on both sides.

    Args:
        steps: Measured steps, repeated or not.
    """
    measured = np.unique(np.asarray(steps, dtype=float))
    if measured.size == 0:
        return {}
    gap = float(np.diff(measured).min()) if measured.size > 1 else 1.0
    every = math.ceil(measured.size / 9)
    reach = [float(measured[0] - 0.7 * gap), float(measured[-1] + 0.7 * gap)]
    return {"tickvals": measured[::every].astype(np.float32), "range": reach, "title": {"text": "step", "standoff": 6}}


def for_background(figure: go.Figure, dark: bool) -> go.Figure:
    """Give a figure the ink that reads on a light or a dark page; returns the figure it was given.

    Args:
        figure: Any figure in house style.
        dark: The page is dark.
    """
    ink, paper = ("#E6EAEE", "#1C232A") if dark else ("#1B2229", "#FFFFFF")
    hover = {"bgcolor": paper, "bordercolor": RULE, "font": {"color": ink}}
    return figure.update_layout(font={"color": ink}, hoverlabel=hover)
