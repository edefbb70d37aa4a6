"""Numbers as a study's page writes them, a dash where they are undefined, and intervals as columns of its tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from otb_analysis.figures.styles import GREY, estimator_style
from otb_analysis.figures.svg import Curve
from otb_analysis.statistics import Interval, cluster_jackknife
from otb_analysis.statistics.intervals import WIDE
from otb_analysis.types import Float, Label
from studies.lib.record import Row, Rows, distinct, select

Measured = Interval | Row | None
"""An interval, a row with the columns NAME, NAME_low and NAME_high, or nothing."""


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Return a number with so many significant digits, as a table keeps it; None where it is not finite."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def interval_columns(name: str, found: Interval | None, digits: int = 5) -> dict[str, float | None]:
    """Return an interval as the columns NAME, NAME_low and NAME_high of a row."""
    # Five digits first, also where fewer are asked: the committed tables were rounded so, and stay the same.
    values = zip(("", "_low", "_high"), ends(found), strict=True)
    return {f"{name}{end}": rounded(rounded(x), digits) for end, x in values}


def statistics_columns(row: Any, *names: str) -> dict[str, float | None]:
    """Return quantities of a row of `pooled_statistics` with their intervals; without names the usual four."""
    names = names or ("variance", "projection", "sf", "efficiency")
    return {k: v for name in names for k, v in interval_columns(name, row.intervals[name]).items()}


def ratio_columns(pair: Any, names: Mapping[str, str]) -> dict[str, float | None]:
    """Return ratios of a pair (`variance`, `sf`, `efficiency`) by the columns' names; nothing is known without one."""
    return {k: v for name, of in names.items() for k, v in interval_columns(name, getattr(pair, of, None)).items()}


def by_label(rows: Sequence[Any]) -> dict[Label, Any]:
    """Return rows of `pooled_statistics` or `paired_ratios` by estimator and energy source."""
    return {(row.estimator, row.energy_source): row for row in rows}


def ends(of: Measured, name: str = "") -> tuple[float | None, float | None, float | None]:
    """Return estimate, low and high."""
    if isinstance(of, Interval):
        return of.estimate, of.low, of.high
    row = of or {}
    return row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high")


def number(value: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    """Return a number, and beyond 999 only that it is: such a ratio says no more."""
    if value is None:
        return "–"
    value *= scale
    return format(value, form) if abs(value) < 1000 else (">" if value > 0 else "<−") + "999"


def hidden(low: float | None, high: float | None) -> bool:
    """Return whether the ends of a positive quantity's interval are so far apart that it says nothing."""
    return low is not None and high is not None and low > 0 and high >= WIDE * low


def interval(of: Measured, name: str = "", form: str = ".2f", scale: float = 1.0, linear: bool = False) -> str:
    """Return `1.25 (1.10–1.42)`; with a sign in the form `+3.1 (-0.4 to +6.6)`; without ends the estimate alone.

    A positive quantity is a dash where noise hides it as `hidden` says; one with a sign, or a `linear` one such as a
    correlation, is not: there an end near 0 says what is known.
    """
    estimate, low, high = ends(of, name)
    shown = number(None if not linear and "+" not in form and hidden(low, high) else estimate, form, scale)
    return shown if shown == "–" or low is None or high is None else f"{shown} ({_between(low, high, form, scale)})"


def percent(of: Measured | float, name: str = "", digits: int = 0) -> str:
    """Return `41.2 % (36.1–46.5)` of a share and its interval; `41 %` of a share alone."""
    (estimate, low, high), form = (of, None, None) if isinstance(of, int | float) else ends(of, name), f".{digits}f"
    shown = "–" if estimate is None or hidden(low, high) else f"{number(estimate, form, 100)} %"
    return shown if shown == "–" or low is None or high is None else f"{shown} ({_between(low, high, form, 100)})"


def span(values: Sequence[float], form: str = ".2f", scale: float = 1.0) -> str:
    """Return the least and the largest value, as in `0.35–0.59`."""
    return _between(min(values), max(values), form, scale) if len(values) else "–"


def median(values: Sequence[float], form: str = ".2f", scale: float = 1.0) -> str:
    """Return the median and the range, as in `32 (9–78)`."""
    return f"{number(float(np.median(values)), form, scale)} ({span(values, form, scale)})" if len(values) else "–"


def _between(low: float, high: float, form: str, scale: float) -> str:
    return f"{number(low, form, scale)}{' to ' if low < 0 or '+' in form else '–'}{number(high, form, scale)}"


def above(of: Measured, value: float, name: str = "") -> bool:
    """Return whether an interval lies above a value: whether that is shown."""
    low = ends(of, name)[1]
    return low is not None and low > value


def below(of: Measured, value: float, name: str = "") -> bool:
    """Return whether an interval lies below a value."""
    high = ends(of, name)[2]
    return high is not None and high < value


def spanning(of: Measured, value: float, name: str = "") -> bool:
    """Return whether an interval contains a value: whether no difference is shown."""
    return ends(of, name)[1] is not None and not above(of, value, name) and not below(of, value, name)


def find(rows: Rows, **values: Any) -> Row:
    """Return the first row whose columns have these values, or an empty one."""
    return next(iter(select(rows, **values)), {})


def with_deleted(x: Float) -> Float:
    """Return the mean of one number per cluster [K], and the mean without each of them [1 + K]."""
    return np.concatenate([[x.mean()], (x.sum() - x) / (len(x) - 1)])


def ratio_interval(above: Any, below: Any, words: str, scale: Any = "log") -> Interval | None:
    """Return Σ above / Σ below with its interval; each entry of the two is one cluster."""
    return cluster_jackknife(np.stack([above, below], axis=-1), lambda m: m[..., 0] / m[..., 1], words, scale)


def column(rows: Rows, name: str) -> list[Any]:
    """Return the values of a column that are not missing."""
    return [row[name] for row in rows if row[name] is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return float(np.mean(values)) if len(values) else None


def heads(*names: object) -> str:
    """Return the head of a Markdown table: the first column flush left, the others right."""
    return f"| {' | '.join(map(str, names))} |\n| {' | '.join(['---', *['---:'] * (len(names) - 1)])} |"


def grid(rows: Rows, down: str, across: str, cell: Callable[[Row], str], head: str = "{}") -> str:
    """Return a Markdown table of rows by two columns, each in the order of its values; a missing pair is left empty."""
    columns = distinct(rows, across)
    lines = [heads(down, *(head.format(value) for value in columns))]
    for name in distinct(rows, down):
        matches = [select(rows, **{down: name, across: value}) for value in columns]
        lines.append(f"| {' | '.join([str(name), *(cell(one[0]) if one else '' for one in matches)])} |")
    return "\n".join(lines)


def or_nan(value: float | None) -> float:
    """Return NaN for what is undefined, as curves want it."""
    return math.nan if value is None else float(value)


def interval_curve(points: Mapping[float, Measured], name: str, words: str, color: str, **looks: Any) -> Curve:
    """Return a curve with its band: points are intervals, or rows with the columns NAME, by where they stand."""
    y, low, high = ([or_nan(ends(of, name)[k]) for of in points.values()] for k in range(3))
    return Curve(list(points), y, words, low, high, color, **looks)


def interval_curves(
    rows: Rows, by: str, x: Callable[[Row], float], name: str, colors: Mapping[str, str]
) -> list[Curve]:
    """Return a curve with its band for each value of a column that has a color and rows, in the order of the colors."""
    by_key = {key: chosen for key in colors if (chosen := select(rows, **{by: key}))}
    return [interval_curve({x(row): row for row in chosen}, name, key, colors[key]) for key, chosen in by_key.items()]


def side_by_side(found: Sequence[Measured], place: int, name: str, words: str, color: str) -> Curve:
    """Return intervals as points at 1, 2 …, moved a little aside by the place of their kind among three.

    What is undefined has no point, so that a panel may be empty.
    """
    points = {at + 0.12 * (place - 1): one for at, one in enumerate(found, 1) if ends(one, name)[0] is not None}
    return interval_curve(points, name, words, color, width=0)


def seed_curves(rows: Rows, y: str) -> list[Curve]:
    """Return one thin grey curve for each seed."""
    each = [select(rows, seed=seed) for seed in distinct(rows, "seed")]
    return [Curve(column(own, "step"), column(own, y), "one seed", color=GREY, width=1.0) for own in each]


def mean_curve(rows: Rows, x: str, y: str, words: str, color: str, **looks: Any) -> Curve:
    """Return the means of two columns over the rows of each step."""
    at = [select(rows, step=step) for step in sorted(distinct(rows, "step"))]
    across, up = ([or_nan(mean(column(own, name))) for own in at] for name in (x, y))
    return Curve(across, up, words, color=color, **looks)


def looks_of(estimator: str) -> dict[str, Any]:
    """Return the colour of an estimator's curve, and whether it is dashed."""
    style = estimator_style(estimator)
    return {"color": style.color, "dashed": style.dash != "solid"}
