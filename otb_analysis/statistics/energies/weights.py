"""Correlation of energies with rewards: it decides whether an energy-weighted baseline helps.

An energy-weighted baseline differs from the group mean by Cov(W, R)/mean(W), so corr(W_T, R) within a prompt is the
statistic to look at first: where it is near 0 there is nothing to gain.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.statistics.energies.cells import deviation
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class WeightStatistics:
    """Energies against rewards; made by `weight_statistics`."""

    # corr(W_T, R) over the rollouts of each prompt, prompts in ascending order [P]; NaN where either is constant.
    total_reward_corr: Float
    # The same of deviations from the prompts' means, over all prompts at once; None where it is undefined.
    pooled_total_reward_corr: float | None


def weight_statistics(energy: ArrayLike, mask: ArrayLike, reward: ArrayLike, group: ArrayLike) -> WeightStatistics:
    """Correlate energies with rewards within prompts: corr(W_T, R) over rollouts, W_T = Σ_t w_t.

    Multiplying all energies, or all rewards, of a prompt by a positive constant does not change the prompt's figure.

    Raises:
        InputError: The shapes do not fit, or an energy inside the mask is negative or not finite.
    """
    w, chosen, r, codes, n_prompts = _checked(energy, mask, reward, group)
    # Deviations from the prompt's mean: between prompts both energy and reward go with difficulty.
    dw, dr = (deviation(x, codes) for x in (np.where(chosen, w, 0.0).sum(axis=1), r))
    ww, wr, rr = (np.bincount(codes, x, n_prompts) for x in (dw * dw, dw * dr, dr * dr))
    # Prompts whose rewards are all equal say nothing about the correlation and would only dilute the pooled one.
    informative = (ww > 0) & (rr > 0)
    norm = np.sqrt(ww * rr)
    each = np.divide(wr, norm, out=np.full(n_prompts, np.nan), where=norm > 0)
    sum_ww, sum_wr, sum_rr = (x[informative].sum() for x in (ww, wr, rr))
    # Sums before the quotient: a mean of the prompts' correlations would let prompts of two rollouts, ±1, decide.
    scale = sum_ww * sum_rr
    return WeightStatistics(each, float(sum_wr / np.sqrt(scale)) if scale > 0 else None)


def _checked(
    energy: ArrayLike, mask: ArrayLike, reward: ArrayLike, group: ArrayLike
) -> tuple[Float, Bool, Float, Int, int]:
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
    return w, chosen, r, codes.astype(np.int64), unique.size
