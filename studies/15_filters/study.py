"""Filters of sampling on enumerated policies: the mean, the variance and the efficiency of what they leave. Exact."""

from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.objectives.filters import RejectionOptions
from otb_analysis.objectives.shaping import ProfiledOptions
from otb_analysis.training.runtime.progress import Bar
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.enumeration.facts import GROUP
from studies.lib.enumeration.filters import Filtered, batch_cosine, filtered, profiled
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.trees import Tree, random_tree

N = 4
ESTIMATORS = ("none", "rloo", "otb", "otb_loo", "otb_carry_loo", "sequence_optimal_loo", "grpo")
FILTERS: dict[str, tuple[str, Any]] = {
    "none": ("none", None),
    "dynamic": ("dynamic", None),
    "prs": ("prs", RejectionOptions(budget=4, low=0.0, high=0.75)),
}
"""Texts of 1 to 3 tokens: q = ¾, ½, ¼, so a right text stays with probability 1, ⅔, ⅓."""
PROFILED = ProfiledOptions(budget=4, weight=1.0)
UPDATE = 32
"""Prompts of an update without a filter; with one, as many rollouts are drawn."""
TOGETHER = 4
"""Policies whose prompts share one batch."""


def cells(policies: int) -> list[Cell]:
    """Return one cell per filter, the profiled rewards, and the batches of several prompts."""
    same: dict[str, Any] = {"policies": policies, "n": N, "update": UPDATE, "estimators": list(ESTIMATORS)}
    made = [Cell(name, {**same, "options": repr(options)}) for name, (_, options) in FILTERS.items()]
    return [
        *made,
        Cell("profiled", {**same, "options": repr(PROFILED)}),
        Cell("batches", {**same, "together": TOGETHER}),
    ]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Enumerate the policies of a cell."""
    count = cell.settings["policies"]
    trees = [random_tree(GROUP, np.random.default_rng(seed)) for seed in range(count)]
    if cell.name == "batches":
        return {"batches": batches(trees)}
    rows = []
    for seed, tree in enumerate(trees):
        for estimator in ESTIMATORS:
            found = profiled_row(tree, estimator) if cell.name == "profiled" else row_of(tree, cell.name, estimator)
            rows.append({"filter": cell.name, "policy": seed, "estimator": estimator} | found)
        bar(seed + 1, count, f"{cell.name}: policy {seed + 1}")
    return {"filters": rows}


def row_of(tree: Tree, name: str, estimator: str) -> dict[str, float | None]:
    """Return what a filter makes of an estimator on one policy."""
    which, options = FILTERS[name]
    found = filtered(tree, N, which, estimator, options)
    plain = group_moments(estimator, tree, N)
    return {
        "kept": rounded(found.kept),
        "bias": rounded(found.moments.relative_bias),
        "off_target": rounded(found.off_target),
        "c": rounded(found.moments.projection),
        "cosine": rounded(found.cosine, 8),
        "same_drawn": rounded(found.efficiency(UPDATE) / plain.efficiency(UPDATE)),
        "same_kept": rounded(found.moments.efficiency(UPDATE) / plain.efficiency(UPDATE)),
    }


def profiled_row(tree: Tree, estimator: str) -> dict[str, float | None]:
    """Return what profiled rewards make of an estimator; bias is against ∇J of the task's own reward."""
    paid = profiled(tree, PROFILED)
    moments = group_moments(estimator, paid, N)
    own = Filtered(moments, paid.gradient, 1.0)
    mean, gradient = moments.mean, tree.gradient
    length = float(np.linalg.norm(gradient))
    return {
        "kept": 1.0,
        "bias": rounded(float(np.linalg.norm(mean - gradient)) / length),
        "off_target": rounded(own.off_target),
        "c": rounded(float(mean @ gradient) / length**2),
        "cosine": rounded(float(mean @ gradient) / (length * float(np.linalg.norm(mean))), 8),
        "same_drawn": None,
        "same_kept": None,
    }


def batches(trees: list[Tree]) -> list[dict[str, Any]]:
    """Return the cosine of the mean update of several prompts and their ∇J; parameters are shared, features are not."""
    rows = []
    for estimator in ESTIMATORS:
        for name in ("none", "dynamic", "prs"):
            parts = [filtered(tree, N, FILTERS[name][0], estimator, FILTERS[name][1]) for tree in trees]
            for k in range(0, len(parts), TOGETHER):
                some = parts[k : k + TOGETHER]
                for fresh in (True, False) if name == "dynamic" else (False,):
                    label = {True: "dynamic, other prompts", False: name}[fresh]
                    label = "dynamic, same prompt again" if name == "dynamic" and not fresh else label
                    cosine = rounded(batch_cosine(some, fresh), 8)
                    rows.append({"filter": label, "batch": k // TOGETHER, "estimator": estimator, "cosine": cosine})
    return rows


STUDY = Study(
    title="Filters of sampling",
    question="What do DAPO's dynamic sampling, rejection of lazy right answers (PRS) and profiled rewards (PR) make of "
    "the mean and the efficiency of an update?",
    cells=cells(60),
    quick=cells(4),
    measure=measure,
)
