"""Inner products of many gradients, in bounded memory and accumulated in float64, exact or from features."""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.batch.inputs import Weights, check_group, check_weights
from otb_analysis.types import Float

CHUNK = 1 << 12
"""Entries of each gradient per float64 block: few enough for those of some hundred gradients to stay in cache."""
ROWS = 64
"""Gradients whose products with themselves and all later ones are taken together."""
GRADIENT_BYTES = 4 << 30
"""What all gradients of one Gram matrix may occupy together. Of R gradients of D entries that take more, R·D·itemsize /
4 GiB stretches are formed one after the other, at the price of as many rounds of forward and (ever shorter) backward
passes; the matrix itself, 8 R² bytes, must fit as well."""

ROW = 100_000
"""Numbers in a row of a tensor up to which its norm is taken in float32."""
TINY = 1e-20
"""A sum of squares below which single squares may be too small for float32, however many they are."""

_log = logging.getLogger(__name__)

Stretch = list[tuple[int, slice]]
"""Part of a gradient: indices of parameters and, of each, a range of its flattened entries."""


def stretches(parameters: Sequence[Tensor], count: int) -> list[Stretch]:
    """Cut the parameters so that `count` gradients of one stretch fit in `GRADIENT_BYTES`; in one piece if they do.

    Stretches hold whole parameters where possible, because a cut one is formed again for each of its parts.
    """
    found: list[Stretch] = [[]]
    free = GRADIENT_BYTES // count
    for index, parameter in enumerate(parameters):
        size = parameter.numel()
        most = max(1, GRADIENT_BYTES // (count * parameter.element_size()))
        pieces = -(-size // most)
        for k in range(pieces):
            span = slice(size * k // pieces, size * (k + 1) // pieces)
            needed = (span.stop - span.start) * parameter.element_size()
            if needed > free and found[-1]:
                found.append([])
                free = GRADIENT_BYTES // count
            found[-1].append((index, span))
            free -= needed
    return found


def held(gradient: Tensor, span: slice) -> Tensor:
    """The entries of one parameter's gradient that a stretch keeps, without the rest of its memory."""
    flat = gradient.flatten()
    return flat if span.stop - span.start == len(flat) else flat[span].clone()


def refuse_many(count: int) -> None:
    """Raise where blocks of gradients do not help because the Gram matrix is too large itself."""
    fit = math.isqrt(GRADIENT_BYTES // 8)
    if count > fit:
        raise InputError(
            f"weights has {count} rows, counting each prompt's, whose Gram matrix exceeds the "
            f"{GRADIENT_BYTES / 2**30:.3g} GiB allowed; pass at most {fit} (rows of weights times prompts), or measure "
            "features once with sketch_score_norms(..., features=True) and take gram_from_features of a part at a time."
        )


def tell_rounds(rounds: int, count: int) -> None:
    """Log that gradients do not fit in memory together, what that costs, and what does without."""
    if rounds > 1:
        _log.warning(
            "%d gradients exceed %.3g GiB, so their Gram matrix takes %d rounds of backward passes; gram_from_features "
            "estimates it from sketch_score_norms(..., features=True) in one.",
            count,
            GRADIENT_BYTES / 2**30,
            rounds,
        )


def gram_from_features(features: Tensor | np.ndarray, weights: Weights, group: Tensor | np.ndarray) -> Float:
    """Estimate the Gram matrix of group gradients from per-token features instead of gradients.

    Ĝ[m, m', p, p'] = ⟨F_{m,p}, F_{m',p'}⟩,  F_{m,p} = Σ_{n in p} Σ_t weights[n,m,t] f_{n,t}.

    With f = s·D_k/√K, E[D Dᵀ] = I, as `sketch_score_norms(..., features=True)` gives them, E⟨f_t, f_k⟩ = s_t·s_k for
    t ≠ k *and* for t = k, because all tokens are projected on the same directions: every entry of Ĝ is unbiased, the
    diagonals p = p' and m = m' included, and nothing is to be subtracted from them. (Features with noise of their own,
    f_t = s_t + ε_t, would be biased by E‖ε‖² there; so would features from one seed per rollout everywhere off it.)
    The entries share the noise of K directions: their standard error is that of K products, √(G_aa G_bb + G_ab²)/√K for
    Gaussian directions, √(2/K)·‖g‖² on the diagonal, and ratios of entries are only consistent, with a bias of order
    1/K. The gradients are those of the log-probability: no 1/N, no advantage factor beyond `weights`.

    Args:
        features: Per-token features [N, L, K]; read only where a weight is not zero.
        weights: M rows of weights per rollout [N, M, L], zero at tokens that were not sampled.
        group: Prompt of each rollout [N], any integers; axis p is ordered by the sorted distinct values.

    Returns:
        Estimated Gram matrix [M, M, P, P], float64, symmetric under exchange of (m, p) and (m', p').

    Raises:
        InputError: Shapes disagree, or the matrix does not fit in `GRADIENT_BYTES`.
        NonFiniteError: A weight, or a feature that is read, is NaN or infinite.
    """
    values = features.detach().cpu().numpy() if isinstance(features, Tensor) else np.asarray(features)
    if values.ndim != 3:
        raise InputError(f"features has shape {values.shape}; pass one vector per token, shape [N, L, K].")
    n, length, _ = values.shape
    rows = check_weights(weights, np.ones((n, length), dtype=bool))
    prompts, index = np.unique(check_group(group, n), return_inverse=True)
    refuse_many(rows.shape[1] * len(prompts))
    sums = np.zeros((rows.shape[1], len(prompts), values.shape[2]))
    for rollout in range(n):
        sums[:, index[rollout]] += _weighted_features(values, rows, rollout)
    return np.einsum("mpk,nqk->mnpq", sums, sums, optimize=True)


def _weighted_features(features: Float, rows: Float, rollout: int) -> Float:
    read = np.flatnonzero(rows[rollout].any(0))
    found = features[rollout, read].astype(np.float64)
    if not np.isfinite(found).all():
        token = read[np.argwhere(~np.isfinite(found))[0][0]]
        raise NonFiniteError(
            f"features is not finite at rollout {rollout}, token {token}; pass weight 0 where nothing was sampled."
        )
    return rows[rollout][:, read] @ found


def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> Float:
    """All pairwise inner products ⟨g_i, g_j⟩ of gradients.

    Args:
        gradients: R gradients, each one tensor per parameter, in the same order.

    Returns:
        Symmetric matrix [R, R], float64.
    """
    count, device = len(gradients), gradients[0][0].device
    total = torch.zeros(count, count, dtype=torch.float64, device=device)
    for parts in zip(*gradients, strict=True):
        add_products(total, [part.flatten() for part in parts])
    return total.cpu().numpy()


def add_products(total: Tensor, gradients: Sequence[Tensor] | Tensor) -> None:
    """Add the inner products of (parts of) R gradients to their matrix.

    A float32 product over millions of entries is off by 1e-5 and more; here entries are converted to float64 a chunk at
    a time before they are multiplied, so only the gradients' own rounding is left. Of the symmetric matrix the blocks
    on and above the diagonal are computed.

    Args:
        total: Matrix [R, R], float64, added to in place.
        gradients: R flat gradients of n entries, as one tensor [R, n] or as a list.
    """
    whole = isinstance(gradients, Tensor)
    for start in range(0, len(gradients[0]), CHUNK):
        span = slice(start, start + CHUNK)
        block = gradients[:, span].double() if whole else torch.stack([g[span] for g in gradients]).double()
        for first in range(0, len(block), ROWS):
            part = block[first : first + ROWS] @ block[first:].T
            total[first : first + ROWS, first:] += part
            total[first + ROWS :, first : first + ROWS] += part[:, ROWS:].T


def _row_norms(tensor: Tensor) -> Tensor:
    """Norms of a tensor's rows, flat."""
    wide = torch.float64 if tensor.shape[-1:] > (ROW,) else torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=wide).flatten().double()


def norm_sq_of(gradient: Sequence[Tensor]) -> float:
    """‖·‖² over all tensors of a gradient together: short rows in float32 at least, their sum in float64.

    A float32 norm of a row of some thousand numbers is off by about 1e-7 of it, and by more the longer it is; so rows
    beyond ROW are taken in float64, which takes four times as long, as is everything whose squares leave the range of
    float32.
    """
    tensors = [t.detach() for t in gradient]
    rows = [_row_norms(t) for t in tensors]
    total = float(torch.cat(rows).square().sum())
    if TINY < total < math.inf:
        return total
    norms = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors])
    return float(norms.square().sum())
