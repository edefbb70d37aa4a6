"""What the facts about baselines say of one enumerated policy, and one row of figures per random policy for study 01.

Identities come out as errors relative to a natural scale, 0 up to rounding where they hold.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from otb_analysis.energies import realized_energy
from otb_analysis.estimators import TailOptions, estimate
from otb_analysis.types import Float
from studies.lib.enumeration.groups import group_gradients, group_moments, multisets
from studies.lib.enumeration.off_policy import CASES, drifted, mean_shift
from studies.lib.enumeration.population import (
    gap_closed,
    population_baseline,
    population_moments,
    position_optimum,
    prefix_optimum,
    regret,
    values,
)
from studies.lib.enumeration.trees import GroupMoments, Tree, TreeSpec, random_tree

SETTINGS = {
    "tabular, terminal": TreeSpec(),
    "tabular, dense": TreeSpec(dense=True),
    "shared, terminal": TreeSpec(shared=6),
    "shared, dense": TreeSpec(shared=6, dense=True),
}
CLOSERS = (
    ("classic_optimal", "exact"), ("sequence_optimal", "exact"), ("otb", "exact"), ("otb", "proxy"),
    ("token_optimal", "exact"), ("token_optimal", "proxy"),
)  # fmt: skip
"""Estimators and energies whose share of the gap closed is listed."""
GROUP, GROUP_SIZE = TreeSpec(horizon=3, shared=5, end_token=True), 4
GROUPS = {"ragged": GROUP, "equal": replace(GROUP, end_token=False)}
"""Policies whose groups of four are enumerated, by their lengths."""
LONG_GROUPS = TreeSpec(vocabulary=2, horizon=4, shared=3, end_token=True)
"""Five completions: few enough to enumerate every group of 32."""
LARGE, SMALL = 32, 4
COMPARED = (
    "none", "group_mean", "rloo", "sequence_optimal", "otb", "token_optimal", "sequence_optimal_loo", "otb_loo",
    "token_optimal_loo",
)  # fmt: skip
"""Estimators of the groups, in the order of the table's columns."""


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


def population_row(setting: str, seed: int) -> dict[str, Any]:
    """Return what facts 1, 2 and 5 say of one policy."""
    tree, rng = random_tree(SETTINGS[setting], np.random.default_rng(seed)), np.random.default_rng([seed, 1])
    best, mean, value, prefix = (
        population_moments(tree, b).variance
        for b in (position_optimum(tree), population_baseline("group_mean", tree), values(tree), prefix_optimum(tree))
    )
    off_policy, width = drifted(SETTINGS[setting], seed), tree.mask.shape[1]
    row = {"setting": setting, "policy": seed, "overlap": score_overlap(tree)}
    row |= {"regret_error": regret_error(tree, rng.normal(size=width))}
    row |= {"regret_error_off_policy": regret_error(off_policy, rng.normal(size=width))}
    row |= {"first_token_error": first_token_error(tree)}
    row |= {f"{name} {source}": gap_closed(name, tree, source) for name, source in CLOSERS}
    return row | {"gap": 1 - best / mean, "value": value / best, "prefix": prefix / best}


def group_row(setting: str, seed: int) -> dict[str, Any]:
    """Return what facts 3 and 4 say of one policy in groups of four."""
    tree = random_tree(GROUPS[setting], np.random.default_rng(seed))
    moments = {name: group_moments(name, tree, GROUP_SIZE) for name in COMPARED}
    tails = [group_moments("otb_loo", tree, GROUP_SIZE, TailOptions(tail=tail)) for tail in ("group", "zero")]
    unbiased = [moments[name] for name in COMPARED if name in ("none", "rloo") or name.endswith("_loo")] + tails[:1]
    reference, mean = moments["rloo"], moments["group_mean"]
    best = population_moments(tree, position_optimum(tree)).variance
    row: dict[str, Any] = {
        "setting": setting, "policy": seed, "corr": energy_reward_corr(tree),
        "loo_bias": max(m.relative_bias for m in unbiased), "zero_tail_bias": tails[1].relative_bias,
        "mean_length_error": abs(mean.projection - (1 - 1 / GROUP_SIZE)), "mean_sideways": sideways(mean),
        "otb_sideways": sideways(moments["otb"]), "self_inclusion_error": self_inclusion_error(tree, GROUP_SIZE),
    }  # fmt: skip
    for name, m in moments.items():
        row[f"v {name}"], row[f"sf {name}"] = m.variance / reference.variance, m.sf / reference.sf
        row[f"e1 {name}"], row[f"e1000 {name}"] = (m.efficiency(p) / reference.efficiency(p) for p in (1, 1000))
        row[f"nsf {name}"] = GROUP_SIZE * m.sf / best
    return row


def ratio_row(setting: str, seed: int) -> dict[str, Any]:
    """Return how far a baseline moves the mean under each ratio on one pair of policies."""
    tree = drifted(SETTINGS[setting], seed)
    return {"setting": setting, "policy": seed, **{label: mean_shift(tree, case) for label, case in CASES.items()}}


def prompt_row(seed: int) -> dict[str, Any]:
    """Return how the variance of two prompts' mean gradient splits, on two policies as prompts, groups of two."""
    trees = [random_tree(GROUP, np.random.default_rng(2 * seed + k)) for k in (0, 1)]
    within, between = prompt_parts("rloo", trees, 2)
    whole, plain = two_prompt_variance("rloo", trees, 2), prompt_parts("none", trees, 2)[1]
    mean, otb = (prompt_parts(name, trees, 2)[1] / plain for name in ("group_mean", "otb"))
    errors = {
        "split_error": abs((within + between) / 2 - whole) / whole,
        "between_rloo_error": abs(between / plain - 1),
    }
    return {"policy": seed, **errors, "between_mean": mean, "between_otb": otb}


def size_row(seed: int) -> dict[str, Any]:
    """Return `otb` in groups of 4 over the group mean in groups of 32 on one policy, every group enumerated."""
    tree = random_tree(LONG_GROUPS, np.random.default_rng(seed))
    small, large = group_moments("otb", tree, SMALL), group_moments("group_mean", tree, LARGE)
    row = {"policy": seed, "corr": energy_reward_corr(tree), "variance": small.variance / large.variance}
    return row | {"sf": small.sf / large.sf, "efficiency": small.efficiency(1) / large.efficiency(1)}
