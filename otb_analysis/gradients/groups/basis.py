"""Few gradients in place of many: the rows of weights that one prompt's rollouts get are nearly dependent.

Estimators differ by a baseline, so their rows of weights span far fewer dimensions than there are estimators: every
baseline that is one number per rollout lies in the span of the rollouts' indicators, and one that is shared by the
rollouts adds one pattern over the tokens. With weights = mix · rows, gradients are mix · (gradients of rows).
"""

from dataclasses import dataclass

import numpy as np

from otb_analysis.types import Float

TOLERANCE = 1e-8
"""How far a row may be from what its basis gives, as a share of the row's own length."""
FLOOR = 1e-6
"""Smallest scale of a token beside the largest: what a sure token's score is known to."""


@dataclass(frozen=True)
class Basis:
    """weights = mix @ rows, up to TOLERANCE of each row."""

    rows: Float  # Basis rows [r, K], orthogonal in the metric of the tokens' scales
    mix: Float  # Coefficients [M, r]


def basis_of(weights: Float, scale: Float) -> Basis:
    """Factor M rows of weights over K tokens, with the smallest rank that leaves no row more than TOLERANCE away.

    `scale` [K] is what ‖s_k‖ is roughly proportional to, such as 1 − π_k; not negative.
    """
    # A row's gradient is Σ_k weights[m, k] s_k, so an error in a weight counts by ‖s_k‖: distances are taken in the
    # metric of the scales. A scale of 0 would let any weight go lost, hence the floor.
    metric = np.maximum(scale, FLOOR * scale.max(initial=0.0))
    scaled = weights * np.where(metric > 0, metric, 1.0)
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    used = length[:, 0] > 0
    if not used.any():
        return Basis(np.zeros((0, weights.shape[1])), np.zeros((len(weights), 0)))
    # Rows of length 1: the rank must not depend on how large an estimator's weights are.
    left, values, right = np.linalg.svd(scaled[used] / length[used], full_matrices=False)
    mixed = left * values
    missing = np.sqrt(np.cumsum((mixed**2)[:, ::-1], axis=1)[:, ::-1])  # [m, r]: row m without its first r directions
    rank = int((missing.max(axis=0) > TOLERANCE).sum())
    mix = np.zeros((len(weights), rank))
    mix[used] = length[used] * mixed[:, :rank]
    # Back from the metric, which is 1 where no token has a scale.
    return Basis(right[:rank] / np.where(metric > 0, metric, 1.0), mix)
