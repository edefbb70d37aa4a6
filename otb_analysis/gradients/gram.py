"""Inner products of many gradients, formed in parameter chunks and accumulated in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from otb_analysis.types import Float

CHUNK = 1 << 14
"""Entries of each gradient per float64 block: small beside the gradients, large enough for one efficient product."""


def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> Float:
    """All pairwise inner products ⟨g_i, g_j⟩ of gradients.

    A float32 product over millions of entries is off by 1e-5 and more; here each parameter is cut into chunks whose
    entries are converted to float64 before they are multiplied, so only the gradients' own rounding is left.

    Args:
        gradients: R gradients, each one tensor per parameter, in the same order.

    Returns:
        Symmetric matrix [R, R], float64.
    """
    first = gradients[0][0]
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64, device=first.device)
    for parts in zip(*(tuple(g.flatten() for g in gradient) for gradient in gradients), strict=True):
        for start in range(0, len(parts[0]), CHUNK):
            block = torch.stack([part[start : start + CHUNK] for part in parts]).double()
            total += block @ block.T
    return total.cpu().numpy()


def norm_sq_of(gradient: Sequence[Tensor]) -> float:
    """‖·‖² over all tensors of a gradient together, accumulated in float64."""
    norms = torch.stack([torch.linalg.vector_norm(t.detach(), dtype=torch.float64) for t in gradient])
    return float(norms.square().sum())
