"""Side by side, on the same rollouts: every estimator over another one, and each in groups of other sizes.

An estimator that takes smaller steps has a smaller variance whether or not it is better. So the four measures always
stand together: batch variance, projection c = ⟨m, ∇J⟩/‖∇J‖², SF = variance/c², and efficiency.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.diagnostics.planner import Planner
from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.styles import (
    GREY,
    MISSING,
    RULE,
    TEMPLATE,
    TOP,
    Style,
    beside_one,
    columns_of,
    error_bars,
    estimator_style,
    interval_cell,
    labels,
    log_axis,
    noise_scale_cell,
    number,
    panels,
    shown_name,
)
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    NOTHING,
    Decision,
    Interval,
    decide,
    is_informative,
    paired_ratios,
    pooled_statistics,
)
from otb_analysis.types import Gram, Label, Proved


@dataclass(frozen=True)
class Measure:
    """One way to compare gradient estimators: a column, how its panel is titled, what it is in one line."""

    column: str
    title: str
    line: str
    log: bool = False


MEASURES = (
    Measure("efficiency", "Efficiency", "share of the update along the true gradient"),
    Measure("sf", "Variance at equal progress", "variance ÷ c², norm²; lower is better", log=True),
    Measure("variance", "Batch variance", "norm², smaller for shorter steps, too", log=True),
    Measure("projection", "Step length c", "along the true gradient; 1 is as long as it"),
)

RATIOS = (
    ("sf", "Variance at equal progress", "left is less noisy"),
    ("efficiency", "Efficiency", "along the true gradient; right is better"),
    ("variance", "Batch variance", "smaller for shorter steps, too"),
)
DECIDES = {"variance": "sf", "efficiency": "efficiency"}
"""Which ratio decides, by how a pair is compared."""
VALUES = ("efficiency", "sf", "variance", "projection", "relative_bias", "rollout_equivalents")
TWO = ".2f"
"""Digits of ratios and shares."""
OWN = ("efficiency", "relative_bias", "rollout_equivalents")
"""Values of an estimator itself that are shown with their intervals."""
SILENT: dict[str, Any] = {"hoverinfo": "skip"}
_ONE = Interval(1.0, 1.0, 1.0, 0, "the same update, up to the length of its step")


@dataclass(frozen=True)
class Row:
    """One estimator of the comparison."""

    key: Label
    label: str
    style: Style
    ratios: tuple[Interval | None, ...]  # 95 % each by itself, in the order of `RATIOS`; None where noise hides it
    decides: str  # Which of them is judged; empty for the estimator that all are compared with, and for multiples
    together: Interval | None  # Of that one, 95 % with all that were looked at; None without an interval
    told: str  # better, worse, or empty where that interval holds 1
    values: dict[str, float | None]  # Its own `VALUES`; None where undefined or not to be shown
    intervals: dict[str, Interval | None]  # Of `OWN` and of the noise scale; likewise
    c_known: bool  # True where its projection is proved, so that its SF is a variance
    n_prompts: int  # Independent prompts it was measured on


@dataclass(frozen=True)
class ComparisonInfo:
    """The numbers behind the forest plot."""

    # The estimator that all are compared with first; then those with a proved projection, the least noisy first, then
    # the others, the most efficient first. As measured where nothing is told apart: a ranking would be of noise.
    rows: tuple[Row, ...]
    against: str
    n_steps: int
    n_prompts: int
    judged: bool  # False where no interval of what is judged can be shown
    sampled: bool  # False where another sampler drew the tokens, so that nothing is judged
    together: str  # What the corrected intervals are called

    @property
    def shown(self) -> list[int]:
        """Which of `RATIOS` say anything: more than the 1 of what is compared with, and of its multiples."""
        return [k for k, _ in enumerate(RATIOS) if any(row.ratios[k] not in (None, _ONE) for row in self.rows)]

    @property
    def marked(self) -> list[Row]:
        """The rows that have a mark in the figure; all where none has."""
        rows = [row for row in self.rows if any(one is not None and one.estimate > 0 for one in row.ratios)]
        return rows or list(self.rows)


def comparison_info(
    grams: Sequence[Gram],
    against: str | Label = "rloo",
    energy_source: str = "both",
    estimators: Iterable[str] | None = None,
    known: Proved = NOTHING,
    decision: Decision | None = None,
) -> ComparisonInfo:
    """Compare all estimators with one on the same rollouts, pooled over the steps that are passed.

    ratio = measure(estimator)/measure(against), sums over steps before anything is divided; the interval deletes one
    prompt at a time (paired, on the logarithm), from 16 prompts up. What is claimed of a row follows from `decide`,
    which counts all estimators that were measured, whichever rows are shown.

    Args:
        against: A name, which is compared with its first energy source, or a label.
        energy_source: Limits the rows to estimators that read no energy or this kind; `both` shows all.
        estimators: Limits them to these names.
        decision: What was decided against that one; by default it is worked out here.

    Raises:
        InputError: The estimator was not measured in any of the steps.
    """
    measured = list(dict.fromkeys(label for gram in grams for label in gram.labels))
    base = against if isinstance(against, tuple) else next((one for one in measured if one[0] == against), None)
    if base not in measured or base is None:
        name = against if isinstance(against, str) else against[0]
        raise InputError(f"against is {name!r}, which was not measured; {nearest(name, [m for m, _ in measured])}")
    sources = {"none", energy_source} if energy_source != "both" else {source for _, source in measured}
    names = {name for name, _ in measured} if estimators is None else {base[0], *estimators}
    shown = [one for one in measured if one == base or (one[0] in names and one[1] in sources)]
    decision = decision or decide(grams, base, known)
    rows = compared(grams, decision, shown, known)
    if any(row.told for row in rows):
        # What all are compared with, then proved ones by SF, then the others by efficiency, undefined ones last.
        rank = dict[Label, tuple[int, float]]()
        for row in rows:
            sf, efficiency, _ = row.ratios
            if sf is _ONE:
                rank[row.key] = 0, float(row.key != base)
            elif row.decides == "sf":
                rank[row.key] = 1, sf.estimate if sf else np.inf
            else:
                rank[row.key] = 2, -efficiency.estimate if efficiency else np.inf
        rows.sort(key=lambda row: rank[row.key])
    return ComparisonInfo(
        tuple(rows), labels(shown)[base], len(grams), decision.n_prompts, bool(decision.tested),
        decision.cause != "another sampler", f"all {decision.looked_at} together",
    )  # fmt: skip


def compared(grams: Sequence[Gram], decision: Decision, shown: Sequence[Label], known: Proved) -> list[Row]:
    """Return a row for each of `shown`, all of which were measured, as ratios to what the decision compares with."""
    base, sampled = decision.against, decision.cause != "another sampler"
    by_label = {(s.estimator, s.energy_source): s for s in pooled_statistics(grams, known=known, only=shown)}
    pairs = {(r.estimator, r.energy_source): r for r in paired_ratios(grams, against=base, known=known, only=shown)}
    names, rows = labels(shown), []
    for label in shown:
        judged = decision.comparison_of(label) if label != base else None
        statistics, pair = by_label[label], pairs.get(label)
        # What is measured along ∇J is known where ∇J is: both efficiencies then, and the SF of estimated step lengths.
        along = sampled and statistics.signal and by_label[base].signal
        may_be_shown = {"variance": True, "sf": along or (pair is not None and pair.c_known), "efficiency": along}
        same = decision.alike[label].of == base  # the same update, up to the length of its step
        ratios: list[Interval | None] = []
        for name, *_ in RATIOS:
            ratio: Interval | None = getattr(pair, name, None) if may_be_shown[name] else None
            # Where prompts suffice for an interval and noise leaves none, a point would be chance.
            chance = ratio is None or (ratio.n_clusters >= MIN_CLUSTERS and not is_informative(ratio))
            one = label == base or (same and name != "variance")
            ratios.append(_ONE if one else None if chance else ratio)
        bounds = {of: statistics.shown(of) if sampled or of == "variance" else None for of in (*VALUES, "noise_scale")}
        told = [word for word in ("better", "worse") if judged is not None and getattr(judged, word)]
        decides, together = ("", None) if judged is None else (DECIDES[judged.by], judged.together)
        values = {of: getattr(statistics, of) if bounds[of] else None for of in VALUES}
        intervals = {of: bounds[of] for of in (*OWN, "noise_scale")}
        rows.append(
            Row(
                label, names[label], estimator_style(*label), tuple(ratios), decides, together, "".join(told), values,
                intervals, statistics.c_known, statistics.n_clusters,
            )
        )  # fmt: skip
    return rows


def display_table(info: ComparisonInfo, beside: Decision | None = None, every: bool = True) -> pd.DataFrame:
    """Return the comparison as it is read at every door, intervals in brackets; a dash where noise hides a number.

    Args:
        beside: A decision against another one, whose intervals of all together stand below the ratio that decides.
        every: Add what compares with other batches only: bias, efficiency and noise scale by themselves, variances.
    """
    records = []
    for row in info.rows:
        (sf, efficiency, variance), scale, c = row.ratios, row.intervals["noise_scale"], row.values["projection"]
        together = MISSING
        if row.together is not None:
            together = interval_cell(row.together, beside_one(row.together) if row.told else TWO)
            together = f"{'SF' if row.decides == 'sf' else 'eff.'} {together}{'*' * bool(row.told)}"
        record = {
            "estimator": row.key[0], "energy": row.key[1], f"SF ÷ {info.against}": interval_cell(sf, TWO),
            f"efficiency ÷ {info.against}": interval_cell(efficiency, TWO), info.together: together,
        }  # fmt: skip
        if beside is not None:
            one = beside.comparison_of(row.key)
            for by, title in (("variance", "SF"), ("efficiency", "efficiency")):
                name = f"{title} ÷ {shown_name(beside.against)}, all {beside.looked_at}"
                record[name] = interval_cell(one.together if one and one.by == by else None, TWO)
        record["equiv."] = interval_cell(row.intervals["rollout_equivalents"], ".0f")
        record["c"] = MISSING if c is None else f"{c:.4g} proved" if row.c_known else f"≈{c:.2f}"
        if every:
            record |= {
                "bias": interval_cell(row.intervals["relative_bias"], ".2g"),
                "efficiency": interval_cell(row.intervals["efficiency"], TWO),
                "noise scale": MISSING if scale is None else noise_scale_cell(scale),
                f"variance ÷ {info.against}": interval_cell(variance, TWO),
                "variance": number(row.values["variance"]),
            }
        records.append(record)
    table: Any = pd.DataFrame(records)
    titles = enumerate(("SF", "efficiency", "variance"))
    empty = {f"{title} ÷ {info.against}" for k, title in titles if k not in info.shown}
    return table[[name for name in table if name not in empty and set(table[name]) != {MISSING}]]


def comparison_table(info: ComparisonInfo) -> pd.DataFrame:
    """Return the comparison as a table, one row per estimator: each ratio with its intervals, then its own values."""
    records = []
    for row in info.rows:
        record: dict[str, object] = {
            "estimator": row.key[0], "energy_source": row.key[1], "c_known": row.c_known, "decides": row.decides,
            "told": row.told,
        }  # fmt: skip
        intervals = {f"{name}_ratio": ratio for (name, *_), ratio in zip(RATIOS, row.ratios, strict=True)}
        for name, interval in {**intervals, "together": row.together, **row.intervals}.items():
            record |= columns_of(name, interval)
        records.append(record | {name: value for name, value in row.values.items() if name not in OWN})
    table = pd.DataFrame(records)
    words = ("estimator", "energy_source", "c_known", "decides", "told")
    return table.astype({name: float for name in table if name not in words})


def plot_comparison(info: ComparisonInfo) -> go.Figure:
    """Draw the forest: one line per estimator, one panel per ratio, logarithmic axes, a rule at 1.

    A thick bar is the interval of one look; a thin one, of the ratio that is judged, holds with all others. Open marks
    have no interval. An arrow at the edge says that an interval goes on beyond it. A ratio that says nothing has no
    panel; the words say so.
    """
    count, shown = len(info.marked), info.shown or [0]
    height = 27 * count + 160
    titles = [RATIOS[index][1:] for index in shown]
    figure, places = panels(titles, len(shown), height=height - TOP, shared_x=False)
    heights = {row.label: count - 1 - k for k, row in enumerate(info.marked)}
    for where, index in zip(places, shown, strict=True):
        name, title, _ = RATIOS[index]
        drawn = [(row, ratio) for row in info.marked if (ratio := row.ratios[index]) is not None and ratio.estimate > 0]
        wide = {row.label: row.together for row, _ in drawn if row.decides == name}
        every = [one for one in (*(ratio for _, ratio in drawn), *wide.values()) if one is not None]
        ends = [end for ratio in every for end in (ratio.low, ratio.high) if end is not None]
        axis = log_axis([1.0, *(ratio.estimate for _, ratio in drawn)], ends, most=4)
        rows = [row for row, _ in drawn]
        y, colors = np.array([heights[row.label] for row in rows]), [row.style.color for row in rows]
        marker = {"color": colors, "size": 9, "line": {"color": colors, "width": 1.6}}
        place = {"mode": "markers", "showlegend": False, **where}
        # A trace takes a browser as long as a hundred points, so each kind of mark is one.
        for thickness, ratios in (1, [wide.get(row.label) for row in rows]), (4, [ratio for _, ratio in drawn]):
            x, error_x = error_bars(ratios, thickness=thickness, color=GREY)
            if not (known := ~np.isnan(x)).any():
                continue
            bars = {name: values[known] for name, values in error_x.items() if name.startswith("array")}
            look = {"error_x": error_x | bars, "marker": {"size": 1, "color": GREY}} | SILENT
            figure.add_scatter(x=x[known].astype(np.float32), y=y[known], **look, **place)
        hover = [_hover_text(info, title, row, ratio, wide.get(row.label)) for row, ratio in drawn]
        symbols = [row.style.symbol.removesuffix("-open") + "-open" * (ratio.low is None) for row, ratio in drawn]
        figure.add_scatter(
            x=np.array([ratio.estimate for _, ratio in drawn], np.float32), y=y, marker=marker | {"symbol": symbols},
            text=hover, hovertemplate="%{text}<extra></extra>", **place,
        )  # fmt: skip
        left, right = (10**limit for limit in axis["range"])
        longest = [(row, wide.get(row.label) or ratio) for row, ratio in drawn]
        known = [(row, one.low, one.high) for row, one in longest if one.low is not None and one.high is not None]
        beyond = [(row, left, "triangle-left") for row, low, _ in known if low < left]
        beyond += [(row, right, "triangle-right") for row, _, high in known if high > right]
        if beyond:
            arrows = {
                "symbol": [arrow for *_, arrow in beyond],
                "color": [row.style.color for row, *_ in beyond],
                "size": 8,
            }
            at = {"x": [x for _, x, _ in beyond], "y": [heights[row.label] for row, *_ in beyond]}
            figure.add_scatter(**at, marker=arrows, cliponaxis=False, **SILENT, **place)
        figure.add_vline(x=1, line={"width": 1, "dash": "dot", "color": RULE}, **where)
        figure.update_xaxes(**axis, title_text=f"÷ {info.against}", title_standoff=6, **where)
        # Numbers, not categories: a browser leaves out the name of a row without a point.
        names = {"tickvals": list(heights.values()), "ticktext": list(heights), "range": [-0.6, count - 0.4]}
        names["ticklabelstandoff"] = 8  # an arrow of what goes on beyond the left edge stands there
        figure.update_yaxes(**names, showticklabels=where["col"] == 1, zeroline=False, **where)
    for thickness, words in ((4, "one look"), (1, info.together)) if info.judged else ():
        line = {"color": GREY, "width": thickness}
        figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=words, showlegend=True, row=1, col=1)
    return figure.update_layout(margin={"l": 150, "t": TOP}, height=height)


def _hover_text(info: ComparisonInfo, title: str, row: Row, ratio: Interval, together: Interval | None) -> str:
    """Return what is said of one ratio where the mouse rests."""
    ends = "no interval" if ratio.low is None else f"one look {number(ratio.low)} to {number(ratio.high)}"
    if together is not None:
        ends += f"<br>{info.together} {number(together.low)} to {number(together.high)}"
    return f"{row.label}<br>{title} ÷ {info.against} <b>{number(ratio.estimate)}</b><br>{ends}"


def plot_planner(planner: Planner) -> go.Figure:
    """Draw efficiency against group size, one curve per estimator; stars are best.

    Where no efficiency may be shown it draws cost against the recorded size with its interval, as far as that is told.
    """
    figure = go.Figure(layout=go.Layout(template=TEMPLATE, height=360))
    costs = all(cell.efficiency is None for cell in planner.cells)
    drawn = [(cell.estimator, cell.energy_source) for cell in planner.cells if not costs or cell.cost is not None]
    one = Interval(1.0, 1.0, 1.0, 0, "over itself")
    for label, name in labels(drawn).items():
        curve = [cell for cell in planner.cells if (cell.estimator, cell.energy_source) == label]
        style = estimator_style(*label)
        symbol = style.symbol.removesuffix("-open")
        bars = [one if cell.size == planner.recorded_size else cell.cost for cell in curve]
        cost, error_y = error_bars(bars, width=2, visible=costs)
        figure.add_scatter(
            x=[cell.size for cell in curve], y=cost if costs else [cell.efficiency for cell in curve],
            error_y=error_y, name=name, mode="lines+markers", showlegend=True,
            line={"color": style.color, "dash": style.dash, "width": 1.6},
            marker={
                "symbol": ["star" if cell.best else symbol for cell in curve],
                "size": [14 if cell.best else 8 for cell in curve],
            },
            hovertemplate="groups of %{x}: <b>%{y:.3g}</b><extra>" + name + "</extra>",
        )  # fmt: skip
    sizes = sorted({cell.size for cell in planner.cells})
    figure.update_xaxes(title="group size N", type="log", tickvals=sizes, ticktext=[str(size) for size in sizes])
    title = f"cost, groups of {planner.recorded_size} = 1" if costs else "efficiency"
    return figure.update_yaxes(title=title, rangemode="tozero")


def planner_table(planner: Planner) -> pd.DataFrame:
    """Return one row per estimator and size: efficiency, and cost against the recorded size with its interval."""
    return pd.DataFrame(
        {
            "estimator": c.estimator, "energy_source": c.energy_source, "group_size": c.size,
            "efficiency": c.efficiency, "shown_best": c.best, **columns_of("cost", c.cost),
        }
        for c in planner.cells
    )  # fmt: skip


def planner_display(planner: Planner) -> pd.DataFrame:
    """Return efficiency and cost as they are read, by estimator and size: * is the best of its curve.

    No row has neither number.
    """
    table = pd.DataFrame(
        {
            "estimator": c.estimator + ("" if c.energy_source == "none" else f"/{c.energy_source}"),
            "group size": f"{c.size}{'*' * c.best}",
            "efficiency": number(c.efficiency, ".2f"),
            "cost": "1" if c.size == planner.recorded_size else interval_cell(c.cost, ".2f"),
        }
        for c in planner.cells
        if c.efficiency is not None or c.cost is not None
    )
    known = any(c.efficiency is not None for c in planner.cells)
    return table if known else table.drop(columns="efficiency", errors="ignore")
