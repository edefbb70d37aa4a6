"""Deviations and ranks within cells, such as the rollouts of one prompt at one position."""

import numpy as np
import scipy
from numpy.typing import ArrayLike

from otb_analysis.types import Float, Int


def position_cells(group: ArrayLike, length: int) -> Int:
    """Number the (prompt, position) cells of [N, T] arrays: the cell of each token [N, T]."""
    codes = np.unique(np.asarray(group), return_inverse=True)[1].astype(np.int64)
    return codes[:, None] * length + np.arange(length)


def deviation(x: Float, cells: Int) -> Float:
    """Subtract each cell's mean: x − x̄_c, exactly 0 throughout a cell whose values are all alike."""
    if x.size == 0:
        return x
    scale = np.zeros(cells.max() + 1)
    np.maximum.at(scale, cells, np.abs(x))
    centred = x - (np.bincount(cells, x) / np.maximum(np.bincount(cells), 1))[cells]
    # What rounding leaves of a constant is not a deviation, and would correlate with anything.
    return np.where(np.abs(centred) > 1e-13 * scale[cells], centred, 0.0)


def cell_ranks(x: Float, cells: Int) -> Float:
    """Rank values within their cells, ties averaged, scaled to (0, 1) so that cells of any size weigh alike."""
    if x.size == 0:
        return x
    # Ranking (cell, value) pairs at once: shifting a whole cell by more than any rank keeps cells apart and ties tied.
    ranks = scipy.stats.rankdata(scipy.stats.rankdata(x) + cells * (2.0 * x.size))
    count = np.bincount(cells)
    return (ranks - (np.cumsum(count) - count)[cells]) / (count + 1)[cells]
