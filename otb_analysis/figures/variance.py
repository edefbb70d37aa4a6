"""Variance over training: every estimator on the same rollouts, never as raw variance alone.

An estimator that takes smaller steps has a smaller variance whether or not it is better. So the four measures always
stand together: batch variance, projection c = ⟨m, ∇J⟩/‖∇J‖², SF = variance/c², and efficiency.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.gradient_table import MEASURES, labels, trace_style
from otb_analysis.figures.intervals import error_bars
from otb_analysis.figures.numbers import number, span
from otb_analysis.figures.scales import linear_range, log_axis, step_axis
from otb_analysis.figures.styles import Style
from otb_analysis.figures.theme import RULE, note_in_panel, panels, place
from otb_analysis.types import Float32

UNDEFINED = "not shown: too few prompts to tell it from noise;<br>measure more prompts or pool more steps"


@dataclass(frozen=True)
class Trace:
    """One estimator in one panel: `step`, `value`, `low`, `high` [S] float32; low and high are NaN without interval."""

    label: str
    style: Style
    step: Float32
    value: Float32
    low: Float32
    high: Float32


@dataclass(frozen=True)
class VarianceInfo:
    """The numbers behind the variance panels."""

    traces: tuple[tuple[Trace, ...], ...]
    n_prompts: tuple[int, int]
    reference: tuple[str, ...]
    hidden: tuple[int, ...]  # Points that a logarithmic axis cannot show (SF or variance not above 0), per measure
    # Points without efficiency, or SF and projection where c is not proved: there the estimate of ‖∇J‖², from pairs of
    # different prompts, is lost in the noise, so that nothing can be measured against it.
    undefined: int
    n_points: int
    # True where the projection of some estimators is proved, and ∇J pooled over the unbiased ones.
    c_known: bool = False

    @property
    def has_intervals(self) -> bool:
        """True when at least one point carries an interval."""
        return any(bool(np.isfinite(t.low).any()) for traces in self.traces for t in traces)


def variance_info(gradients: pd.DataFrame, estimators: Iterable[str] | None = None) -> VarianceInfo:
    """Collect the four measures of every estimator over the measured steps of one run.

    A column `<measure>_low` beside a measure, where there is one, is the lower end of its 95 % interval clustered by
    prompt; `<measure>_high` the upper end.
    """
    table: Any = gradients.sort_values("step")  # pandas' own annotations call every selection a Series or a frame
    if estimators is not None:
        table = table[table["estimator"].isin(list(estimators))]
    groups = [(str(e), str(s), part) for (e, s), part in table.groupby(["estimator", "energy_source"], sort=False)]
    names = labels((e, s) for e, s, _ in groups)
    traces = tuple(
        tuple(_trace(names[e, s], trace_style(e, s), part, m.column) for e, s, part in groups) for m in MEASURES
    )
    hidden = tuple(int((table[m.column] <= 0).sum()) if m.log else 0 for m in MEASURES)
    reference = tuple(sorted(table["reference"].dropna().unique())) if "reference" in table else ()
    undefined = int(table["efficiency"].isna().sum())
    counts = table["n_prompts"].dropna() if "n_prompts" in table else ()
    prompts = (int(min(counts)), int(max(counts))) if len(counts) else (0, 0)
    known = "c_known" in table and bool(table["c_known"].fillna(False).any())
    return VarianceInfo(traces, prompts, reference, hidden, undefined, len(table), known)


def _trace(name: str, style: Style, part: Any, column: str) -> Trace:
    part = part[part[column].notna()]
    missing = pd.Series(np.nan, index=part.index)
    low, high = (part.get(f"{column}_{end}", missing).to_numpy(np.float32) for end in ("low", "high"))
    step, value = part["step"].to_numpy(np.float32), part[column].to_numpy(np.float32)
    return Trace(name, style, step, value, low, high)


def plot_variance(info: VarianceInfo) -> go.Figure:
    """Draw the four measures, each with its intervals; estimators are set slightly apart so that none hides another."""
    figure, named = panels([(m.title, m.line) for m in MEASURES], 2, height=300), set[str]()
    steps = np.unique(_joined([trace.step for traces in info.traces for trace in traces]))
    # All estimators together take up a third of the gap between measured steps.
    third = float(np.diff(steps).min()) / 3 if len(steps) > 1 else 1 / 3
    for index, (measure, traces) in enumerate(zip(MEASURES, info.traces, strict=True)):
        where = place(index, 2)
        for rank, trace in enumerate(traces):
            new = trace.step.size > 0 and trace.label not in named
            named |= {trace.label} if new else set()
            shift = third * (rank - (len(traces) - 1) / 2) / len(traces)
            figure.add_trace(_scatter(trace, shift, measure.log).update(showlegend=new), **where)
        if not any(trace.step.size for trace in traces):
            note_in_panel(figure, UNDEFINED, where)
        values = _joined([trace.value for trace in traces])
        ends = _joined([end for trace in traces for end in (trace.low, trace.high)])
        if measure.log:
            figure.update_yaxes(**log_axis(values, ends), **where)
        elif measure.column == "projection":
            figure.update_yaxes(range=linear_range(values, ends, around=1.0), **where)
            figure.add_hline(y=1, line={"dash": "dot", "width": 1, "color": RULE}, **where)
        else:
            figure.update_yaxes(rangemode="tozero", **where)
        figure.update_xaxes(**step_axis(steps), **where)
    for column in (1, 2):
        figure.update_xaxes(title_text=None, row=1, col=column)
    return figure


def _scatter(trace: Trace, shift: float, log: bool) -> go.Scatter:
    """Return one estimator's points with light bars, so that many do not hide them."""
    red, green, blue = (int(trace.style.color[i : i + 2], 16) for i in (1, 3, 5))
    drawable = np.where(trace.value > 0, trace.value, np.nan).astype(np.float32) if log else trace.value
    texts = [
        f"step {step:.0f}: <b>{number(value)}</b>"
        + (f"<br>95 % interval {span(low, high)}" if np.isfinite(low) else "")
        for step, value, low, high in np.stack([trace.step, trace.value, trace.low, trace.high], -1).tolist()
    ]
    return go.Scatter(
        x=trace.step + np.float32(shift), y=drawable, name=trace.label, legendgroup=trace.label,
        mode="lines+markers", line={"color": trace.style.color, "width": 1.6, "dash": trace.style.dash},
        marker={"symbol": trace.style.symbol, "size": 7}, text=texts,
        error_y=error_bars(trace.value, trace.low, trace.high, width=2, color=f"rgba({red}, {green}, {blue}, 0.45)"),
        hovertemplate="%{text}<extra>" + trace.label + "</extra>",
    )  # fmt: skip


def _joined(arrays: list[Float32]) -> Float32:
    return np.concatenate([np.zeros(0, np.float32), *arrays])
