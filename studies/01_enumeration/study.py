"""The seven facts about baselines, by exact enumeration of tiny policies: which hold, on which policies, by how much.

Everything is exact but groups on the derailment process, which are sampled.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.enumeration import Derailment
from otb_analysis.enumeration.derailment import derailment_samples
from otb_analysis.enumeration.facts import (
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
from otb_analysis.study import Cell, Study, Tables
from otb_analysis.training.runtime.progress import Bar

POLICIES = {"population": 60, "ragged": 60, "equal": 24, "ratios": 60, "prompts": 20, "sizes": 60}
QUICK_POLICIES = {"population": 4, "ragged": 4, "equal": 2, "ratios": 3, "prompts": 2, "sizes": 1}
"""Random policies per setting; of `prompts`, pairs of them."""
MISTAKES = (0.2, 0.7, 2.0)
"""Expected mistakes in 64 tokens: success .76, .50 and .20."""
CHUNKS = ((SMALL, 24, 400), (LARGE, 12, 150))
QUICK_CHUNKS = ((SMALL, 3, 40), (LARGE, 3, 10))
"""Group size, chunks, groups per chunk."""


def cells(policies: Mapping[str, int], chunks: Sequence[Sequence[int]]) -> list[Cell]:
    """Return one cell per kind of policy."""
    names = ("population", "groups", "ratios", "prompts", "sizes")
    found = [Cell(name, {key: n for key, n in policies.items() if key == name or key in GROUPS}) for name in names]
    return [*found, Cell("derailment", {"mistakes": list(MISTAKES), "chunks": [list(c) for c in chunks]})]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Enumerate the policies of a cell."""
    if cell.name == "derailment":
        return derailment_tables(cell.settings, bar)
    if cell.name == "groups":
        rows = [row for name in GROUPS for row in _each(name, cell, lambda seed, n=name: group_row(n, seed), bar)]
        return {"groups": rows}
    if cell.name in ("population", "ratios"):
        make = population_row if cell.name == "population" else ratio_row
        kinds = list(SETTINGS) if cell.name == "population" else ["tabular, terminal", "shared, terminal"]
        return {cell.name: [row for k in kinds for row in _each(cell.name, cell, lambda seed, k=k: make(k, seed), bar)]}
    return {cell.name: _each(cell.name, cell, {"prompts": prompt_row, "sizes": size_row}[cell.name], bar)}


def _each(key: str, cell: Cell, make: Callable[[int], dict[str, Any]], bar: Bar) -> list[dict[str, Any]]:
    count, rows = int(str(cell.settings[key])), []
    for seed in range(count):
        rows.append({name: _short(value) for name, value in make(seed).items()})
        bar(seed + 1, count, f"{cell.name}: policy {seed + 1} of {key}")
    return rows


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if np.isfinite(value) else None


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
            exact.append({key: _short(value) for key, value in (facts | {"variance": relative}).items()})
        for (name, n), chunks in derailment_samples(process, sizes).items():
            for chunk, (variance, sf) in enumerate(chunks.tolist()):
                row = {"mistakes": mistakes, "n": n, "chunk": chunk, "estimator": name, "nv": variance, "nsf": sf}
                sampled.append({key: _short(value) for key, value in row.items()})
        bar(number + 1, len(settings["mistakes"]), f"derailment: {mistakes} mistakes")
    return {"derailment": exact, "derailment_groups": sampled}


STUDY = Study(
    title="The seven facts, enumerated",
    question="Which of the seven facts about baselines hold on exactly enumerated policies, where, and by how much?",
    cells=cells(POLICIES, CHUNKS),
    quick=cells(QUICK_POLICIES, QUICK_CHUNKS),
    measure=measure,
)
