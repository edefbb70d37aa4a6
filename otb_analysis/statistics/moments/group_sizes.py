"""Variance at group sizes that were not recorded, for estimators that average single rollouts or pairs of them.

`none` averages single rollouts, so E‖g_N‖² = q + a/N. `rloo` averages pairs: g_N is the U-statistic with the kernel
h(i, j) = ½(X_i + X_j − S_i R_j − S_j R_i), X_i = Σ_t s_{i,t} G_{i,t} and S_i = Σ_t s_{i,t}; with one terminal reward
h = ½(S_i − S_j)(R_i − R_j). By Hoeffding (1948), with ζ₁ = tr Cov(E[h | i]) and ζ₂ = tr Cov(h),

    E‖g_N‖² = q + 4(N−2)/(N(N−1))·ζ₁ + 2/(N(N−1))·ζ₂ = q + a/N + b/(N(N−1)),   a = 4ζ₁,   b = 2ζ₂ − 4ζ₁ ≥ 0.

q = E_x‖E[g | x]‖² is the part between prompts and the mean itself. Both need rollouts of a prompt to be independent
draws, whoever drew them, and the mean m does not depend on N. At R rollouts an update has R/N prompts and the variance

    N·V(N)/R = (N(q − ‖m‖²) + a + b/(N−1))/R,   least at N = 1 + √(b/(q − ‖m‖²)).

Standing: proved, and confirmed by enumeration.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from otb_analysis.statistics.moments.measures import quotient
from otb_analysis.types import Float


@dataclass(frozen=True)
class SizeLaw:
    """E‖g_N‖² as a function of the group size; each coefficient of any one shape."""

    square: Float  # q
    single: Float  # a
    pair: Float  # b

    def power(self, size: int) -> Float:
        """E‖g_N‖² of groups of N ≥ 1, or of N ≥ 2 where pairs count."""
        once = self.square + self.single / size
        return once + self.pair / (size * (size - 1)) if size > 1 else once

    def best_size(self, mean_sq: Float) -> Float:
        """Size with the least variance at the same rollouts; NaN where b or q − ‖m‖² is estimated as not positive."""
        return 1 + np.sqrt(quotient(np.where(self.pair > 0, self.pair, np.nan), self.square - mean_sq))


def single_law(power: Mapping[int, Float]) -> SizeLaw | None:
    """Fit q + a/N to E‖g‖² of `none` by group size; None with fewer than two sizes.

    From the largest size N and the smallest n: q = (N·E_N − n·E_n)/(N − n), the mean of the products of rollouts that
    are not in one smaller group. Sizes between add no pairs.
    """
    if len(power) < 2:
        return None
    small, large = min(power), max(power)
    square = (large * power[large] - small * power[small]) / (large - small)
    return SizeLaw(square, large * (power[large] - square), np.zeros_like(square))


def pair_law(power: Mapping[int, Float], square: Float | None = None) -> SizeLaw | None:
    """Fit q + a/N + b/(N(N−1)) to E‖g‖² of `rloo` by group size, through the three largest sizes.

    Args:
        power: E‖g‖² by size, each at least 2.
        square: q, where two sizes must do. That of `none` is the same where E[S | x] = 0: the rollouts were drawn from
            the policy whose scores these are.

    Returns:
        None with fewer than three sizes, or two and q.
    """
    sizes = sorted(power, reverse=True)[:3]
    if len(sizes) == 3:
        rows = np.array([[1, 1 / n, 1 / (n * (n - 1))] for n in sizes])
        constant, single, pair = np.linalg.solve(rows, np.stack([power[n] for n in sizes]))
        return SizeLaw(constant, single, pair)
    if len(sizes) == 2 and square is not None:
        rows = np.array([[1 / n, 1 / (n * (n - 1))] for n in sizes])
        single, pair = np.linalg.solve(rows, np.stack([power[n] - square for n in sizes]))
        return SizeLaw(square, single, pair)
    return None
