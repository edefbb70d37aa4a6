"""Side by side: every estimator's variance, SF and efficiency as ratios to another's, with paired intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.conclusion import noise_scale_cell
from otb_analysis.figures.gradient_table import against_truth, hidden_columns, is_defined, labels, trace_style
from otb_analysis.figures.numbers import interval_cell, number, span
from otb_analysis.figures.scales import log_axis
from otb_analysis.figures.styles import Style
from otb_analysis.figures.theme import RULE, TITLE, TOP, note_in_panel, panels, place
from otb_analysis.figures.variance import UNDEFINED
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    NOTHING,
    GradientStatistics,
    Interval,
    paired_ratios,
    pooled_statistics,
)
from otb_analysis.types import Gram, Label, Proved

RATIOS = (
    ("efficiency", "Efficiency ratio", "right of 1 is better"),
    ("sf", "SF ratio", "left of 1 is better"),
    ("variance", "Variance ratio", "smaller for shorter steps, too"),
)
VALUES = ("efficiency", "sf", "variance", "projection", "relative_bias", "rollout_equivalents")
OWN = ("efficiency", "relative_bias", "rollout_equivalents")
"""Values of an estimator itself that are shown with their intervals."""
ORDERED = "Most efficient first."
NOT_DISTINGUISHABLE = (
    "Not distinguishable: no interval leaves out 1, so nothing is told from {}. The order says nothing."
)
_ONE = Interval(1.0, None, None, 0, "the estimator over itself")


@dataclass(frozen=True)
class Row:
    """One estimator of the comparison."""

    label: str
    style: Style
    # Interval of each ratio in the order of `RATIOS`; None where the ratio is undefined.
    ratios: tuple[Interval | None, ...]
    # Its own `VALUES`; None where undefined or not to be shown.
    values: dict[str, float | None]
    # Intervals of `OWN` and of the noise scale; None where undefined or not to be shown.
    intervals: dict[str, Interval | None]
    c_known: bool  # True where its projection is proved, so that its SF is a variance
    n_prompts: int  # Independent prompts it was measured on


@dataclass(frozen=True)
class ComparisonInfo:
    """The numbers behind the forest plot."""

    # Best efficiency first, or best SF where that is lost in the noise, undefined ones last; as measured where nothing
    # is told apart, since a ranking would be of noise.
    rows: tuple[Row, ...]
    against: str
    n_steps: int
    n_prompts: int
    estimand: str  # What points and intervals are, in words

    @property
    def order(self) -> str:
        """What the order of the rows says."""
        return ORDERED if any(_differs(row) for row in self.rows) else NOT_DISTINGUISHABLE.format(self.against)


def comparison_info(
    grams: Sequence[Gram],
    against: str = "rloo",
    energy_source: str = "both",
    estimators: Iterable[str] | None = None,
    known: Proved = NOTHING,
) -> ComparisonInfo:
    """Compare all estimators with one on the same rollouts, pooled over the steps that are passed.

    ratio = measure(estimator)/measure(against), sums over steps before anything is divided; the interval deletes one
    prompt at a time (paired, on the logarithm), from 16 prompts up.

    `against` is compared with its first energy source. `energy_source` limits the rows to estimators that read no
    energy or this kind; `both` shows all.

    Raises:
        InputError: The estimator was not measured in any of the steps.
    """
    measured = dict.fromkeys(label for gram in grams for label in gram.labels)
    shown = [label for label in measured if energy_source == "both" or label[1] in ("none", energy_source)]
    if estimators is not None:
        shown = [label for label in shown if label[0] in {against, *estimators}]
    base = next((label for label in shown if label[0] == against), None)
    if base is None:
        raise InputError(f"against is {against!r}, which was not measured; {nearest(against, [m for m, _ in shown])}")
    rows, name = compared(grams, base, shown, known), labels(shown)[base]
    if any(_differs(row) for row in rows):
        rows.sort(key=_rank)
    n_prompts = next(row.n_prompts for row in rows if row.label == name)
    return ComparisonInfo(tuple(rows), name, len(grams), n_prompts, _estimand(len(grams), n_prompts))


def compared(grams: Sequence[Gram], base: Label, shown: Sequence[Label], known: Proved) -> list[Row]:
    """Return a row for each of `shown`, all of which were measured, as ratios to `base`."""
    by_label = {(s.estimator, s.energy_source): s for s in pooled_statistics(grams, known=known, only=shown)}
    pairs = {(r.estimator, r.energy_source): r for r in paired_ratios(grams, against=base, known=known, only=shown)}
    rows, names = [], labels(shown)
    for label in shown:
        pair, statistics = pairs.get(label), by_label[label]
        lost = {name for one in (statistics, by_label[base]) if not is_defined(one) for name in against_truth(one)}
        ratios = tuple(
            None if name in lost else _ONE if label == base else told(getattr(pair, name, None)) for name, *_ in RATIOS
        )
        rows.append(_row(names[label], statistics, ratios))
    return rows


def told(ratio: Interval | None) -> Interval | None:
    """Return a ratio but where prompts suffice for an interval and noise leaves none: a point would be chance."""
    return None if ratio is None or (ratio.low is None and ratio.n_clusters >= MIN_CLUSTERS) else ratio


def _row(name: str, statistics: GradientStatistics, ratios: tuple[Interval | None, ...]) -> Row:
    hidden = hidden_columns(statistics)
    hidden += ("rollout_equivalents",) if "sf" in hidden else ()
    values = {of: None if of in hidden else getattr(statistics, of) for of in VALUES}
    intervals = {of: None if of in hidden else statistics.intervals[of] for of in (*OWN, "noise_scale")}
    style = trace_style(statistics.estimator, statistics.energy_source)
    return Row(name, style, ratios, values, intervals, statistics.c_known, statistics.n_clusters)


def _differs(row: Row) -> bool:
    """Tell whether an interval of the efficiency ratio, or where there is none of the SF ratio, leaves out 1."""
    ratio = row.ratios[0] or row.ratios[1]
    return ratio is not None and ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high


def _rank(row: Row) -> tuple[bool, float]:
    """Best efficiency first; where that is lost in the noise for some, best SF, and undefined ones last."""
    efficiency, sf, _ = row.ratios
    if efficiency is not None:
        return False, 1 / efficiency.estimate if efficiency.estimate > 0 else np.inf
    return sf is None, sf.estimate if sf else np.inf


def display_table(info: ComparisonInfo) -> pd.DataFrame:
    """Return the comparison as it is read: three significant digits, intervals in brackets behind their ratio."""
    records = []
    for row in info.rows:
        record: dict[str, object] = {"estimator": row.label}
        own = row.values | {name: interval_cell(row.intervals[name]) for name in OWN}
        record |= {_TITLES.get(name, name): value for name, value in own.items()}
        record["projection is"] = "proved" if row.c_known else "estimated"
        record["noise scale"] = noise_scale_cell(row.intervals["noise_scale"])
        for (name, *_), ratio in zip(RATIOS, row.ratios, strict=True):
            record[f"{_TITLES[name]} ÷ {info.against}"] = interval_cell(ratio)
        records.append(record)
    return pd.DataFrame(records)


_TITLES = {
    "efficiency": "efficiency", "sf": "SF", "variance": "variance", "relative_bias": "bias",
    "rollout_equivalents": "rollout equivalents",
}  # fmt: skip


def _estimand(n_steps: int, n_prompts: int) -> str:
    where = "one measured step" if n_steps == 1 else f"{n_steps} measured steps"
    prompts = f"{n_prompts} prompt{'s' * (n_prompts != 1)}"
    start = f"Ratio of the two expectations over {prompts} of {where}, on the same rollouts"
    if n_prompts < MIN_CLUSTERS:
        return f"{start}; below {MIN_CLUSTERS} prompts these are points without intervals."
    return f"{start}, with 95 % intervals clustered by prompt (paired jackknife on the log-ratio)."


def comparison_table(info: ComparisonInfo) -> pd.DataFrame:
    """Return the comparison as a table, one row per estimator: its own values, then each ratio with its interval."""
    records = []
    for row in info.rows:
        record: dict[str, object] = {"estimator": row.label, **row.values, "c_known": row.c_known}
        intervals = {f"{name}_ratio": ratio for (name, *_), ratio in zip(RATIOS, row.ratios, strict=True)}
        for name, interval in {**row.intervals, **intervals}.items():
            ends = (None, None, None) if interval is None else (interval.estimate, interval.low, interval.high)
            record |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
        records.append(record)
    table = pd.DataFrame(records)
    return table.astype({name: float for name in table if name not in ("estimator", "c_known")})


def plot_comparison(info: ComparisonInfo) -> go.Figure:
    """Draw the forest: one line per estimator, one panel per ratio, logarithmic axes, a rule at 1.

    Open marks have no interval. An arrow at the edge says that an interval goes on beyond it.
    """
    count = len(info.rows)
    height = 27 * count + 130
    figure = panels([(title, line) for _, title, line in RATIOS], 3, height=height - TOP, shared_x=False)
    heights = {row.label: count - 1 - k for k, row in enumerate(info.rows)}
    for index, (name, *_) in enumerate(RATIOS):
        where = place(index, 3)
        drawn = [(row, ratio) for row in info.rows if (ratio := row.ratios[index]) is not None and ratio.estimate > 0]
        ends = [end for _, ratio in drawn for end in (ratio.low, ratio.high) if end is not None]
        axis = log_axis([1.0, *(ratio.estimate for _, ratio in drawn)], ends, most=4)
        for row, ratio in drawn:
            marker = {"color": row.style.color, "line": {"color": row.style.color, "width": 1.6}}
            symbol = row.style.symbol.removesuffix("-open") + ("-open" if ratio.low is None else "")
            said = "<br>no interval" if ratio.low is None else f"<br>95 % interval {span(ratio.low, ratio.high)}"
            figure.add_scatter(
                x=np.array([ratio.estimate], np.float32), y=[heights[row.label]], mode="markers", showlegend=False,
                marker=marker | {"symbol": symbol, "size": 9}, error_x=_bar(ratio), **where,
                hovertemplate=f"{row.label}<br>{name} ratio <b>{number(ratio.estimate)}</b>{said}<extra></extra>",
            )  # fmt: skip
            for end, symbol in _beyond(ratio, axis["range"]):
                figure.add_scatter(
                    x=[10**end], y=[heights[row.label]], mode="markers", showlegend=False, hoverinfo="skip",
                    marker=marker | {"symbol": symbol, "size": 8}, cliponaxis=False, **where,
                )  # fmt: skip
        figure.add_vline(x=1, line={"width": 1, "dash": "dot", "color": RULE}, **where)
        figure.update_xaxes(**axis, **where)
        figure.update_xaxes(title_text=f"÷ {info.against}", title_standoff=6, **where)
        if not drawn:
            note_in_panel(figure, UNDEFINED.replace(";", ";<br>"), where)
        # Numbers, not categories: a browser leaves out the name of a row without a point.
        names = {"tickvals": list(heights.values()), "ticktext": list(heights), "range": [-0.6, count - 0.4]}
        figure.update_yaxes(**names, showticklabels=index == 0, zeroline=False, **where)
    return figure.update_layout(margin={"l": 150, "t": TITLE + 6}, height=height)


def _beyond(ratio: Interval, shown: Sequence[float]) -> list[tuple[float, str]]:
    """Return where an interval leaves the range that is shown, as log₁₀ and with the arrow that says so."""
    if ratio.low is None or ratio.high is None:
        return []
    low, high = shown
    left = [(low, "triangle-left")] if ratio.low <= 0 or np.log10(ratio.low) < low else []
    return left + ([(high, "triangle-right")] if np.log10(ratio.high) > high else [])


def _bar(ratio: Interval) -> dict[str, object]:
    if ratio.low is None or ratio.high is None:
        return {"type": "data", "array": [0], "visible": False}
    ends = {"array": [ratio.high - ratio.estimate], "arrayminus": [ratio.estimate - ratio.low]}
    return {"type": "data", "symmetric": False, "thickness": 1.5, "width": 0, **ends}
