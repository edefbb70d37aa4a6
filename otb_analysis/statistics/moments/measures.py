"""What a gradient estimator is worth, as functions of five moments; exact moments or estimated ones.

m = E ĝ is the mean of the estimator's group gradient, V = tr Cov of one prompt's group gradient, ∇J the gradient that
the unbiased reference estimates. Raw variance alone ranks estimators wrongly, since a baseline that includes its own
rollout shrinks the gradient: read it beside `projection`, and compare by `sf` and `efficiency`.

Every function is vectorised over the shape of the moments and gives NaN, without a warning, where the quantity is
undefined. All of them are invariant under an orthogonal change of the parameters' coordinates.
"""

from dataclasses import dataclass, replace

import numpy as np

from otb_analysis.types import Float


@dataclass(frozen=True)
class Moments:
    """First and second moments of group gradients, each of any one shape; made by `gram`, or exactly by enumeration."""

    power: Float  # E‖g_p‖² = ‖m‖² + V of one prompt's group gradient
    mean_sq: Float
    along: Float
    truth_sq: Float
    reference_power: Float  # E‖g_p‖² of the reference


def batch_variance(moments: Moments, n_prompts: float) -> Float:
    """Variance of the mean gradient of P prompts: V/P = (E‖g_p‖² − ‖m‖²)/P.

    With moments estimated from P prompts this equals Σ_p‖ḡ_p − ḡ‖²/(P(P−1)). Prompts are independent, so it holds for
    any baseline. Scaling the gradients by a multiplies it by a².
    """
    # The estimate of ‖m‖² has no bias, so by chance it exceeds the power; a variance is not negative.
    return np.maximum(moments.power - moments.mean_sq, 0) / n_prompts


def projection(moments: Moments) -> Float:
    """Progress per step relative to ∇J: c = ⟨m, ∇J⟩/‖∇J‖².

    1 for an unbiased estimator; 1 − 1/N for the group mean in groups of N; scales with the estimator.
    """
    return quotient(moments.along, moments.truth_sq)


def relative_bias(moments: Moments) -> Float:
    """Length of the bias relative to ∇J: ‖m − ∇J‖/‖∇J‖, with ‖m − ∇J‖² = ‖m‖² − 2⟨m, ∇J⟩ + ‖∇J‖².

    0 for an unbiased estimator, 1/N for the group mean. The estimated square can be negative and is then taken as 0, so
    the estimate is not itself unbiased.
    """
    # Of three unbiased terms, so it is often negative where the bias is small; √ of its positive part is biased up.
    return np.sqrt(np.maximum(bias_sq(moments), 0))


def bias_sq(moments: Moments) -> Float:
    """Return the squared relative bias ‖m − ∇J‖²/‖∇J‖²; an estimate can be negative."""
    return quotient(moments.mean_sq - 2 * moments.along + moments.truth_sq, moments.truth_sq)


def sf(moments: Moments, n_prompts: float) -> Float:
    """Variance at equal progress: SF = batch variance / c².

    Multiplying an estimator by a constant leaves it unchanged; it does not charge bias in direction, which
    `efficiency` does. It equals the batch variance for an unbiased estimator.
    """
    return quotient(batch_variance(moments, n_prompts), projection(moments) ** 2)


def efficiency(moments: Moments, n_prompts: float) -> Float:
    """Share of an update of P prompts that points along ∇J: ⟨m,∇J⟩² / (‖∇J‖² · (‖m‖² + V/P)).

    In [0, 1] for exact moments; an estimate can leave that range through noise and is not clipped. It tends to
    cos²(m, ∇J) as P grows, does not change when the estimator is multiplied by a constant, and is 1/(1 + V/(P‖∇J‖²))
    for an unbiased one.
    """
    # ‖m‖² + V/P is E‖ĝ‖²: the squared length of the whole update, noise included.
    update_sq = moments.mean_sq + batch_variance(moments, n_prompts)
    return quotient(quotient(moments.along**2, moments.truth_sq), update_sq)


def rollout_equivalents(moments: Moments, n_prompts: float, n_rollouts: float) -> Float:
    """Rollouts that the reference would need for the same efficiency, with more prompts at the same group size.

    The reference reaches efficiency e with P' prompts where e = 1/(1 + V_ref/(P'‖∇J‖²)); the answer is
    n_rollouts · P'/P. It is n_rollouts for the reference itself, and ∞ where no number of rollouts reaches e (e ≥ 1,
    which only an estimate can be).
    """
    share = efficiency(moments, n_prompts)
    noise = np.maximum(moments.reference_power - moments.truth_sq, 0) / n_prompts
    # e/(1 − e) is the signal-to-noise ratio of an unbiased update; equal efficiency is equal odds.
    odds = np.where(share >= 1, np.inf, quotient(share, 1 - share))
    with np.errstate(invalid="ignore"):  # no noise in either is 0·∞: undefined
        return n_rollouts * quotient(noise, moments.truth_sq) * odds


def with_projection(moments: Moments, c: float | None) -> Moments:
    """Use a proved projection instead of an estimate: m = c·∇J, so ‖m‖² = c²‖∇J‖² and ⟨m, ∇J⟩ = c‖∇J‖².

    E‖g_p‖² stays as it was measured, so V = E‖g_p‖² − c²‖∇J‖². Two proved estimators on the same prompts have the same
    ‖∇J‖², so that E‖g_p‖²/c² alone says which of them has less variance at equal progress.
    """
    if c is None:
        return moments
    # m is known to be c·∇J, so estimating its length and direction a second time would only add noise.
    return replace(moments, mean_sq=c**2 * moments.truth_sq, along=c * moments.truth_sq)


def crossing(moments: Moments) -> Float:
    """Prompts P above which the reference is the more efficient of the two: where the two efficiencies are equal.

    P = (⟨m,∇J⟩²·V_ref − ‖∇J‖⁴·V) / (‖∇J‖²·(‖∇J‖²·‖m‖² − ⟨m,∇J⟩²)). A biased but quiet estimator is ahead below it. ∞
    where it is quieter at equal progress and its direction is right, so that it stays ahead; 0 where it never is.
    """
    truth, along_sq = np.asarray(moments.truth_sq, dtype=float), np.asarray(moments.along, dtype=float) ** 2
    noise = (np.maximum(a - b, 0) for a, b in ((moments.reference_power, truth), (moments.power, moments.mean_sq)))
    reference_noise, own_noise = noise
    lead = along_sq * reference_noise - truth**2 * own_noise
    sideways = truth * moments.mean_sq - along_sq  # ‖∇J‖² times what of ‖m‖² is not along ∇J
    straight = sideways <= 1e-12 * along_sq  # what rounding leaves of an unbiased direction
    finite = quotient(np.maximum(lead, 0), np.where(straight, np.nan, truth * sideways))
    ahead = lead > 1e-12 * along_sq * reference_noise
    return np.where(truth > 0, np.where(straight, np.where(ahead, np.inf, 0.0), finite), np.nan)


def known_number(value: float) -> float | None:
    """Return a number, None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def quotient(numerator: Float, denominator: Float) -> Float:
    """Return the quotient where the denominator is positive, NaN elsewhere."""
    numerator, denominator = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    shape = np.broadcast_shapes(numerator.shape, denominator.shape)
    # An estimated ‖∇J‖² at or below 0 is lost in noise: what it divides is unknown, not infinite.
    return np.divide(numerator, denominator, out=np.full(shape, np.nan), where=denominator > 0)
