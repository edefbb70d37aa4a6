"""Numbers, intervals and names of estimators: as people read them, and as figures and tables take them."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from otb_analysis.statistics import Interval, is_informative
from otb_analysis.types import Label

MISSING = "–"
"""Stands where there is no value."""


def number(value: float | int | None) -> str:
    """Return a number with three significant digits, thousands separated; a missing one (None, NaN) is an en dash.

    0.012345 → 0.0123, 12345.6 → 12,300, 1.2e-7 → 1.20×10⁻⁷; integers keep all their digits.
    """
    if value is None or value != value:
        return MISSING
    if value < 0:
        return f"−{number(-value)}"
    if isinstance(value, int) or math.isinf(value):
        return f"{value:,}".replace("inf", "∞")
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    if not -4 <= exponent < 6:
        return f"{value / 10.0**exponent:.2f}×10{superscript(exponent)}"
    return f"{round(value, 2 - exponent):,.{max(0, 2 - exponent)}f}"


def superscript(exponent: int) -> str:
    """Return an exponent in raised digits: −7 → ⁻⁷."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def formatted(value: float | None, form: str = "") -> str:
    """Return a number in a Python format such as `.2f`; without one as `number` writes it."""
    if not form or value is None:
        return number(value)
    return "∞" if math.isinf(value) else format(value, form)


def span(low: float | None, high: float | None) -> str:
    """Return the two ends of an interval: 0.73 to 0.87."""
    return f"{number(low)} to {number(high)}"


def interval_cell(interval: Interval | None, form: str = "") -> str:
    """Return an estimate with the ends of its interval, where it has them: 0.79 [0.73, 0.87]; a dash without one."""
    if interval is None:
        return MISSING
    point, low, high = formatted(interval.estimate, form), interval.low, interval.high
    # What is known needs no ends.
    if low is None or high is None or math.isnan(low) or math.isclose(low, high, rel_tol=1e-9):
        return point
    return f"{point} [{formatted(low, form)}, {formatted(high, form)}]"


def bracketed(value: float, low: float | None, high: float | None, form: str = "") -> str:
    """Return a value with the ends of its interval as `interval_cell` writes them."""
    return interval_cell(Interval(value, low, high, 0, ""), form)


def noise_scale_cell(scale: Interval | None) -> str:
    """Return a noise scale as it is read: `116 [50, 254]`, or what it is above where its upper end is not known."""
    if scale is None:
        return "not known, since noise hides the signal"
    if scale.low is not None and not is_informative(scale):
        return f"above {number(scale.low)}"
    return interval_cell(scale)


def shown_name(label: Label) -> str:
    """Return how an estimator is called in a sentence."""
    name, source = label
    name = "no baseline (none)" if name == "none" else name
    return {"exact": f"{name} with exact norms", "calibrated": f"{name} with calibrated energies"}.get(source, name)


def labels(pairs: Iterable[Label]) -> dict[Label, str]:
    """Return how estimators are called side by side: `otb · proxy` where several energy sources meet, else `otb`."""
    pairs = list(pairs)
    several = len({source for _, source in pairs if source != "none"}) > 1
    return {(e, s): f"{e} · {s}" if several and s != "none" else e for e, s in pairs}


def cell(value: Any) -> str:
    """Return a table's cell as text: three digits for numbers, yes or no for truth values, a dash for the missing."""
    if value is None or value is pd.NA or value is pd.NaT:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    item = getattr(value, "item", None)  # a scalar of NumPy's
    return cell(item()) if callable(item) else str(value)


def columns_of(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return an interval as three columns: its estimate, and its ends as `name_low` and `name_high`."""
    ends = (None, None, None) if interval is None else (interval.estimate, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def error_bars(value: ArrayLike, low: ArrayLike, high: ArrayLike, **look: object) -> dict[str, Any]:
    """Return Plotly's bars from values to the ends of their intervals; none where an end is NaN."""
    value, low, high = (np.asarray(one, np.float64) for one in (value, low, high))
    known = np.isfinite(low) & np.isfinite(high)
    up, down = (np.where(known, np.maximum(one, 0), 0).astype(np.float32) for one in (high - value, value - low))
    bars = {"array": up, "arrayminus": down, "visible": bool(known.any())}
    return {"type": "data", "symmetric": False, "width": 0, "thickness": 1.2, **bars, **look}
