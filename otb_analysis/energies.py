"""Token energies w_t = ‖s_t‖² as weights: proxies from stored columns, sums over the past, importance ratios.

All functions take [N, T] arrays, return float64 and are zero outside the mask where they take one.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.signal import lfilter

from otb_analysis.arrays import masked
from otb_analysis.errors import InputError
from otb_analysis.types import Bool, Float


def logit_energy(logprob: ArrayLike, sum_pi_sq: ArrayLike) -> Float:
    """Return the score norm in logit space from the two stored columns.

    w = ‖e_y − π‖² = (1 − π_y)² + (Σ_v π_v² − π_y²).

    The textbook 1 − 2π_y + Σ_v π_v² is the same number but cancels on peaked tokens. Here the first term is computed
    as expm1(log π_y)², and the second is clamped to [0, (1 − π_y)²], the range it has for any distribution; so a
    rounded Σ_v π_v² costs at most a factor of two and never a sign. Proved; see `logit_stats` for the value computed
    from the logits themselves.

    Args:
        logprob: log π_y in nats.
        sum_pi_sq: Σ_v π_v², of the same distribution.

    Returns:
        w in [0, 2], shape of the inputs.
    """
    log_pi = np.asarray(logprob, np.float64)
    missed_sq = np.expm1(np.minimum(log_pi, 0.0)) ** 2
    rest = np.asarray(sum_pi_sq, np.float64) - np.exp(2.0 * log_pi)
    return missed_sq + np.clip(rest, 0.0, missed_sq)


def lm_head_energy(energy: ArrayLike, hidden_norm_sq: ArrayLike, temperature: float = 1.0) -> Float:
    """Return the exact score norm of an untied output matrix.

    ‖∂ log π(y)/∂W_out‖² = w · ‖h‖² / τ², w the logit-space energy at temperature τ. Proved; an output bias adds
    w/τ², which is not included.

    Args:
        energy: Logit-space energy w.
        hidden_norm_sq: ‖h‖² of the final hidden state that predicts the token.
        temperature: Sampling temperature τ.

    Raises:
        InputError: The temperature is not positive.
    """
    if not temperature > 0:
        raise InputError(f"temperature is {temperature} but must be above 0; pass the one used for sampling.")
    return np.asarray(energy, np.float64) * np.asarray(hidden_norm_sq, np.float64) / temperature**2


def token_weight(energy: ArrayLike, mask: Bool, ratio: ArrayLike | None = None) -> Float:
    """Return the instantaneous weight of each token.

    ρ_t² w_t, or w_t without ratios.

    Args:
        energy: Token energy w [N, T].
        mask: True at policy tokens [N, T].
        ratio: Importance ratio ρ [N, T], or None on-policy.
    """
    weight = masked(energy, mask)
    return weight if ratio is None else weight * masked(ratio, mask) ** 2


def realized_energy(energy: ArrayLike, mask: Bool, ratio: ArrayLike | None = None) -> Float:
    """Return the energy realized up to each token: what the optimal token baseline weights by.

    W_t = Σ_{j≤t} ρ_j² w_j over policy tokens. With ratios this is the sum that the published code forms; its text says
    ρ_t² Σ_j w_j.

    Args:
        energy: Token energy w [N, T].
        mask: True at policy tokens [N, T].
        ratio: Importance ratio ρ [N, T], or None on-policy.

    Returns:
        W [N, T]; after the last policy token it keeps its final value.
    """
    return np.cumsum(token_weight(energy, mask, ratio), axis=1)


def decayed_energy(weight: Float, decay: float) -> Float:
    """Return the exponentially forgetting sum of the weights so far.

    W_t = λ W_{t−1} + w_t = Σ_{j≤t} λ^{t−j} w_j: λ = 0 gives w, λ = 1 gives the realized energy.

    Args:
        weight: Instantaneous weight [N, T], zero outside the mask; column = policy position.
        decay: λ in [0, 1].
    """
    return np.asarray(lfilter([1.0], [1.0, -decay], weight, axis=1))
