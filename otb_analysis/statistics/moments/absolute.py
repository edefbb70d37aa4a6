"""Efficiency and noise scale of one estimator by themselves: where they may be shown, and within which interval.

Both divide by ‖∇J‖², which noise can hide. A rule that shows an efficiency only where the signal came out large shows
the lucky ones: with a noise scale of 536 prompts and 24 measured the efficiencies shown were five times too high, and a
third of their 95 % intervals missed. So the interval here is that of an efficiency *given that it is shown*.
Ratios of efficiencies do not need this: what two estimators share cancels.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from otb_analysis.statistics.inference.intervals import LEVEL, MIN_CLUSTERS, Interval, jackknife_interval
from otb_analysis.statistics.inference.studentized import Studentized
from otb_analysis.statistics.moments import measures
from otb_analysis.statistics.moments.measures import Moments
from otb_analysis.types import Float

LEAST = 1 / 3
"""Fewer measured prompts than this multiple of the noise scale do not show an absolute efficiency."""

MISS = 0.01
"""Chance that the lower end of a shown efficiency is above the truth, if the prompts' law is well behaved."""

NOT_SHOWN = (
    "An efficiency by itself is not shown where fewer prompts were measured than a third of the noise scale, since "
    "there only lucky estimates are large enough to be seen, nor where its interval has ends a factor of 100 apart; "
    "ratios on the same rollouts stay."
)
"""Why an efficiency is missing, in one sentence."""


def has_signal(moments: Moments) -> bool:
    """Tell whether ∇J is told from noise: the 95 % interval of ‖∇J‖², over at least 16 prompts, leaves out 0."""
    found = jackknife_interval(moments.truth_sq[0], moments.truth_sq[1:], "‖∇J‖²", "linear")
    return found is not None and found.low is not None and found.low > 0


def noise_scale(moments: Moments) -> Interval | None:
    """Return V/‖m‖² in prompts, with the interval of its inverse turned over.

    The signal-to-noise ratio of one prompt, ‖m‖²/V, has a jackknife interval on the linear scale whatever its sign.
    Where that reaches 0 the noise scale has no upper end (∞), and where the estimate itself is not positive it is ∞.
    On either side the wider of this and the interval on the log scale counts, which fits a strong signal.

    Returns:
        A point below 16 prompts; None where neither a point nor an end is known.
    """
    # Estimated, so a spread near 0 can come out below it.
    noise = np.maximum(moments.power - moments.mean_sq, 0)
    words, scale = "gradient noise scale V/‖m‖² in prompts", measures.quotient(noise, moments.mean_sq)[0]
    ratio = measures.quotient(moments.mean_sq, noise)
    found = jackknife_interval(ratio[0], ratio[1:], words, "linear")
    if found is None or found.low is None or found.high is None or found.high <= 0:
        return Interval(float(scale), None, None, ratio.size - 1, words) if np.isfinite(scale) else None
    low, high = 1 / found.high, 1 / found.low if found.low > 0 else np.inf
    by_logarithm = jackknife_interval(ratio[0], ratio[1:], words)
    if by_logarithm is not None and by_logarithm.low is not None and by_logarithm.high is not None:
        low, high = min(low, 1 / by_logarithm.high), max(high, 1 / by_logarithm.low)
    return Interval(float(scale) if np.isfinite(scale) else np.inf, low, high, found.n_clusters, words)


def may_be_shown(efficiency: float, n_prompts: float, n_measured: int) -> bool:
    """Tell whether at least a third of the noise scale was measured: of (1 − e)·P/e prompts, by the efficiency e of P.

    An estimate above 1 is lost in the noise too.
    """
    return 0 < efficiency <= 1 and (1 - efficiency) * n_prompts * LEAST <= efficiency * n_measured


def shown_efficiency(efficiency: Float, n_prompts: float, floor: float, words: str) -> Interval | None:
    """Return an efficiency with its 95 % interval where it may be shown, else None.

    With r = e/((1 − e)·P), for an unbiased estimator the inverse of its noise scale, it is shown from
    r ≥ c = 1/(3·measured prompts) on, and where it has an ordinary interval: a jackknife interval on the logit scale.
    The lower end is the r₀ at which an estimate as large as this one has a chance of 1 % *among those shown*,
    Φ̄((r − r₀)/s)/Φ̄((c − r₀)/s) = .01, or the ordinary one at that level where that is lower. Near c, where an estimate
    says little, it is 0. It is 1 % and not 2.5 %, since in heavy tails a sample without the rare prompts has too large
    an estimate and too small an s. Source: selective inference for a normal mean above a threshold (Zhong and
    Prentice, 2008).

    s² is the jackknife's at r and falls in proportion to r₀ down to that of the noise alone: where there is no signal
    only pairs of noises are left.

    Args:
        efficiency: From all K prompts, and without each of them [1 + K].
        n_prompts: Prompts P of the update that it is stated for.
        floor: Standard error of ‖∇J‖² from pairs of noises alone, relative to ‖∇J‖².
        words: What it is.
    """
    e, k = float(efficiency[0]), efficiency.size - 1
    if not may_be_shown(e, n_prompts, k):
        return None
    ordinary = jackknife_interval(e, efficiency[1:], words, "logit")
    if ordinary is None or k < MIN_CLUSTERS or e == 1:  # without any noise there is nothing to be in doubt of
        return ordinary
    if ordinary.low is None:
        return None
    r = efficiency / ((1 - efficiency) * n_prompts)
    stderr = float(np.sqrt((k - 1) * r[1:].var()))
    # As many standard errors as skewed or heavy-tailed prompts take, in units of a normal law's.
    stretch = Studentized.from_influence(-r[1:]).quantiles(LEVEL)[0] / special.ndtri((1 + LEVEL) / 2)
    # The jackknife counts the variance of pairs of noises twice, and in few directions they are skewed to the right.
    least = min(2 * floor * float(r[0]), stderr)
    lowest = _lower_end(float(r[0]), LEAST / k, stretch * stderr, stretch * least) * n_prompts
    cautious = jackknife_interval(e, efficiency[1:], words, "logit", 1 - 2 * MISS)
    if cautious is None or cautious.low is None:
        return None
    return Interval(e, min(cautious.low, lowest / (1 + lowest)), ordinary.high, k, f"{words}, given that it is shown")


def _lower_end(r: float, threshold: float, stderr: float, least: float) -> float:
    """Return the r₀ in [0, r] at which an estimate above r has the chance `MISS` among those above the threshold."""

    def log_chance(at: float) -> NDArray[np.float64]:
        s = np.sqrt(least**2 + (stderr**2 - least**2) * at / r)
        return special.log_ndtr((at - r) / s) - special.log_ndtr((at - threshold) / s)

    rare = np.log(MISS)
    if least == 0 or log_chance(0.0) >= rare:
        return 0.0
    low, high = 0.0, r
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if log_chance(middle) < rare else (low, middle)
    return low
