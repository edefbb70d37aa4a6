"""A and B over steps: both curves, and below them the paired difference or ratio with its 95 % intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.collapse import QUANTITIES, derived
from otb_analysis.figures.curves import Quantity, finite, plain_name
from otb_analysis.figures.intervals import ends_of, error_bars
from otb_analysis.figures.numbers import bracketed, interval_cell, number
from otb_analysis.figures.pairing import By, Pairing
from otb_analysis.figures.scales import linear_range, log_axis
from otb_analysis.figures.styles import BLUE, GREY, ORANGE
from otb_analysis.figures.theme import RULE, panels, place
from otb_analysis.statistics import MIN_CLUSTERS, Interval, cluster_jackknife, seed_mean
from otb_analysis.types import Float, Int

COMPARED = ("reward_mean", "heldout_reward", "grad_norm", "entropy_mean", "length_mean")
"""Quantities that are compared, where both sides recorded them."""

HELD_OUT = Quantity("Held-out reward", "prompts never trained on", "heldout_reward", rare=True)

BLOCKS = MIN_CLUSTERS
"""Most blocks of steps. Neighbouring steps are alike, so blocks are as long as an interval allows."""

ALIKE = 0.4
"""Correlation of neighbouring blocks from where they are no independent clusters; few of 16 independent ones reach it.
`tests/figures/test_pair_curves.py` measures how often, and how often the intervals hold."""

COLORS = (BLUE, ORANGE)
COLUMNS = 3


@dataclass(frozen=True)
class PairPanel:
    """One quantity of A and of B, on the steps that all R pairs of runs have."""

    quantity: Quantity
    step: Int  # Shared steps [S]
    a: Float  # [R, S]
    b: Float  # [R, S]
    at: Float  # Middle step of each block [K]
    blocks: tuple[Interval | None, ...]  # B − A, or B ÷ A, in each block; without ends where one pair has no interval
    whole: Interval | None  # Over all shared steps
    ratio: bool = False

    @property
    def differs(self) -> bool:
        """True where the interval over all shared steps leaves out no difference."""
        return differs(self.whole, 1.0 if self.ratio else 0.0)

    @property
    def drifts(self) -> bool:
        """True where neighbouring blocks of one pair are alike, so that the interval over blocks is too short."""
        values = np.array([np.nan if one is None else one.estimate for one in self.blocks])
        if self.ratio or len(self.a) > 1 or len(values) < MIN_CLUSTERS or np.ptp(values) == 0:
            return False
        off = values - values.mean()
        return bool(off[1:] @ off[:-1] > ALIKE * (off @ off))


def drift_note(panels_: Sequence["PairPanel"]) -> str:
    """Say for which quantities the interval over blocks of steps is too short; empty where for none."""
    drifting = [panel.quantity.title.lower() for panel in panels_ if panel.drifts]
    if not drifting:
        return ""
    which = ", ".join(drifting)
    return (
        f"The difference drifts over training in {which}: neighbouring blocks are alike, so these intervals are too "
        "short. Read the blocks, and compare several seeds."
    )


def differs(interval: Interval | None, null: float) -> bool:
    """Tell whether an interval leaves out a value; False without an interval."""
    if interval is None or interval.low is None or interval.high is None:
        return False
    return not interval.low <= null <= interval.high


def compare_curves(steps: Mapping[str, pd.DataFrame], pairing: Pairing) -> tuple[PairPanel, ...]:
    """Compare what two sides recorded, quantity by quantity, on shared steps whose numbers are finite.

    The difference is B − A at the same step, averaged over steps. By seed, the interval is Student's over the pairs'
    averages; within a block likewise. One pair has no second seed: its interval deletes one block of steps at a time.
    """
    known = {quantity.column: quantity for quantity in (*QUANTITIES, HELD_OUT)}
    tables = {run: derived(steps[run]) for run in pairing.runs}
    found = (_panel(tables, pairing, known[column]) for column in COMPARED)
    return tuple(panel for panel in found if panel is not None)


def _panel(tables: Mapping[str, pd.DataFrame], pairing: Pairing, quantity: Quantity) -> PairPanel | None:
    name = quantity.column
    if any(name not in tables[run] for run in pairing.runs):
        return None
    kept = {run: tables[run].loc[finite(tables[run], name)] for run in pairing.runs}
    recorded = {run: table.set_index("step")[name].astype(float) for run, table in kept.items()}
    shared = reduce(np.intersect1d, (one.index.to_numpy() for one in recorded.values()))
    if not shared.size:
        return None
    a, b = (np.stack([recorded[pair[side]].loc[shared].to_numpy() for pair in pairing.pairs]) for side in (0, 1))
    parts = [part for part in np.array_split(np.arange(shared.size), min(BLOCKS, shared.size)) if part.size]
    words = f"mean over steps of the difference in {name}"
    blocks = tuple(seed_mean((b - a)[:, part].mean(axis=1), words) for part in parts)
    at = np.array([shared[part].mean() for part in parts], float)
    whole = average_difference(b - a, parts, pairing.by, words)
    return PairPanel(quantity, shared.astype(np.int64), a, b, at, blocks, whole)


def average_difference(difference: Float, parts: Sequence[Int], by: By, words: str) -> Interval | None:
    """Return the mean difference over pairs and steps, from [R, S], with its interval over seeds or blocks of steps."""
    if by == "seed":
        return seed_mean(difference.mean(axis=1), words)
    sums = np.array([[difference[:, part].sum(), difference[:, part].size] for part in parts])
    return cluster_jackknife(sums, lambda mean: mean[..., 0] / mean[..., 1], words, "linear")


def pair_table(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return one row per quantity: means of A and B over the shared steps, and the difference or ratio."""
    rows = []
    for panel in panels_:
        row = {"quantity": panel.quantity.column, "steps": len(panel.step), "pairs": len(panel.a)}
        row |= {"A": float(panel.a.mean()), "B": float(panel.b.mean()), "is": "ratio" if panel.ratio else "difference"}
        rows.append(row | _ends(panel.whole) | {"differs": panel.differs})
    columns = ["quantity", "steps", "pairs", "A", "B", "is", "B to A", "low", "high", "differs"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(("A", "B", "B to A", "low", "high"), float))


def pair_display(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return the same as it is read."""
    return pd.DataFrame(
        {
            "quantity": panel.quantity.title,
            "A": number(float(panel.a.mean())),
            "B": number(float(panel.b.mean())),
            "B ÷ A" if panel.ratio else "B − A": interval_cell(panel.whole),
            "steps": str(len(panel.step)),
        }
        for panel in panels_
    )


def block_rows(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return the difference or ratio of every quantity in each block of steps, with its interval."""
    rows = [
        {"quantity": panel.quantity.column, "step": float(at), **_ends(one)}
        for panel in panels_
        for at, one in zip(panel.at, panel.blocks, strict=True)
    ]
    return pd.DataFrame(rows, columns=["quantity", "step", "B to A", "low", "high"])


def _ends(one: Interval | None) -> dict[str, float | None]:
    ends = (None, None, None) if one is None else (one.estimate, one.low, one.high)
    return dict(zip(("B to A", "low", "high"), ends, strict=True))


def curves_rows(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return every value behind the curves as one long table."""
    parts = [
        pd.DataFrame({
            "quantity": panel.quantity.column, "pair": pair, "step": panel.step, "A": panel.a[pair], "B": panel.b[pair],
        })
        for panel in panels_ for pair in range(len(panel.a))
    ]  # fmt: skip
    return (
        pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["quantity", "pair", "step", "A", "B"])
    )


def plot_pair(info: Sequence[PairPanel], a: str, b: str) -> go.Figure:
    """Draw A and B, and below each quantity its difference or ratio: by block, and over all steps as a band."""
    columns = 2 if len(info) in (2, 4) else min(len(info), COLUMNS)
    titles, places = list[tuple[str, str]](), list[int]()
    for first in range(0, len(info), columns):
        row = info[first : first + columns]
        empty = [("", "")] * (columns - len(row))
        places += range(len(titles), len(titles) + len(row))
        titles += [(p.quantity.title, p.quantity.line) for p in row] + empty
        titles += [("Ratio B ÷ A" if p.ratio else "Difference B − A", _said(p)) for p in row] + empty
    figure = panels(titles, columns, height=215)
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    for index, (panel, at) in enumerate(zip(info, places, strict=True)):
        above, below = place(at, columns), place(at + columns, columns)
        for values, name, color, dash in ((panel.a, a, COLORS[0], "solid"), (panel.b, b, COLORS[1], "dash")):
            _side(figure, panel, values, (plain_name(name), color, dash), above, panel is info[0])
        _difference(figure, panel, below)
        for where in (above, below):
            figure.update_xaxes(visible=True, **where).update_yaxes(visible=True, **where)
        if index + columns >= len(info):  # the lowest of its column
            figure.update_xaxes(title_text="step", title_standoff=6, **below)
    return figure


def _said(panel: PairPanel) -> str:
    if panel.whole is None:
        return "not known"
    words = "" if panel.whole.low is None or panel.differs else ", not distinguishable"
    return bracketed(panel.whole.estimate, panel.whole.low, panel.whole.high) + words


def _side(figure: go.Figure, panel: PairPanel, values: Float, look: Any, where: Any, legend: bool) -> None:
    """Every pair's curve faintly where there are several, their mean as the line."""
    name, color, dash = look
    for one in values if len(values) > 1 else ():
        figure.add_scatter(
            x=panel.step, y=one, mode="lines", line={"color": color, "width": 1}, opacity=0.3, hoverinfo="skip",
            showlegend=False, legendgroup=name, **where,
        )  # fmt: skip
    figure.add_scatter(
        x=panel.step, y=values.mean(axis=0), name=name, legendgroup=name, showlegend=legend,
        mode="lines+markers" if panel.quantity.rare or panel.ratio else "lines",
        line={"color": color, "width": 1.8, "dash": dash}, marker={"size": 5},
        hovertemplate="step %{x}: <b>%{y:.4g}</b><extra>" + name + "</extra>", **where,
    )  # fmt: skip
    if panel.quantity.share or panel.quantity.from_zero:
        figure.update_yaxes(rangemode="tozero", **where)
    elif panel.ratio:
        figure.update_yaxes(**log_axis(np.stack([panel.a, panel.b]), most=4), **where)


def _difference(figure: go.Figure, panel: PairPanel, where: Any) -> None:
    values, low, high = ends_of(panel.blocks)
    figure.add_scatter(
        x=panel.at, y=values, mode="markers", marker={"color": GREY, "size": 5}, showlegend=False,
        text=[interval_cell(one) for one in panel.blocks], error_y=error_bars(values, low, high),
        hovertemplate="step %{x:.0f}: %{text}<extra></extra>", **where,
    )  # fmt: skip
    if panel.whole is not None and panel.whole.low is not None:
        figure.add_hrect(
            y0=panel.whole.low, y1=panel.whole.high, fillcolor=GREY, opacity=0.22, line_width=0, layer="below", **where
        )
    null = 1.0 if panel.ratio else 0.0
    figure.add_hline(y=null, line={"width": 1, "dash": "dot", "color": RULE}, **where)
    ends = np.concatenate([low, high, *ends_of([panel.whole])[1:]])
    if panel.ratio:
        figure.update_yaxes(**log_axis(np.append(values, null), ends, most=4), **where)
    else:
        figure.update_yaxes(range=linear_range(values, ends, null), **where)
