"""Filters of sampling on enumerated policies: the mean, the variance and the efficiency of what they leave. Exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.objectives.shaping import ProfiledOptions, RejectionOptions
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.enumeration.facts import GROUP
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.objectives import Filtered, batch_cosine, filtered, profiled
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
    options = {name: repr(chosen) for name, (_, chosen) in FILTERS.items()} | {"profiled": repr(PROFILED)}
    made = [Cell(name, {**same, "options": words}) for name, words in options.items()]
    return [*made, Cell("batches", {**same, "together": TOGETHER})]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Enumerate the policies of a cell."""
    count = cell.settings["policies"]
    trees = [random_tree(GROUP, np.random.default_rng(seed)) for seed in range(count)]
    if cell.name == "batches":
        return {"batches": batches(trees)}
    rows = list[dict[str, Any]]()
    for seed, tree in enumerate(trees):
        key = {"filter": cell.name, "policy": seed}
        rows += [key | {"estimator": name} | row_of(tree, cell.name, name) for name in ESTIMATORS]
        bar(seed + 1, count, f"{cell.name}: policy {seed + 1}")
    return {"filters": rows}


def row_of(tree: Tree, name: str, estimator: str) -> dict[str, float | None]:
    """Return what a filter, or profiled rewards, make of an estimator; bias is against ∇J of the task's own reward."""
    efficiencies: dict[str, float | None] = {"same_drawn": None, "same_kept": None}
    if name == "profiled":
        paid = profiled(tree, PROFILED)
        update = Filtered(group_moments(estimator, paid, N), paid.gradient, 1.0)
    else:
        update = filtered(tree, N, FILTERS[name][0], estimator, FILTERS[name][1])
        plain = group_moments(estimator, tree, N).efficiency(UPDATE)
        efficiencies["same_drawn"] = rounded(update.efficiency(UPDATE) / plain)
        efficiencies["same_kept"] = rounded(update.moments.efficiency(UPDATE) / plain)
    on_task = replace(update, moments=replace(update.moments, gradient=tree.gradient))
    return {
        "kept": rounded(update.kept), "bias": rounded(on_task.moments.relative_bias),
        "off_target": rounded(update.off_target), "c": rounded(on_task.moments.projection),
        "cosine": rounded(on_task.cosine, 8),
    } | efficiencies  # fmt: skip


def batches(trees: list[Tree]) -> list[dict[str, Any]]:
    """Return the cosine of the mean update of several prompts and their ∇J; parameters are shared, features are not."""
    rows = []
    for estimator in ESTIMATORS:
        for name, (which, options) in FILTERS.items():
            parts = [filtered(tree, N, which, estimator, options) for tree in trees]
            for k in range(0, len(parts), TOGETHER):
                some = parts[k : k + TOGETHER]
                again = {"dynamic, other prompts": True, "dynamic, same prompt again": False}
                for label, fresh in (again if name == "dynamic" else {name: False}).items():
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
