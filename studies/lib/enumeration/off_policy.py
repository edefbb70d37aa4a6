"""Off-policy on enumerated policies: samplers at a stated distance, and which importance ratios leave the mean alone.

The policy of a tree is log-linear, so its scores at one parameter vector give its probabilities at every other: with
s_v = φ_v − E_π φ, log π_{θ+δ}(v|h) = log π_θ(v|h) + s_v·δ − log Σ_u π_θ(u|h) e^{s_u·δ}. A sampler can so be put behind
the policy along its own gradient, as staleness does, or off it in a random direction, at any divergence.

With a ratio that is known at its token and not clipped, E[ρ_t s_t] = 0 given the prefix, so any constant baseline drops
out. The same holds for the whole sequence's ratio, which turns the sampler into the policy. Truncation, clips, masks
and means over the whole completion break it.
"""

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from otb_analysis.arrays import masked
from otb_analysis.errors import InputError
from otb_analysis.objectives.ratios import (
    RATIOS,
    BandOptions,
    DivergenceOptions,
    GateOptions,
    GspoOptions,
    MaskOptions,
    MeanOptions,
    MoveOptions,
    Ratio,
    RatioInputs,
    ThresholdOptions,
    TruncationOptions,
    importance_ratio,
)
from otb_analysis.types import Float
from studies.lib.enumeration.trees import GroupMoments, Tree, TreeSpec, random_tree, weighted_moments

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
    "`cispo`": Case("cispo"),
    "`icepop` within ± .2": Case("icepop", BandOptions(0.8, 1.2)),
    "`ipo` within .05": Case("ipo", ThresholdOptions(0.05)),
    "`dppo_tv` within .05": Case("dppo_tv", MoveOptions(0.05, 0.05)),
    "`dppo_kl` within .01": Case("dppo_kl", DivergenceOptions(0.01, 0.01)),
    "`sapo`": Case("sapo"),
    "`sapo`, τ = 5": Case("sapo", GateOptions(5.0, 5.0)),
    "`gmpo`": Case("gmpo"),
    "`gmpo` within ± .2": Case("gmpo", MeanOptions(0.2, 0.2)),
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
    return np.einsum("m,mt,mtd->d", tree.prob, case.ratio(tree).coefficient(_advantage(tree, baseline)), tree.score)


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
    return weighted_moments(np.einsum("mt,mtd->md", coefficient, tree.score), tree.prob, tree.gradient, 1)


def touched(tree: Tree, case: Case) -> float:
    """Return the share of sampled tokens that a clip or mask stops, or a truncation changes, with the baseline J."""
    ratio = case.ratio(tree)
    stopped = ratio.limited | ratio.clipped(_advantage(tree, tree.objective))
    return float(tree.prob @ stopped.sum(axis=1) / (tree.prob @ tree.mask.sum(axis=1)))


def _advantage(tree: Tree, baseline: float) -> Float:
    return tree.returns - masked(baseline, tree.mask)


LONGEST = 1e4
"""The longest move, in units of the direction."""


def moved_logprob(tree: Tree, move: Float) -> Float:
    """Return log π_{θ+δ}(y_t|h_t) of every completion [M, T], zero outside the mask; exact, whatever the length of δ.

    Raises:
        InputError: δ has another number of entries than the policy has parameters.
    """
    if move.shape != tree.score.shape[2:]:
        raise InputError(f"move has shape {move.shape} but scores have {tree.score.shape}; pass one entry a parameter.")
    tilted = tree.logprob + tree.score @ move
    # The normaliser sums over tokens of a prefix; completions repeat a (prefix, token) pair, so take each pair once.
    pairs = tree.prefix[tree.mask] * (tree.token.max() + 1) + tree.token[tree.mask]
    first = np.unique(pairs, return_index=True)[1]
    total = np.full(tree.prefix.max() + 1, -np.inf)
    np.logaddexp.at(total, tree.prefix[tree.mask][first], tilted[tree.mask][first])
    return np.where(tree.mask, tilted - total[tree.prefix], 0.0)


def divergence(tree: Tree) -> float:
    """Return KL(μ‖π) of a whole completion in nats, μ the policy that samples: 0 on-policy."""
    return float(tree.expect((tree.behavior_logprob - tree.logprob).sum(axis=1)))


def sampled_at(tree: Tree, direction: Float, distance: float) -> Tree:
    """Return the policy with a sampler at θ + α·direction, α > 0 such that KL(μ‖π) is a given number.

    Args:
        direction: −∇J for a sampler that the policy has improved on [D].
        distance: KL(μ‖π) of a whole completion in nats.

    Raises:
        InputError: No sampler in this direction is that far away.
    """
    if distance > farthest(tree, direction):
        raise InputError(f"no sampler in this direction is {distance} nats away; ask for less.")

    def moved(length: float) -> Tree:
        return replace(tree, behavior_logprob=moved_logprob(tree, length * direction))

    far = 1.0  # doubled until the root is bracketed
    while divergence(moved(far)) < distance:
        far *= 2.0
    return moved(cast(float, brentq(lambda length: divergence(moved(length)) - distance, 0.0, far, xtol=1e-12)))


def farthest(tree: Tree, direction: Float) -> float:
    """Return KL(μ‖π) of the sampler at the end of a direction: a bound where it ends in one completion."""
    return divergence(replace(tree, behavior_logprob=moved_logprob(tree, LONGEST * direction)))


def effective_share(tree: Tree) -> float:
    """Return ESS/N of the sequence ratios with infinitely many rollouts: 1/E_μ[(Π_t ρ_t)²], 1 on-policy."""
    policy, behavior = tree.logprob.sum(axis=1), tree.behavior_logprob.sum(axis=1)
    total = cast(float, logsumexp(2 * policy - behavior))  # E_μ[(π/μ)²] = Σ π²/μ, which may be too large a number
    return float(np.exp(-total))
