"""Means over a few seeds of whole training runs."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from otb_analysis.errors import InputError, nearest
from otb_analysis.statistics.inference.intervals import LEVEL, SCALES, Interval


def seed_mean(values: ArrayLike, estimand: str, scale: str = "linear") -> Interval | None:
    """Return the mean of one value per seed, with Student's 95 % interval from two seeds up.

    f⁻¹(f(x̄) ∓ t_{K−1}·se) with se² = (K−1)/K · Σ_k (f(x̄_(k)) − mean)² over the means without one seed; with f the
    identity it is x̄ ∓ t_{K−1}·s/√K. Unlike the intervals over prompts it trusts that the seeds are about normal on that
    scale: a few seeds do not show their skewness. Training outcomes are averages over many tokens and prompts; rewards
    of single prompts are not, and have `cluster_jackknife`.

    Returns:
        None without a value or where one is not finite; a point for one seed, for seeds that are all alike, and where
        a mean is outside the domain of the scale.

    Raises:
        InputError: The scale is unknown.
    """
    if scale not in SCALES:
        raise InputError(f"scale is {scale!r}; {nearest(scale, SCALES)}")
    transform, inverse = SCALES[scale]
    x = np.asarray(values, dtype=float).ravel()
    k = x.size
    if k == 0 or not np.isfinite(x).all():
        return None
    method = f"Student t over {k} seeds on the {scale} scale"
    point = Interval(float(x.mean()), None, None, k, estimand, method)
    # Seeds that agree to the last digit do not show their spread: no interval, rather than one of length 0.
    if k < 2 or np.ptp(x) == 0:
        return point
    with np.errstate(divide="ignore", invalid="ignore"):
        # Means without one seed, as over prompts: one formula for every scale.
        centre, deleted = transform(x.mean()), transform((x.sum() - x) / (k - 1))
    if not (np.isfinite(centre) and np.isfinite(deleted).all()):
        return point
    # No correction for skewness: three to ten values do not show it, and its estimate would be noise.
    half = float(special.stdtrit(k - 1, (1 + LEVEL) / 2) * np.sqrt((k - 1) * deleted.var()))
    low, high = inverse(np.array([centre - half, centre + half]))
    return Interval(float(x.mean()), float(low), float(high), k, estimand, method)
