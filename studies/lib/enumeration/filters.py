"""Filters of sampling and profiled rewards on enumerated policies: what becomes of the mean of an update.

A filter k(y) of single rollouts with refilling draws i.i.d. from π·k/Z, Z = E k. Then `rloo` has the mean
∇(E[R·k]/E[k]) exactly: Cov under π·k/Z of R and ∇log(π·k/Z). A filter of groups has the law of a group given that it
is kept; an estimator without a gradient in the others has the mean ∇J/P(kept). Standing: proved, confirmed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.objectives.filters import FILTERS, FilterInputs, keep_chance
from otb_analysis.objectives.shaping import ShapingInputs, shape_rewards
from otb_analysis.types import Float, Int
from studies.lib.enumeration.groups import group_gradients, multisets
from studies.lib.enumeration.moments import GroupMoments, weighted_moments
from studies.lib.enumeration.trees import Tree


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
    tokens = tree.mask[rows].sum(axis=1).astype(np.float64)
    return FilterInputs(tree.total[rows], tokens, np.zeros(len(rows)), group)
