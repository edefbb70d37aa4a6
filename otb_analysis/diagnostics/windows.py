"""Causal windows over a series: the last few values, and what was usual before them.

Medians of long windows are kept, and computed only for what is new where a series has grown.
"""

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from otb_analysis.types import Float

MIN_SPREAD = 0.05
"""Least spread of logarithms, 5 %: a quantity that happens to repeat itself must not make every change infinite."""

NORMAL = 1.4826
"""Standard deviation of a normal law per unit of its median absolute deviation."""


_START, _MOST_KEPT = 16, 256
_kept: dict[tuple[object, ...], tuple[Float, Float]] = {}
"""Series and what a function says of them [..., K], by function, its lengths and how the series begins."""


def going_on(function: Callable[..., Float], x: Float, *lengths: int, reach: int) -> Float:
    """Return what a function says at every index of a series, from where it ended when the series was shorter.

    Args:
        function: Takes x [K] and lengths, returns [..., K].
        reach: How many values up to an index, that one included, decide what it says there, once there are so many.
    """
    key = (function, *lengths, x[:_START].tobytes())
    before, said = _kept.get(key, (x[:0], x[:0]))
    n = len(before)
    if n < reach or not np.array_equal(x[:n], before, equal_nan=True):
        said = function(x, *lengths)
    elif n < x.size:
        said = np.concatenate([said, function(x[n - reach :], *lengths)[..., reach:]], axis=-1)
    if key not in _kept and len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[key] = x.copy(), said
    return said.copy()


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
    centre, spread = going_on(_usual, x, gap, least, most, reach=gap + most)
    return centre, spread


def _usual(x: Float, gap: int, least: int, most: int) -> Float:
    centre, spread = np.full(x.size, np.nan), np.full(x.size, np.nan)
    # The reference grows until it has its full length; from there on it slides.
    first, full = gap + least - 1, gap + most - 1
    if x.size > first:
        rows = np.tile(x[: min(full, x.size) - gap], (min(full, x.size) - first, 1))
        centre[first:full] = medians_growing(rows)
        deviation = medians_growing(np.abs(rows - centre[first:full, None]))
        spread[first:full] = np.maximum(NORMAL * deviation, MIN_SPREAD)
    if x.size > full:
        centre[full:], spread[full:] = robust(sliding_window_view(x, most)[: x.size - full])
    return np.stack([centre, spread])


def median_of_last(x: Float, least: int, most: int) -> Float:
    """Return the median of the last `most` values at every index, of all while there are fewer; NaN before `least`."""
    return going_on(_median_of_last, x, least, most, reach=most)


def _median_of_last(x: Float, least: int, most: int) -> Float:
    values = np.full(x.size, np.nan)
    if x.size >= least:
        values[least - 1 : most] = medians_growing(np.tile(x[:most], (min(most, x.size) - least + 1, 1)))
    if x.size > most:
        values[most:] = np.median(sliding_window_view(x[1:], most), axis=-1)
    return values


def medians_growing(rows: Float) -> Float:
    """Return the median of each row's first values: all of the last row, one less of the row before, and so on."""
    counts = np.arange(rows.shape[1] - len(rows), rows.shape[1]) + 1
    if not np.isfinite(rows).all():
        return np.array([np.median(row[:count]) for row, count in zip(rows, counts, strict=True)])
    ordered = np.sort(np.where(np.arange(rows.shape[1]) < counts[:, None], rows, np.inf), axis=1)
    at = np.arange(len(rows))
    return (ordered[at, (counts - 1) // 2] + ordered[at, counts // 2]) / 2


def robust(x: Float) -> tuple[Float, Float]:
    """Return median and robust spread along the last axis."""
    centre = np.median(x, axis=-1)
    # Medians of medians: a surge among the values hardly moves the spread it is held against.
    deviation = np.median(np.abs(x - centre[..., None]), axis=-1)
    return centre, np.maximum(NORMAL * deviation, MIN_SPREAD)
