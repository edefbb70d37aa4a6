"""Coordinates of gradients turned into squared norms: of single scores, of running sums, or parameter by parameter.

A tally is handed coordinates X [r, C, D] of C gradients for one group of parameters at a time. It owns the buffers that
they are written into, so that the running sums can lie next to what is added to them.
"""

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

Group = tuple[tuple[str, int], ...]
"""Parameters whose coordinates lie side by side on the last axis, with their widths."""


class Workspace:
    """Memory that is handed out by name again and again: fresh pages cost more than the arithmetic on them.

    Parts that are never alive at the same time use the same name.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, *shape: int) -> Tensor:
        """An uninitialised tensor that is valid until the same name is taken again."""
        size = 1
        for n in shape:
            size *= n
        held = self._held.get(name)
        if held is None or held.numel() < size:
            self._held.pop(name, None)
            held = None  # let go of the smaller one first
            held = self._held[name] = self._like.new_empty(size)
        return held[:size].view(shape)


class Tally(Protocol):
    """What the backward pass needs of a tally."""

    def take(self, group: Group, rows: int, count: int) -> Tensor:
        """Memory [rows, count, D] to write the coordinates of `count` gradients to."""
        ...

    def note(self, group: Group, found: Tensor) -> None:
        """Count coordinates that were written to the memory taken last for this group."""
        ...


class Single:
    """‖s_c‖² of each of the C gradients of a block."""

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self._rows: list[Tensor] = []

    def take(self, group: Group, rows: int, count: int) -> Tensor:
        """See `Tally`."""
        return self._work.take("coordinates", rows, count, _width(group))

    def note(self, group: Group, found: Tensor) -> None:
        """See `Tally`."""
        del group  # norms of all parameters add up
        self._rows.append(torch.linalg.vector_norm(found, dim=-1))

    def total(self) -> Tensor:
        """Squared norms [C] since the last call, float64."""
        rows = torch.cat(self._rows)
        self._rows.clear()
        return rows.double().square().sum(0)


class Running:
    """‖s_c‖² and ‖Σ_{j≤c} s_j‖², the sum going on from block to block.

    The running sum S lies in front of the block's X, so that one small Gram matrix per coordinate row,
    [S, X][S, X]ᵀ, holds every inner product that either norm is made of.
    """

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self._sums: dict[Group, Tensor] = {}
        self._grams: list[Tensor] = []

    def take(self, group: Group, rows: int, count: int) -> Tensor:
        """See `Tally`; a longer prefix only appends coordinate rows, whose sum so far is zero."""
        both = self._work.take("coordinates", rows, 1 + count, _width(group))
        before = self._sums.get(group)
        known = 0 if before is None else len(before)
        if before is not None:
            both[:known, 0] = before
        both[known:, 0] = 0
        return both[:, 1:]

    def note(self, group: Group, found: Tensor) -> None:
        """See `Tally`."""
        rows, count, width = found.shape
        both = self._work.take("coordinates", rows, 1 + count, width)
        self._grams.append(torch.bmm(both, both.transpose(1, 2)))
        self._sums[group] = both.sum(1)

    def total(self) -> tuple[Tensor, Tensor]:
        """Squared norms [C] of the scores and of the sums up to each since the last call, float64."""
        gram = torch.cat(self._grams).double().sum(0)
        self._grams.clear()
        return gram.diagonal()[1:], gram.cumsum(0).cumsum(1).diagonal()[1:]


class Parts:
    """‖s_c‖² parameter by parameter, for checking a model."""

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self.by_name: dict[str, Tensor] = {}

    def take(self, group: Group, rows: int, count: int) -> Tensor:
        """See `Tally`."""
        return self._work.take("coordinates", rows, count, _width(group))

    def note(self, group: Group, found: Tensor) -> None:
        """See `Tally`."""
        for (name, _), part in zip(group, found.split([width for _, width in group], -1), strict=True):
            self.by_name[name] = self.by_name.get(name, 0.0) + part.double().square().sum((0, 2))


def outer_gram(left: Tensor, right: Tensor) -> Tensor:
    """Inner products [K, K] of K outer products left ⊗ right, float64."""
    return (left @ left.T).double() * (right @ right.T).double()


def norm_sq(values: Tensor) -> Tensor:
    """‖·‖² of each of K tensors [K, ...], rows first and then, in float64, over the rows [K]."""
    rows = torch.linalg.vector_norm(values, dim=-1).double().square()
    return rows if rows.ndim == 1 else rows.flatten(1).sum(-1)


def _width(group: Group) -> int:
    return sum(width for _, width in group)
