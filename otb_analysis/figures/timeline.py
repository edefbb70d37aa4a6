"""One run over its steps: a lane of events above panels that share the axis of steps and one cursor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.diagnostics import ChangePoint, Finding, Outlier
from otb_analysis.figures.alarms import MARKS, PANELS, TITLES
from otb_analysis.figures.curves import NAMES, QUANTITIES, Quantity, derived, finite
from otb_analysis.figures.styles import BLUE, GREY, RULE, TEMPLATE, log_axis, number
from otb_analysis.types import Float, Int

FIRST = (
    *("reward_mean", "grad_norm", "entropy_mean", "length_mean", "zero_variance_share"),
    *("mismatch_max", "mismatch_rms"),
)
"""Panels that are shown at once; the others wait behind "more"."""

UNBOUNDED = ("grad_norm", "entropy_mean", "length_mean", "mismatch_max", "mismatch_rms", "mismatch_k3")
"""Positive and without an upper end, so that a logarithmic axis may help."""

CENTRED = 9
"""Steps of the centred mean that is drawn thinly behind the recorded values."""

LANE, NAME, PANEL, GAP = 28, 14, 112, 30
"""Heights in pixels: of the marks of events, of a row of their names, of a panel, and between two."""

ROWS, LETTER, MARGIN = 4, 6, 16
"""Most rows of names, pixels of a letter in them, and those to the right of the panels."""

DENSE = 400
"""From so many steps on markers would hide the line; spikes stay visible in it."""

SPOKEN = ("watch", "alarm")
"""Kinds of events that a detector spoke at; their names come first."""

UNSEEN = {"size": 4, "opacity": 0, "maxdisplayed": 1}
"""Markers of a dense curve: a click selects the nearest of all, and a line without markers cannot be clicked."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a step."""

    step: int
    kind: str  # `watch`, `alarm`, `change` or `outlier`
    column: str  # Column of the panel it belongs to, if that is drawn
    text: str


@dataclass(frozen=True)
class Series:
    """One panel."""

    quantity: Quantity
    step: Int  # Steps that recorded it [K]
    value: Float  # [K]
    mean: Float  # Centred mean over `CENTRED` of them, of those there are at both ends [K]


@dataclass(frozen=True)
class TimelineInfo:
    """The numbers behind the panels of a run."""

    series: tuple[Series, ...]  # Only those that have finite values
    events: tuple[Event, ...]  # In order of steps


def timeline_info(
    steps: pd.DataFrame,
    findings: Sequence[Finding],
    points: Sequence[ChangePoint],
    more: bool = False,
    outliers: Sequence[Outlier] = (),
) -> TimelineInfo:
    """Collect the panels and events of one run; `more` adds every other quantity that was recorded.

    Events are the first firing of each detector at each level, change points, and single-step outliers.
    """
    table: Any = derived(steps)
    ordered = sorted(QUANTITIES, key=lambda q: FIRST.index(q.column) if q.column in FIRST else len(FIRST))
    panels = []
    for quantity in ordered if more else ordered[: len(FIRST)]:
        if (known := finite(table, quantity.column)).any():
            value = table.loc[known, quantity.column].to_numpy(np.float64)
            step = table.loc[known, "step"].to_numpy(np.int64)
            mean: Any = pd.Series(value).rolling(CENTRED, 1, center=True).mean()
            panels.append(Series(quantity, step, value, mean.to_numpy()))
    events = []
    for finding in findings:
        for kind, step in (("watch", finding.watch_step), ("alarm", finding.alarm_step)):
            if step is not None and not (kind == "watch" and step == finding.alarm_step):
                column = finding.evidence[0].column
                events.append(Event(step, kind, PANELS.get(column, column), TITLES[finding.detector]))
    for p in points:
        events.append(Event(p.step, "change", p.column, f"{NAMES[p.column]}: {number(p.before)} → {number(p.after)}"))
    for one in outliers:
        text = f"{NAMES[one.column]} {number(one.value)}, {number(one.multiple)} × the usual"
        events.append(Event(one.step, "outlier", one.column, text))
    return TimelineInfo(tuple(panels), tuple(sorted(events, key=lambda event: event.step)))


def event_names(info: TimelineInfo, width: float) -> list[tuple[Event, int, bool]]:
    """Return the events whose names fit into a lane of some pixels: each with its row, and whether it ends at its mark.

    Names begin at their marks, but for those that would reach beyond the right edge; or all that can end there, where
    more fit so. Alarms and watches come first; a line leads from a name down to its mark.
    """
    return max((_named(info, width, reach) for reach in (width + MARGIN, 0)), key=len)


def _named(info: TimelineInfo, width: float, reach: float) -> list[tuple[Event, int, bool]]:
    every = [int(step) for series in info.series for step in series.step[[0, -1]]] or [0, 1]
    wanted = []
    for event in info.events:
        x, long = (event.step - min(every)) / max(max(every) - min(every), 1) * width, LETTER * len(event.text)
        wanted.append((event, x, (x - long, x) if x + long > reach and x > long else (x, x + long)))
    # From both ends inwards and from the top row down no line crosses the name of the mark before.
    wanted.sort(key=lambda one: (one[0].kind not in SPOKEN, ends := one[2][0] < one[1], -one[1] if ends else one[1]))
    taken: list[list[tuple[float, float]]] = [[] for _ in range(ROWS)]
    named = []
    for event, x, span in wanted:
        clear = [[not any(a < high and low < b for a, b in row) for row in taken] for low, high in (span, (x, x))]
        rows = [row for row in range(ROWS) if clear[0][row] and all(clear[1][:row])]
        if rows:
            named.append((event, rows[-1], span[0] < x))
            taken[rows[-1]].append(span)
            for below in taken[: rows[-1]]:
                below.append((x, x))
    lowest = min((row for _, row, _ in named), default=0)
    return [(event, row - lowest, ends) for event, row, ends in named]


def plot_timeline(
    info: TimelineInfo, step: int | None = None, *, log_y: bool = False, color: str = BLUE, width: float = 560
) -> go.Figure:
    """Draw the lane and the panels over one axis of steps in the run's colour; a rule marks the chosen step.

    One cursor runs through all panels. `log_y` turns the axes of positive, unbounded quantities. Events have those of
    their names that fit where the panels are `width` pixels wide or more; all have them where the mouse rests.
    """
    figure, named = go.Figure(), event_names(info, width)
    lane = LANE + NAME * (1 + max([row for _, row, _ in named], default=-1))
    height = lane + len(info.series) * (PANEL + GAP)
    figure.update_layout(
        template=TEMPLATE, height=height + 60, hovermode="x unified", hoversubplots="axis", showlegend=False,
        margin={"l": 64, "r": MARGIN, "t": 24, "b": 36}, clickmode="event+select", dragmode="zoom",
    )  # fmt: skip
    _lane(figure, info.events, named, lane, 1 - lane / height)
    for index, series in enumerate(info.series):
        end = 1 - (lane + index * (PANEL + GAP) + GAP) / height
        single = [e.step for e in info.events if (e.kind, e.column) == ("outlier", series.quantity.column)]
        figure.add_scatter(
            x=series.step, y=series.value, yaxis=f"y{index + 2}", name=series.quantity.title, mode="lines+markers",
            line={"color": color, "width": 1.5}, marker=UNSEEN if len(series.step) >= DENSE else {"size": 4},
            hovertemplate="%{y:.4g}",
        )  # fmt: skip
        _panel(figure, series, index + 2, (max(0.0, end - PANEL / height), end), log_y, single)
    every = np.concatenate([(), *(series.step for series in info.series)]) if info.series else np.array([0, 1])
    first, last = int(every.min()), int(every.max())
    reach = max(0.5, 0.01 * (last - first))
    figure.update_xaxes(
        anchor=f"y{len(info.series) + 1}" if info.series else "y", range=[first - reach, last + reach],
        title={"text": "step", "standoff": 4},
        showspikes=True, spikemode="across", spikethickness=1, spikedash="solid", spikecolor=RULE,
    )  # fmt: skip
    if step is not None:
        figure.add_shape(
            type="line", x0=step, x1=step, xref="x", y0=0, y1=1, yref="paper", line={"color": BLUE, "width": 2}
        )
    return figure


def _lane(
    figure: go.Figure, events: Sequence[Event], named: list[tuple[Event, int, bool]], height: int, bottom: float
) -> None:
    """One row of marks: watches, alarms, change points and outliers, in the order in which they could be seen."""
    for kind, (name, symbol, color) in MARKS.items():
        marked = [event for event in events if event.kind == kind]
        figure.add_scatter(
            x=[event.step for event in marked], y=[LANE / 2] * len(marked), mode="markers", name=name, yaxis="y",
            marker={"symbol": symbol, "size": 11, "color": color, "line": {"width": 1, "color": "#FFFFFF"}},
            text=[event.text for event in marked], hovertemplate=f"{name}: %{{text}}<extra></extra>",
        )  # fmt: skip
    for event, row, ends in named:
        figure.add_annotation(
            x=event.step, y=LANE / 2, yref="y", text=event.text, font={"size": 11}, xanchor="right" if ends else "left",
            ax=0, ay=-NAME * (row + 1), arrowhead=0, arrowwidth=1, arrowcolor=RULE,
        )  # fmt: skip
    lane = {
        "domain": (bottom, 1.0),
        "range": [0, height],
        "showticklabels": False,
        "showgrid": False,
        "fixedrange": True,
    }
    figure.update_layout(yaxis=lane)
    marks = "first watch △, first alarm ▲, change point ▼, single step ◆"
    _title(figure, "Events", marks if events else "nothing fired, nothing changed its level", 1.0)


def _panel(
    figure: go.Figure, series: Series, number_: int, domain: tuple[float, float], log_y: bool, single: list[int]
) -> None:
    """The centred mean of the recorded values thinly, marks at `single` steps, and the panel's axis and title."""
    quantity, axis = series.quantity, f"y{number_}"
    line = {"color": GREY, "width": 1}
    figure.add_scatter(x=series.step, y=series.mean, yaxis=axis, mode="lines", line=line, hoverinfo="skip")
    if single:
        _, symbol, color = MARKS["outlier"]
        figure.add_scatter(
            x=single, y=series.value[np.searchsorted(series.step, single)], yaxis=axis, mode="markers",
            marker={"symbol": symbol, "size": 9, "color": color}, hoverinfo="skip",
        )  # fmt: skip
    layout: dict[str, Any] = {"domain": domain, "nticks": 4}
    notes = [quantity.line]
    if quantity.column == "grad_norm" and (zero := int((series.value == 0).sum())):  # measured; nothing was learned
        notes.append(f"exactly 0 at {zero:,} of {len(series.value):,} steps")
    if log_y and quantity.column in UNBOUNDED and bool((series.value > 0).all()):
        layout |= log_axis(series.value, most=4)
        notes.append("logarithmic")
    elif quantity.share or quantity.from_zero:
        layout |= {"rangemode": "tozero"}
    figure.update_layout({f"yaxis{number_}": layout})
    _title(figure, quantity.title, " · ".join(notes), domain[1])


def _title(figure: go.Figure, title: str, line: str, top: float) -> None:
    figure.add_annotation(
        text=f"{title} <span style='font-size:11px;color:{GREY}'>{line}</span>", showarrow=False, font={"size": 13},
        xref="paper", x=0, xanchor="left", yref="paper", y=top, yanchor="bottom",
    )  # fmt: skip
