"""Per-token estimators of the divergence KL(π‖π_ref) from one sampled token, with l = log π(y) − log π_ref(y).

Source: Schulman, "Approximating KL Divergence" (2020), which names them k1, k2 and k3.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError, nearest
from otb_analysis.types import Float


@dataclass(frozen=True)
class Divergence:
    """One estimator."""

    name: str  # Its name in `DIVERGENCES`
    value: Callable[[Float], Float]  # l → estimate in nats
    # l → derivative by log π(y): the coefficient of the score s_t in the gradient of Σ value
    slope: Callable[[Float], Float]
    note: str  # What it estimates, as a value and as a loss


DIVERGENCES: dict[str, Divergence] = {
    "k1": Divergence(
        "k1", lambda log_ratio: log_ratio, np.ones_like, "Unbiased; as a loss its expected gradient is zero."
    ),
    "k2": Divergence(
        "k2",
        lambda log_ratio: 0.5 * log_ratio**2,
        lambda log_ratio: log_ratio,
        "Biased as a value; as a loss its expected gradient is that of KL(π‖π_ref).",
    ),
    "k3": Divergence(
        "k3",
        lambda log_ratio: np.expm1(-log_ratio) + log_ratio,
        lambda log_ratio: -np.expm1(-log_ratio),
        "Unbiased and never negative; as a loss its expected gradient is that of KL(π_ref‖π).",
    ),
}


def divergence(name: str, logprob: ArrayLike, reference: ArrayLike) -> Float:
    """Return the estimate of KL(π‖π_ref) at each sampled token, in nats.

    k1 = l, k2 = l²/2, k3 = e^{−l} − 1 + l, l = log π(y) − log π_ref(y), y drawn from π. All three are zero where the
    policies agree. E[k1] = E[k3] = KL(π‖π_ref); E[k2] differs from it in third order.

    Raises:
        InputError: The name is unknown.
    """
    return _entry(name).value(_log_ratio(logprob, reference))


def divergence_slope(name: str, logprob: ArrayLike, reference: ArrayLike) -> Float:
    """Return the coefficient of ∇ log π(y) in the gradient of the estimate.

    ∇k1 = s, ∇k2 = l·s, ∇k3 = (1 − e^{−l})·s with s = ∇_θ log π(y): log-probability, no 1/N, no sign change. On-policy
    E[s] = 0, so k1 as a loss does nothing but add noise; E[l·s] = ∇KL(π‖π_ref); E[(1 − e^{−l})·s] = ∇KL(π_ref‖π).

    Raises:
        InputError: The name is unknown.
    """
    return _entry(name).slope(_log_ratio(logprob, reference))


def _entry(name: str) -> Divergence:
    if name not in DIVERGENCES:
        raise InputError(f"divergence {name!r} does not exist; {nearest(name, DIVERGENCES)}")
    return DIVERGENCES[name]


def _log_ratio(logprob: ArrayLike, reference: ArrayLike) -> Float:
    return np.asarray(logprob, np.float64) - np.asarray(reference, np.float64)
