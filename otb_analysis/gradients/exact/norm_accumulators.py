"""Coordinates of gradients turned into squared norms: of single scores, of running sums, or parameter by parameter.

The backward pass hands an accumulator the coordinates X [r, C, D] of C gradients for one group of parameters at a time.
The accumulator owns the memory that they are written into, so that running sums can lie next to what is added to them.
"""

import math
from collections.abc import Hashable, Iterable, Iterator

import torch
from torch import Tensor

from otb_analysis.gradients.exact.attention import query_blocks

GRAM_BYTES = 1 << 24
"""What the rows of a Gram matrix of K outer products that are formed together may occupy."""
Group = tuple[tuple[str, int], ...]
"""Parameters whose coordinates lie side by side on the last axis, with their widths."""


class Workspace:
    """Memory that is handed out by name again and again; parts that are never alive at once use the same name."""

    # Fresh pages cost more than the arithmetic on them.
    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, *shape: int) -> Tensor:
        """An uninitialised tensor that is valid until the same name is taken again."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            self._held.pop(name, None)
            held = None  # let go of the smaller one first
            held = self._held[name] = self._like.new_empty(size)
        return held[:size].view(shape)


class NormAccumulator:
    """Takes coordinates of a block's C gradients, one group of parameters after the other, and gives ‖s_c‖²."""

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self._parts: list[Tensor] = []

    def take(self, group: Group, rows: int, count: int) -> Tensor:
        """Memory [rows, count, D] to write the coordinates of `count` gradients to."""
        return self._work.take("coordinates", rows, count, _width(group))

    def note(self, group: Group, coordinates: Tensor) -> None:
        """Count coordinates that were written to the memory taken last for this group."""
        # Lengths of coordinate rows: norms of all parameters add up, so the group does not matter.
        self._parts.append(torch.linalg.vector_norm(coordinates, dim=-1))

    def total(self) -> tuple[Tensor, Tensor | None]:
        """Squared norms [C] of the gradients since the last call, and of running sums where they are kept; float64."""
        # Norms are kept and squared in float64 at the end: squares in float32 would lose small ones.
        rows = torch.cat(self._parts)
        self._parts.clear()
        return rows.double().square().sum(0), None


class Running(NormAccumulator):
    """‖s_c‖² and ‖Σ_{j≤c} s_j‖², the sum going on from block to block.

    The running sum S lies in front of the block's X, so that one small Gram matrix per coordinate row,
    [S, X][S, X]ᵀ, holds every inner product that either norm is made of.
    """

    def __init__(self, work: Workspace) -> None:
        super().__init__(work)
        self._sums: dict[Group, Tensor] = {}

    def take(self, group: Group, rows: int, count: int) -> Tensor:
        """Memory behind the running sums; a longer prefix only appends coordinate rows, whose sum so far is zero."""
        both = self._work.take("coordinates", rows, 1 + count, _width(group))
        before = self._sums.get(group)
        known = 0 if before is None else len(before)
        if before is not None:
            both[:known, 0] = before
        both[known:, 0] = 0
        return both[:, 1:]

    def note(self, group: Group, coordinates: Tensor) -> None:
        """Keep the inner products of the running sums and the coordinates, and the new sums."""
        rows, count, width = coordinates.shape
        both = self._work.take("coordinates", rows, 1 + count, width)  # the same memory, with S in front
        self._parts.append(torch.bmm(both, both.transpose(1, 2)))
        self._sums[group] = both.sum(1)

    def total(self) -> tuple[Tensor, Tensor | None]:
        """Squared norms [C] of the scores, and of the sums up to each, since the last call; float64."""
        # Products are float32, but there is one small matrix per coordinate row, and they are summed in float64.
        gram = torch.cat(self._parts).double().sum(0)
        self._parts.clear()
        # ‖Σ_{j≤k} s_j‖² are the sums of the matrix' leading blocks.
        return gram.diagonal()[1:], (2 * gram.tril().sum(1) - gram.diagonal()).cumsum(0)[1:]


class Parts(NormAccumulator):
    """‖s_c‖² parameter by parameter, for checking a model."""

    def __init__(self, work: Workspace) -> None:
        super().__init__(work)
        self.by_name: dict[str, Tensor] = {}

    def note(self, group: Group, coordinates: Tensor) -> None:
        """Add each parameter's part."""
        for (name, _), part in zip(group, coordinates.split([width for _, width in group], -1), strict=True):
            self.by_name[name] = self.by_name.get(name, 0.0) + part.double().square().sum((0, 2))


class RowLengths:
    """‖x_c‖² of C gradients from coordinates [C, ...] that come part by part: lengths of rows, squared at the end."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def note(self, coordinates: Tensor) -> None:
        """Count the coordinates of one parameter."""
        self._parts.append(torch.linalg.vector_norm(coordinates, dim=-1).reshape(len(coordinates), -1))

    @property
    def norm_sq(self) -> Tensor | float:
        """Squared norms [C], float64; 0 where nothing came."""
        # Squares in float32 would lose small ones; one conversion for all parts, because each is short.
        return torch.cat(self._parts, 1).double().square().sum(1) if self._parts else 0.0


def outer_gram(left: Tensor, right: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Inner products [r, K] of K outer products left ⊗ right, float64, for some rows at a time."""
    for rows in query_blocks(len(left), left.device, max(1, GRAM_BYTES // (8 * max(len(left), 1)))):
        yield rows, (left[rows] @ left.T).double() * (right[rows] @ right.T).double()


def outer_path_norms(left: Tensor, right: Tensor) -> Tensor:
    """‖Σ_{j≤k} a_j‖² [K] of outer products a_k = left_k ⊗ right_k."""
    # What each one adds: twice its products with those before, and its own square.
    steps = [2 * gram.tril(rows.start - 1).sum(1) + gram[:, rows].diagonal() for rows, gram in outer_gram(left, right)]
    return torch.cat(steps).cumsum(0)


def outer_norms(pairs: Iterable[tuple[Tensor, Tensor]], like: Tensor, path: bool) -> tuple[Tensor, Tensor]:
    """‖a_t‖² and, with `path`, ‖Σ_{j≤t} a_j‖² [K], where a_t has the parts left_t ⊗ right_t; `like` is [K, ...]."""
    norms = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    path_norms = torch.zeros_like(norms)
    for left, right in pairs:
        norms += norm_sq(left) * norm_sq(right)
        if path:
            path_norms += outer_path_norms(left, right)
    return norms, path_norms


def outer_row_norms(pairs: Iterable[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] a_k‖² [M], where a_k has the parts left_k ⊗ right_k."""
    result = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for left, right in pairs:
        for some, gram in outer_gram(left, right):
            result += (rows[:, some] @ gram * rows).sum(-1)
    return result


def norm_sq(values: Tensor) -> Tensor:
    """‖·‖² of each of K tensors [K, ...], rows first and then, in float64, over the rows [K]."""
    rows = torch.linalg.vector_norm(values, dim=-1).double().square()
    return rows if rows.ndim == 1 else rows.flatten(1).sum(-1)


def _width(group: Group) -> int:
    return sum(width for _, width in group)
