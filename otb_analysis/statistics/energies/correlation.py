"""Correlations of two energies of the same tokens, with intervals over prompts."""

from dataclasses import replace

import numpy as np

from otb_analysis.statistics.energies.cells import deviation
from otb_analysis.statistics.inference.intervals import Interval, cluster_jackknife
from otb_analysis.types import Float, Int


def log_correlation(
    x: Float, y: Float, prompt: Int, cell: Int | None = None, weight: Float | None = None
) -> Interval | None:
    """Return the correlation of log x and log y, over tokens at which both are positive."""
    both = (x > 0) & (y > 0)
    cell, weight = None if cell is None else cell[both], None if weight is None else weight[both]
    return correlation(np.log(x[both]), np.log(y[both]), prompt[both], cell, weight)


def correlation(
    x: Float, y: Float, prompt: Int, cell: Int | None = None, weight: Float | None = None
) -> Interval | None:
    """Return the Pearson correlation of two variables [n] with a jackknife interval over prompts.

    corr(x − x̄_c, y − ȳ_c) with (prompt, position) cells, corr(x, y) without; no cell spans two prompts. The interval is
    formed on Fisher's scale, atanh r, which is half the logit of (1 + r)/2.

    Args:
        weight: What each entry counts [n], such as 1/π of drawn ones, whose population it then is about; without cells.

    Returns:
        None where either variable is constant; a point below 16 prompts.
    """
    if cell is not None:
        cell = np.unique(cell, return_inverse=True)[1]
        x, y = deviation(x, cell), deviation(y, cell)
    code = np.unique(prompt, return_inverse=True)[1]
    scale = [np.abs(v).max(initial=0.0) or 1.0 for v in (x, y)]
    x, y = x / scale[0], y / scale[1]
    one = np.ones_like(x) if weight is None else weight / weight.max(initial=1.0)
    sums = np.stack([np.bincount(code, one * v) for v in (np.ones_like(x), x, y, x * x, x * y, y * y)], axis=1)
    found = cluster_jackknife(sums, _halfway, "Pearson correlation", scale="logit")
    if found is None:
        return None
    ends = {name: None if (end := getattr(found, name)) is None else 2 * end - 1 for name in ("low", "high")}
    return replace(found, estimate=2 * found.estimate - 1, **ends)


def _halfway(mean: Float) -> Float:
    """Return (1 + r)/2 from means of 1, x, y, x², xy, y²."""
    n, x, y, xx, xy, yy = np.moveaxis(mean, -1, 0)
    spread = (xx * n - x * x) * (yy * n - y * y)
    r = np.divide(xy * n - x * y, np.sqrt(np.maximum(spread, 0)), out=np.full_like(spread, np.nan), where=spread > 0)
    return (1 + r) / 2
