"""One row of figures per random policy: all that the study of the seven facts keeps of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from otb_analysis.enumeration.facts import (
    energy_reward_corr,
    first_token_error,
    prompt_parts,
    regret_error,
    score_overlap,
    self_inclusion_error,
    sideways,
    two_prompt_variance,
)
from otb_analysis.enumeration.figures import CLOSERS, GROUP, GROUP_SIZE, SETTINGS
from otb_analysis.enumeration.groups import group_moments
from otb_analysis.enumeration.moments import GroupMoments
from otb_analysis.enumeration.off_policy import CASES, drifted, mean_shift
from otb_analysis.enumeration.population import (
    gap_closed,
    population_baseline,
    population_moments,
    position_optimum,
    prefix_optimum,
    values,
)
from otb_analysis.enumeration.trees import TreeSpec, random_tree
from otb_analysis.estimators import TailOptions

GROUPS = {"ragged": GROUP, "equal": replace(GROUP, end_token=False)}
"""Policies whose groups of four are enumerated, by their lengths."""
LONG_GROUPS = TreeSpec(vocabulary=2, horizon=4, shared=3, end_token=True)
"""Five completions: few enough to enumerate every group of 32."""
LARGE, SMALL = 32, 4
COMPARED = (
    "none",
    "group_mean",
    "rloo",
    "sequence_optimal",
    "otb",
    "token_optimal",
    "sequence_optimal_loo",
    "otb_loo",
    "token_optimal_loo",
)


def population_row(setting: str, seed: int) -> dict[str, Any]:
    """Return what facts 1, 2 and 5 say of one policy."""
    tree, rng = random_tree(SETTINGS[setting], np.random.default_rng(seed)), np.random.default_rng([seed, 1])
    best, mean, value, prefix = (
        population_moments(tree, b).variance
        for b in (position_optimum(tree), population_baseline("group_mean", tree), values(tree), prefix_optimum(tree))
    )
    off_policy = drifted(SETTINGS[setting], seed)
    return {
        "setting": setting,
        "policy": seed,
        "overlap": score_overlap(tree),
        "regret_error": regret_error(tree, rng.normal(size=tree.mask.shape[1])),
        "regret_error_off_policy": regret_error(off_policy, rng.normal(size=tree.mask.shape[1])),
        "first_token_error": first_token_error(tree),
        **{f"{name} {source}": gap_closed(name, tree, source) for name, source in CLOSERS},
        "gap": 1 - best / mean,
        "value": value / best,
        "prefix": prefix / best,
    }


def group_row(setting: str, seed: int) -> dict[str, Any]:
    """Return what facts 3 and 4 say of one policy in groups of four."""
    tree = random_tree(GROUPS[setting], np.random.default_rng(seed))
    moments = {name: group_moments(name, tree, GROUP_SIZE) for name in COMPARED}
    tails = [group_moments("otb_loo", tree, GROUP_SIZE, TailOptions(tail=tail)) for tail in ("group", "zero")]
    unbiased = [moments[name] for name in COMPARED if name in ("none", "rloo") or name.endswith("_loo")] + tails[:1]
    reference, mean = moments["rloo"], moments["group_mean"]
    best = population_moments(tree, position_optimum(tree)).variance
    return {
        "setting": setting,
        "policy": seed,
        "corr": energy_reward_corr(tree),
        "loo_bias": max(m.relative_bias for m in unbiased),
        "zero_tail_bias": tails[1].relative_bias,
        "mean_length_error": abs(mean.projection - (1 - 1 / GROUP_SIZE)),
        "mean_sideways": sideways(mean),
        "otb_sideways": sideways(moments["otb"]),
        "self_inclusion_error": self_inclusion_error(tree, GROUP_SIZE),
        **_measures(moments, reference, best),
    }


def _measures(moments: Mapping[str, GroupMoments], reference: GroupMoments, best: float) -> dict[str, float]:
    rows = {}
    for name, m in moments.items():
        rows[f"v {name}"], rows[f"sf {name}"] = m.variance / reference.variance, m.sf / reference.sf
        rows[f"e1 {name}"], rows[f"e1000 {name}"] = (m.efficiency(p) / reference.efficiency(p) for p in (1, 1000))
        rows[f"nsf {name}"] = GROUP_SIZE * m.sf / best
    return rows


def ratio_row(setting: str, seed: int) -> dict[str, Any]:
    """Return how far a baseline moves the mean under each ratio on one pair of policies."""
    tree = drifted(SETTINGS[setting], seed)
    return {"setting": setting, "policy": seed, **{label: mean_shift(tree, case) for label, case in CASES.items()}}


def prompt_row(seed: int) -> dict[str, Any]:
    """Return how the variance of two prompts' mean gradient splits, on two policies as prompts, groups of two."""
    trees = [random_tree(GROUP, np.random.default_rng(2 * seed + k)) for k in (0, 1)]
    within, between = prompt_parts("rloo", trees, 2)
    whole, plain = two_prompt_variance("rloo", trees, 2), prompt_parts("none", trees, 2)[1]
    return {
        "policy": seed,
        "split_error": abs((within + between) / 2 - whole) / whole,
        "between_rloo_error": abs(between / plain - 1),
        "between_mean": prompt_parts("group_mean", trees, 2)[1] / plain,
        "between_otb": prompt_parts("otb", trees, 2)[1] / plain,
    }


def size_row(seed: int) -> dict[str, Any]:
    """Return `otb` in groups of 4 over the group mean in groups of 32 on one policy, every group enumerated."""
    tree = random_tree(LONG_GROUPS, np.random.default_rng(seed))
    small, large = group_moments("otb", tree, SMALL), group_moments("group_mean", tree, LARGE)
    return {
        "policy": seed,
        "corr": energy_reward_corr(tree),
        "variance": small.variance / large.variance,
        "sf": small.sf / large.sf,
        "efficiency": small.efficiency(1) / large.efficiency(1),
    }
