"""The sums behind `logit_stats`, by tiles of rows × vocabulary entries, in three buffers used again and again."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from otb_analysis.devices import widenable, working_set

ROWS = {"logits": 32, "hidden": 256}
"""Rows per tile, at most: enough for a matrix product to run at full speed; of given logits few, read in long runs."""
ENTRIES = 1 << 17
"""Entries per tile on a CPU: three buffers of them, 1.5 MB in float32, stay in a core's cache."""
PROMOTED = 1 << 19
"""Entries of the output matrix that are promoted to float32 at once where it is held in fewer bits."""
MERGED = 1 << 11
"""Slices times rows that are merged at once, in float64."""


@dataclass(frozen=True)
class Source:
    """Where the logits of R rows come from: logits [R, V], or hidden states [R, d] and an output layer [V, d]."""

    values: Tensor  # logits where there is no weight, else hidden states
    weight: Tensor | None
    bias: Tensor | None
    temperature: float

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.values.shape[-1] if self.weight is None else self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: float32 or better, so bfloat16 and float16 are promoted."""
        return torch.promote_types(self.values.dtype, torch.float32)

    def chunk(self) -> tuple[int, int]:
        """Rows and vocabulary entries per tile: few rows get long tiles, so that every tile is worth its calls."""
        rows = max(1, min(ROWS["logits" if self.weight is None else "hidden"], len(self.values)))
        columns = working_set(self.values.device, ENTRIES) // rows
        if self.weight is not None and self.weight.dtype != self.dtype:
            columns = min(columns, max(PROMOTED // self.weight.shape[1], 128))
        if columns > self.vocabulary:  # a small vocabulary gets more rows, for the same reason
            rows = max(rows, min(rows * columns // self.vocabulary, len(self.values)))
        return rows, columns

    def promoted(self) -> "Source":
        """The same with hidden states in the dtype of the arithmetic: d numbers a row, where the logits would be V."""
        return self if self.weight is None else replace(self, values=self.values.to(self.dtype))

    def columns(self, low: int, high: int) -> "Source":
        """The part of the source for vocabulary entries low..high, promoted once for all rows."""
        if self.weight is None:
            return replace(self, values=self.values[:, low:high])
        bias = None if self.bias is None else self.bias[low:high].to(self.dtype)
        return replace(self, weight=self.weight[low:high].to(self.dtype), bias=bias)

    def fill(self, rows: slice, z: Tensor) -> None:
        """Write the logits of some rows, divided by the temperature."""
        if self.weight is None:
            z.copy_(self.values[rows])
        else:
            torch.mm(self.values[rows], self.weight.T, out=z)
            if self.bias is not None:
                z.add_(self.bias)
        if self.temperature != 1:
            z.div_(self.temperature)

    def products(self) -> AbstractContextManager[None]:
        """How matrix products are formed: of bfloat16 numbers by bfloat16 instructions, where a processor has them.

        The product of two bfloat16 numbers is exact in float32, and the sums stay in float32, so nothing is rounded
        that the promoted product would not round.
        """
        halves = self.weight is not None and {self.values.dtype, self.weight.dtype} == {torch.bfloat16}
        return _bfloat16_products() if halves and self.values.device.type == "cpu" else nullcontext()


@dataclass(frozen=True)
class Others:
    """The five sums over v ≠ y, float64 [R] each, relative to `top`, the largest z_v among them; and z_y."""

    top: Tensor
    e: Tensor
    e2: Tensor
    e3: Tensor
    ed: Tensor
    ed2: Tensor
    drawn: Tensor

    @classmethod
    def of_slices(cls, sums: Tensor, drawn: Tensor) -> "Others":
        """Merge the sums of all slices of the vocabulary, [top, Σe, Σe², Σe³, Σe·d, Σe·d²] × slices × R."""
        rows = max(1, MERGED // sums.shape[1])
        merged = torch.cat([_merged(part) for part in sums.split(rows, dim=-1)], dim=-1)
        top, e, e2, e3, ed, ed2 = merged
        return cls(top, e, e2, e3, ed, ed2, widenable(drawn).double())


def _merged(sums: Tensor) -> Tensor:
    """Bring the sums of every slice to the largest top and add them up [6, R], float64."""
    tops, e, e2, e3, ed, ed2 = widenable(sums).double()
    top = tops.amax(0)
    c = tops - top
    f = c.exp()
    e, ed, ed2 = f * e, f * (ed + c * e), f * (ed2 + 2 * c * ed + c * c * e)
    e2, e3 = f**2 * e2, f**3 * e3
    return torch.stack([top, *(x.sum(0) for x in (e, e2, e3, ed, ed2))])


def sum_over_tiles(source: Source, y: Tensor, chunk: tuple[int, int]) -> Others:
    """Sum over all other logits of every row.

    Vocabulary outside, rows inside: each slice of the output matrix is read and promoted once.
    """
    across, down = list(_spans(source.vocabulary, chunk[1])), list(_spans(len(y), chunk[0]))
    entries = max(b - a for a, b in across) * max(b - a for a, b in down)
    z, e, product = source.values.new_empty(3, entries, dtype=source.dtype)
    sums = source.values.new_empty(6, len(across), len(y), dtype=source.dtype)
    drawn = source.values.new_empty(len(y), dtype=source.dtype)
    promoted = source.promoted()
    with source.products():
        for s, (low, high) in enumerate(across):
            part = promoted.columns(low, high)
            for first, last in down:
                shape = last - first, high - low
                tile = [x[: shape[0] * shape[1]].view(shape) for x in (z, e, product)]
                part.fill(slice(first, last), tile[0])
                _sum_tile(tile, y[first:last] - low, sums[:, s, first:last], drawn[first:last])
    return Others.of_slices(sums, drawn)


def _sum_tile(tile: list[Tensor], y: Tensor, sums: Tensor, drawn: Tensor) -> None:
    """Sum over one tile, which is overwritten; `y` is the drawn token's column in it, or any other number."""
    z, e, product = tile
    inside = ((y >= 0) & (y < z.shape[1])).nonzero()[:, 0]
    at, flat = inside * z.shape[1] + y[inside], z.view(-1)
    drawn[inside] = flat[at]
    flat.index_fill_(0, at, -torch.inf)
    top = torch.amax(z, -1, out=sums[0])
    torch.exp(z.sub_(top[:, None]), out=e)
    flat.index_fill_(0, at, 0.0)
    torch.sum(e, -1, out=sums[1])
    torch.sum(torch.mul(e, z, out=product), -1, out=sums[4])
    torch.sum(product.mul_(z), -1, out=sums[5])
    # Below the cube root of the smallest normal number, 2e-13 in float32, e³ is subnormal, which is 30 times slower.
    torch.threshold_(e, torch.finfo(e.dtype).tiny ** (1 / 3), 0.0)
    torch.sum(torch.mul(e, e, out=product), -1, out=sums[2])
    torch.sum(product.mul_(e), -1, out=sums[3])


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Let float32 matrix products use bfloat16 instructions; a setting of the process, so put back at once."""
    settings: Any = torch.backends.mkldnn
    before = settings.matmul.fp32_precision
    settings.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.matmul.fp32_precision = before


def _spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut 0..total into near-equal parts of at least `size` where possible, so that no part has a single entry."""
    parts = max(1, total // max(size, 2))
    return pairwise(total * k // parts for k in range(parts + 1))
