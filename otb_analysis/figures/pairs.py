"""A and B: both curves over steps with their paired difference, and B over A in gradient noise; 95 % intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.comparison import MEASURES, RATIOS, Row, compared
from otb_analysis.figures.curves import (
    QUANTITIES,
    Curve,
    CurvesInfo,
    Quantity,
    derived,
    finite,
    plain_name,
    traces_of,
)
from otb_analysis.figures.runs import By, Pairing
from otb_analysis.figures.styles import (
    BLUE,
    GREY,
    ORANGE,
    RULE,
    Style,
    columns_of,
    error_bars,
    estimator_style,
    interval_cell,
    labels,
    linear_range,
    log_axis,
    number,
    panels,
    shown_name,
)
from otb_analysis.phases import plural
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    NOTHING,
    Interval,
    cluster_jackknife,
    decide,
    seed_mean,
)
from otb_analysis.types import Bool, Float, Gram, Int, Label, Proved

COMPARED = ("reward_mean", "heldout_reward", "grad_norm", "entropy_mean", "length_mean")
"""Quantities that are compared, where both sides recorded them."""

HELD_OUT = Quantity("Held-out reward", "prompts never trained on", "heldout_reward", rare=True)

BLOCKS = MIN_CLUSTERS
"""Most blocks of steps. Neighbouring steps are alike, so blocks are as long as an interval allows."""

ALIKE = 0.4
"""Correlation of neighbouring blocks from where they are no independent clusters; few of 16 independent ones reach it.
`tests/figures/test_pair_curves.py` measures how often, and how often the intervals hold."""
COLUMNS = 3
SIDES = Style(BLUE), Style(ORANGE, "dash", "square")
"""The looks of A and B where they are no runs and no estimators."""


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
        return differs(self.whole, float(self.ratio))

    @property
    def logarithmic(self) -> bool:
        """True where A and B stand on a logarithmic axis."""
        return self.ratio and not self.quantity.share

    @property
    def at_zero(self) -> Bool:
        """Where A or B is 0 or less [S], which that axis cannot show."""
        return np.minimum(self.a, self.b).min(axis=0) <= (0 if self.logarithmic else -np.inf)

    @property
    def drifts(self) -> bool:
        """True where neighbouring blocks of one pair are alike, so that the interval over blocks is too short."""
        values = np.array([np.nan if one is None else one.estimate for one in self.blocks])
        if self.ratio or len(self.a) > 1 or len(values) < MIN_CLUSTERS or np.ptp(values) == 0:
            return False
        off = values - values.mean()
        return bool(off[1:] @ off[:-1] > ALIKE * (off @ off))


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
    quantities = {quantity.column: quantity for quantity in (*QUANTITIES, HELD_OUT)}
    tables = {run: derived(steps[run]) for run in pairing.runs}
    panels_ = []
    for name in COMPARED:
        recorded = {
            run: table.loc[finite(table, name)].set_index("step").reindex(columns=[name])[name].astype(float)
            for run, table in tables.items()
        }
        shared = reduce(np.intersect1d, (one.index.to_numpy() for one in recorded.values()))
        if not shared.size:
            continue
        a, b = (np.stack([recorded[pair[side]].loc[shared].to_numpy() for pair in pairing.pairs]) for side in (0, 1))
        parts = np.array_split(np.arange(shared.size), min(BLOCKS, shared.size))
        words = f"mean over steps of the difference in {name}"
        blocks = tuple(seed_mean((b - a)[:, part].mean(axis=1), words) for part in parts)
        at = np.array([shared[part].mean() for part in parts], float)
        whole = average_difference(b - a, parts, pairing.by, words)
        panels_.append(PairPanel(quantities[name], shared.astype(np.int64), a, b, at, blocks, whole))
    return tuple(panels_)


def average_difference(difference: Float, parts: Sequence[Int], by: By, words: str) -> Interval | None:
    """Return the mean difference over pairs and steps, from [R, S], with its interval over seeds or blocks of steps."""
    if by == "seed":
        return seed_mean(difference.mean(axis=1), words)
    sums = np.array([[difference[:, part].sum(), difference[:, part].size] for part in parts])
    return cluster_jackknife(sums, lambda mean: mean[..., 0] / mean[..., 1], words, "linear")


ENDS = {"B to A_low": "low", "B to A_high": "high"}
"""How tables call the ends of the interval of `B to A`."""


def pair_table(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return one row per quantity: means of A and B over the shared steps, and the difference or ratio."""
    rows = [
        {
            "quantity": panel.quantity.column, "steps": len(panel.step), "pairs": len(panel.a),
            "A": float(panel.a.mean()), "B": float(panel.b.mean()), "is": "ratio" if panel.ratio else "difference",
            **columns_of("B to A", panel.whole), "differs": panel.differs,
        }
        for panel in panels_
    ]  # fmt: skip
    columns = ["quantity", "steps", "pairs", "A", "B", "is", "B to A", *ENDS, "differs"]
    numbers = dict.fromkeys(("A", "B", "B to A", *ENDS), float)
    return pd.DataFrame(rows, columns=columns).astype(numbers).rename(columns=ENDS)


def pair_display(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return the same as it is read."""
    return pd.DataFrame(
        {
            "quantity": panel.quantity.title, "A": number(float(panel.a.mean())), "B": number(float(panel.b.mean())),
            "B ÷ A" if panel.ratio else "B − A": interval_cell(panel.whole), "steps": str(len(panel.step)),
        }
        for panel in panels_
    )  # fmt: skip


def block_rows(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return the difference or ratio of every quantity in each block of steps, with its interval."""
    rows = [
        {"quantity": panel.quantity.column, "step": float(at), **columns_of("B to A", one)}
        for panel in panels_
        for at, one in zip(panel.at, panel.blocks, strict=True)
    ]
    return pd.DataFrame(rows, columns=["quantity", "step", "B to A", *ENDS]).rename(columns=ENDS)


def curves_rows(panels_: Sequence[PairPanel]) -> pd.DataFrame:
    """Return every value behind the curves as one long table."""
    columns = ["quantity", "pair", "step", "A", "B"]
    parts = [
        pd.DataFrame({"quantity": panel.quantity.column, "pair": pair, "step": panel.step, "A": a, "B": b})
        for panel in panels_
        for pair, (a, b) in enumerate(zip(panel.a, panel.b, strict=True))
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def plot_pair(info: Sequence[PairPanel], a: str, b: str, styles: tuple[Style, Style] = SIDES) -> go.Figure:
    """Draw A and B, and below each quantity its difference or ratio: by block, and over all steps as a band."""
    columns = 2 if len(info) in (2, 4) else min(len(info), COLUMNS)
    # Quantities side by side, below them their differences.
    at = [2 * columns * (index // columns) + index % columns for index in range(len(info))]
    titles = [("", "")] * (2 * columns * math.ceil(len(info) / columns))
    for first, panel in zip(at, info, strict=True):
        titles[first] = panel.quantity.title, panel.quantity.line
        title = f"{panel.quantity.title}, {'B ÷ A' if panel.ratio else 'B − A'}"
        whole = "not known" if panel.whole is None else ratio_words(panel.whole, panel.ratio)
        titles[first + columns] = title, whole
    figure, places = panels(titles, columns, height=215)
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    for index, (first, panel) in enumerate(zip(at, info, strict=True)):
        above, below = places[first], places[first + columns]
        drawn = (np.where(panel.at_zero, np.nan, values) for values in (panel.a, panel.b))
        for values, name, style in zip(drawn, (a, b), styles, strict=True):
            mean, line = values.mean(axis=0), go.Scatter()
            for one in (*values, mean):  # every pair's curve faintly, their mean as the line, which comes last
                curve = Curve(name, panel.step.astype(np.float32), one, mean, *np.full((2, len(mean)), np.nan))
                *faint, line = traces_of(curve, panel.quantity, style)
                for trace in faint:
                    figure.add_trace(trace.update(showlegend=False), **above)
            figure.add_trace(line.update(name=plain_name(name), showlegend=index == 0), **above)
        if panel.quantity.share or panel.quantity.from_zero:
            figure.update_yaxes(rangemode="tozero", **above)
        elif panel.logarithmic:
            figure.update_yaxes(**log_axis(np.stack([panel.a, panel.b]), most=4), **above)
        _difference(figure, panel, below)
        for where in (above, below):
            figure.update_xaxes(visible=True, **where).update_yaxes(visible=True, **where)
        if index + columns >= len(info):  # the lowest of its column
            figure.update_xaxes(title_text="step", title_standoff=6, **below)
    return figure


def _difference(figure: go.Figure, panel: PairPanel, where: Any) -> None:
    values, error_y = error_bars(panel.blocks)
    every = [columns_of("", one).values() for one in (*panel.blocks, panel.whole)]
    ends = np.array([end for _, *two in every for end in two], float)
    figure.add_scatter(
        x=panel.at, y=values, mode="markers", marker={"color": GREY, "size": 5}, showlegend=False,
        text=[interval_cell(one) for one in panel.blocks], error_y=error_y,
        hovertemplate="step %{x:.0f}: %{text}<extra></extra>", **where,
    )  # fmt: skip
    if panel.whole is not None and panel.whole.low is not None:
        figure.add_hrect(
            y0=panel.whole.low, y1=panel.whole.high, fillcolor=GREY, opacity=0.22, line_width=0, layer="below", **where
        )
    figure.add_hline(y=float(panel.ratio), line={"width": 1, "dash": "dot", "color": RULE}, **where)
    if panel.ratio:
        figure.update_yaxes(**log_axis(np.append(values, 1.0), ends, most=4), **where)
    else:
        figure.update_yaxes(range=linear_range(values, ends, 0.0), **where)


FEWEST = 4
"""Blocks of measured steps that two estimators are compared in, where so many steps were measured."""

TITLES = {"efficiency": "efficiency", "sf": "variance at equal progress", "variance": "variance"}


@dataclass(frozen=True)
class NoiseRow:
    """One comparison of gradient noise."""

    what: str
    ratios: tuple[Interval | None, ...]  # In the order of `RATIOS`: B over A; None where undefined
    n_steps: int
    n_prompts: int

    decides: str  # Which of them is judged: `sf` where both step lengths are proved, else `efficiency`
    together: Interval | None = None  # What is judged, where A was compared with more than B: it holds with all others
    looked_at: int = 1  # How many A was compared with

    @property
    def judged(self) -> Interval | None:
        """The ratio that says which of the two is less noisy."""
        if self.looked_at > 1:
            return self.together
        return self.ratios[[name for name, *_ in RATIOS].index(self.decides)]


@dataclass(frozen=True)
class NoiseInfo:
    """All comparisons of gradient noise of A and B, and why one is missing."""

    rows: tuple[NoiseRow, ...]
    notes: tuple[str, ...] = ()


def on_same_rollouts(grams: Sequence[Gram], a: Label, b: Label, known: Proved) -> tuple[list[Row], NoiseRow]:
    """Return the rows of A and B, and the comparison of B over A."""
    rows = compared(grams, decide(grams, a, known, only=[b]), [a, b], known)
    what, ratio = f"{shown_name(b)} ÷ {shown_name(a)}", rows[1]
    decides = ratio.decides or "sf"  # a multiple is judged by nothing
    return rows, NoiseRow(what, ratio.ratios, len(grams), ratio.n_prompts, decides)


def compare_estimators(
    grams: Mapping[int, Gram], a: Label, b: Label, known: Proved = NOTHING
) -> tuple[tuple[PairPanel, ...], NoiseInfo]:
    """Compare two estimators of one run on the same rollouts: over blocks of measured steps, and over all of them.

    A block has at least 16 prompts, and so an interval, where that leaves four blocks; else four blocks are points. A
    measure has a panel where some block shows both values.
    """
    steps = np.array(sorted(step for step, gram in grams.items() if a in gram.labels and b in gram.labels))
    if not steps.size:
        return (), NoiseInfo(())
    prompts = sum(grams[step].n_prompts for step in steps)
    count = min(BLOCKS, len(steps), max(prompts // MIN_CLUSTERS, FEWEST))
    parts = np.array_split(steps, count)
    at = np.array([part.mean() for part in parts])
    blocks = [on_same_rollouts([grams[step] for step in part], a, b, known)[0] for part in parts]
    _, whole = on_same_rollouts([grams[step] for step in steps], a, b, known)
    panels_ = []
    for index, (name, *_) in enumerate(RATIOS):
        values = np.array([[row.values[name] for row in two] for two in blocks], float).T  # None becomes NaN
        shown = np.flatnonzero(~np.isnan(values).any(axis=0))
        if shown.size:
            measure = next(measure for measure in MEASURES if measure.column == name)
            quantity = Quantity(measure.title, measure.line, name, share=not measure.log, rare=True)
            ratios = tuple(blocks[k][1].ratios[index] for k in shown)
            of_a, of_b = values[:, None, shown]
            panel = PairPanel(quantity, at[shown], of_a, of_b, at[shown], ratios, whole.ratios[index], ratio=True)
            panels_.append(panel)
    return tuple(panels_), NoiseInfo((whole,))


MOST = 3
"""Most estimators that are drawn over training."""
READING = {
    "sf": "below 1 is less noisy",
    "efficiency": "above 1 is better",
    "variance": "smaller for shorter steps, too",
}


def over_training(grams: Mapping[int, Gram], against: Label, chosen: Sequence[Label], known: Proved) -> CurvesInfo:
    """Compare estimators with one of them on the same rollouts, by block of measured steps as `compare_estimators`.

    Each curve is estimator ÷ `against` with 95 % intervals over prompts. A ratio that no block can tell has no panel.
    """
    names = labels([against, *chosen])
    ratios = {names[one]: compare_estimators(grams, against, one, known)[0] for one in chosen if one != against}
    quantities, curves = [], []
    for name, title, _ in RATIOS:
        drawn = []
        for estimator, panel in ((e, p) for e, panels_ in ratios.items() for p in panels_ if p.quantity.column == name):
            told = [
                [at, *columns_of("", one).values()]
                for at, one in zip(panel.at, panel.blocks, strict=True)
                if one and one.estimate > 0
            ]
            if told:
                step, value, low, high = np.array(told, np.float32).T
                drawn.append(Curve(estimator, step, value, value, low, high))
        if drawn:
            line = f"÷ {names[against]}: {READING[name]}"
            quantities.append(Quantity(title, line, name, rare=True, ratio=True, interval=True))
            curves.append(tuple(drawn))
    styles = {names[label]: estimator_style(*label) for label in chosen}
    return CurvesInfo(tuple(quantities), tuple(curves), styles, 1)


def noise_table(info: NoiseInfo) -> pd.DataFrame:
    """Return every ratio with its ends, as numbers."""
    rows = []
    for row in info.rows:
        rows.append({"what": row.what, "steps": row.n_steps, "prompts": row.n_prompts})
        for (name, *_), ratio in zip(RATIOS, row.ratios, strict=True):
            rows[-1] |= columns_of(name, ratio)
    return pd.DataFrame(rows)


def noise_display(info: NoiseInfo) -> pd.DataFrame:
    """Return every ratio as it is read: `not distinguishable` stands where its interval holds 1."""
    return pd.DataFrame(
        {
            "B ÷ A": row.what,
            **{TITLES[name]: ratio_words(ratio) for (name, *_), ratio in zip(RATIOS, row.ratios, strict=True)},
            "measured on": f"{plural(row.n_prompts, 'prompt')}, {plural(row.n_steps, 'step')}",
        }
        for row in info.rows
    )


def ratio_words(ratio: Interval | None, is_ratio: bool = True) -> str:
    """Return a ratio or difference with its interval, and whether it is told from no difference."""
    alike = ratio is not None and ratio.low is not None and not differs(ratio, float(is_ratio))
    return interval_cell(ratio) + ", not distinguishable" * alike
