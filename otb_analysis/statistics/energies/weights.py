"""What energies do to rewards: the correlations that decide whether an energy-weighted baseline helps.

An energy-weighted baseline differs from the group mean by Cov(W, R)/mean(W), so corr(W_T, R) within a prompt is the
statistic to look at first: where it is near 0 there is nothing to gain.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.statistics.energies.cells import deviation, position_cells
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class WeightStatistics:
    """Energies against rewards, per prompt and pooled; made by `weight_statistics`.

    Attributes:
        group: The prompts, as they were named [P].
        size: Rollouts of each [P].
        token_reward_corr: corr(w_t, R) within (prompt, position), over each prompt's tokens [P]; NaN where undefined.
        total_reward_corr: corr(W_T, R) over the rollouts of each prompt [P]; NaN where undefined.
        effective_size: (ΣW)²/ΣW² of the rollouts' final energies [P], between 1 and the group's size; NaN where ΣW = 0.
        largest_weight: max W/ΣW [P].
        pooled_token_reward_corr: The same correlations of deviations over all prompts at once, None where undefined.
        pooled_total_reward_corr: The same for W_T.
        mean_effective_share: Mean over prompts of effective size divided by size.
        mean_largest_weight: Mean over prompts.
    """

    group: Int
    size: Int
    token_reward_corr: Float
    total_reward_corr: Float
    effective_size: Float
    largest_weight: Float
    pooled_token_reward_corr: float | None
    pooled_total_reward_corr: float | None
    mean_effective_share: float | None
    mean_largest_weight: float | None


def weight_statistics(energy: ArrayLike, mask: ArrayLike, reward: ArrayLike, group: ArrayLike) -> WeightStatistics:
    """Correlations of energies with rewards within prompts, and how uneven the weights are.

    corr(W_T, R) is over rollouts of a prompt, W_T = Σ_t w_t. corr(w_t, R) takes deviations from the mean of each
    (prompt, position) cell, over the rollouts still alive there. Multiplying all energies, or all rewards, of a prompt
    by a positive constant changes none of the prompt's figures.

    Args:
        energy: Token energies w [N, T]; entries outside the mask are never read.
        mask: True at policy tokens [N, T].
        reward: Total reward of each rollout [N].
        group: Prompt of each rollout [N].

    Returns:
        Figures per prompt and pooled; a prompt where either variable is constant has no correlation.

    Raises:
        InputError: The shapes do not fit, or an energy inside the mask is negative or not finite.
    """
    w, chosen, r, codes, names = _checked(energy, mask, reward, group)
    size = np.bincount(codes, minlength=names.size)
    total = np.where(chosen, w, 0.0).sum(axis=1)
    rows, columns = np.nonzero(chosen)
    position = np.cumsum(chosen, axis=1)[rows, columns] - 1
    cells = np.unique(position_cells(codes, w.shape[1])[rows, 0] + position, return_inverse=True)[1]
    by_token = _Products.of(w[rows, columns], r[rows], cells, codes[rows], names.size)
    by_rollout = _Products.of(total, r, codes, codes, names.size)
    sum_w, sum_sq = (np.bincount(codes, v, names.size).astype(float) for v in (total, total**2))
    largest = np.zeros(names.size)
    np.maximum.at(largest, codes, total)
    effective, largest = _quotient(sum_w**2, sum_sq), _quotient(largest, sum_w)
    return WeightStatistics(
        group=names,
        size=size,
        token_reward_corr=by_token.correlations(),
        total_reward_corr=by_rollout.correlations(),
        effective_size=effective,
        largest_weight=largest,
        pooled_token_reward_corr=by_token.pooled(),
        pooled_total_reward_corr=by_rollout.pooled(),
        mean_effective_share=_mean(effective / size),
        mean_largest_weight=_mean(largest),
    )


@dataclass(frozen=True)
class _Products:
    """Sums of squares and products of deviations from cell means, per prompt."""

    xx: Float
    xy: Float
    yy: Float

    @staticmethod
    def of(x: Float, y: Float, cells: Int, prompts: Int, n_prompts: int) -> "_Products":
        dx, dy = deviation(x, cells), deviation(y, cells)
        return _Products(*(np.bincount(prompts, v, n_prompts).astype(float) for v in (dx * dx, dx * dy, dy * dy)))

    def correlations(self) -> Float:
        return _quotient(self.xy, np.sqrt(self.xx * self.yy))

    def pooled(self) -> float | None:
        # Prompts whose rewards are all equal say nothing about the correlation and would only dilute it.
        informative = (self.xx > 0) & (self.yy > 0)
        xx, xy, yy = (v[informative].sum() for v in (self.xx, self.xy, self.yy))
        return float(xy / np.sqrt(xx * yy)) if xx * yy > 0 else None


def _quotient(numerator: Float, denominator: Float) -> Float:
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator > 0)


def _mean(values: Float) -> float | None:
    found = values[np.isfinite(values)]
    return float(found.mean()) if found.size else None


def _checked(
    energy: ArrayLike, mask: ArrayLike, reward: ArrayLike, group: ArrayLike
) -> tuple[Float, Bool, Float, Int, Int]:
    w, chosen = np.asarray(energy, dtype=float), np.asarray(mask, dtype=bool)
    r, names = np.asarray(reward, dtype=float), np.asarray(group)
    if w.ndim != 2 or w.shape != chosen.shape:
        raise InputError(f"energy has shape {w.shape} but mask {chosen.shape}; pass both as [N, T].")
    if r.shape != (len(w),) or names.shape != (len(w),):
        raise InputError(
            f"reward has shape {r.shape} and group {names.shape} but there are {len(w)} rollouts; pass one of each per "
            "rollout, shape [N]."
        )
    bad = chosen & ~(np.isfinite(w) & (w >= 0))
    if bad.any():
        n, t = np.argwhere(bad)[0]
        raise InputError(f"energy[{n}, {t}] is {w[n, t]}; energies are finite squared norms, at least 0.")
    unique, codes = np.unique(names, return_inverse=True)
    return w, chosen, r, codes.astype(np.int64), unique
