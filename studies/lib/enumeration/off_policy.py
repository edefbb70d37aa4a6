"""Importance ratios on enumerated policies: under which a baseline leaves the mean alone, and how far others move it.

With a ratio that is known at its token and not clipped, E[ρ_t s_t] = 0 given the prefix, so any constant baseline drops
out. The same holds for the whole sequence's ratio, which turns the sampler into the policy. Truncation, clips, masks
and means over the whole completion break it.
"""

from dataclasses import dataclass, replace

import numpy as np

from otb_analysis.arrays import masked
from otb_analysis.objectives.ratios import (
    RATIOS,
    GspoOptions,
    MaskOptions,
    Ratio,
    RatioInputs,
    TruncationOptions,
    importance_ratio,
)
from otb_analysis.types import Float
from studies.lib.enumeration.moments import GroupMoments, weighted_moments
from studies.lib.enumeration.trees import Tree, TreeSpec, random_tree

DRIFT = 0.2
"""The policy that sampled has parameters larger by this share."""


@dataclass(frozen=True)
class Case:
    """One ratio with the options under which it is enumerated."""

    name: str
    options: object = None
    quoted: str = ""  # What other draws of such policies gave first

    @property
    def keeps_mean(self) -> bool:
        """What the catalogue says of it."""
        return RATIOS[self.name].keeps_mean

    def ratio(self, tree: Tree) -> Ratio:
        """Return the ratio of every token of every completion."""
        return importance_ratio(self.name, RatioInputs(tree.logprob, tree.behavior_logprob, tree.mask), self.options)


_CHOSEN = {
    "`token`": Case("token", quoted="0"),
    "`sequence`": Case("sequence"),
    "`cumulative`": Case("cumulative", quoted="0"),
    "`minpro`": Case("minpro", quoted="0"),
    "`none`": Case("none"),
    "`tis`, cap 1.2": Case("tis", TruncationOptions(cap=1.2), ".04"),
    "`cumulative_truncated`": Case("cumulative_truncated", quoted=".17"),
    "`ctpo`": Case("ctpo"),
    "`ppo`": Case("ppo", quoted=".23"),
    "`sequence_mask` ± .05": Case("sequence_mask", MaskOptions(low=0.05, high=0.05), ".60"),
    "`gspo` without its clip": Case("gspo", GspoOptions(low=float("inf"), high=float("inf")), "moves"),
    "`gspo`": Case("gspo"),
}
_COVERED = {case.name for case in _CHOSEN.values()}
CASES: dict[str, Case] = _CHOSEN | {f"`{name}`": Case(name) for name in RATIOS if name not in _COVERED}
"""Every ratio; with options where the defaults do nothing, or stop everything, at this drift."""


def drifted(spec: TreeSpec, seed: int, drift: float = DRIFT) -> Tree:
    """Draw a policy and the one that sampled for it: same features and rewards, parameters larger by a share."""
    older = replace(spec, scale=spec.scale * (1 + drift))
    return random_tree(spec, np.random.default_rng(seed)).sampled_by(random_tree(older, np.random.default_rng(seed)))


def mean_gradient(tree: Tree, case: Case, baseline: float) -> Float:
    """Return E[Σ_t c_t s_t] exactly [D], c the gradient coefficients of the ratio's surrogate for A = G − B."""
    coefficient = case.ratio(tree).coefficient(_advantage(tree, baseline))
    return np.einsum("m,mt,mtd->d", tree.prob, coefficient, tree.score)


def mean_shift(tree: Tree, case: Case, baseline: float | None = None) -> float:
    """Return how far a constant baseline B, by default J, moves the mean: ‖E g(B) − E g(0)‖/‖∇J‖."""
    # Not linear in B where a clip looks at the sign of the advantage, hence the difference of two means.
    constant = tree.objective if baseline is None else baseline
    moved = mean_gradient(tree, case, constant) - mean_gradient(tree, case, 0.0)
    return float(np.linalg.norm(moved) / np.linalg.norm(tree.gradient))


def case_moments(tree: Tree, case: Case) -> GroupMoments:
    """Return the exact moments of one rollout's gradient Σ_t c_t s_t, c the ratio's coefficients for A = G − J.

    The baseline J is the limit of every plain mean on-policy. `efficiency(P)` of the answer is that of P rollouts.
    """
    coefficient = case.ratio(tree).coefficient(_advantage(tree, tree.objective))
    single = np.einsum("mt,mtd->md", coefficient, tree.score)
    return weighted_moments(single, tree.prob, tree.gradient, 1)


def touched(tree: Tree, case: Case) -> float:
    """Return the share of sampled tokens that a clip or mask stops, or a truncation changes, with the baseline J."""
    ratio = case.ratio(tree)
    stopped = ratio.limited | ratio.clipped(_advantage(tree, tree.objective))
    return float(tree.prob @ stopped.sum(axis=1) / (tree.prob @ tree.mask.sum(axis=1)))


def _advantage(tree: Tree, baseline: float) -> Float:
    return tree.returns - masked(baseline, tree.mask)
