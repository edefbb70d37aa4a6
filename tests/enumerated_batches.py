"""Batches of several prompts, enumerated whole: the ground truth of estimators that look across prompts."""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.types import EstimatorInputs, Float, NormalEquations, Tallies
from studies.lib.enumeration.groups import MOST_GROUPS, multisets
from studies.lib.enumeration.trees import Tree


def batch_means(
    name: str, trees: Sequence[Tree], n: int, options: Any = None, state: NormalEquations | Tallies | None = None
) -> list[Float]:
    """Return E ḡ_p [D] of every prompt p in batches of one group of n per tree, with exact energies.

    Prompts are numbered from 0 for those that remember by prompt.

    Every batch is enumerated: what looks across prompts is only then seen whole. Trees have one horizon.

    Raises:
        InputError: There are too many batches to enumerate.
    """
    groups = [multisets(tree, n) for tree in trees]
    size = prod(len(members) for members, _ in groups)
    if size > MOST_GROUPS:
        raise InputError(f"there are {size} batches but at most {MOST_GROUPS} are enumerated; take smaller trees.")
    label = np.repeat(np.arange(len(trees)), n)
    means = [np.zeros(tree.score.shape[2]) for tree in trees]
    for chosen in product(*(range(len(members)) for members, _ in groups)):
        rows = [members[k] for (members, _), k in zip(groups, chosen, strict=True)]
        prob = prod(float(p[k]) for (_, p), k in zip(groups, chosen, strict=True))
        parts = [vars(tree.inputs(one, label[:n])) for tree, one in zip(trees, rows, strict=True)]
        columns: dict[str, Any] = {
            key: np.concatenate([part[key] for part in parts]) for key, x in parts[0].items() if x is not None
        }
        inputs = EstimatorInputs(**columns | {"group": label, "prompt": label, "state": state})
        advantage = estimate(name, inputs, options).advantage
        for p, (tree, one) in enumerate(zip(trees, rows, strict=True)):
            coefficient = advantage[p * n : (p + 1) * n] * tree.ratio[one]
            means[p] += prob / n * np.einsum("nt,ntd->d", coefficient, tree.score[one])
    return means
