"""How far a baseline is from the best one of its kind, and what a proxy costs."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.statistics.inference.intervals import Interval, jackknife_interval
from otb_analysis.statistics.moments import measures
from otb_analysis.statistics.moments.gram import REFERENCE, deleted_moments
from otb_analysis.types import Float, Gram, Label


def position_optimum(features: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> Float:
    """Best baseline that depends on the position only: B_t* = E[s_t · Σ_k s_k G_k]/E‖s_t‖².

    Without shared parameters it is E[w_t G_t]/E[w_t]. Estimate it on rollouts other than those it is applied to: on the
    same ones it fits their noise. Standing: proved, and confirmed by enumeration.

    Args:
        features: Scores or sketches of one prompt's rollouts [R, T, K].
        returns: Return-to-go G [R, T].
        mask: True at policy tokens [R, T].

    Returns:
        B* [T], 0 where no rollout has a score.

    Raises:
        InputError: The shapes do not fit.
    """
    chosen, g = np.asarray(mask, dtype=bool), np.asarray(returns, dtype=float)
    f = np.asarray(features, dtype=float)
    if f.ndim != 3 or f.shape[:2] != g.shape or g.shape != chosen.shape:
        raise InputError(
            f"features has shape {f.shape}, returns {g.shape} and mask {chosen.shape}; pass [R, T, K], [R, T] and "
            "[R, T]."
        )
    f, g = np.where(chosen[..., None], f, 0.0), np.where(chosen, g, 0.0)
    gradient = np.einsum("rtk,rt->rk", f, g)
    along = np.einsum("rtk,rk->t", f, gradient)
    energy = np.einsum("rtk,rtk->t", f, f)
    return np.divide(along, energy, out=np.zeros_like(along), where=energy > 0)


def regret(energy: ArrayLike, baseline: ArrayLike, optimum: ArrayLike, mask: ArrayLike) -> float:
    """Variance that a baseline leaves on the table: Σ_t E‖s_t‖²·(B_t − B_t*)².

    Equal to Var(B) − Var(B*) of one rollout's gradient for a baseline that does not depend on that rollout; for a
    leave-one-out baseline it is the same given the other rollouts. Standing: proved, and confirmed by enumeration.

    Args:
        energy: ‖s_t‖² [R, T].
        baseline: B [R, T] or [T].
        optimum: B* [T], or anything that broadcasts.
        mask: True at policy tokens [R, T].

    Returns:
        norm² per rollout.

    Raises:
        InputError: There is no rollout.
    """
    w, chosen = np.asarray(energy, dtype=float), np.asarray(mask, dtype=bool)
    if w.shape[0] == 0:
        raise InputError("energy has no rollouts; pass at least one, shape [R, T].")
    distance = np.asarray(baseline, dtype=float) - np.asarray(optimum, dtype=float)
    return float(np.where(chosen, w * distance**2, 0.0).sum() / w.shape[0])


def gain_lost(
    grams: Sequence[Gram],
    proxy: Label,
    exact: Label,
    reference: Label = REFERENCE,
    n_prompts: int | None = None,
) -> Interval | None:
    """Share of an estimator's efficiency gain that is lost by using a proxy for its energies.

    (e_exact − e_proxy)/(e_exact − e_reference) on the same rollouts: 0 when the proxy costs nothing, 1 when the gain
    over the reference is gone, negative when the proxy does better. This, not a correlation, is what a proxy is judged
    by.

    Args:
        grams: One Gram matrix per step; those with all three labels are used.
        proxy: The estimator with proxy energies, as (`otb`, `proxy`).
        exact: The same estimator with the energies the proxy stands for.
        reference: The unbiased estimator that stands for ∇J, and that the gain is counted from.
        n_prompts: Prompts P of the update that efficiency is stated for; by default a typical step's. The gain is
            largest, and the share best determined, where P is of the order of the noise scale.

    Returns:
        None where an efficiency is undefined or the exact form gains nothing over the reference; the interval is over
        prompts, of the ratio of the two differences.
    """
    labels = (exact, proxy, reference)
    having = [gram for gram in grams if all(label in gram.labels for label in labels)]
    if not having:
        return None
    batch = n_prompts or max(round(float(np.mean([gram.n_prompts for gram in having]))), 1)
    with_exact, with_proxy, plain = (
        measures.efficiency(deleted_moments(having, label, reference), batch) for label in labels
    )
    gain = with_exact - plain
    share = np.divide(with_exact - with_proxy, gain, out=np.full_like(gain, np.nan), where=gain > 0)
    estimand = f"share of the efficiency gain lost by {proxy} instead of {exact} in an update of {batch} prompts"
    return jackknife_interval(share[0], share[1:], estimand, scale="linear")
