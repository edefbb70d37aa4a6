"""Random directions of the parameters, the same for every rollout and every call with one seed."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor

from otb_analysis.gradients.batch.inputs import ScoreBatch


@dataclass(frozen=True)
class Directions:
    """K random directions D with E[(s·D)²] = ‖s‖² for every s; each entry has mean 0 and variance 1.

    A parameter's own stream depends on the seed and its name only.
    """

    batch: ScoreBatch
    count: int  # K
    seed: int

    @cached_property
    def signs(self) -> dict[str, tuple[Tensor, ...]]:
        """By parameter one Rademacher vector per axis and direction, ([K, n_0], [K, n_1], …); ±1 in float32 or 64."""
        signs = {}
        for name, like in zip(self.batch.scope.names, self.batch.scope.parameters, strict=True):
            kind = torch.promote_types(like.dtype, torch.float32)
            drawn = self._signs(name, [(self.count, n) for n in like.shape])
            signs[name] = tuple(x.to(like.device, kind) for x in drawn)
        return signs

    def rank_one(self, k: int) -> list[Tensor]:
        """Direction k in full: of each tensor the outer product of the signs of its axes."""
        return [reduce(lambda whole, axis: whole[..., None] * axis[k], s[1:], s[0][k]) for s in self.signs.values()]

    def rows(self, name: str, part: slice, shape: tuple[int, int]) -> Tensor:
        """Independent signs in rows of an embedding, of some directions [k, *shape]."""
        drawn = [x for k in range(part.start, part.stop) for x in self._signs(f"{name}:rows:{k}", [shape])]
        return torch.stack(drawn) if drawn else torch.zeros(0, *shape, dtype=torch.int8, device="cpu")

    def gaussian(self, k: int) -> list[Tensor]:
        """Direction k with independent standard normal entries."""
        dense = []
        for name, like in zip(self.batch.scope.names, self.batch.scope.parameters, strict=True):
            stream, kind = self.stream(f"{name}:{k}"), torch.promote_types(like.dtype, torch.float32)
            values = torch.randn(like.shape, generator=stream, dtype=kind, device="cpu")
            dense.append(values.to(like.device))
        return dense

    def stream(self, name: str) -> torch.Generator:
        """Random numbers of the CPU, the same on every machine, that depend on the seed and this name only."""
        return torch.Generator("cpu").manual_seed(self._key(name))

    def _signs(self, name: str, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Independent ±1 as int8, which NumPy draws eight to a byte, from one stream."""
        bits, signs = np.random.default_rng(self._key(name)), list[Tensor]()
        for rows, columns in shapes:
            drawn = np.frombuffer(bits.bytes(-(-rows * columns // 8)), dtype=np.uint8)
            drawn = np.unpackbits(drawn, count=rows * columns).view(np.int8)
            signs.append(torch.from_numpy(drawn).reshape(rows, columns) * 2 - 1)
        return signs

    def _key(self, name: str) -> int:
        # Python's own `hash` of a string differs from process to process.
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


NEGLIGIBLE = 1e-12
"""Share of the largest eigenvalue below which a dimension of the span is left out."""


@dataclass(frozen=True)
class Aligned:
    """Directions D_k of tied matrices, on the rows that a rollout reads, and the known side of their products."""

    rows: dict[str, Tensor]  # By tied parameter, D_k [k, U, d]
    known: Tensor  # Factors α_tk with E[α_tk ⟨B_t, D_k⟩] = ⟨A_t, B_t⟩ [T, k]
    # Share of the span that the directions leave out, which multiplies the variance of their mean; 0 where it is exact
    unseen: float


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
    # Known up to a sign, which libraries of linear algebra choose differently: the largest entry is positive here.
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
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
    return Aligned(rows, known, 1 - known.shape[1] / dimension)
