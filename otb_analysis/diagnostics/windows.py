"""Causal windows over a series: the last few values, and what was usual before them."""

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from otb_analysis.types import Float

MIN_SPREAD = 0.05
"""Least spread of logarithms, 5 %: a quantity that happens to repeat itself must not make every change infinite."""

NORMAL = 1.4826
"""Standard deviation of a normal law per unit of its median absolute deviation."""


def trailing(x: Float, window: int, statistic: Callable[..., Float]) -> Float:
    """Return a statistic of the last `window` values at every index [K]; NaN before there are so many.

    The statistic takes [..., window] and `axis`, such as `np.median`.
    """
    values = np.full(x.size, np.nan)
    if x.size >= window:
        values[window - 1 :] = statistic(sliding_window_view(x, window), axis=-1)
    return values


def usual(x: Float, gap: int, least: int, most: int) -> tuple[Float, Float]:
    """Return median and robust spread of what came before the last `gap` values, at every index.

    The reference at index t is x[max(0, t−gap−most+1) … t−gap], NaN while it has fewer than `least` values; x [K] are
    usually logarithms. Spread = 1.4826 · median absolute deviation, at least `MIN_SPREAD`.
    """
    centre, spread = np.full(x.size, np.nan), np.full(x.size, np.nan)
    # The reference grows until it has its full length; from there on it slides, all indices at once.
    for t in range(gap + least - 1, min(gap + most - 1, x.size)):
        centre[t], spread[t] = robust(x[: t - gap + 1])
    full = gap + most - 1
    if x.size > full:
        centre[full:], spread[full:] = robust(sliding_window_view(x, most)[: x.size - full])
    return centre, spread


def robust(x: Float) -> tuple[Float, Float]:
    """Return median and robust spread along the last axis."""
    centre = np.median(x, axis=-1)
    # Medians of medians: a surge among the values hardly moves the spread it is held against.
    deviation = np.median(np.abs(x - centre[..., None]), axis=-1)
    return centre, np.maximum(NORMAL * deviation, MIN_SPREAD)
