"""How many prompts an update needs: gradient noise scale, signal-to-noise and the norm test.

All three compare the same two numbers, ‖m‖² and V; each has its own customary unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.statistics.inference.intervals import Interval, jackknife_interval
from otb_analysis.statistics.moments.gram import deleted_moments
from otb_analysis.types import Float, Gram, Label


@dataclass(frozen=True)
class NoiseScale:
    """Signal and noise of a gradient, None where the estimated signal is not positive.

    Attributes:
        grad_sq: |G|², squared norm of the mean gradient.
        noise: S, variance of the gradient of one sample (a rollout or a prompt, as the batches were counted).
        scale: S/|G|², in samples: the batch at which noise and signal are equal.
    """

    grad_sq: float
    noise: float
    scale: float | None


def noise_scale(small_sq: ArrayLike, small_batch: float, big_sq: ArrayLike, big_batch: float) -> NoiseScale:
    """Gradient noise scale from squared norms at two batch sizes.

    |G|² = (B_b|G_b|² − B_s|G_s|²)/(B_b − B_s), S = (|G_s|² − |G_b|²)/(1/B_s − 1/B_b), B_simple = S/|G|².
    Over several steps the norms are averaged before anything is divided. Source: McCandlish et al. (2018).

    Args:
        small_sq: |G_s|², one value or one per step.
        small_batch: B_s in samples.
        big_sq: |G_b|², likewise.
        big_batch: B_b in samples, larger than `small_batch`.

    Returns:
        Signal, noise and their ratio.

    Raises:
        InputError: The batches are not 0 < small < big, or there is no step.
    """
    if not 0 < small_batch < big_batch:
        raise InputError(f"batches are {small_batch} and {big_batch}; pass 0 < small_batch < big_batch.")
    if np.asarray(small_sq).size == 0 or np.asarray(big_sq).size == 0:
        raise InputError("small_sq or big_sq is empty; pass squared norms of one step or more.")
    small, big = (float(np.asarray(norms, dtype=float).mean()) for norms in (small_sq, big_sq))
    grad_sq = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return NoiseScale(grad_sq, noise, noise / grad_sq if grad_sq > 0 else None)


@dataclass(frozen=True)
class GradientNoise:
    """Signal and noise of one estimator's update; None where the estimated signal is not positive.

    Attributes:
        grad_sq: ‖m‖² from pairs of different prompts.
        noise: V, variance of one prompt's group gradient.
        scale: V/‖m‖² in *prompts*, with its interval; at P prompts the efficiency of an unbiased estimator is
            P/(P + scale).
        signal_to_noise: ‖m‖²/(V/P), P prompts of one update.
        n_prompts: P.
    """

    grad_sq: float
    noise: float
    scale: Interval | None
    signal_to_noise: float | None
    n_prompts: int


def gradient_noise(grams: Sequence[Gram], label: Label) -> GradientNoise | None:
    """Signal and noise of one estimator from Gram matrices, prompts as samples.

    A constant factor on the estimator changes neither `scale` nor `signal_to_noise`.

    Args:
        grams: One Gram matrix per step; those that have the label are used.
        label: The estimator.

    Returns:
        None when no step has two prompts.
    """
    having = [gram for gram in grams if label in gram.labels]
    moments = deleted_moments(having, label, label)
    if not np.isfinite(moments.mean_sq[0]):
        return None
    noise = np.maximum(moments.power - moments.mean_sq, 0)
    p = max(round(float(np.mean([gram.n_prompts for gram in having]))), 1)
    scale = _over(noise, moments.mean_sq)
    interval = jackknife_interval(scale[0], scale[1:], "noise scale V/‖m‖² in prompts")
    signal = float(p / scale[0]) if scale[0] > 0 else None
    return GradientNoise(float(moments.mean_sq[0]), float(noise[0]), interval, signal, p)


@dataclass(frozen=True)
class NormTest:
    """Whether a batch was large enough.

    Attributes:
        ratio: √(variance/‖ḡ‖²).
        passes: ratio ≤ θ.
        prompts_needed: Smallest batch that would pass at this variance and norm.
    """

    ratio: float
    passes: bool
    prompts_needed: int


def norm_test(variance: float, mean_norm_sq: float, n_prompts: int, theta: float = 1.0) -> NormTest | None:
    """Test whether the batch variance is small against the gradient: variance ≤ θ²·‖ḡ‖².

    At θ = 1 the expected update still points more along the gradient than off it. ‖ḡ‖² contains the noise
    (E‖ḡ‖² = ‖m‖² + V/P), so θ ≥ 1 passes almost always; θ well below 1 is the useful range. Source: Byrd et al. (2012).

    Args:
        variance: Batch variance of P prompts.
        mean_norm_sq: ‖ḡ‖² of the same batch.
        n_prompts: P.
        theta: θ.

    Returns:
        None where ‖ḡ‖² is 0.

    Raises:
        InputError: θ is not positive.
    """
    if not theta > 0:
        raise InputError(f"theta is {theta}; pass a positive number.")
    if not mean_norm_sq > 0:
        return None
    ratio = float(np.sqrt(variance / mean_norm_sq))
    return NormTest(ratio, ratio <= theta, max(1, int(np.ceil(n_prompts * (ratio / theta) ** 2 - 1e-9))))


def _over(a: Float, b: Float) -> Float:
    return np.divide(a, b, out=np.full_like(a, np.nan), where=b > 0)
