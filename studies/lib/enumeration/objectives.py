"""Filters of sampling, profiled rewards and token weights on enumerated policies: what becomes of an update's mean.

A filter k(y) of single rollouts with refilling draws i.i.d. from π·k/Z, Z = E k. Then `rloo` has the mean
∇(E[R·k]/E[k]) exactly: Cov under π·k/Z of R and ∇log(π·k/Z). A filter of groups has the law of a group given that it
is kept; an estimator without a gradient in the others has the mean ∇J/P(kept). Standing: proved, confirmed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.objectives.aggregation import (
    TOKEN_WEIGHTS,
    CovarianceOptions,
    CriticalOptions,
    DelightOptions,
    StapoOptions,
    TokenWeightInputs,
    token_weights,
)
from otb_analysis.objectives.shaping import FILTERS, FilterInputs, ShapingInputs, keep_chance, shape_rewards
from otb_analysis.types import Float, Int
from studies.lib.enumeration.groups import group_gradients, linear_gradients, multisets
from studies.lib.enumeration.trees import GroupMoments, Tree, TreeSpec, weighted_moments


@dataclass(frozen=True)
class Filtered:
    """What a filter makes of one prompt's updates."""

    moments: GroupMoments  # Against ∇J
    target: Float  # What `rloo` follows: ∇(E[R·k]/E[k]), or ∇J/P(kept) for a filter of groups [D]
    kept: float  # Share of the rollouts, or of the groups, that stay

    @property
    def cosine(self) -> float:
        """Cosine of the mean update and ∇J: 1 where the filter changes the length of a step at most."""
        mean, gradient = self.moments.mean, self.moments.gradient
        return float(mean @ gradient / (np.linalg.norm(mean) * np.linalg.norm(gradient)))

    @property
    def off_target(self) -> float:
        """‖m − target‖/‖target‖."""
        return float(np.linalg.norm(self.moments.mean - self.target) / np.linalg.norm(self.target))

    def efficiency(self, prompts: float) -> float:
        """Return the efficiency of an update for which as many rollouts are drawn as P unfiltered groups have."""
        return self.moments.efficiency(prompts * self.kept)


def filtered(
    tree: Tree, n: int, name: str, estimator: str, options: Any = None, estimator_options: Any = None
) -> Filtered:
    """Return the exact moments of an estimator's group gradient, in groups that a filter has filled.

    Raises:
        InputError: The filter does not exist, or there are too many groups to enumerate.
    """
    if FILTERS[name].keeps == "rollout":
        stays = keep_chance(name, _inputs(tree, np.arange(len(tree.prob)), np.arange(len(tree.prob))), options)
        kept = float(tree.prob @ stays)
        members, prob = multisets(tree, n, tree.prob * stays / kept)
        target = conditional_gradient(tree, stays)
    else:
        members, prob = multisets(tree, n)
        group = np.repeat(np.arange(len(members)), n)
        prob = prob * keep_chance(name, _inputs(tree, members.reshape(-1), group), options)[::n]
        kept = float(prob.sum())
        prob, target = prob / kept, tree.gradient / kept
    gradients = group_gradients(estimator, tree, members, estimator_options)
    return Filtered(weighted_moments(gradients, prob, tree.gradient, n), target, kept)


def conditional_gradient(tree: Tree, stays: Float) -> Float:
    """Return ∇(E[R·k]/E[k]) [D], k [M] held fixed: Σ p k (R − E[R·k]/E[k]) S / E[k], S the rollout's score."""
    law = tree.prob * stays / (tree.prob @ stays)
    return np.einsum("m,md->d", law * (tree.total - law @ tree.total), tree.score.sum(axis=1))


def profiled(tree: Tree, options: Any = None) -> Tree:
    """Return the same policy with rewards that pay right completions more, the less they spend."""
    group = np.zeros(len(tree.prob), np.int64)
    return replace(tree, reward=shape_rewards("profiled", ShapingInputs(tree.reward, tree.mask, group), options).reward)


def batch_cosine(parts: Sequence[Filtered], fresh: bool) -> float:
    """Return the cosine of the mean update of many prompts and Σ_p ∇J_p.

    Where a dropped group gives way to a group of a `fresh` prompt, a prompt counts by how often its groups are kept;
    where its own prompt is sampled again until a group stays, all count alike.
    """
    weight = [part.kept if fresh else 1.0 for part in parts]
    mean = sum(w * part.moments.mean for w, part in zip(weight, parts, strict=True))
    gradient = np.sum([part.moments.gradient for part in parts], axis=0)
    return float(mean @ gradient / (np.linalg.norm(mean) * np.linalg.norm(gradient)))


def _inputs(tree: Tree, rows: Int, group: Int) -> FilterInputs:
    return FilterInputs(tree.total[rows], tree.mask[rows].sum(axis=1).astype(np.float64), np.zeros(len(rows)), group)


PEAKED = TreeSpec(vocabulary=3, horizon=3, shared=5, end_token=True, scale=2.0)
"""Policies that are sure of most tokens, as trained ones are."""
WEIGHT_CASES: dict[str, tuple[str, object]] = {
    "`none`": ("none", None),
    "`stapo`, τ_p = .2, τ_h = .6": ("stapo", StapoOptions(0.2, 0.6)),
    "`delightful`": ("delightful", None),
    "`delightful`, η = .25": ("delightful", DelightOptions(0.25)),
    "`critical`": ("critical", None),
    "`critical`, κ = ½": ("critical", CriticalOptions(0.5)),
    "`clip_cov`": ("clip_cov", None),
    "`clip_cov`, a tenth above .2": ("clip_cov", CovarianceOptions(0.1, 0.2)),
    "`kl_cov`": ("kl_cov", None),
}
"""Every token weight; with options where the defaults do nothing on three tokens."""


def exact_contrast(tree: Tree) -> Float:
    """Return the contrast of every token [M, T] by copies without error: π given that the answer is right, or wrong.

    π(y|h, right) = π(y|h)·v(hy)/v(h) and π(y|h, wrong) = π(y|h)·(1 − v(hy))/(1 − v(h)), v the chance to be right, so
    the contrast is π(y|h)·v(hy)²/(1 − v(hy)) over its sum: a likely token has a high one whatever it does. Where a
    token cannot be wrong any more, such tokens share 1.

    Raises:
        InputError: Rewards are not 0 or 1 at the end.
    """
    right = tree.total
    if not np.isin(right, (0.0, 1.0)).all():
        raise InputError("rewards of the tree are not 0 or 1, so no answer is right or wrong; draw it without dense.")
    at, out = tree.mask, np.zeros(tree.mask.shape)
    answer, paid = (np.broadcast_to(x[:, None], at.shape)[at] for x in (np.exp(tree.logprob.sum(axis=1)), right))
    pairs = tree.prefix[at] * (int(tree.token.max()) + 1) + tree.token[at]  # h and y
    _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
    chance = np.bincount(place, answer * paid) / np.bincount(place, answer)
    pi, prefix = np.exp(tree.logprob[at][first]), tree.prefix[at][first]
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = pi * chance**2 / (1 - chance)
        sure = np.where(np.isinf(odds), pi, 0.0)
        total, certain = (np.bincount(prefix, x)[prefix] for x in (odds, sure))
        share = np.where(certain > 0, sure / certain, np.where(total > 0, odds / total, pi))
    out[at] = share[place]
    return out


def weighed_moments(tree: Tree, name: str, n: int, options: object = None) -> tuple[GroupMoments, float]:
    """Return the exact moments of (1/N) Σ m_{i,t} A_{i,t} s_{i,t} with A of `rloo`, and the share of tokens with m < ½.

    Raises:
        InputError: The tree has no entropies.
    """
    if tree.entropy is None:
        raise InputError("the tree has no entropies, which token weights read; draw it by random_tree.")
    members, prob = multisets(tree, n)
    rows = members.reshape(-1)
    inputs = tree.inputs(rows, np.repeat(np.arange(len(members)), n))
    advantage = estimate("rloo", inputs).advantage
    contrast = exact_contrast(tree)[rows] if "contrast" in TOKEN_WEIGHTS[name].needs else None
    logprob, entropy = tree.logprob[rows], tree.entropy[rows]
    read = TokenWeightInputs(inputs.mask, advantage, logprob, entropy, contrast, update=inputs.group)
    weight = token_weights(name, read, options)
    low = (inputs.mask & (weight < 0.5)).reshape(len(members), -1).sum(axis=1)
    tokens = inputs.mask.reshape(len(members), -1).sum(axis=1)
    moments = weighted_moments(linear_gradients(tree, members, advantage * weight), prob, tree.gradient, n)
    return moments, float(prob @ low / (prob @ tokens))
