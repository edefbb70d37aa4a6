"""Intervals as figures and tables take them: columns with two ends, and bars."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.statistics import Interval
from otb_analysis.types import Float


def ends_of(intervals: Sequence[Interval | None]) -> tuple[Float, Float, Float]:
    """Return estimates, lower and upper ends [K]; NaN where there is none."""
    rows = [(None, None, None) if one is None else (one.estimate, one.low, one.high) for one in intervals]
    estimate, low, high = np.array(rows, np.float64).reshape(-1, 3).T
    return estimate, low, high


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
