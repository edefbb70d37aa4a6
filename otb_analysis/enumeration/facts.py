"""What the facts about baselines say of one enumerated policy: errors of identities, correlations, parts of a variance.

Identities come out as errors relative to a natural scale, 0 up to rounding where they hold.
"""

from collections.abc import Sequence

import numpy as np

from otb_analysis.energies import realized_energy
from otb_analysis.enumeration.groups import group_gradients, multisets
from otb_analysis.enumeration.moments import GroupMoments
from otb_analysis.enumeration.population import population_baseline, population_moments, position_optimum, regret
from otb_analysis.enumeration.trees import Tree
from otb_analysis.estimators import estimate
from otb_analysis.types import Float


def score_overlap(tree: Tree) -> float:
    """Return how far scores at different positions are from orthogonal: max_{t≠k} |E[s_t·s_k]| / max_t E‖s_t‖²."""
    inner = np.einsum("m,mtd,mkd->tk", tree.prob, tree.score, tree.score)
    power = np.diag(inner)
    return float(np.abs(inner - np.diag(power)).max() / power.max())


def regret_error(tree: Tree, baseline: Float) -> float:
    """Return how far Var(B) − Var(B*) = Σ_t E[ρ_t²‖s_t‖²] (B_t − B_t*)² is from true, relative to Var(B*)."""
    best = population_moments(tree, position_optimum(tree)).variance
    return abs(population_moments(tree, baseline).variance - best - regret(tree, baseline)) / best


def first_token_error(tree: Tree) -> float:
    """Return |B_1 − B_1*| of `otb`: 0 where tokens share no parameters, since W_1 = w_1."""
    return float(np.abs(population_baseline("otb", tree)[:, 0] - position_optimum(tree)[0]).max())


def energy_reward_corr(tree: Tree) -> float:
    """Return corr(W_T, R) over the policy's completions; NaN where either is constant."""
    total = tree.energy.sum(axis=1)
    dw, dr = total - tree.expect(total), tree.total - tree.expect(tree.total)
    scale = np.sqrt(tree.expect(dw**2) * tree.expect(dr**2))
    return float(tree.expect(dw * dr) / scale) if scale > 0 else float("nan")


def sideways(moments: GroupMoments) -> float:
    """Return the part of the bias that is not along the gradient: ‖m − c·∇J‖ / ‖∇J‖."""
    off = moments.mean - moments.projection * moments.gradient
    return float(np.linalg.norm(off) / np.linalg.norm(moments.gradient))


def self_inclusion_error(tree: Tree, n: int) -> float:
    """Return how far G − B_otb = (1 − ω_i)(G − B_otb_loo), ω_i = W_i/ΣW over those alive, is from true.

    The largest error over every group of n and every token with another rollout alive.
    """
    members, _ = multisets(tree, n)
    rows, group = members.reshape(-1), np.repeat(np.arange(len(members)), n)
    inputs = tree.inputs(rows, group)
    including, excluding = estimate("otb", inputs), estimate("otb_loo", inputs)
    # Finished rollouts keep W but are no longer averaged over, so their weight is 0.
    weight = realized_energy(tree.energy[rows], inputs.mask) * inputs.mask
    everyone = np.repeat(weight.reshape(len(members), n, -1).sum(axis=1), n, axis=0)
    share = np.divide(weight, everyone, out=np.zeros_like(weight), where=everyone > 0)
    inside = inputs.mask & ~excluding.fallback
    return float(np.abs(including.advantage - (1 - share) * excluding.advantage)[inside].max(initial=0.0))


def prompt_parts(name: str, trees: Sequence[Tree], n: int) -> tuple[float, float]:
    """Return within and between of an estimator on prompts drawn alike from some policies, each with its own groups.

    within = E_x tr Cov(ḡ | x); between = tr Cov_x E(ḡ | x).
    """
    outcomes, prob, prompt = _outcomes(name, trees, n)
    mean = np.stack([(prob * (prompt == x)) @ outcomes * len(trees) for x in range(len(trees))])
    within = prob @ ((outcomes - mean[prompt]) ** 2).sum(axis=1)
    return float(within), float(((mean - mean.mean(axis=0)) ** 2).sum(axis=1).mean())


def two_prompt_variance(name: str, trees: Sequence[Tree], n: int) -> float:
    """Return tr Cov of the mean gradient of P = 2 prompts, over all pairs of prompts and all of their groups."""
    outcomes, prob, _ = _outcomes(name, trees, n)
    mean, variance = prob @ outcomes, 0.0
    # One row of pairs at a time: the square of the number of groups does not fit in memory.
    for first, chance in zip(outcomes, prob, strict=True):
        variance += chance * (prob @ ((0.5 * (first + outcomes) - mean) ** 2).sum(axis=1))
    return float(variance)


def _outcomes(name: str, trees: Sequence[Tree], n: int) -> tuple[Float, Float, np.ndarray]:
    """Group gradients [K, D], probabilities and prompts [K] of a prompt drawn uniformly and one group of it."""
    drawn = [multisets(tree, n) for tree in trees]
    outcomes = [group_gradients(name, tree, members) for tree, (members, _) in zip(trees, drawn, strict=True)]
    prob = np.concatenate([p / len(trees) for _, p in drawn])
    return np.concatenate(outcomes), prob, np.repeat(np.arange(len(trees)), [len(p) for _, p in drawn])
