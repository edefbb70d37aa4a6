"""How well one energy source stands in for another: pooled over everything, and within (prompt, position).

Baselines normalise their weights within (prompt, position), so a proxy that only misses each cell's scale loses
nothing: Pearson was .68 pooled and .99 within cells. Pooled figures alone mislead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from otb_analysis.errors import InputError
from otb_analysis.statistics.energies.cells import cell_ranks, deviation, position_cells
from otb_analysis.types import Float, Int

_Kind = TypeVar("_Kind", bound=np.generic)


@dataclass(frozen=True)
class Association:
    """Agreement of two variables; None where it is undefined (fewer than three values, or a constant one)."""

    n: int
    pearson: float | None
    log_pearson: float | None  # Linear correlation of the logarithms, where both are positive
    spearman: float | None


@dataclass(frozen=True)
class Fidelity:
    """Agreement of a proxy with exact energies; made by `fidelity`, read by figures and reports."""

    pooled: Association  # Over all values at once
    # Over deviations from cell means (of values, logarithms, ranks within the cell), in cells of two or more values;
    # None when no cells were given.
    within: Association | None
    n_cells: int  # Cells of two or more values


def fidelity(
    proxy: ArrayLike, exact: ArrayLike, mask: ArrayLike | None = None, cell: ArrayLike | None = None
) -> Fidelity:
    """Agreement of proxy energies with exact ones, pooled and within cells.

    Within a cell c: corr(x − x̄_c, y − ȳ_c); the logarithms and the ranks likewise. A positive factor per cell on the
    proxy's logarithm, or any increasing function per cell for the ranks, changes nothing within. For the ranks, values
    are rounded to 0.1 % first: rollouts with the same prefix have the same energy, and rounding is not an order.

    Args:
        mask: True where a value counts; values that are not finite (not measured) never count.
        cell: Integer cell of each value, as from `position_cells`; any shape that broadcasts.

    Raises:
        InputError: The shapes differ.
    """
    x, y = np.asarray(proxy, dtype=float), np.asarray(exact, dtype=float)
    if x.shape != y.shape:
        raise InputError(f"proxy has shape {x.shape} but exact {y.shape}; pass one value of each per token.")
    chosen = np.isfinite(x) & np.isfinite(y)
    if mask is not None:
        chosen &= _as_shape("mask", np.asarray(mask, dtype=bool), x.shape)
    if cell is None:
        return Fidelity(_pooled(x[chosen], y[chosen]), None, 0)
    cells = _as_shape("cell", np.asarray(cell), x.shape)
    x, y, cells = x[chosen], y[chosen], np.unique(cells[chosen], return_inverse=True)[1]
    return _between(x, y, cells, [(0, x.size)])[0]


def fidelity_by_part(
    proxy: ArrayLike, exact: ArrayLike, cell: ArrayLike, part: ArrayLike
) -> tuple[Fidelity, dict[int, Fidelity]]:
    """Return `fidelity` of all values [N], and of the values of each part, computed in one pass.

    The numbers are those of `fidelity` of each part alone; a part without finite values is left out.

    Args:
        part: Integer part of each value, such as its step; all values of a cell are in one part.

    Raises:
        InputError: The shapes differ, or values of one cell are in several parts.
    """
    x, y = np.asarray(proxy, dtype=float), np.asarray(exact, dtype=float)
    if not (x.ndim == 1 and x.shape == y.shape == np.shape(cell) == np.shape(part)):
        raise InputError(
            f"proxy has shape {x.shape}, exact {y.shape}, cell {np.shape(cell)} and part {np.shape(part)}; pass four "
            "arrays of shape [N]."
        )
    x, y, cells, starts = _sorted_by_part(x, y, np.asarray(cell), np.asarray(part))
    first = list(starts.values())
    whole, *found = _between(x, y, cells, [(0, x.size), *zip(first, [*first, x.size][1:], strict=True)])
    return whole, dict(zip(starts, found, strict=True))


def _sorted_by_part(x: Float, y: Float, cell: Int, part: Int) -> tuple[Float, Float, Int, dict[int, int]]:
    """Return finite values and their cells, numbered, by part, and where each part begins."""
    order = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    order = order[np.argsort(part[order], kind="stable")]
    parts, cells = part[order], np.unique(cell[order], return_inverse=True)[1]
    of_cell = np.zeros(order.size, parts.dtype)
    of_cell[cells] = parts
    if (of_cell[cells] != parts).any():
        raise InputError("values of one cell are in several parts; number the cells of each part on their own.")
    names, starts = np.unique(parts, return_index=True)
    return x[order], y[order], cells, dict(zip(names.tolist(), starts.tolist(), strict=True))


def realized_fidelity(proxy: ArrayLike, exact: ArrayLike, mask: ArrayLike, group: ArrayLike) -> Fidelity:
    """Agreement of realized energies W_t = Σ_{j≤t} w_j, which are what `otb` weights by.

    Running sums are correlated along a rollout by construction, so these figures are higher than those of w_t; the part
    within (prompt, position) is the one that reaches the baseline.

    Args:
        exact: Exact token energies [N, T]; a rollout counts up to its first token that was not measured.

    Raises:
        InputError: The shapes differ or are not [N, T].
    """
    x, y, chosen = np.asarray(proxy, dtype=float), np.asarray(exact, dtype=float), np.asarray(mask, dtype=bool)
    if not (x.ndim == 2 and x.shape == y.shape == chosen.shape):
        raise InputError(
            f"proxy has shape {x.shape}, exact {y.shape} and mask {chosen.shape}; pass three arrays of shape [N, T]."
        )
    # NaN is absorbing: after a token that was not measured the running sum is unknown, hence not compared.
    running = [np.cumsum(np.where(chosen, w, 0.0), axis=1) for w in (x, y)]
    position = np.cumsum(chosen, axis=1) - 1
    # By policy position, as the baseline compares: a column counts tool tokens too.
    cells = position_cells(group, x.shape[1])[:, :1] + position
    return fidelity(running[0], running[1], chosen, cells)


def _pooled(x: Float, y: Float) -> Association:
    positive = (x > 0) & (y > 0)
    logs = _correlation(np.log(x[positive]), np.log(y[positive]))
    return Association(x.size, _correlation(x, y), logs, _correlation(scipy.stats.rankdata(x), scipy.stats.rankdata(y)))


def _between(x: Float, y: Float, cells: Int, ends: Sequence[tuple[int, int]]) -> list[Fidelity]:
    """Return the agreement of the values from a first place to before a last one, for several such pairs."""
    # A value alone in its cell deviates from nothing.
    shared = np.flatnonzero(np.bincount(cells)[cells] > 1) if cells.size else np.zeros(0, dtype=np.int64)
    positive = shared[(x[shared] > 0) & (y[shared] > 0)]
    within = [
        _correlations(x, y, cells, shared, deviation, ends),
        _correlations(x, y, cells, positive, lambda v, at: deviation(np.log(v), at), ends),
        _correlations(x, y, cells, shared, lambda v, at: deviation(cell_ranks(_coarse(v), at), at), ends),
    ]
    agreed = []
    for (first, last), values, logs, ranks in zip(ends, *within, strict=True):
        some = shared[slice(*np.searchsorted(shared, (first, last)))]
        of_cells = Association(some.size, values, logs, ranks)
        agreed.append(Fidelity(_pooled(x[first:last], y[first:last]), of_cells, int(np.unique(cells[some]).size)))
    return agreed


def _correlations(
    x: Float, y: Float, cells: Int, places: Int, deviate: Callable[[Float, Int], Float], ends: Sequence[tuple[int, int]]
) -> list[float | None]:
    """Return the correlations of deviations from cell means of the values at some places, between each pair of ends."""
    dx, dy = (deviate(v[places], cells[places]) for v in (x, y))
    at = np.searchsorted(places, np.array(ends).reshape(-1, 2))
    return [_correlation(dx[first:last], dy[first:last]) for first, last in at]


def _coarse(x: Float) -> Float:
    """Round to a relative 2⁻¹⁰: rollouts that share a prefix share the energy up to rounding, which is not an order."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 1024) / 1024, exponent)


def _correlation(x: Float, y: Float) -> float | None:
    if x.size < 3 or not (_varies(x) and _varies(y)):
        return None
    x, y = x - x.mean(), y - y.mean()
    # Scaled so that squares of energies of any size neither overflow nor vanish.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()), -1, 1))


def _varies(x: Float) -> bool:
    """Tell whether a spread is more than what rounding leaves of a constant."""
    return bool(np.ptp(x) > 1e-12 * np.abs(x).max())


def _as_shape(name: str, value: NDArray[_Kind], shape: tuple[int, ...]) -> NDArray[_Kind]:
    try:
        return np.broadcast_to(value, shape)
    except ValueError as error:
        raise InputError(f"{name} has shape {value.shape} but the energies {shape}; pass one per token.") from error
