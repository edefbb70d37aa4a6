"""Inner products of many gradients, in bounded memory and accumulated in float64."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from otb_analysis.devices import working_set
from otb_analysis.errors import InputError
from otb_analysis.types import Float

CHUNK = 1 << 12
"""Entries of each gradient per float64 block on a CPU: those of some hundred gradients stay in its cache."""
SHORT = 1 << 10
"""The same of float32 blocks, whose products are then off by at most one rounding of ‖g‖‖g'‖."""
ROWS = 64
"""Gradients whose products with themselves and all later ones are taken together."""
GRADIENT_BYTES = 4 << 30
"""What all gradients of one Gram matrix may occupy together. Of R gradients of D entries that take more, R·D·itemsize /
4 GiB stretches are formed one after the other, at the price of as many rounds of forward and (ever shorter) backward
passes; the matrix itself, 8 R² bytes, must fit as well."""

SLICE = 1 << 16
"""Entries of each gradient that are converted to float64 together for its norm."""
ROW = 100_000
"""Numbers in a row of a tensor up to which its norm is taken in float32."""
TINY = 1e-20
"""A sum of squares below which single squares may be too small for float32, however many they are."""

_log = logging.getLogger(__name__)

Stretch = list[tuple[int, slice]]
"""Part of a gradient: indices of parameters and, of each, a range of its flattened entries."""


def stretches(parameters: Sequence[Tensor], count: int) -> list[Stretch]:
    """Cut the parameters so that `count` gradients of one stretch fit in `GRADIENT_BYTES`; in one piece if they do."""
    # Whole parameters where possible: the gradient of a cut one is formed again for each of its parts.
    cut: list[Stretch] = [[]]
    free = GRADIENT_BYTES // count
    for index, parameter in enumerate(parameters):
        size = parameter.numel()
        # A parameter too large for a stretch of its own is cut into near-equal pieces.
        most = max(1, GRADIENT_BYTES // (count * parameter.element_size()))
        pieces = -(-size // most)
        for k in range(pieces):
            span = slice(size * k // pieces, size * (k + 1) // pieces)
            needed = (span.stop - span.start) * parameter.element_size()
            if needed > free and cut[-1]:
                cut.append([])
                free = GRADIENT_BYTES // count
            cut[-1].append((index, span))
            free -= needed
    return cut


def refuse_many(count: int) -> None:
    """Raise where blocks of gradients do not help because the Gram matrix is too large itself."""
    fit = math.isqrt(GRADIENT_BYTES // 8)
    if count > fit:
        raise InputError(
            f"weights has {count} rows, counting each prompt's, whose Gram matrix exceeds the "
            f"{GRADIENT_BYTES / 2**30:.3g} GiB allowed; pass at most {fit} (rows of weights times prompts), or "
            "estimate it from gradient_sketch."
        )


def tell_rounds(rounds: int, count: int) -> None:
    """Log that gradients do not fit in memory together, what that costs, and what does without."""
    if rounds > 1:
        _log.warning(
            "%d gradients exceed %.3g GiB, so their Gram matrix takes %d rounds of backward passes; gradient_sketch "
            "estimates it in one.",
            count,
            GRADIENT_BYTES / 2**30,
            rounds,
        )


def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> Float:
    """All pairwise inner products ⟨g_i, g_j⟩ of R gradients, each a tensor per parameter; symmetric [R, R], float64."""
    count, device = len(gradients), gradients[0][0].device
    total = torch.zeros(count, count, dtype=torch.float64, device=device)
    for parts in zip(*gradients, strict=True):
        add_products(total, [part.flatten()[None] for part in parts])
    return total.cpu().numpy()


def add_products(total: Tensor, gradients: Sequence[Tensor]) -> None:
    """Add the inner products of (parts of) R flat gradients, some at a time [r, n], to their matrix `total` [R, R]."""
    # A float32 product over millions of entries is off by 1e-5 and more, one over a short chunk by less than the
    # gradients' own rounding; chunks are summed in float64. Of the symmetric matrix the blocks on and above the
    # diagonal are computed.
    # Many float64 products take 2.4 times as long; float32 will do where torch puts nothing coarser in its place.
    single = len(total) >= ROWS and total.device.type == "cpu" and gradients[0].dtype != torch.float64
    single = single and torch.get_float32_matmul_precision() == "highest"
    size, dtype = (SHORT, torch.float32) if single else (working_set(total.device, CHUNK), torch.float64)
    for start in range(0, gradients[0].shape[1], size):
        parts = [g[:, start : start + size] for g in gradients]
        block = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        for first in range(0, len(block), ROWS):
            part = block[first : first + ROWS] @ block[first:].T
            total[first : first + ROWS, first:] += part
            # The mirror image of what lies right of the diagonal block.
            total[first + ROWS :, first : first + ROWS] += part[:, ROWS:].T


def flat_norm_sq(gradients: Tensor) -> Tensor:
    """‖·‖² of flat gradients [R, n], float64 [R], a slice at a time."""
    # A float64 norm of the whole would first copy it, at twice its size, just when memory is at its peak.
    parts = [part.double().square().sum(1) for part in gradients.split(working_set(gradients.device, SLICE), dim=1)]
    return torch.stack(parts).sum(0)


def _row_norms(tensor: Tensor) -> Tensor:
    """Norms of a tensor's rows, flat."""
    wide = torch.float64 if tensor.shape[-1:] > (ROW,) else torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=wide).flatten().double()


def norm_sq_of(gradient: Sequence[Tensor]) -> float:
    """‖·‖² over all tensors of a gradient together: short rows in float32 at least, their sum in float64."""
    # A float32 norm of a row of some thousand numbers is off by about 1e-7 of it, and by more the longer it is. Float64
    # takes four times as long, so it is kept for rows beyond ROW and for squares that leave the range of float32.
    tensors = [t.detach() for t in gradient]
    # Rows first: each is short, so float32 is exact enough, and the long sum over rows is in float64.
    total = float(torch.cat([_row_norms(t) for t in tensors]).square().sum())
    if TINY < total < math.inf:
        return total
    return sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)
