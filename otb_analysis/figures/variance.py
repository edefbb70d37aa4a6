"""Variance over training: every estimator on the same rollouts, never as raw variance alone.

An estimator that takes smaller steps has a smaller variance whether or not it is better. So the four measures always
stand together: batch variance, projection c = ⟨m, ∇J⟩/‖∇J‖², SF = variance/c², and efficiency.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from otb_analysis.figures.theme import (
    RULE,
    Style,
    estimator_style,
    log_axis,
    note_in_panel,
    number,
    panels,
    place,
    step_axis,
)
from otb_analysis.statistics import Interval, pooled_statistics
from otb_analysis.types import Gram

Array = NDArray[np.float32]
UNDEFINED = "undefined: ‖∇J‖² is lost in the noise;<br>measure more prompts or pool more steps"


@dataclass(frozen=True)
class Measure:
    """One way to compare gradient estimators.

    Attributes:
        column: Column of the gradients table.
        title: Panel title.
        line: Unit and reading, below the title.
        formula: What it is, in one line.
        log: Drawn on a logarithmic axis.
        better: -1 when smaller is better, 1 when larger is, 0 when neither by itself.
    """

    column: str
    title: str
    line: str
    formula: str
    log: bool
    better: int


MEASURES = (
    Measure(
        "efficiency",
        "Efficiency",
        "share of 1, higher is better",
        "⟨m, ∇J⟩² / (‖∇J‖² · (‖m‖² + variance)): share of this update of P prompts that points along ∇J.",
        False,
        1,
    ),
    Measure(
        "sf",
        "SF = variance / c²",
        "norm², lower is better",
        "Variance at equal progress: batch variance ÷ projection².",
        True,
        -1,
    ),
    Measure(
        "variance",
        "Batch variance",
        "norm², read it with c",
        "Σ_p ‖ḡ_p − ḡ‖² / (P(P − 1)) over the P measured prompts, ḡ_p the mean gradient of prompt p's group.",
        True,
        0,
    ),
    Measure(
        "projection",
        "Projection c",
        "1 is the step of ∇J",
        "⟨m, ∇J⟩ / ‖∇J‖², m the estimator's mean gradient, ∇J from the reference estimator on other prompts.",
        False,
        0,
    ),
)


@dataclass(frozen=True)
class Trace:
    """One estimator in one panel: `step`, `value`, `low`, `high` [S] float32; low and high are NaN without interval."""

    label: str
    style: Style
    step: Array
    value: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class VarianceInfo:
    """The numbers behind the variance panels.

    Attributes:
        traces: One tuple of traces per entry of `MEASURES`.
        n_prompts: Fewest and most measured prompts over the steps.
        n_rollouts: Fewest and most measured rollouts over the steps.
        reference: Estimators that stood for ∇J.
        hidden: Points that a logarithmic axis cannot show (SF or variance not above 0), per measure.
        undefined: Points without SF, projection and efficiency: there the estimate of ‖∇J‖², from pairs of different
            prompts, is not above 0, so that nothing can be measured against it.
        n_points: Points in all, defined or not.
    """

    traces: tuple[tuple[Trace, ...], ...]
    n_prompts: tuple[int, int]
    n_rollouts: tuple[int, int]
    reference: tuple[str, ...]
    hidden: tuple[int, ...]
    undefined: int
    n_points: int

    @property
    def has_intervals(self) -> bool:
        """True when at least one point carries an interval."""
        return any(bool(np.isfinite(t.low).any()) for traces in self.traces for t in traces)


def labels(found: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return how estimators are called side by side: `otb · proxy` where several energy sources meet, else `otb`.

    Args:
        found: (estimator, energy source) of each.
    """
    pairs = list(found)
    several = len({source for _, source in pairs if source != "none"}) > 1
    return {(e, s): f"{e} · {s}" if several and s != "none" else e for e, s in pairs}


def trace_style(estimator: str, energy_source: str) -> Style:
    """Return the estimator's style; anything but exact energies is drawn dotted.

    Args:
        estimator: Name in the estimator dictionary.
        energy_source: Where its energies came from.
    """
    style = estimator_style(estimator)
    if energy_source in ("none", "exact"):
        return style
    return Style(style.color, "dot" if style.dash == "solid" else "dashdot", style.symbol)


def statistics_table(grams: Mapping[int, Gram], window: int = 1) -> pd.DataFrame:
    """Return the four measures of every estimator at every measured step, with intervals clustered by prompt.

    Row (step, estimator) pools the last `window` measured steps: sums over steps first, then ratios. Where these hold
    fewer than 16 prompts there is a point and no interval.

    Args:
        grams: Gram matrix of each measured step.
        window: Measured steps pooled into one point.
    """
    records = []
    steps = sorted(grams)
    for last in range(len(steps)):
        pooled = [grams[s] for s in steps[max(0, last + 1 - window) : last + 1]]
        for found in pooled_statistics(pooled):
            record: dict[str, object] = {"step": steps[last], **found.as_row(), "n_clusters": found.n_clusters}
            for measure in MEASURES:
                interval: Interval | None = getattr(found, f"{measure.column}_interval")
                record[f"{measure.column}_low"] = None if interval is None else interval.low
                record[f"{measure.column}_high"] = None if interval is None else interval.high
            records.append(record)
    table = pd.DataFrame(records)
    numeric = [f"{m.column}{end}" for m in MEASURES for end in ("", "_low", "_high")]
    return table.astype(dict.fromkeys(numeric, float)) if len(table) else table


def variance_info(gradients: pd.DataFrame, estimators: Iterable[str] | None = None) -> VarianceInfo:
    """Collect the four measures of every estimator over the measured steps of one run.

    A column `<measure>_low` beside a measure, where there is one, is the lower end of its 95 % interval clustered by
    prompt; `<measure>_high` the upper end.

    Args:
        gradients: From `statistics_table`, or the gradients table of a run without Gram matrices.
        estimators: Which estimators to show; all when left out.
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
    undefined = int(table["projection"].isna().sum())
    prompts, rollouts = _span(table, "n_prompts"), _span(table, "n_rollouts")
    return VarianceInfo(traces, prompts, rollouts, reference, hidden, undefined, len(table))


def _trace(name: str, style: Style, part: Any, column: str) -> Trace:
    part = part[part[column].notna()]
    missing = pd.Series(np.nan, index=part.index)
    low, high = (part.get(f"{column}_{end}", missing).to_numpy(np.float32) for end in ("low", "high"))
    step, value = part["step"].to_numpy(np.float32), part[column].to_numpy(np.float32)
    return Trace(name, style, step, value, low, high)


def _span(table: Any, column: str) -> tuple[int, int]:
    if column not in table or table[column].isna().all():
        return (0, 0)
    return (int(table[column].min()), int(table[column].max()))


def plot_variance(info: VarianceInfo) -> go.Figure:
    """Draw the four measures, each with its intervals; estimators are set slightly apart so that none hides another.

    Args:
        info: From `variance_info`.
    """
    figure = panels([(m.title, m.line) for m in MEASURES], 2, height=300)
    steps = np.unique(_joined([trace.step for traces in info.traces for trace in traces]))
    named: set[str] = set()
    for index, (measure, traces) in enumerate(zip(MEASURES, info.traces, strict=True)):
        where = place(index, 2)
        for rank, trace in enumerate(traces):
            shift = _dodge(steps, rank, len(traces))
            bars = np.isfinite(trace.low) & np.isfinite(trace.high)
            figure.add_scatter(
                x=trace.step + shift, y=_drawable(trace.value, measure.log), name=trace.label, legendgroup=trace.label,
                showlegend=trace.label not in named and trace.step.size > 0, mode="lines+markers",
                line={"color": trace.style.color, "width": 1.6, "dash": trace.style.dash},
                marker={"symbol": trace.style.symbol, "size": 7},
                error_y={
                    "type": "data", "symmetric": False, "thickness": 1, "width": 2, "visible": bool(bars.any()),
                    "array": np.where(bars, np.maximum(trace.high - trace.value, 0), 0).astype(np.float32),
                    "arrayminus": np.where(bars, np.maximum(trace.value - trace.low, 0), 0).astype(np.float32),
                },
                text=[_hover(*row) for row in zip(trace.step, trace.value, trace.low, trace.high, strict=True)],
                hovertemplate="%{text}<extra>" + trace.label + "</extra>", **where,
            )  # fmt: skip
            named |= {trace.label} if trace.step.size else set()
        if not any(trace.step.size for trace in traces):
            note_in_panel(figure, UNDEFINED, where)
        if measure.log:
            values, ends = [t.value for t in traces], [end for t in traces for end in (t.low, t.high)]
            figure.update_yaxes(**log_axis(_joined(values), _joined(ends)), **where)
        if measure.column == "projection":
            figure.add_hline(y=1, line={"dash": "dot", "width": 1, "color": RULE}, **where)
        if measure.column == "efficiency":
            figure.update_yaxes(rangemode="tozero", **where)
        figure.update_xaxes(**step_axis(steps), **where)
    for column in (1, 2):
        figure.update_xaxes(title_text=None, row=1, col=column)
    return figure


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)


def _drawable(value: Array, log: bool) -> Array:
    return np.where(value > 0, value, np.nan).astype(np.float32) if log else value


def _hover(step: float, value: float, low: float, high: float) -> str:
    interval = f"<br>95 % interval {number(float(low))} to {number(float(high))}" if np.isfinite(low) else ""
    return f"step {step:.0f}: <b>{number(float(value))}</b>{interval}"


def _dodge(steps: Array, rank: int, count: int) -> float:
    """Offset along the step axis: all estimators together take up a third of the gap between measured steps."""
    gap = float(np.diff(steps).min()) if len(steps) > 1 else 1.0
    return gap / 3 * (rank - (count - 1) / 2) / max(1, count)
