"""Count sketches of long vectors by a hash of the entry's index, the same in every process and on every device."""

import torch
from torch import Tensor

from otb_analysis.devices import working_set
from otb_analysis.errors import InputError

CHUNK = 1 << 15
"""Entries hashed or summed at a time: a few int64 arrays of this size stay in cache."""


def count_sketch(values: Tensor, start: int, dim: int, seed: int = 0) -> Tensor:
    """Count sketch of a piece of a long vector, such as one shard of a gradient; the pieces' sketches add up.

    Bucket b holds Σ_{j: h(j)=b} σ(j) values[j − start] for the indices j = start, start + 1, … of the whole vector, of
    which `values` is a piece. The hash is a fixed integer function of (seed, j), so it is the same in every process and
    on every device. The sketch is [dim], float64, on the device of `values`.

    Raises:
        InputError: `dim` is not positive.
    """
    check_dim(dim)
    return Buckets(start, values.numel(), dim, seed, values.device).sketch(values)


class Buckets:
    """The hash of one piece of the vector, kept for many sketches: hashing takes three times as long as summing."""

    def __init__(self, start: int, length: int, dim: int, seed: int, device: torch.device) -> None:
        self.dim = dim
        self.signed = torch.empty(length, dtype=torch.int32, device=device)
        self.chunk = working_set(device, CHUNK)
        for first in range(0, length, self.chunk):
            part = self.signed[first : first + self.chunk]
            # h(j) where σ(j) = +1 and dim + h(j) where it is −1: one draw for both.
            mixed = _shift(_mix(torch.arange(start + first, start + first + len(part), device=device), seed), 1)
            power = dim & (dim - 1) == 0
            part.copy_(mixed.bitwise_and_(2 * dim - 1) if power else mixed.remainder_(2 * dim))

    def sketch(self, values: Tensor) -> Tensor:
        """Return what `count_sketch` returns for the piece."""
        flat = values.detach().flatten()
        # Float64: millions of entries fall into few buckets and mostly cancel.
        signed = torch.zeros(2 * self.dim, dtype=torch.float64, device=flat.device)
        for piece, into in zip(flat.split(self.chunk), self.signed.split(self.chunk), strict=True):
            signed.scatter_add_(0, into.long(), piece.double())
        return signed[: self.dim] - signed[self.dim :]


def check_dim(dim: int) -> None:
    """Raise where the number of buckets is not positive."""
    if dim < 1:
        raise InputError(f"dim is {dim}; pass a positive number of buckets, 65536 by default.")


_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mix(index: Tensor, seed: int) -> Tensor:
    """SplitMix64 of (seed, index), written into `index`, in int64 arithmetic that wraps."""
    stride, first, second = (_signed(c) for c in _MIX)
    x = index.mul_(stride).add_(_signed(_mix_int(seed)))
    x.bitwise_xor_(_shift(x, 30)).mul_(first)
    x.bitwise_xor_(_shift(x, 27)).mul_(second)
    return x.bitwise_xor_(_shift(x, 31))


def _mix_int(seed: int) -> int:
    """SplitMix64 of a seed, so that neighbouring seeds are unrelated."""
    word = (1 << 64) - 1
    x = (seed + 1) * _MIX[0] & word
    x = (x ^ (x >> 30)) * _MIX[1] & word
    x = (x ^ (x >> 27)) * _MIX[2] & word
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
