"""The seven facts about baselines, by exact enumeration of tiny policies: which hold, on which policies, by how much.

Everything is exact but groups on the derailment process, which are sampled.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.enumeration.derailment import Derailment, derailment_samples
from studies.lib.enumeration.facts import (
    GROUPS,
    LARGE,
    SETTINGS,
    SMALL,
    group_row,
    population_row,
    prompt_row,
    ratio_row,
    size_row,
)

POLICIES = {"population": 60, "ragged": 60, "equal": 24, "ratios": 60, "prompts": 20, "sizes": 60}
QUICK_POLICIES = {"population": 4, "ragged": 4, "equal": 2, "ratios": 3, "prompts": 2, "sizes": 1}
"""Random policies per setting; of `prompts`, pairs of them."""
MISTAKES = (0.2, 0.7, 2.0)
"""Expected mistakes in 64 tokens: success .76, .50 and .20."""
CHUNKS = ((SMALL, 24, 400), (LARGE, 12, 150))
QUICK_CHUNKS = ((SMALL, 3, 40), (LARGE, 3, 10))
"""Group size, chunks, groups per chunk."""
ROWS: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[str | None]]] = {
    "population": (population_row, list(SETTINGS)),
    "groups": (group_row, list(GROUPS)),
    "ratios": (ratio_row, ["tabular, terminal", "shared, terminal"]),
    "prompts": (prompt_row, [None]),
    "sizes": (size_row, [None]),
}
"""What makes the row of one policy, and for which kinds of policies."""


def cells(policies: Mapping[str, int], chunks: Sequence[Sequence[int]]) -> list[Cell]:
    """Return one cell per kind of policy."""
    exact = [Cell(name, {key: n for key, n in policies.items() if key == name or key in GROUPS}) for name in ROWS]
    return [*exact, Cell("derailment", {"mistakes": list(MISTAKES), "chunks": [list(c) for c in chunks]})]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Enumerate the policies of a cell."""
    if cell.name == "derailment":
        return derailment_tables(cell.settings, bar)
    make, kinds = ROWS[cell.name]
    rows = []
    for kind in kinds:
        count = cell.settings[kind if kind in GROUPS else cell.name]
        for seed in range(count):
            rows.append(_short(make(seed) if kind is None else make(kind, seed)))
            bar(seed + 1, count, f"{cell.name}: policy {seed + 1} of {kind or cell.name}")
    return {cell.name: rows}


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: rounded(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def derailment_tables(settings: Mapping[str, Any], bar: Bar) -> Tables:
    """Return exact population variances and sampled groups at each rate of mistakes."""
    exact, sampled, sizes = [], [], [(n, chunks, groups) for n, chunks, groups in settings["chunks"]]
    for number, mistakes in enumerate(settings["mistakes"]):
        process = Derailment(mistake=mistakes / 64)
        best = process.variance(process.baseline("token_optimal"))
        state, token, reward = process.sample(4000, np.random.default_rng(2))
        corr = float(np.corrcoef(process.energy[state, token].sum(axis=1), reward)[0, 1])
        for name in ("none", "group_mean", "value", "sequence_optimal", "otb", "token_optimal", "prefix"):
            relative = process.variance(process.baseline(name)) / best
            facts = {"mistakes": mistakes, "success": process.success, "corr": corr, "baseline": name}
            exact.append(_short(facts | {"variance": relative}))
        for (name, n), chunks in derailment_samples(process, sizes).items():
            for chunk, (variance, sf) in enumerate(chunks.tolist()):
                row = {"mistakes": mistakes, "n": n, "chunk": chunk, "estimator": name, "nv": variance, "nsf": sf}
                sampled.append(_short(row))
        bar(number + 1, len(settings["mistakes"]), f"derailment: {mistakes} mistakes")
    return {"derailment": exact, "derailment_groups": sampled}


STUDY = Study(
    title="The seven facts, enumerated",
    question="Which of the seven facts about baselines hold on exactly enumerated policies, where, and by how much?",
    cells=cells(POLICIES, CHUNKS),
    quick=cells(QUICK_POLICIES, QUICK_CHUNKS),
    measure=measure,
)
