"""Gram matrices to the rows of `schema.GRAMS` and back, each pair of group gradients once."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otb_analysis.errors import InputError
from otb_analysis.statistics.gram import Gram


def gram_columns(gram: Gram, step: int, group: Sequence[int] | None = None) -> dict[str, NDArray]:
    """Columns of `schema.GRAMS` for one step, one row for each unordered pair of (estimator, prompt).

    Args:
        gram: The matrix.
        step: Optimiser step.
        group: Index of each prompt within the step [P]; 0 … P−1 by default.

    Returns:
        Arrays by column name, M·P·(M·P + 1)/2 rows.
    """
    m, p = len(gram.labels), gram.n_prompts
    flat = np.asarray(gram.inner, dtype=float).transpose(0, 2, 1, 3).reshape(m * p, m * p)
    first, second = np.triu_indices(m * p)
    names, sources = (np.array([label[i] for label in gram.labels], dtype=object) for i in (0, 1))
    groups = np.arange(p) if group is None else np.asarray(group, dtype=np.int64)
    return {
        "step": np.full(first.size, step, dtype=np.int64),
        "estimator": names[first // p] if p else names[:0],
        "energy_source": sources[first // p] if p else sources[:0],
        "group": groups[first % p] if p else groups,
        "other_estimator": names[second // p] if p else names[:0],
        "other_energy_source": sources[second // p] if p else sources[:0],
        "other_group": groups[second % p] if p else groups,
        "inner_product": flat[first, second],
    }


def grams_from_columns(
    columns: Mapping[str, ArrayLike],
    n_rollouts: Mapping[int, int],
    prompt: Mapping[tuple[int, int], object] | None = None,
) -> dict[int, Gram]:
    """Rebuild the Gram matrix of every step from the rows of `schema.GRAMS`; a data frame of them is such a mapping.

    Args:
        columns: The eight columns of the table, in any row order.
        n_rollouts: Rollouts behind each step's matrix.
        prompt: Name of the prompt of each (step, group), for intervals clustered across steps; None when all are new.

    Returns:
        One Gram matrix per step, in order of steps, labels in order of appearance; pairs that are missing are NaN.

    Raises:
        InputError: A step has no entry in `n_rollouts`.
    """
    table = {name: np.asarray(columns[name]) for name in _COLUMNS}
    found = {}
    for step in np.unique(table["step"]).tolist():
        if step not in n_rollouts:
            raise InputError(f"n_rollouts has no entry for step {step}; pass the rollouts behind every step's matrix.")
        rows = {name: values[table["step"] == step] for name, values in table.items()}
        found[step] = _one(rows, step, n_rollouts[step], prompt)
    return found


_SIDES = (("estimator", "energy_source", "group"), ("other_estimator", "other_energy_source", "other_group"))
_COLUMNS = ("step", *_SIDES[0], *_SIDES[1], "inner_product")


def _one(
    rows: Mapping[str, NDArray], step: int, n_rollouts: int, prompt: Mapping[tuple[int, int], object] | None
) -> Gram:
    sides = [list(zip(*(rows[name].tolist() for name in side), strict=True)) for side in _SIDES]
    labels = list(dict.fromkeys((e, s) for side in sides for e, s, _ in side))
    groups = sorted({g for side in sides for _, _, g in side})
    at_label, at_group = {v: i for i, v in enumerate(labels)}, {v: i for i, v in enumerate(groups)}
    (m, p), (n, q) = (
        (np.array([at_label[e, s] for e, s, _ in side]), np.array([at_group[g] for *_, g in side])) for side in sides
    )
    inner = np.full((len(labels), len(labels), len(groups), len(groups)), np.nan)
    inner[m, n, p, q] = rows["inner_product"]
    inner[n, m, q, p] = rows["inner_product"]
    names = None if prompt is None else tuple(prompt[step, g] for g in groups)
    return Gram(inner, tuple(labels), n_rollouts, names)
