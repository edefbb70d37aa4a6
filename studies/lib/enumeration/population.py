"""Infinitely many rollouts: baselines as expectations, their exact variance, and the optimum they are measured by.

Variance here is that of one rollout's ĝ = Σ_t ρ_t s_t (G_t − B_t) with a baseline that does not depend on it. `ratio`
is what multiplies each score, known at its token [M, T]: ρ or a truncation of it; None means the exact token ratio.
"""

import numpy as np

from otb_analysis.arrays import Groups, masked
from otb_analysis.energies import decayed_energy
from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators.spec import Batch
from otb_analysis.types import Float
from studies.lib.enumeration.trees import GroupMoments, Tree, weighted_moments

POPULATION = (
    "none", "group_mean", "opo", "classic_optimal", "sequence_optimal", "otb", "otb_carry", "token_optimal",
    "energy_ema", "position_optimal", "value",
)  # fmt: skip
"""Entries with a limit of their own; leave-one-out forms share it, and so does every plain mean."""


def population_baseline(name: str, tree: Tree, source: str = "exact", decay: float = 0.9) -> Float:
    """Return what an entry's baseline becomes with infinitely many rollouts.

    The sums of the entry turn into expectations: `otb` is E[W_t G_t; alive]/E[W_t; alive], and so on.

    Raises:
        InputError: The name has no population form of its own.
    """
    if name not in POPULATION:
        raise InputError(f"{name!r} has no population form of its own; {nearest(name, POPULATION)}")
    if name in ("value", "position_optimal"):
        return values(tree) if name == "value" else masked_rows(position_optimum(tree), tree)
    # The whole population is one group of an estimator's own batch code, so weights are defined in one place only.
    energy = {"exact": tree.energy, "proxy": tree.proxy}[source]
    alive, whole = tree.mask.astype(np.float64), Groups.from_labels(np.zeros(len(tree.prob), np.int64))
    batch = Batch(tree.returns, tree.total, tree.mask, alive, whole, energy=energy, ratio=tree.ratio * alive)
    rollout_norm_sq = (tree.score.sum(axis=1) ** 2).sum(axis=1)
    # `otb_carry` keeps finished rollouts in the average, with their total return.
    total, carried = tree.total[:, None], np.where(tree.mask, tree.returns, tree.total[:, None])
    weight, paid = {
        "none": (np.ones((len(total), 1)), 0.0 * total), "group_mean": (batch.present[:, None], total),
        "opo": (batch.length[:, None], total), "classic_optimal": (rollout_norm_sq[:, None], total),
        "sequence_optimal": (batch.final[:, None], total), "otb": (batch.realized * tree.mask, tree.returns),
        "otb_carry": (batch.realized, carried), "token_optimal": (batch.weight, tree.returns),
        "energy_ema": (decayed_energy(batch.weight, decay) * tree.mask, tree.returns),
    }[name]  # fmt: skip
    return masked_rows(tree.expect(weight * paid) / tree.expect(weight), tree)


def position_optimum(tree: Tree, ratio: Float | None = None) -> Float:
    """Return the variance-optimal constant of each position.

    B_t* = E[ρ_t s_t · g] / E[ρ_t² ‖s_t‖²], g = Σ_k ρ_k s_k G_k; without ratios E[s_t · Σ_k s_k G_k] / E‖s_t‖².
    """
    rho = tree.ratio if ratio is None else ratio
    return tree.expect(_alignment(tree, rho)) / tree.expect(rho**2 * tree.energy)


def prefix_optimum(tree: Tree) -> Float:
    """Return the variance-optimal function of the prefix.

    b*(h) = E[s_t · g | h] / E[‖s_t‖² | h].
    """
    return _by_prefix(tree, _alignment(tree, tree.ratio), tree.ratio**2 * tree.energy)


def values(tree: Tree) -> Float:
    """Return V(h_t) = E[G_t | h_t] under the sampling policy."""
    return _by_prefix(tree, tree.returns, np.ones(tree.mask.shape))


def population_moments(tree: Tree, baseline: Float, ratio: Float | None = None) -> GroupMoments:
    """Return the exact moments of one rollout's gradient with a baseline that does not depend on that rollout."""
    factor = (tree.ratio if ratio is None else ratio) * (tree.returns - masked_rows(baseline, tree))
    return weighted_moments(np.einsum("mt,mtd->md", factor, tree.score), tree.prob, tree.gradient, 1)


def regret(tree: Tree, baseline: Float, ratio: Float | None = None) -> float:
    """Return what a position-dependent baseline costs in variance above the optimum.

    Var(B) − Var(B*) = Σ_t E[ρ_t²‖s_t‖²] (B_t − B_t*)², exactly, since E[ρ_t s_t·ρ_k s_k] = 0 for t ≠ k wherever ρ_t is
    known at token t.

    B is [T], or [M, T] constant over the completions alive at each position.
    """
    rho = tree.ratio if ratio is None else ratio
    off = masked_rows(baseline, tree) - masked_rows(position_optimum(tree, rho), tree)
    return float(tree.expect(rho**2 * tree.energy * off**2).sum())


def gap_closed(name: str, tree: Tree, source: str = "exact") -> float:
    """Return the share of the gap from the mean to B* that an entry closes, 1 at the optimum, negative when worse."""
    baseline, mean = population_baseline(name, tree, source), population_baseline("group_mean", tree)
    return 1 - regret(tree, baseline) / regret(tree, mean)


def masked_rows(baseline: Float, tree: Tree) -> Float:
    """Return B as [M, T], zero outside the mask."""
    return masked(np.broadcast_to(baseline, tree.mask.shape), tree.mask)


def _alignment(tree: Tree, rho: Float) -> Float:
    """ρ_t s_t · Σ_k ρ_k s_k G_k [M, T]."""
    # g of the completion first: s_t·g then needs no T × T products of scores.
    return rho * np.einsum("mtd,md->mt", tree.score, np.einsum("mt,mtd->md", rho * tree.returns, tree.score))


def _by_prefix(tree: Tree, numerator: Float, denominator: Float) -> Float:
    """Conditional expectations given h_t: Σ p x / Σ p y over completions through the same prefix."""
    prob = np.broadcast_to(tree.prob[:, None], tree.mask.shape)[tree.mask]
    at = tree.prefix[tree.mask]
    top, bottom = (np.bincount(at, prob * x[tree.mask]) for x in (numerator, denominator))
    out = np.zeros(tree.mask.shape)
    out[tree.mask] = (top / bottom)[at]
    return out
