"""Directions for the two uses of a tied matrix: where one use is known, the other need be looked at along it only.

With A_t the output use of a tied matrix in one token's score, exact, and B_t its use as embedding, the norm holds
2⟨A_t, B_t⟩. Any direction D gives ⟨A_t, D⟩⟨B_t, D⟩, but in a space of many rows and features almost all of what B_t
has lies where no A_t reaches. So directions are drawn inside the span of the A_t: D = Σ_j σ_j^½ z_j G_j, with G_j an
orthonormal basis of the span and z a random orthonormal frame. Then ⟨A_t, B_t⟩ is the expectation of the product of
Σ_j σ_j^(−½) z_j ⟨A_t, G_j⟩, which is known, and ⟨B_t, D⟩. The variance, ‖Σ^(−½) A_t‖² ‖Σ^½ B_t‖², is least on average
for σ_j² ∝ the mean of ⟨A_t, G_j⟩²/‖a_t‖².
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NEGLIGIBLE = 1e-12
"""Share of the largest eigenvalue below which a dimension of the span is left out."""


@dataclass(frozen=True)
class Aligned:
    """Directions D_k of tied matrices, on the rows that a rollout reads, and the known side of their products."""

    rows: dict[str, Tensor]  # By tied parameter, D_k [k, U, d]
    known: Tensor  # Factors α_tk with E[α_tk ⟨B_t, D_k⟩] = ⟨A_t, B_t⟩ [T, k]
    dimension: int  # Of the span; with as many directions the mean over them is exact

    @property
    def unseen(self) -> float:
        """Share of the span that the directions leave out, which multiplies the variance of their mean."""
        return 1 - len(self.known[0]) / self.dimension


def aligned(
    shared: Mapping[str, tuple[Tensor, Tensor]], norm_sq: Tensor, count: int, generator: torch.Generator
) -> Aligned | None:
    """Draw at most `count` directions in the span of the output uses; None where the span is empty.

    `shared` holds by tied parameter (right [T, U], left [T, d]), whose outer products are the A_t; `norm_sq` ‖a_t‖² of
    all that is known of the scores [T], the scale of each token.
    """
    scale = norm_sq.clamp_min(torch.finfo(norm_sq.dtype).tiny).rsqrt()
    parts = {name: (right.double(), left.double()) for name, (right, left) in shared.items()}
    # Inner products of outer products, so the large A_t are never formed.
    gram = torch.stack([(right @ right.T) * (left @ left.T) for right, left in parts.values()]).sum(0)
    values, vectors = torch.linalg.eigh(gram * scale[:, None] * scale)
    # A dimension of no length must not count: the others are scaled by negative powers of theirs.
    kept = values > NEGLIGIBLE * values[-1].clamp_min(0)
    values, vectors = values[kept], vectors[:, kept]
    dimension = len(values)
    if not dimension:
        return None
    normal = torch.randn(
        dimension, min(count, dimension), generator=generator, dtype=torch.float64, device=generator.device
    )
    frame = torch.linalg.qr(normal).Q.to(values.device) * dimension**0.5
    # eigh gives A_t in the basis G: ⟨A_t, G_j⟩ = (vectors · values^½)/scale, and σ_j = values_j^½.
    known = (vectors @ (values[:, None] ** 0.25 * frame)) / scale[:, None]
    mixed = (vectors @ (values[:, None] ** -0.25 * frame)).T * scale
    rows = {name: torch.stack([(c[:, None] * r).T @ left for c in mixed]) for name, (r, left) in parts.items()}
    return Aligned(rows, known, dimension)
