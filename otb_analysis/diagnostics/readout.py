"""Is a number that the hidden states hold also read by the output layer? Counting readout (arXiv 2605.03258).

From its abstract: linear probes find the count, and the digit rows of the output layer are nearly orthogonal to them.
The ridge, the split of the prompts, the shift beside the probe and the shares are our choices.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.types import Float


@dataclass(frozen=True)
class Probe:
    """A linear probe of one layer: count ≈ offset + direction · h. Made by `linear_probe`."""

    direction: Float  # [d], counts per unit of the hidden state
    offset: float
    r_squared: float  # 1 − Σ(n − n̂)²/Σ(n − n̄)² on prompts the probe was not fitted on; below 0 if worse than their mean
    exact: float  # Share of those prompts whose rounded prediction is the count


def linear_probe(hidden: ArrayLike, count: ArrayLike, fitted: ArrayLike, ridge: float = 1e-3) -> Probe:
    """Fit u = argmin Σ (n − n̄ − u·(h − h̄))² + ridge·tr(C)/d·‖u‖², C = Σ(h − h̄)(h − h̄)ᵀ, and judge it on the rest.

    hidden [N, d] is one layer's state before the answer, count [N], fitted [N] is true at the prompts to fit on. A
    ridge relative to tr(C)/d makes the fit independent of the layer's scale.

    Raises:
        InputError: A shape differs, a number is not finite, the ridge is not positive, or a part has one count only.
    """
    h, n, on = np.asarray(hidden, float), np.asarray(count, float), np.asarray(fitted, bool)
    if h.ndim != 2 or n.shape != h.shape[:1] or on.shape != n.shape:
        raise InputError(f"hidden has shape {h.shape}, count {n.shape}, fitted {on.shape}; pass [N, d], [N], [N].")
    if not (np.isfinite(h).all() and np.isfinite(n).all()):
        raise InputError("hidden or count holds NaN or infinite numbers; leave such prompts out of the probe.")
    if not ridge > 0:
        raise InputError(f"ridge is {ridge}; pass a positive number.")
    for name, part in (("fitted", n[on]), ("held-out", n[~on])):
        if np.unique(part).size < 2:
            raise InputError(
                f"the {part.size} {name} prompts have {np.unique(part).size} different counts; "
                "a probe needs at least 2, so pass more prompts."
            )
    centre, mean = h[on].mean(axis=0), n[on].mean()
    x = h[on] - centre
    products = x.T @ x
    if not np.trace(products) > 0:
        raise InputError("hidden is the same at every fitted prompt; take the state of the last prompt token.")
    damping = ridge * np.trace(products) / h.shape[1] * np.eye(h.shape[1])
    direction = np.linalg.solve(products + damping, x.T @ (n[on] - mean))
    offset = float(mean - centre @ direction)
    out, truth = offset + h[~on] @ direction, n[~on]
    unexplained = np.square(truth - out).sum() / np.square(truth - truth.mean()).sum()
    return Probe(direction, offset, float(1 - unexplained), float((np.rint(out) == truth).mean()))


def count_shift(hidden: ArrayLike, count: ArrayLike) -> Float:
    """A = Σ (n − n̄)(h − h̄) / Σ (n − n̄)²: how the state [d] moves on average when the count grows by one.

    A probe's direction u is a filter, not this shift: it also cancels what varies beside the count, so u can be
    orthogonal to a row of the output layer that follows the count, whose logit moves by W_v·a a count (Haufe et al.,
    2014). hidden is [N, d], count [N].

    Raises:
        InputError: A shape differs, or there is one count only.
    """
    h, n = np.asarray(hidden, float), np.asarray(count, float)
    if h.ndim != 2 or n.shape != h.shape[:1]:
        raise InputError(f"hidden has shape {h.shape} and count {n.shape}; pass [N, d] and [N].")
    away = n - n.mean()
    if not away.any():
        raise InputError("all prompts have the same count; pass prompts of at least 2 counts.")
    return away @ (h - h.mean(axis=0)) / np.square(away).sum()


def row_cosines(direction: ArrayLike, rows: ArrayLike) -> Float:
    """cos(u, W_v − W̄) of a direction [d] with each row [K, d] of the output layer, W̄ the mean of those rows.

    What all K rows share changes no probability among them. A row that equals the mean has NaN.

    Raises:
        InputError: A shape differs, there are fewer than two rows, or the direction is 0.
    """
    u, w = np.asarray(direction, float), np.asarray(rows, float)
    if u.ndim != 1 or w.ndim != 2 or w.shape[1:] != u.shape or len(w) < 2:
        raise InputError(f"direction has shape {u.shape} and rows {w.shape}; pass [d] and at least two rows [K, d].")
    if not np.linalg.norm(u) > 0:
        raise InputError("direction is 0, so it has no angle; the probe of this layer found nothing.")
    w = w - w.mean(axis=0)
    lengths = np.linalg.norm(w, axis=1)
    return np.divide(w @ u, lengths * np.linalg.norm(u), out=np.full(len(w), np.nan), where=lengths > 0)


def rows_share(logprob: ArrayLike, token_id: ArrayLike, rows: ArrayLike) -> Float:
    """Σ_{v in rows} δ_v² / Σ_v δ_v² with δ = e_y − π: the rows' share of the output layer's squared score norm [N].

    logprob [N, V] holds log π of whole distributions, token_id [N] the sampled tokens, rows [K] token ids. Since
    ∇_W log π(y) = δ ⊗ h, ‖h‖² cancels; times ‖δ‖²‖h‖²/(τ²‖s‖²) it is the share of the whole score (untied layer).

    Raises:
        InputError: A shape differs, an id is outside the vocabulary, or an id repeats.
    """
    z, y, chosen = np.asarray(logprob, float), np.asarray(token_id), np.asarray(rows)
    if z.ndim != 2 or y.shape != z.shape[:1] or chosen.ndim != 1:
        raise InputError(
            f"logprob has shape {z.shape}, token_id {y.shape}, rows {chosen.shape}; pass [N, V], [N], [K]."
        )
    ids = np.concatenate([y, chosen])
    if np.unique(chosen).size < chosen.size or (ids < 0).any() or (ids >= z.shape[1]).any():
        raise InputError(f"an id repeats in rows or is outside 0…{z.shape[1] - 1}; pass each row of the layer once.")
    at = np.arange(len(y))
    delta = np.exp(z)
    # 1 − π_y as the sum of the other π: the difference cancels for a sure token.
    delta[at, y] = 0.0
    delta[at, y] = delta.sum(axis=1)
    power = np.square(delta)
    total = power.sum(axis=1)
    return np.divide(power[:, chosen].sum(axis=1), total, out=np.full(len(y), np.nan), where=total > 0)
