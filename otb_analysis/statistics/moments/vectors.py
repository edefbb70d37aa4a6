"""Moments from the prompts' mean gradients themselves, where prompts are too many for a Gram matrix of all of them."""

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.statistics.moments.measures import Moments
from otb_analysis.types import Float


def vector_moments(mean: ArrayLike, power: ArrayLike, truth: ArrayLike, truth_power: ArrayLike) -> Moments:
    """Return what `deleted_moments` returns of one step of different prompts, in time and memory O(P·K) instead of P².

    ‖m‖², ⟨m, ∇J⟩ and ‖∇J‖² are means over pairs of different prompts, Σ_{p≠q} a_p·b_q = (Σ a)·(Σ b) − Σ_p a_p·b_p;
    without prompt p they lose a_p·Σb + b_p·Σa − 2 a_p·b_p.

    Args:
        mean: Gradient of every prompt [P, K], the mean over its groups where there are several.
        power: Mean of ‖g‖² over its groups [P].
        truth: The same of what stands for ∇J [P, K].
        truth_power: And its ‖g‖² [P].

    Returns:
        Arrays [1 + P]: entry 0 from all prompts, entry 1 + p without prompt p. NaN where no pair is left.

    Raises:
        InputError: The shapes do not fit.
    """
    g, u, size, other = (np.asarray(x, dtype=float) for x in (mean, truth, power, truth_power))
    if g.ndim != 2 or u.shape != g.shape or size.shape != g.shape[:1] or other.shape != g.shape[:1]:
        raise InputError(
            f"mean has shape {g.shape}, truth {u.shape}, power {size.shape} and truth_power {other.shape}; pass "
            "[P, K], [P, K], [P] and [P]."
        )
    return Moments(_deleted_mean(size), _pairs(g, g), _pairs(g, u), _pairs(u, u), _deleted_mean(other))


def _deleted_mean(x: Float) -> Float:
    kept = np.concatenate([[x.sum()], x.sum() - x])
    counts = np.concatenate([[x.size], np.full(x.size, x.size - 1)])
    return kept / np.where(counts > 0, counts, np.nan)


def _pairs(a: Float, b: Float) -> Float:
    """Return the mean of a_p·b_q over pairs p ≠ q, of all prompts and without each [1 + P]."""
    count = len(a)
    same = np.einsum("pk,pk->p", a, b)
    total = float(a.sum(axis=0) @ b.sum(axis=0) - same.sum())
    touched = a @ b.sum(axis=0) + b @ a.sum(axis=0) - 2 * same
    pairs = np.concatenate([[count * (count - 1)], np.full(count, (count - 1) * (count - 2))])
    return np.concatenate([[total], total - touched]) / np.where(pairs > 0, pairs, np.nan)
