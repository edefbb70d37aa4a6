"""Token energies w_t = ‖s_t‖² as weights: proxies, their calibration, sums over the past.

Functions of arrays take [N, T], return float64 and are zero outside the mask where they take one.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.arrays import masked
from otb_analysis.errors import InputError
from otb_analysis.types import Bool, Float


def lm_head_energy(energy: ArrayLike, hidden_norm_sq: ArrayLike, temperature: float = 1.0) -> Float:
    """Return the exact score norm of an untied output matrix.

    ‖∂ log π(y)/∂W_out‖² = w · ‖h‖² / τ², w the logit-space energy at temperature τ. Proved; an output bias adds
    w/τ², which is not included.

    Raises:
        InputError: The temperature is not positive.
    """
    if not temperature > 0:
        raise InputError(f"temperature is {temperature} but must be above 0; pass the one used for sampling.")
    return np.asarray(energy, np.float64) * np.asarray(hidden_norm_sq, np.float64) / temperature**2


def realized_energy(energy: ArrayLike, mask: Bool) -> Float:
    """Return the energy realized up to each token: what the optimal token baseline weights by.

    W_t = Σ_{j≤t} w_j over policy tokens [N, T]; after the last one it keeps its value.
    """
    return np.cumsum(masked(energy, mask), axis=1)


def decayed_energy(weight: Float, decay: float) -> Float:
    """Return the exponentially forgetting sum of the weights so far.

    W_t = λ W_{t−1} + w_t = Σ_{j≤t} λ^{t−j} w_j: λ = 0 gives w, λ = 1 gives the realized energy. Columns are policy
    positions, so squeeze a weight with gaps first.
    """
    summed = np.array(weight, np.float64)
    for t in range(1, summed.shape[1]):
        summed[:, t] += decay * summed[:, t - 1]
    return summed


@dataclass(frozen=True)
class Calibration:
    """A proxy turned into an estimate of the exact energy: ŵ = c·e^a·proxy^b; made by `calibrate`."""

    intercept: float  # a
    slope: float  # b: 1 where the proxy only misses the scale
    factor: float  # c: makes the estimated total over the fitted sample that of the exact energies
    log_error: float  # Standard deviation of log w around the fit, over the population the sample stands for
    n: int

    def predict(self, proxy: ArrayLike) -> Float:
        """Return ŵ of any tokens; a proxy of 0 gives 0."""
        x = np.asarray(proxy, np.float64)
        positive = x > 0  # a proxy of 0 has no logarithm; it predicts 0
        fitted = np.exp(self.intercept + self.slope * np.log(np.where(positive, x, 1.0)))
        return np.where(positive, self.factor * fitted, 0.0)


def calibrate(exact: ArrayLike, proxy: ArrayLike, inclusion_prob: ArrayLike | None = None) -> Calibration:
    """Fit a proxy to exact energies on the tokens where both are known, for use on all others.

    log w ≈ a + b·log proxy by least squares with weights 1/π, then ŵ = c·exp(…) with
    c = Σ_drawn (w/π) / Σ_drawn (exp(…)/π).

    The weights make the sample stand for its population. The factor undoes what the logarithm loses (E e^ε > e^{E ε}):
    with constant fitted values it is Duan's (1983) smearing mean of e^ε; as a ratio of totals it needs no equal spread
    and makes Σ ŵ over all tokens the model-assisted estimate of Σ w (`statistics.difference_total` then adds nothing).
    An exact power law w = k·proxy^b is found as it is. Tokens that were not measured are NaN in `exact`; those where
    either energy is 0 have no part in the exponent.

    Raises:
        InputError: Shapes disagree, a probability of a measured token is not in (0, 1], or fewer than three
            tokens are usable, or their proxies are all alike.
    """
    y, x = np.asarray(exact, np.float64), np.asarray(proxy, np.float64)
    prob = np.ones(y.shape) if inclusion_prob is None else np.asarray(inclusion_prob, np.float64)
    if not y.shape == x.shape == prob.shape:
        raise InputError(
            f"exact has shape {y.shape}, proxy {x.shape} and inclusion_prob {prob.shape}; pass one of each per token."
        )
    seen = ~np.isnan(y)
    if not ((prob[seen] > 0) & (prob[seen] <= 1)).all():
        raise InputError("inclusion_prob of a measured token is outside (0, 1]; pass what it was drawn with.")
    use = seen & (y > 0) & (x > 0)
    design = np.column_stack([np.ones(use.sum()), np.log(x[use])])
    if len(design) < 3 or np.ptp(design[:, 1]) < 1e-9:
        raise InputError(
            f"{len(design)} tokens with {len(np.unique(x[use]))} different proxies are too few for a calibration; "
            "measure more of them."
        )
    # Weighted least squares: rows scaled by √weight.
    root = np.sqrt(1 / prob[use])
    coefficients = np.linalg.lstsq(design * root[:, None], np.log(y[use]) * root, rcond=None)[0]
    residual = np.log(y[use]) - design @ coefficients
    error = np.sqrt(np.average(residual**2, weights=1 / prob[use]))
    raw = Calibration(*coefficients.tolist(), factor=1.0, log_error=float(error), n=len(design))
    predicted = raw.predict(x[seen])
    # Tokens of energy 0 count here: they have no logarithm, but they belong to the total.
    factor = float((y[seen] / prob[seen]).sum() / (predicted / prob[seen]).sum())
    return replace(raw, factor=factor)
