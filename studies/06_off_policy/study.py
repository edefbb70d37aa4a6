"""What importance ratios and their clips make of the gradient as the sampler falls behind the policy.

Exactly, on enumerated policies whose sampler is a chosen divergence away.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from otb_analysis.statistics import cluster_jackknife
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables, interval_columns, rounded
from studies.lib.enumeration.off_policy import (
    CASES,
    case_moments,
    effective_share,
    farthest,
    mean_shift,
    sampled_at,
    touched,
)
from studies.lib.enumeration.trees import Tree, TreeSpec, random_tree

SPEC = TreeSpec(vocabulary=3, horizon=4, shared=8, end_token=True)
DRIFTS = ("behind", "random")
"""The sampler lies behind along ∇J, as with staleness, or off in a random direction."""
DIVERGENCES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""KL(μ‖π) of a whole completion in nats."""
LEAST_ESS = 0.01
"""Policies whose sampler at the largest distance has a smaller ESS are left out: some completions are next to never
sampled there, and the means would be theirs alone."""
BUDGETS = (32, 1024)
"""Rollouts of an update for which efficiency is stated on enumerated policies."""
INSTANCES, QUICK_INSTANCES = 120, 24
"""Policies that are drawn."""


def cells(instances: int) -> list[Cell]:
    """Return one cell per kind of drift."""
    facts = {"spec": asdict(SPEC), "divergences": list(DIVERGENCES), "least_ess": LEAST_ESS, "ratios": list(CASES)}
    facts |= {"budgets": list(BUDGETS), "instances": instances}
    return [Cell(f"exact-{drift}", {"drift": drift, **facts}) for drift in DRIFTS]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Return what each ratio does at each divergence: means over random policies, and every policy's efficiencies.

    Ratios are compared on the same policies, so their efficiencies are kept policy by policy.
    """
    drift, instances = cell.settings["drift"], cell.settings["instances"]
    by_case: dict[tuple[float, str], list[dict[str, float]]] = {}
    policies, most = [], max(DIVERGENCES)
    for seed in range(instances):
        rng = np.random.default_rng(seed)
        tree = random_tree(SPEC, rng)
        direction = -tree.gradient if drift == "behind" else rng.normal(size=tree.gradient.shape)
        direction /= np.linalg.norm(direction)
        # A sampler at every distance, with something left of the sample at the largest
        if farthest(tree, direction) < most or effective_share(sampled_at(tree, direction, most)) < LEAST_ESS:
            continue
        for distance in DIVERGENCES:
            figures = one_policy(tree, sampled_at(tree, direction, distance))
            row = {"drift": drift, "divergence": distance, "policy": seed}
            for name, facts in figures.items():
                by_case.setdefault((distance, name), []).append(facts)
            by_name = {f"efficiency_{n} {name}": f[f"efficiency_{n}"] for n in BUDGETS for name, f in figures.items()}
            policies.append(row | {name: rounded(value) for name, value in by_name.items()})
        bar(seed + 1, instances, f"exact-{drift}: policies enumerated")
    means = []
    for (distance, name), rows in by_case.items():
        row = {"drift": drift, "divergence": distance, "ratio": name, "policies": len(rows), "drawn": instances}
        for column in rows[0]:  # policies are the clusters
            values = np.array([[one[column]] for one in rows])
            row |= interval_columns(column, cluster_jackknife(values, lambda m: m[..., 0], f"mean {column}", "linear"))
        means.append(row)
    return {"exact": means, "policies": policies}


def one_policy(tree: Tree, off: Tree) -> dict[str, dict[str, float]]:
    """Return the exact figures of every ratio on a policy with its sampler.

    Where a clip stops every token there is no update, and its efficiency is 0.
    """
    fresh, figures = case_moments(tree, CASES["`none`"]), {}
    for name, case in CASES.items():
        moments = case_moments(off, case)
        figures[name] = {
            "ess": effective_share(off), "touched": touched(off, case), "baseline_shift": mean_shift(off, case),
            "bias": moments.relative_bias, "projection": moments.projection,
            "variance": moments.variance / fresh.variance,
        } | {f"efficiency_{n}": moments.efficiency(n) if moments.mean.any() else 0.0 for n in BUDGETS}  # fmt: skip
    return figures


STUDY = Study(
    title="Off-policy",
    question="What do importance ratios and their clips make of mean and variance of the update as the sampler falls "
    "behind the policy?",
    cells=cells(INSTANCES),
    quick=cells(QUICK_INSTANCES),
    measure=measure,
)
