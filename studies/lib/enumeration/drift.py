"""Samplers at a stated distance from an enumerated policy.

The policy of a tree is log-linear, so its scores at one parameter vector give its probabilities at every other: with
s_v = φ_v − E_π φ, log π_{θ+δ}(v|h) = log π_θ(v|h) + s_v·δ − log Σ_u π_θ(u|h) e^{s_u·δ}. A sampler can so be put behind
the policy along its own gradient, as staleness does, or off it in a random direction, at any divergence.
"""

from dataclasses import replace
from typing import cast

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from otb_analysis.errors import InputError
from otb_analysis.types import Float
from studies.lib.enumeration.trees import Tree

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

    def at(length: float) -> Tree:
        return replace(tree, behavior_logprob=moved_logprob(tree, length * direction))

    far = 1.0  # doubled until the root is bracketed
    while divergence(at(far)) < distance:
        far *= 2.0
    return at(cast(float, brentq(lambda length: divergence(at(length)) - distance, 0.0, far, xtol=1e-12)))


def farthest(tree: Tree, direction: Float) -> float:
    """Return KL(μ‖π) of the sampler at the end of a direction: a bound where it ends in one completion."""
    return divergence(replace(tree, behavior_logprob=moved_logprob(tree, LONGEST * direction)))


def effective_share(tree: Tree) -> float:
    """Return ESS/N of the sequence ratios with infinitely many rollouts: 1/E_μ[(Π_t ρ_t)²], 1 on-policy."""
    policy, behavior = tree.logprob.sum(axis=1), tree.behavior_logprob.sum(axis=1)
    total = cast(float, logsumexp(2 * policy - behavior))  # E_μ[(π/μ)²] = Σ π²/μ, which may be too large a number
    return float(np.exp(-total))
