"""Norms and inner products of gradients, in bounded memory and accumulated in float64.

Gradients come whole, as outer products left ⊗ right, or as coordinates X [r, C, D] of C gradients, for one group of
parameters at a time: a `NormAccumulator` owns the memory that those are written into, so that running sums can lie next
to what is added to them.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otb_analysis.devices import working_set
from otb_analysis.errors import InputError
from otb_analysis.gradients.exact.attention import query_blocks
from otb_analysis.types import Float

CHUNK = 1 << 12
"""Entries of each gradient per float64 block on a CPU: those of some hundred gradients stay in its cache."""
SHORT = 1 << 10
"""The same of float32 blocks. However long gradients are, their products are then off by less than √SHORT·2⁻²⁴ = 1.9e-6
of ‖g‖‖g'‖, if roundings of a sum are as good as random (Higham and Mary, 2019), and by SHORT·2⁻²⁴ in any case."""
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


def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> Float:
    """All pairwise inner products ⟨g_i, g_j⟩ of R gradients, each a tensor per parameter; symmetric [R, R], float64."""
    count, device = len(gradients), gradients[0][0].device
    total = torch.zeros(count, count, dtype=torch.float64, device=device)
    for parts in zip(*gradients, strict=True):
        add_products(total, [part.flatten()[None] for part in parts])
    return total.cpu().numpy()


def add_products(total: Tensor, gradients: Sequence[Tensor]) -> None:
    """Add the inner products of (parts of) R flat gradients, some at a time [r, n], to their matrix `total` [R, R]."""
    # A float32 product over millions of entries is off by 1e-5 and more, so chunks are short, and summed in float64. Of
    # the symmetric matrix the blocks on and above the diagonal are computed.
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


def norm_sq_of(gradient: Sequence[Tensor]) -> float:
    """‖·‖² over all tensors of a gradient together: short rows in float32 at least, their sum in float64."""
    # A float32 norm of a row of some thousand numbers is off by about 1e-7 of it, and by more the longer it is. Float64
    # takes four times as long, so it is kept for rows beyond ROW and for squares that leave the range of float32.
    tensors = [t.detach() for t in gradient]
    # Rows first: each is short, so float32 is exact enough, and the long sum over rows is in float64.
    rows = list[Tensor]()
    for t in tensors:
        kind = torch.float64 if t.shape[-1:] > (ROW,) else torch.promote_types(t.dtype, torch.float32)
        rows.append(torch.linalg.vector_norm(t, dim=-1, dtype=kind).flatten().double())
    total = float(torch.cat(rows).square().sum())
    if TINY < total < math.inf:
        return total
    return sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)


GRAM_BYTES = 1 << 24
"""What the rows of a Gram matrix of K outer products that are formed together may occupy."""
Group = tuple[tuple[str, int], ...]
"""Parameters whose coordinates lie side by side on the last axis, with their widths."""


@dataclass
class Workspace:
    """Memory that is handed out by name again and again; parts that are never alive at once use the same name."""

    # Fresh pages cost more than the arithmetic on them.
    like: Tensor  # Whose dtype and device it has
    _memory: dict[Hashable, Tensor] = field(init=False, default_factory=dict)

    def take(self, name: Hashable, *shape: int) -> Tensor:
        """An uninitialised tensor that is valid until the same name is taken again."""
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory.pop(name, None)  # let go of the smaller one first
            self._memory[name] = self.like.new_empty(size)
        return self._memory[name][:size].view(shape)


@dataclass
class NormAccumulator:
    """Takes coordinates of a block's C gradients, one group of parameters after the other, and gives ‖s_c‖².

    With `path` also ‖Σ_{j≤c} s_j‖², the sum going on from block to block: the running sum S lies in front of the
    block's X, so that one small Gram matrix per coordinate row, [S, X][S, X]ᵀ, holds every inner product that either
    norm is made of. Where `by_name` is given, ‖s_c‖² is added there parameter by parameter instead, to check a model.
    """

    work: Workspace
    path: bool = False
    by_name: dict[str, Tensor] | None = None
    _parts: list[Tensor] = field(init=False, default_factory=list)
    _sums: dict[Group, Tensor] = field(init=False, default_factory=dict)  # S of each group

    def take(self, group: Group, rows: int, count: int) -> Tensor:
        """Memory [rows, count, D] to write the coordinates of `count` gradients to, behind the running sums."""
        both = self.work.take("coordinates", rows, self.path + count, sum(width for _, width in group))
        if self.path:
            # A longer prefix only appends coordinate rows, whose sum so far is zero.
            before = self._sums.get(group, both[:0, 0])
            both[: len(before), 0] = before
            both[len(before) :, 0] = 0
        return both[:, int(self.path) :]

    def note(self, group: Group, coordinates: Tensor) -> None:
        """Count coordinates that were written to the memory taken last for this group."""
        rows, count, width = coordinates.shape
        if self.by_name is not None:
            for (name, _), part in zip(group, coordinates.split([size for _, size in group], -1), strict=True):
                self.by_name[name] = self.by_name.get(name, 0.0) + part.double().square().sum((0, 2))
        elif self.path:
            both = self.work.take("coordinates", rows, 1 + count, width)  # the same memory, with S in front
            self._parts.append(torch.bmm(both, both.transpose(1, 2)))
            self._sums[group] = both.sum(1)
        else:
            # Lengths of coordinate rows: norms of all parameters add up, so the group does not matter.
            self._parts.append(torch.linalg.vector_norm(coordinates, dim=-1))

    def total(self) -> tuple[Tensor, Tensor | None]:
        """Squared norms [C] of the gradients since the last call, and with `path` of the sums up to each; float64."""
        # Squares in float32 would lose small ones. Products of a path are float32, but there is one small matrix per
        # coordinate row, and they are summed in float64.
        parts = torch.cat(self._parts).double()
        self._parts.clear()
        if not self.path:
            return parts.square().sum(0), None
        gram = parts.sum(0)
        # ‖Σ_{j≤k} s_j‖² are the sums of the matrix' leading blocks.
        return gram.diagonal()[1:], (2 * gram.tril().sum(1) - gram.diagonal()).cumsum(0)[1:]


def sum_of_squares(lengths: Sequence[Tensor]) -> Tensor | float:
    """‖x_c‖² [C] of C gradients from the lengths of rows of their coordinates, part by part; 0 where nothing came."""
    # Squares in float32 would lose small ones; one conversion for all parts, because each is short.
    return torch.cat([x.reshape(len(x), -1) for x in lengths], 1).double().square().sum(1) if lengths else 0.0


def outer_gram(left: Tensor, right: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Inner products [r, K] of K outer products left ⊗ right, float64, for some rows at a time."""
    for rows in query_blocks(len(left), left.device, max(1, GRAM_BYTES // (8 * max(len(left), 1)))):
        yield rows, (left[rows] @ left.T).double() * (right[rows] @ right.T).double()


def outer_norms(pairs: Iterable[tuple[Tensor, Tensor]], like: Tensor, path: bool) -> tuple[Tensor, Tensor]:
    """‖a_t‖² and, with `path`, ‖Σ_{j≤t} a_j‖² [K], where a_t has the parts left_t ⊗ right_t; `like` is [K, ...]."""
    norms = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    path_norms = torch.zeros_like(norms)
    for left, right in pairs:
        norms += norm_sq(left) * norm_sq(right)
        if path:
            # What each one adds: twice its products with those before, and its own square.
            grams = outer_gram(left, right)
            steps = [2 * gram.tril(rows.start - 1).sum(1) + gram[:, rows].diagonal() for rows, gram in grams]
            path_norms += torch.cat(steps).cumsum(0)
    return norms, path_norms


def outer_row_norms(pairs: Iterable[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] a_k‖² [M], where a_k has the parts left_k ⊗ right_k."""
    result = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for left, right in pairs if len(rows) else ():
        for some, gram in outer_gram(left, right):
            result += (rows[:, some] @ gram * rows).sum(-1)
    return result


def norm_sq(values: Tensor) -> Tensor:
    """‖·‖² of each of K tensors [K, ...], rows first and then, in float64, over the rows [K]."""
    rows = torch.linalg.vector_norm(values, dim=-1).double().square()
    return rows if rows.ndim == 1 else rows.flatten(1).sum(-1)
