"""Training curves: any per-step quantities of any runs as small multiples with one shared axis of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.numbers import bracketed
from otb_analysis.figures.scales import log_axis
from otb_analysis.figures.styles import Style, run_styles
from otb_analysis.figures.theme import note_in_panel, panels, place
from otb_analysis.types import Bool, Float32


@dataclass(frozen=True)
class Quantity:
    """One panel of training curves."""

    title: str
    line: str  # Unit and reading, below the title
    column: str
    from_zero: bool = False  # A linear axis starts at 0, so that heights compare as ratios
    share: bool = False  # A share: as `from_zero`, and where it never changes the axis shows 0 to 1
    rare: bool = False  # Measured rarely: points are drawn, and nothing is smoothed
    smoothed: bool = True  # Takes part in the running mean; False for what is a running mean already
    # The columns `<column>_low` and `<column>_high` are the ends of its interval, drawn as a band.
    interval: bool = False


@dataclass(frozen=True)
class Curve:
    """One run in one panel: `step` [S], the recorded `value` [S] and its running mean `smooth` [S], all float32.

    `low` and `high` [S] are the ends of the value's interval, NaN where none was given.
    """

    run: str
    step: Float32
    value: Float32
    smooth: Float32
    low: Float32
    high: Float32


@dataclass(frozen=True)
class CurvesInfo:
    """The numbers behind small multiples of training curves."""

    quantities: tuple[Quantity, ...]
    curves: tuple[tuple[Curve, ...], ...]
    estimators: Mapping[str, str]
    window: int


def running_mean(value: Float32, window: int) -> Float32:
    """Return the trailing mean of the last `window` entries, of those there are at the start.

    m_k = mean(v_{max(0, k−window+1)}, …, v_k); window 1 returns the values.
    """
    total = np.concatenate([[0.0], np.cumsum(value, dtype=np.float64)])
    end = np.arange(1, len(value) + 1)
    start = np.maximum(0, end - window)
    return ((total[end] - total[start]) / (end - start)).astype(np.float32)


def curves_info(
    steps: Mapping[str, pd.DataFrame], quantities: Sequence[Quantity], estimators: Mapping[str, str], window: int = 1
) -> CurvesInfo:
    """Collect what each run recorded of each quantity; steps without a finite value are left out, never drawn as 0."""
    curves = tuple(
        tuple(_curve(run, table, one, window) for run, table in steps.items() if finite(table, one.column).any())
        for one in quantities
    )
    return CurvesInfo(tuple(quantities), curves, {run: estimators.get(run, "") for run in steps}, window)


def finite(table: pd.DataFrame, column: str) -> Bool:
    """Tell at which steps a number was recorded that can be drawn and averaged; False everywhere without the column."""
    if column not in table:
        return np.zeros(len(table), dtype=bool)
    return np.isfinite(table[column].to_numpy(np.float64, na_value=np.nan))


def _curve(run: str, table: pd.DataFrame, quantity: Quantity, window: int) -> Curve:
    column = quantity.column
    recorded = table.loc[finite(table, column)].sort_values("step")
    value = recorded[column].to_numpy(np.float32)
    smooth = running_mean(value, window if quantity.smoothed and not quantity.rare else 1)
    ends = recorded.reindex(columns=[f"{column}_low", f"{column}_high"]).to_numpy(np.float32, na_value=np.nan)
    low, high = ends.T if quantity.interval else np.full_like(ends.T, np.nan)
    return Curve(run, recorded["step"].to_numpy(np.float32), value, smooth, low, high)


def curves_table(info: CurvesInfo) -> pd.DataFrame:
    """Return the curves of small multiples as one long table: value, running mean and ends of its interval by step."""
    columns = ["run", "quantity", "step", "value", "smooth", "low", "high"]
    parts = [
        pd.DataFrame(
            dict(zip(columns, (c.run, q.column, c.step.astype(int), c.value, c.smooth, c.low, c.high), strict=True))
        )
        for q, curves in zip(info.quantities, info.curves, strict=True)
        for c in curves
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def plot_curves(info: CurvesInfo, *, columns: int = 3, height: int = 250, log_y: bool = False) -> go.Figure:
    """Draw the panels; the running mean is the line, the recorded values stand faintly behind it."""
    figure = panels([(q.title, q.line) for q in info.quantities], columns, height=height)
    styles = run_styles(info.estimators)
    named: set[str] = set()
    for index, (quantity, curves) in enumerate(zip(info.quantities, info.curves, strict=True)):
        where = place(index, columns)
        for curve in curves:
            if np.isfinite(curve.low + curve.high).any():
                figure.add_trace(_band(curve, styles[curve.run]), **where)
            for trace in _scatters(curve, quantity, styles[curve.run]):
                figure.add_trace(trace.update(showlegend=trace.showlegend and curve.run not in named), **where)
            named.add(curve.run)
        if not curves:
            note_in_panel(figure, "no finite number was recorded", where)
        if log_y:
            figure.update_yaxes(**log_axis(np.concatenate([c.value for c in curves]) if curves else []), **where)
        elif curves and quantity.share and np.ptp(np.concatenate([curve.value for curve in curves])) == 0:
            figure.update_yaxes(range=[0.0, 1.03], **where)  # an axis around one value would show more than there is
        elif quantity.from_zero or quantity.share:
            figure.update_yaxes(rangemode="tozero", **where)
        if index + columns >= len(info.quantities):  # the lowest of its column
            figure.update_xaxes(title_text="step", title_standoff=6, **where)
    return figure


def _scatters(curve: Curve, quantity: Quantity, style: Style) -> list[Any]:
    """The recorded values faintly, where they differ from the line; then the line."""
    recorded = go.Scatter(
        x=curve.step, y=curve.value, mode="lines", line={"color": style.color, "width": 1}, opacity=0.25,
        hoverinfo="skip", showlegend=False, legendgroup=curve.run,
    )  # fmt: skip
    rows = zip(curve.value, curve.low, curve.high, strict=True)
    line = go.Scatter(
        x=curve.step, y=curve.smooth, name=curve.run, legendgroup=curve.run, showlegend=True,
        mode="lines+markers" if quantity.rare else "lines",
        line={"color": style.color, "width": 2, "dash": style.dash}, marker={"symbol": style.symbol, "size": 7},
        text=[bracketed(float(value), float(low), float(high)) for value, low, high in rows],
        hovertemplate="step %{x}: <b>%{text}</b><extra>" + plain_name(curve.run) + "</extra>",
    )  # fmt: skip
    return [line] if np.array_equal(curve.value, curve.smooth) else [recorded, line]


def _band(curve: Curve, style: Style) -> go.Scatter:
    """The intervals of a curve as one outline, of the steps that have one."""
    known = np.isfinite(curve.low + curve.high)
    step, low, high = curve.step[known], curve.low[known], curve.high[known]
    return go.Scatter(
        x=np.concatenate([step, step[::-1]]), y=np.concatenate([high, low[::-1]]), mode="lines", fill="toself",
        fillcolor=style.color, line={"color": style.color, "width": 1}, opacity=0.2,
        hoverinfo="skip", showlegend=False, legendgroup=curve.run,
    )  # fmt: skip


def plain_name(text: str) -> str:
    """Keep Plotly from reading markup or a template in a run's name."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")
