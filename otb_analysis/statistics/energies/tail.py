"""How heavy the upper tail of a positive quantity is."""

import numpy as np
import scipy
from numpy.typing import ArrayLike

from otb_analysis.types import Float

TAIL, TOP = 0.1, 0.01
"""Shares of the values that make up the tail of `pareto_k` and the top of `top_share`."""

MIN_EXCEEDANCES = 25
"""Fewer tail values than this give no index."""


def pareto_k(values: ArrayLike) -> float | None:
    """Shape k of a generalised Pareto law fitted to the upper tenth of `values`.

    P(X − u > x | X > u) ≈ (1 + k·x/σ)^{−1/k}; moments of order 1/k and above are infinite. On token *energies* k ≥ ½
    makes the standard error of a variance estimate unreliable; an infinite gradient variance needs k ≥ 1. Exponential
    tails have k = 0, a bounded quantity (the logit proxy is at most 2) has k < 0. Fitted by maximum likelihood; None
    with fewer than `MIN_EXCEEDANCES` values above the threshold or where they are all alike.
    """
    x = np.asarray(values, dtype=float).ravel()
    x = x[np.isfinite(x)]
    if x.size == 0:
        return None
    threshold = np.quantile(x, 1 - TAIL)  # the law is fitted to what lies above it
    excess = x[x > threshold] - threshold
    if excess.size < MIN_EXCEEDANCES or np.ptp(excess) <= 1e-12 * np.abs(x).max():
        return None
    # Divided by the mean: the shape has no unit, and the search starts near its answer.
    k = _pareto_shape(excess / excess.mean())
    return k if np.isfinite(k) else None


def _pareto_shape(x: Float) -> float:
    """Return k of the generalised Pareto law of the largest likelihood, scipy's `genpareto.fit` at a sixth of its time.

    −log L = n·log σ + (1 + 1/k)·Σ log(1 + k·x/σ), and infinite where some x is outside the law's support.
    """
    top = x.max()

    def loss(at: Float) -> float:
        k, scale = at
        # For k < 0 the law ends at −scale/k; parameters under which the largest value is impossible have no likelihood.
        if scale <= 0 or 1 + k * top / scale <= 0:
            return np.inf
        shape = (1 + 1 / k) * np.log1p(k * x / scale).sum() if k else x.sum() / scale
        return float(len(x) * np.log(scale) + shape)

    return float(scipy.optimize.fmin(loss, (1.0, 1.0), disp=False)[0])


def top_share(values: ArrayLike) -> float | None:
    """Share of the total that the largest 1 % of the values hold: Σ_{top ⌈n/100⌉} |x| / Σ |x|.

    None where there is no value or the total is 0; 1 when one value is everything.
    """
    x = np.abs(np.asarray(values, dtype=float).ravel())
    x = x[np.isfinite(x)]
    total = x.sum()
    if total == 0:
        return None
    n_top = int(np.ceil(TOP * x.size))
    return float(np.partition(x, x.size - n_top)[x.size - n_top :].sum() / total)
