"""Random directions of the parameters, the same for every rollout and every call with one seed."""

import hashlib
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
            bits = self._bits(name)
            drawn = [_signs(bits, (self.count, n)) for n in like.shape]
            signs[name] = tuple(x.to(like.device, _wide(like)) for x in drawn)
        return signs

    def rank_one(self, k: int) -> list[Tensor]:
        """Direction k in full: of each tensor the outer product of the signs of its axes."""
        return [reduce(lambda whole, axis: whole[..., None] * axis[k], s[1:], s[0][k]) for s in self.signs.values()]

    def rows(self, name: str, part: slice, shape: tuple[int, int]) -> Tensor:
        """Independent signs in rows of an embedding, of some directions [k, *shape]."""
        drawn = [_signs(self._bits(f"{name}:rows:{k}"), shape) for k in range(part.start, part.stop)]
        return torch.stack(drawn) if drawn else torch.zeros(0, *shape, dtype=torch.int8, device="cpu")

    def gaussian(self, k: int) -> list[Tensor]:
        """Direction k with independent standard normal entries."""
        dense = []
        for name, like in zip(self.batch.scope.names, self.batch.scope.parameters, strict=True):
            values = torch.randn(like.shape, generator=self.stream(f"{name}:{k}"), dtype=_wide(like), device="cpu")
            dense.append(values.to(like.device))
        return dense

    def stream(self, name: str) -> torch.Generator:
        """Random numbers of the CPU, the same on every machine, that depend on the seed and this name only."""
        return torch.Generator("cpu").manual_seed(self._key(name))

    def _bits(self, name: str) -> np.random.Generator:
        """The same for signs, which NumPy draws eight to a byte."""
        return np.random.default_rng(self._key(name))

    def _key(self, name: str) -> int:
        # Python's own `hash` of a string differs from process to process.
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def _signs(bits: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    """Independent ±1 as int8."""
    count = shape[0] * shape[1]
    drawn = np.unpackbits(np.frombuffer(bits.bytes(-(-count // 8)), dtype=np.uint8), count=count)
    return torch.from_numpy(drawn.view(np.int8)).reshape(shape) * 2 - 1


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
