"""What filters of rollouts do to the mean of an update: exactly, on enumerated prompts.

Dynamic sampling keeps groups with unequal rewards and fills the batch with others; profiled rejection samples anew in
place of right answers that spent much. Everything is a sum over all groups of N completions.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from otb_analysis.enumeration.groups import group_gradients, multisets
from otb_analysis.enumeration.trees import Tree, TreeSpec, random_tree
from otb_analysis.study import Cell, Study, Tables, rounded
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Float, Int

SPEC = TreeSpec(vocabulary=3, horizon=3, shared=8, end_token=True)
WORLDS, PROMPTS = 40, 16
"""Populations, and enumerated prompts in each; they share their parameters."""
SIZES = (2, 4)
ARMS = ("none", "rloo", "group_mean", "grpo", "otb", "otb_loo")
FILTERS = ("none", "dynamic", "profiled")
FLOOR = 0.2
"""Probability with which profiled rejection keeps the longest right answer."""
UPDATE = 256
"""Rollouts drawn for an update, rejected ones included."""


def cells(quick: bool) -> list[Cell]:
    """Return one cell per group size."""
    settings = {
        "worlds": 4 if quick else WORLDS, "prompts": 4 if quick else PROMPTS, "spec": asdict(SPEC), "floor": FLOOR,
        "update": UPDATE, "arms": list(ARMS), "filters": list(FILTERS),
    }  # fmt: skip
    return [Cell(f"groups-of-{size}", settings | {"size": size}) for size in ((2,) if quick else SIZES)]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Return one row per population, filter and estimator."""
    rows, s = [], cell.settings
    for world in range(s["worlds"]):
        rng = np.random.default_rng(world)
        trees = [random_tree(SPEC, rng) for _ in range(s["prompts"])]
        for kind in FILTERS:
            for arm in ARMS:
                row = {"world": world, "size": s["size"], "filter": kind, "estimator": arm}
                rows.append(row | {name: rounded(x) for name, x in update(trees, kind, arm, s["size"]).items()})
        bar(world + 1, s["worlds"], f"{cell.name}: populations enumerated")
    return {"worlds": rows}


def update(trees: list[Tree], kind: str, arm: str, size: int) -> dict[str, float]:
    """Return what an update of `UPDATE` drawn rollouts is, under a filter.

    m is the mean of the batch's gradient, a mean over the groups that were kept. `projection` is ⟨m, ∇J⟩/‖∇J‖²,
    `sideways` the part of m that is not along ∇J, over ‖m‖: the sine of their angle. `paid_sideways` is the same
    against the gradient of E[k(y)·R], k the probability with which the filter keeps a right answer.
    """
    truth = np.mean([tree.gradient for tree in trees], axis=0)
    other = np.mean([wanted(tree) for tree in trees], axis=0)
    mean, power, share, cost = np.zeros(len(truth)), 0.0, 0.0, 0.0
    for tree in trees:
        members, gradient, prob = groups(tree, kind, arm, size)
        stays = live(tree, members) if kind == "dynamic" else np.ones(len(prob))
        mean += (prob * stays) @ gradient
        power += float((prob * stays) @ (gradient**2).sum(axis=1))
        share += float(prob @ stays)
        cost += size / float(tree.prob @ kept(tree)) if kind == "profiled" else size
    mean, power = mean / share, power / share  # of a kept group; prompts are kept as often as they pass
    per_group = cost / share  # rollouts that are drawn for it
    along, length = float(mean @ truth), float(mean @ mean)
    noise = (power - length) * per_group / UPDATE
    return {
        "drawn": per_group / size, "projection": along / float(truth @ truth), "sideways": angle(mean, truth),
        "paid_sideways": angle(mean, other), "efficiency": float(along**2 / (truth @ truth) / (length + noise)),
    }  # fmt: skip


def groups(tree: Tree, kind: str, arm: str, size: int) -> tuple[Int, Float, Float]:
    """Return every group, its gradient and its probability; a rejected completion is drawn again."""
    members, prob = multisets(tree, size)
    if kind == "profiled":
        law = kept(tree)
        prob = prob * law[members].prod(axis=1) / float(tree.prob @ law) ** size
    return members, group_gradients(arm, tree, members), prob


def live(tree: Tree, members: Int) -> Float:
    """Return 1 for groups whose rewards are not all equal."""
    reward = tree.total[members]
    return (np.ptp(reward, axis=1) > 1e-12).astype(float)


def kept(tree: Tree) -> Float:
    """Return the probability with which profiled rejection keeps each completion [M]."""
    length = tree.mask.sum(axis=1)
    quality = 1 - (length - 1) / (SPEC.horizon - 1)
    return np.where(tree.total > 0.5, FLOOR + (1 - FLOOR) * quality, 1.0)


def wanted(tree: Tree) -> Float:
    """Return the gradient of E[k(y)·R] [D]."""
    scores = tree.score.sum(axis=1)
    return (tree.prob * kept(tree) * tree.total) @ scores


def angle(mean: Float, truth: Float) -> float:
    """Return the sine of the angle between two vectors."""
    cosine = float(mean @ truth) / np.sqrt(float(mean @ mean) * float(truth @ truth))
    return float(np.sqrt(max(1 - cosine**2, 0.0)))


STUDY = Study(
    title="Filters",
    question="What do filters that fill a batch, dynamic sampling and rejection of lazy right answers, do to the mean "
    "of an update, and do they pay?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
