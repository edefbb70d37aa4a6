"""How numbers, intervals and names are written, and the look of all figures: light grids, ticks as people read.

An estimator has the colour of its family, and a dash and a marker of its own. Colours are Okabe and Ito's, which stay
apart under the common colour-vision deficiencies, of a lightness that is seen on white and on the dark page; inside a
family lightness, dash and marker separate the members, and a leave-one-out form is the dashed twin of its
self-inclusive form. Where runs are compared, each has a colour of its own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from otb_analysis.statistics import Interval, is_informative
from otb_analysis.types import Float, Label

MISSING = "–"
"""Stands where there is no value."""


def number(value: float | int | None, form: str = "") -> str:
    """Return a number with three significant digits, thousands separated; a missing one (None, NaN) is an en dash.

    0.012345 → 0.0123, 12345.6 → 12,300, 1.2e-7 → 1.20×10⁻⁷; integers keep all their digits. With a Python format such
    as `.2f` it is written in that one, ∞ but for its sign.
    """
    if form and value is not None:
        return "∞" if math.isinf(value) else format(value, form)
    if value is None or value != value:
        return MISSING
    if value < 0:
        return f"−{number(-value)}"
    if isinstance(value, int) or math.isinf(value):
        return f"{value:,}".replace("inf", "∞")
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    if not -4 <= exponent < 6:
        return f"{value / 10.0**exponent:.2f}×10{superscript(exponent)}"
    return f"{round(value, 2 - exponent):,.{max(0, 2 - exponent)}f}"


def superscript(exponent: int) -> str:
    """Return an exponent in raised digits: −7 → ⁻⁷."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def interval_cell(interval: Interval | None, form: str = "") -> str:
    """Return an estimate with the ends of its interval, where it has them: 0.79 [0.73, 0.87]; a dash without one."""
    if interval is None:
        return MISSING
    point, low, high = number(interval.estimate, form), interval.low, interval.high
    # What is known needs no ends.
    if low is None or high is None or math.isnan(low) or math.isclose(low, high, rel_tol=1e-9):
        return point
    return f"{point} [{number(low, form)}, {number(high, form)}]"


def beside_one(interval: Interval) -> str:
    """Return the fewest digits, two at least, with which no end of a ratio's interval reads as 1."""
    ends = [end for end in (interval.low, interval.high) if end is not None]
    return next((f".{k}f" for k in range(2, 7) if all(round(end, k) != 1 for end in ends)), ".2f")


def noise_scale_cell(scale: Interval | None) -> str:
    """Return a noise scale as it is read: `116 [50, 254]`, or what it is above where its upper end is not known."""
    if scale is None:
        return "not known, since noise hides the signal"
    if scale.low is not None and not is_informative(scale):
        return f"above {number(scale.low)}"
    return interval_cell(scale)


def shown_name(label: Label) -> str:
    """Return how an estimator is called in a sentence."""
    name, source = label
    name = "no baseline (none)" if name == "none" else name
    return {"exact": f"{name} with exact norms", "calibrated": f"{name} with calibrated energies"}.get(source, name)


def labels(pairs: Iterable[Label]) -> dict[Label, str]:
    """Return how estimators are called side by side: `otb · proxy` where several energy sources meet, else `otb`."""
    pairs = list(pairs)
    several = len({source for _, source in pairs if source != "none"}) > 1
    return {(e, s): f"{e} · {s}" if several and s != "none" else e for e, s in pairs}


def cell(value: Any) -> str:
    """Return a table's cell as text: three digits for numbers, yes or no for truth values, a dash for the missing."""
    if value is None or value is pd.NA or value is pd.NaT:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    item = getattr(value, "item", None)  # a scalar of NumPy's
    return cell(item()) if callable(item) else str(value)


def columns_of(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return an interval as three columns: its estimate, and its ends as `name_low` and `name_high`."""
    ends = (None, None, None) if interval is None else (interval.estimate, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def error_bars(intervals: Sequence[Interval | None], **look: object) -> tuple[Float, dict[str, Any]]:
    """Return estimates [K], NaN without one, and Plotly's bars from them to the ends of their intervals."""
    value, low, high = np.array([[*columns_of("", one).values()] for one in intervals], np.float64).T
    known = np.isfinite(low) & np.isfinite(high)
    up, down = (np.where(known, np.maximum(one, 0), 0).astype(np.float32) for one in (high - value, value - low))
    bars = {"array": up, "arrayminus": down, "visible": bool(known.any())}
    return value, {"type": "data", "symmetric": False, "width": 0, "thickness": 1.2, **bars, **look}


GREY, PALE = "#6F7782", "#9AA4AF"
"""Of marks without a name and of small text; of small text on the dark page."""
INK, PAPER, GRID = "#1B2229", "#FFFFFF", "#E3E6EA"
"""Text, ground and lines of a picture on paper."""
BLUE, ORANGE, GREEN, PINK, AMBER, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#C68800", "#4A9CCB"


@dataclass(frozen=True)
class Style:
    """How one estimator or run is drawn everywhere."""

    color: str
    dash: str = "solid"
    symbol: str = "circle"


ESTIMATOR_STYLES: dict[str, Style] = {
    "none": Style(GREY, "dot", "x"),
    "batch_mean": Style("#006AA6", symbol="square"),
    "group_mean": Style(BLUE),
    "rloo": Style(BLUE, "dash", "circle-open"),
    "grpo": Style(SKY, symbol="square"),
    "james_stein": Style(SKY, "dash", "square-open"),
    "energy_across_loo": Style("#00726A", "dash", "bowtie-open"),
    "energy_regression": Style("#00726A", symbol="bowtie"),
    "blend_otb_regression": Style("#A34E00", symbol="bowtie"),
    "opo": Style("#4464A8", symbol="diamond-tall"),
    "classic_optimal": Style("#4F6F20", symbol="triangle-up"),
    "sequence_optimal": Style(GREEN, symbol="triangle-up"),
    "otb": Style(ORANGE, symbol="diamond"),
    "otb_carry": Style("#AA4700", symbol="diamond-wide"),
    "otb_turn": Style("#D47F4E", symbol="star-diamond"),
    "token_optimal": Style(AMBER, symbol="star"),
    "energy_ema": Style("#8A6A00", symbol="star"),
    "position_optimal": Style("#7B6300", symbol="hexagon"),
    "opob": Style("#7C9440", symbol="triangle-down"),
    "value": Style(PINK, symbol="pentagon"),
    "tvm": Style("#944D7A", symbol="pentagon"),
    "tempo": Style("#7A5CA8", symbol="hourglass"),
    "trloo": Style("#2C7FB8", "dash", "cross-open"),
}
RUN_COLORS = (BLUE, ORANGE, GREEN, PINK, AMBER, "#8250C4", SKY, GREY)
RUN_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Each for four runs: of those of one dash no two colours are near for colour-blind eyes."""

RUN_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "star", "hexagon")

FALLBACK_STYLES = (Style("#5B6770"), Style("#93764A"), Style("#5F7F6B"), Style("#86607D"))


def estimator_style(name: str, energy_source: str = "none") -> Style:
    """Return an estimator's look, dotted with any but exact energies; other names get a muted one, always the same."""
    plain = name if name in ESTIMATOR_STYLES else name.removesuffix("_loo")
    style = ESTIMATOR_STYLES.get(plain) or FALLBACK_STYLES[sum(plain.encode()) % len(FALLBACK_STYLES)]
    if plain != name:  # the leave-one-out form
        style = Style(style.color, "dash", f"{style.symbol}-open")
    if energy_source in ("none", "exact"):
        return style
    return Style(style.color, "dot" if style.dash == "solid" else "dashdot", style.symbol)


WITH_TWIN = "batch_mean opo classic_optimal sequence_optimal otb otb_carry otb_turn token_optimal energy_ema tempo"
ESTIMATOR_STYLES |= {f"{name}_loo": estimator_style(f"{name}_loo") for name in WITH_TWIN.split()}


def run_styles(runs: Iterable[str], estimators: Mapping[str, str] | None = None) -> dict[str, Style]:
    """Return one style per run, by their order: that of creation gives each run of a root the same one everywhere.

    Of four runs each takes its estimator's colour if that is free, so that a run and its estimator look alike; the
    others leave the first colours to them. From the ninth run on colours come back with another dash and marker.
    """
    styles, free, names = dict[str, Style](), list[str](), estimators or {}
    for k, run in enumerate(dict.fromkeys(runs)):
        free = free or list(RUN_COLORS[k % 8 :][:4])
        usual = estimator_style(names.get(run, "")).color
        color = usual if usual in free else free[-1 if names.get(run) else 0]
        free.remove(color)
        styles[run] = Style(color, RUN_DASHES[k // 4 % len(RUN_DASHES)], RUN_SYMBOLS[k % len(RUN_SYMBOLS)])
    return styles


LINES = "rgba(125, 130, 140, 0.18)"
RULE = "rgba(125, 130, 140, 0.75)"
RAMP = "ramp"
"""`meta` of a heatmap whose colours run from the page's to a strong one: a dark page takes them in reverse."""
TOP, TITLE, GAP = 76, 44, 84
"""Pixels: from the first row of panels to the edge, the part of it that titles take, and between two rows."""

FONT = "Source Sans, 'Source Sans Pro', system-ui, -apple-system, 'Segoe UI', sans-serif"


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
            "gridcolor": LINES, "zeroline": False, "linecolor": RULE, "showline": True, "ticks": "outside",
            "ticklen": 4, "tickangle": 0, "tickcolor": RULE, "tickfont": {"size": 12}, "title": {"font": {"size": 13}},
        },
        yaxis={
            "gridcolor": LINES, "zeroline": False, "ticks": "", "exponentformat": "power",
            "tickfont": {"size": 12}, "title": {"font": {"size": 13}},
        },
    )
)  # fmt: skip


Panels = tuple[go.Figure, list[dict[str, Any]]]
"""A figure, and `row` and `col` of each of its panels."""


def panels(titles: Sequence[tuple[str, str]], columns: int, *, height: int = 250, shared_x: bool = True) -> Panels:
    """Return an empty grid of panels in house style and their places: titles flush left, what they measure below.

    `titles` holds (title, unit and reading) row by row, short enough for a third of a small window. The legend stands
    above the first row and pushes the panels down when it needs several lines.
    """
    rows = math.ceil(len(titles) / columns)
    figure = make_subplots(
        rows, columns, shared_xaxes=cast(bool, "all") if shared_x else False,
        subplot_titles=[f"{title}<br><span style='font-size:11px;color:{GREY}'>{of}</span>" for title, of in titles],
        horizontal_spacing=0.09 if columns < 3 else 0.07, vertical_spacing=GAP / (height * rows) if rows > 1 else 0,
    )  # fmt: skip
    figure.update_layout(
        template=TEMPLATE, height=height * rows + TOP, margin={"t": TOP, "b": 44, "l": 56, "r": 12},
        legend={"y": 1 + TITLE / (height * rows - 44), "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )  # fmt: skip
    figure.update_xaxes(showticklabels=True)
    layout: Any = figure.layout
    for index, note in enumerate(layout.annotations):
        axis = layout[f"xaxis{index + 1 if index else ''}"]
        note.update(x=axis.domain[0], xanchor="left", align="left", font={"size": 13}, yshift=4)
    return figure, [{"row": index // columns + 1, "col": index % columns + 1} for index in range(len(titles))]


def stacked(figure: go.Figure) -> go.Figure:
    """Put panels that stand side by side below one another, in place, for a narrow page; each gets its own names.

    Titles of panels that stand so already begin at the edge, since a long one would be cut off.
    """
    layout: Any = figure.layout
    # The titles come first among the notes, one for each panel.
    every = zip(figure.select_xaxes(), figure.select_yaxes(), layout.annotations, strict=False)
    shown = [panel for panel in every if panel[0].visible is not False]
    if len(shown) < 2:
        return figure.update_annotations(xshift=8 - (layout.margin.l or 64), selector={"xref": "paper", "x": 0})
    each = (layout.height - TOP - 44) * (shown[0][1].domain[1] - shown[0][1].domain[0])
    total = len(shown) * (each + GAP) - GAP
    for place, (x, y, title) in enumerate(shown):
        top = 1 - place * (each + GAP) / total
        x.update(domain=[0, 1])
        y.update(domain=[max(0.0, top - each / total), top], showticklabels=y.ticktext is not None or y.showticklabels)
        title.update(x=0, y=top)
    if layout.legend.y is not None:
        layout.legend.y = 1 + TITLE / total if layout.legend.y > 1 else -60 / total
    return figure.update_layout(height=total + TOP + 44)


def note_in_panel(figure: go.Figure, text: str, where: dict[str, Any]) -> None:
    """Write into an empty panel why it is empty, and hide the numbers of its axis."""
    # A browser draws no axes for a panel without a trace, and would put the note into the first panel.
    figure.add_scatter(x=[None], y=[None], showlegend=False, hoverinfo="skip", **where)
    figure.add_annotation(
        text=text, showarrow=False, font={"size": 12}, xref="x domain", yref="y domain", x=0.5, y=0.5, **where
    )  # fmt: skip
    figure.update_yaxes(showticklabels=False, **where)


def for_background(figure: go.Figure, dark: bool) -> go.Figure:
    """Set a figure's text and ramps for a light or a dark page, in place, and return it; marks are seen on both."""
    ink, paper = ("#E6EAEE", "#1C232A") if dark else (INK, PAPER)
    hover = {"bgcolor": paper, "bordercolor": RULE, "font": {"color": ink}}
    figure.for_each_trace(lambda ramp: ramp.update(reversescale=dark), selector={"meta": RAMP})
    figure.for_each_annotation(
        lambda note: note.update(text=note.text.replace(*((GREY, PALE) if dark else (PALE, GREY))))
    )
    bar = {"bgcolor": "rgba(0,0,0,0)", "color": PALE if dark else GREY, "activecolor": ink}  # else a grey box
    return figure.update_layout(font={"color": ink}, hoverlabel=hover, modebar=bar)


def log_axis(values: ArrayLike, ends: ArrayLike = (), most: int = 8) -> dict[str, Any]:
    """Return a logarithmic axis with readable ticks: decades, or 1–2–5 where the values span less than two.

    It spans all values and, up to a factor of five beyond them, the ends of their intervals: one very wide
    interval must not flatten all the others.
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
    texts = [number(tick) if 1e-3 <= tick < 1e5 else f"10{superscript(round(math.log10(tick)))}" for tick in ticks]
    # Without the zeros that a tick does not need: 0.100 → 0.1, 2.00 → 2.
    texts = [text.rstrip("0").rstrip(".") if "." in text else text for text in texts]
    return {"type": "log", "range": [low, high], "tickvals": ticks, "ticktext": texts}


def linear_range(values: ArrayLike, ends: ArrayLike, around: float) -> list[float]:
    """Return the range of a linear axis: all values, one mark, and intervals up to as far again."""
    drawn, reaching = (np.asarray(x, dtype=float) for x in (values, ends))
    drawn = np.append(drawn[np.isfinite(drawn)], around)
    low, high = drawn.min(), drawn.max()
    reach = max(high - low, abs(around), 1e-12)
    reaching = np.clip(np.append(reaching[np.isfinite(reaching)], drawn), low - reach, high + reach)
    margin = 0.06 * (reaching.max() - reaching.min())
    return [float(reaching.min() - margin), float(reaching.max() + margin)]
