"""Enumerated figures for the catalogue: bias and noise of every entry, and medians over random policies."""

from dataclasses import dataclass

import numpy as np

from otb_analysis.enumeration.derailment import Derailment
from otb_analysis.enumeration.groups import group_moments
from otb_analysis.enumeration.moments import GroupMoments, sampled_moments
from otb_analysis.enumeration.population import (
    gap_closed,
    population_baseline,
    population_moments,
    position_optimum,
    prefix_optimum,
    values,
)
from otb_analysis.enumeration.trees import TreeSpec, random_tree
from otb_analysis.estimators import ESTIMATORS, estimate
from otb_analysis.types import Float

GROUP = TreeSpec(horizon=3, shared=5, end_token=True)
GROUP_SIZE = 4
GROUP_POLICIES = 12
PERFORMED = "12 random policies (V = 3, T = 3, end token, 5 shared parameters, rewards 0 or 1), groups of 4"

SETTINGS = {
    "tabular, terminal": TreeSpec(),
    "tabular, dense": TreeSpec(dense=True),
    "shared, terminal": TreeSpec(shared=6),
    "shared, dense": TreeSpec(shared=6, dense=True),
}
CLOSERS = (
    ("classic_optimal", "exact"),
    ("sequence_optimal", "exact"),
    ("otb", "exact"),
    ("otb", "proxy"),
    ("token_optimal", "exact"),
    ("token_optimal", "proxy"),
)
POLICIES = 60

SAMPLED = (
    "none",
    "group_mean",
    "rloo",
    "sequence_optimal",
    "sequence_optimal_loo",
    "otb",
    "otb_loo",
    "token_optimal",
    "token_optimal_loo",
)
SAMPLED_GROUPS = ((4, 12, 400), (32, 6, 100))
"""Group size, chunks, groups per chunk."""


@dataclass(frozen=True)
class Bias:
    """Medians over random policies of one entry's exact group moments.

    Attributes:
        relative_bias: ‖m − ∇J‖/‖∇J‖.
        target_bias: The same against the entry's own target.
        projection: ⟨m, ∇J⟩/‖∇J‖².
        variance: V relative to `rloo`.
        sf: V/c² relative to `rloo`.
        efficiency: Efficiency of one prompt and of 1000.
    """

    relative_bias: float
    target_bias: float
    projection: float
    variance: float
    sf: float
    efficiency: tuple[float, float]


def bias_figures() -> dict[str, Bias]:
    """Return the bias of every entry as a number: what the catalogue prints."""
    trees = [random_tree(GROUP, np.random.default_rng(seed)) for seed in range(GROUP_POLICIES)]
    reference = [group_moments("rloo", tree, GROUP_SIZE) for tree in trees]
    out = {}
    for name in ESTIMATORS:
        moments = [group_moments(name, tree, GROUP_SIZE) for tree in trees]
        pairs = list(zip(moments, reference, strict=True))
        scale = [(tree.objective * (1 - tree.objective)) ** -0.5 if name == "grpo" else 1.0 for tree in trees]
        out[name] = Bias(
            relative_bias=_median([m.relative_bias for m in moments]),
            target_bias=_median([_off_target(m, k) for m, k in zip(moments, scale, strict=True)]),
            projection=_median([m.projection for m in moments]),
            variance=_median([m.variance / r.variance for m, r in pairs]),
            sf=_median([m.sf / r.sf for m, r in pairs]),
            efficiency=(_median([m.efficiency(1) for m in moments]), _median([m.efficiency(1000) for m in moments])),
        )
    return out


def gap_figures() -> dict[str, dict[str, float]]:
    """Return, per kind of policy, the median share of the gap from the mean to B* that each baseline closes.

    Also the median gap itself as a share of the mean's variance, how often OTB was worse than the mean, and the
    median variance of V(h) and of the best function of the prefix relative to B*'s.
    """
    out = {}
    for setting, spec in SETTINGS.items():
        trees = [random_tree(spec, np.random.default_rng(seed)) for seed in range(POLICIES)]
        best = [population_moments(t, position_optimum(t)).variance for t in trees]
        mean = [population_moments(t, population_baseline("group_mean", t)).variance for t in trees]
        closed = {key: [gap_closed(key[0], t, key[1]) for t in trees] for key in CLOSERS}
        row = {f"{name} ({source})": _median(closed[name, source]) for name, source in CLOSERS}
        row["gap"] = _median([1 - b / m for b, m in zip(best, mean, strict=True)])
        row["otb worse than mean"] = float(np.mean(np.array(closed["otb", "exact"]) < 0))
        for label, function in (("V(h)", values), ("best of prefix", prefix_optimum)):
            ratio = [population_moments(t, function(t)).variance / b for t, b in zip(trees, best, strict=True)]
            row[f"{label} / B*"] = _median(ratio)
        out[setting] = row
    return out


def derailment_figures() -> dict[str, float]:
    """Return the exact population variance of each baseline on the derailment process, relative to B*."""
    process = Derailment()
    best = process.variance(process.baseline("token_optimal"))
    names = ("none", "group_mean", "value", "sequence_optimal", "otb", "token_optimal", "prefix")
    return {name: process.variance(process.baseline(name)) / best for name in names}


def derailment_samples() -> dict[tuple[str, int], Float]:
    """Return N·V and N·SF of group gradients on the derailment process, relative to the variance of B*.

    Sampled: every estimator on the same rollouts, in chunks of independent groups, so that differences between
    estimators have standard errors over chunks. c comes from all chunks together.

    Returns:
        (estimator, N) → [chunks, 2], the columns N·V and N·SF.
    """
    process, rng = Derailment(), np.random.default_rng(1)
    best = process.variance(process.baseline("token_optimal"))
    out = {}
    for n, chunks, groups in SAMPLED_GROUPS:
        moments = {name: [] for name in SAMPLED}
        for _ in range(chunks):
            state, token, reward = process.sample(n * groups, rng)
            inputs = process.inputs(state, token, reward, n)
            for name in SAMPLED:
                gradients = process.group_gradients(state, token, estimate(name, inputs).advantage, n)
                moments[name].append(sampled_moments(gradients, process.gradient, n))
        for name, parts in moments.items():
            step = np.mean([m.projection for m in parts])
            out[name, n] = np.array([[m.n_variance, m.n_variance / step**2] for m in parts]) / best
    return out


def _off_target(moments: GroupMoments, scale: float) -> float:
    target = scale * moments.gradient
    return float(np.linalg.norm(moments.mean - target) / np.linalg.norm(target))


def _median(x: list[float]) -> float:
    return float(np.median(x))
