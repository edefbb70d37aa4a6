"""Per-token estimators of the divergence KL(π‖π_ref) from one sampled token, with l = log π(y) − log π_ref(y).

Source: Schulman, "Approximating KL Divergence" (2020), which names them k1, k2 and k3.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.objectives.registry import lookup
from otb_analysis.types import Float


@dataclass(frozen=True)
class Divergence:
    """One estimator as a function of l, and its slope by log π(y): the coefficient of the score s_t in ∇ Σ value."""

    value: Callable[[Float], Float]
    slope: Callable[[Float], Float]


DIVERGENCES: dict[str, Divergence] = {
    # Unbiased. As a loss its expected gradient is zero.
    "k1": Divergence(lambda log_ratio: log_ratio, np.ones_like),
    # Biased as a value. As a loss its expected gradient is that of KL(π‖π_ref).
    "k2": Divergence(lambda log_ratio: 0.5 * log_ratio**2, lambda log_ratio: log_ratio),
    # Unbiased and never negative. As a loss its expected gradient is that of KL(π_ref‖π).
    "k3": Divergence(lambda log_ratio: np.expm1(-log_ratio) + log_ratio, lambda log_ratio: -np.expm1(-log_ratio)),
}


def divergence(name: str, logprob: ArrayLike, reference: ArrayLike) -> Float:
    """Return the estimate of KL(π‖π_ref) at each sampled token, in nats.

    k1 = l, k2 = l²/2, k3 = e^{−l} − 1 + l, l = log π(y) − log π_ref(y), y drawn from π. All three are zero where the
    policies agree. E[k1] = E[k3] = KL(π‖π_ref); E[k2] differs from it in third order.

    Raises:
        InputError: The name is unknown.
    """
    return lookup("divergence", name, DIVERGENCES).value(_log_ratio(logprob, reference))


def divergence_slope(name: str, logprob: ArrayLike, reference: ArrayLike) -> Float:
    """Return the coefficient of ∇ log π(y) in the gradient of the estimate.

    ∇k1 = s, ∇k2 = l·s, ∇k3 = (1 − e^{−l})·s with s = ∇_θ log π(y): log-probability, no 1/N, no sign change. On-policy
    E[s] = 0, so k1 as a loss does nothing but add noise; E[l·s] = ∇KL(π‖π_ref); E[(1 − e^{−l})·s] = ∇KL(π_ref‖π).

    Raises:
        InputError: The name is unknown.
    """
    return lookup("divergence", name, DIVERGENCES).slope(_log_ratio(logprob, reference))


def _log_ratio(logprob: ArrayLike, reference: ArrayLike) -> Float:
    return np.asarray(logprob, np.float64) - np.asarray(reference, np.float64)
