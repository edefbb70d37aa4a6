"""The four measures of gradient estimators over training, never as raw variance alone.

An estimator that takes smaller steps has a smaller variance whether or not it is better. So the four measures always
stand together: batch variance, projection c = ⟨m, ∇J⟩/‖∇J‖², SF = variance/c², and efficiency.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.numbers import columns_of, error_bars, number, span
from otb_analysis.figures.styles import (
    RULE,
    Style,
    estimator_style,
    linear_range,
    log_axis,
    note_in_panel,
    panels,
    step_axis,
)
from otb_analysis.statistics import NOTHING, pooled_statistics
from otb_analysis.types import Float32, Gram, Label, Proved

MAX_WINDOW = 10
"""Most measured steps that one point pools."""

MAX_POINTS = 40
"""Most measured steps at which estimators are drawn over time."""


@dataclass(frozen=True)
class Measure:
    """One way to compare gradient estimators: a column, how its panel is titled, what it is in one line."""

    column: str
    title: str
    line: str
    formula: str
    log: bool = False


MEASURES = (
    Measure(
        "efficiency", "Efficiency", "share of the update along the true gradient",
        "⟨m, ∇J⟩² / (‖∇J‖² · (‖m‖² + variance)): share of an update of P prompts along ∇J, the true gradient.",
    ),
    Measure(
        "sf", "Variance at equal progress", "variance ÷ c², norm²; lower is better",
        "Variance at equal progress: SF = batch variance ÷ projection²; the variance itself where c is 1.", log=True,
    ),
    Measure(
        "variance", "Batch variance", "norm², smaller for shorter steps, too",
        "Σ_p ‖ḡ_p − ḡ‖² / (P(P − 1)) over the P measured prompts, ḡ_p the mean gradient of prompt p's group.", log=True,
    ),
    Measure(
        "projection", "Step length c", "along the true gradient; 1 is as long as it",
        "⟨m, ∇J⟩ / ‖∇J‖², m the estimator's mean gradient, ∇J from unbiased ones on other prompts; 1 where proved.",
    ),
)  # fmt: skip


NOISE_SCALE = (
    "Noise scale",
    "V / ‖m‖² in prompts, V the variance of one prompt's group gradient: at this many prompts the noise of an update "
    "is as large as its signal. An unbiased estimator with P prompts has efficiency P / (P + noise scale). It is not "
    "shown by itself where fewer prompts were measured than a third of the noise scale.",
)
"""Name of the noise scale, and what it is in one line."""


def labels(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return how estimators are called side by side: `otb · proxy` where several energy sources meet, else `otb`."""
    pairs = list(pairs)
    several = len({source for _, source in pairs if source != "none"}) > 1
    return {(e, s): f"{e} · {s}" if several and s != "none" else e for e, s in pairs}


def evenly(steps: Sequence[int], most: int = MAX_POINTS) -> list[int]:
    """Return at most so many of the steps, evenly spread, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int)
    return [steps[place] for place in places]


def statistics_table(
    grams: Mapping[int, Gram],
    window: int = 1,
    known: Proved = NOTHING,
    at: Collection[int] | None = None,
    only: Collection[Label] | None = None,
) -> pd.DataFrame:
    """Return the four measures of every estimator at measured steps, with intervals clustered by prompt.

    Row (step, estimator) pools the last `window` measured steps: sums over steps first, then ratios. Where these hold
    fewer than 16 prompts there is a point and no interval; where ‖∇J‖² is lost in the noise there is not even a point
    of what is measured against it, nor of the efficiency where fewer prompts were measured than a third of the noise
    scale.

    Args:
        at: Only these measured steps; None means all.
        only: The estimators that get rows; None means all.
    """
    records, steps, columns = [], sorted(grams), [measure.column for measure in MEASURES]
    for last in (i for i, step in enumerate(steps) if at is None or step in at):
        pooled = [grams[s] for s in steps[max(0, last + 1 - window) : last + 1]]
        for statistics in pooled_statistics(pooled, known=known, only=only):
            record = {"step": steps[last], **statistics.as_row(), "n_clusters": statistics.n_clusters}
            shown = {name: statistics.shown(name) for name in (*columns, "relative_bias")}
            for name in columns:
                record |= columns_of(name, shown[name]) | {name: record[name]}
            records.append(record | {name: None for name, interval in shown.items() if interval is None})
    table = pd.DataFrame(records)
    numeric = [name for column in columns for name in columns_of(column, None)]
    return table.astype(dict.fromkeys(numeric, float)) if len(table) else table


def default_window(grams: Mapping[int, Gram], known: Proved) -> int:
    """Return the fewest measured steps to pool with which most points have an efficiency; at most `MAX_WINDOW`.

    One, if no point has one with any of these.
    """
    shares = {}
    for window in (1, 2, 3, 5, MAX_WINDOW):
        table = statistics_table(grams, window, known, at=evenly(list(grams), 4))
        shares[window] = 1.0 if table.empty else table["efficiency"].notna().to_numpy().mean()
        if shares[window] > 2 / 3:
            return window
    return MAX_WINDOW if any(shares.values()) else 1


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
    hidden: int  # Points that a logarithmic axis cannot show: SF or variance not above 0
    # Points without efficiency, or SF and projection where c is not proved: there the estimate of ‖∇J‖², from pairs of
    # different prompts, is lost in the noise, so that nothing can be measured against it.
    undefined: int
    n_points: int
    # True where the projection of some estimators is proved, and ∇J pooled over the unbiased ones.
    c_known: bool
    has_intervals: bool  # True when at least one point carries an interval


def variance_info(gradients: pd.DataFrame) -> VarianceInfo:
    """Collect the four measures of every estimator over the measured steps of one run.

    A column `<measure>_low` beside a measure, where there is one, is the lower end of its 95 % interval clustered by
    prompt; `<measure>_high` the upper end.
    """
    table: Any = gradients.sort_values("step")  # pandas' own annotations call every selection a Series or a frame
    parts = {(str(e), str(s)): part for (e, s), part in table.groupby(["estimator", "energy_source"], sort=False)}
    names, traces = labels(parts), []
    for measure in MEASURES:
        traces.append([])
        columns = ["step", *columns_of(measure.column, None)]
        for label, part in parts.items():
            numbers = part[part[measure.column].notna()].reindex(columns=columns).to_numpy(np.float32, na_value=np.nan)
            traces[-1].append(Trace(names[label], estimator_style(*label), *numbers.T))
    counts = table.get("n_prompts", pd.Series(dtype=float)).dropna()
    known = "c_known" in table and bool(table["c_known"].fillna(False).any())
    return VarianceInfo(
        tuple(map(tuple, traces)), (int(counts.min()), int(counts.max())) if len(counts) else (0, 0),
        tuple(sorted(table["reference"].dropna().unique())) if "reference" in table else (),
        sum(int((table[m.column] <= 0).sum()) for m in MEASURES if m.log), int(table["efficiency"].isna().sum()),
        len(table), known, any(bool(np.isfinite(trace.low).any()) for of in traces for trace in of),
    )  # fmt: skip


def plot_variance(info: VarianceInfo) -> go.Figure:
    """Draw the four measures, each with its intervals; estimators are set slightly apart so that none hides another."""
    (figure, places), named = panels([(m.title, m.line) for m in MEASURES], 2, height=300), set[str]()
    steps = np.unique(np.concatenate([(), *(trace.step for traces in info.traces for trace in traces)]))
    # All estimators together take up a third of the gap between measured steps.
    third = float(np.diff(steps).min()) / 3 if len(steps) > 1 else 1 / 3
    for where, measure, traces in zip(places, MEASURES, info.traces, strict=True):
        for rank, trace in enumerate(traces):
            style, rows = trace.style, np.stack([trace.step, trace.value, trace.low, trace.high], -1).tolist()
            texts = [
                f"step {step:.0f}: <b>{number(value)}</b>"
                + (f"<br>95 % interval {span(low, high)}" if np.isfinite(low) else "")
                for step, value, low, high in rows
            ]
            red, green, blue = (int(style.color[i : i + 2], 16) for i in (1, 3, 5))
            light = f"rgba({red}, {green}, {blue}, 0.45)"  # so that many bars do not hide the points
            new = trace.step.size > 0 and trace.label not in named
            named |= {trace.label} if new else set()
            figure.add_scatter(
                x=trace.step + np.float32(third * (rank - (len(traces) - 1) / 2) / len(traces)),
                y=np.where(trace.value > 0, trace.value, np.float32(np.nan)) if measure.log else trace.value,
                name=trace.label, legendgroup=trace.label, showlegend=new, mode="lines+markers", text=texts,
                line={"color": style.color, "width": 1.6, "dash": style.dash},
                marker={"symbol": style.symbol, "size": 7},
                error_y=error_bars(trace.value, trace.low, trace.high, width=2, color=light),
                hovertemplate="%{text}<extra>" + trace.label + "</extra>", **where,
            )  # fmt: skip
        if not any(trace.step.size for trace in traces):
            note_in_panel(figure, UNDEFINED, where)
        values = np.concatenate([(), *(trace.value for trace in traces)])
        ends = np.concatenate([(), *(end for trace in traces for end in (trace.low, trace.high))])
        if measure.log:
            figure.update_yaxes(**log_axis(values, ends), **where)
        elif measure.column == "projection":
            figure.update_yaxes(range=linear_range(values, ends, around=1.0), **where)
            figure.add_hline(y=1, line={"dash": "dot", "width": 1, "color": RULE}, **where)
        else:
            figure.update_yaxes(rangemode="tozero", **where)
        figure.update_xaxes(**step_axis(steps), **where)
    return figure.update_xaxes(title_text=None, row=1)
