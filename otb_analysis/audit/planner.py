"""Where to spend a fixed number of rollouts: efficiency against group size, and how many groups teach nothing."""

from collections.abc import Sequence
from math import comb

import numpy as np

from otb_analysis.audit.results import Cell, DeadGroups
from otb_analysis.diagnostics.advice import Advice, Advised
from otb_analysis.types import Label


def dead_share(rewards: Sequence[float], size: int) -> float:
    """Return the probability that `size` rollouts of one prompt all have the same reward, from G ≥ size recorded ones.

    Σ_v C(k_v, n)/C(G, n) over distinct rewards v, each met k_v times: the hypergeometric estimator, the share of all
    subsets of n recorded rollouts that are dead. Unbiased for Σ_v p_v^n; with rewards of 0 and 1 that is pⁿ + (1−p)ⁿ.
    """
    counts = np.unique(np.asarray(rewards, float), return_counts=True)[1]
    return sum(comb(int(k), size) for k in counts) / comb(len(rewards), size)


def dead_groups(groups: Sequence[Sequence[float]]) -> tuple[DeadGroups, ...]:
    """Return the share of dead groups at 2, 4, 8, … and at the largest recorded size, from each group's rewards.

    A size takes only groups of at least as many rollouts; every prompt that has one counts alike.
    """
    largest = max(map(len, groups), default=0)
    sizes = sorted({2**k for k in range(1, largest.bit_length()) if 2**k <= largest} | ({largest} - {0, 1}))
    rows = []
    for size in sizes:
        shares = [dead_share(rewards, size) for rewards in groups if len(rewards) >= size]
        rows.append(DeadGroups(size, float(np.mean(shares)), len(shares)))
    return tuple(rows)


def cells_of(advice: Advice) -> tuple[Cell, ...]:
    """Return the curves of the planner: estimators measured at more than one size, ordered by name and size."""
    by_label: dict[Label, list[Advised]] = {}
    for one in advice.candidates:
        by_label.setdefault((one.choice.estimator, one.choice.energy_source), []).append(one)
    cells = []
    for label, curve in sorted(by_label.items()):
        if len(curve) < 2:
            continue
        known = [one for one in curve if one.efficiency is not None]
        top = max(known, key=lambda one: one.efficiency or 0.0, default=None)
        cells += [
            Cell(*label, one.choice.size, one.efficiency if one.shown else None, one.ratio, one is top)
            for one in sorted(curve, key=lambda one: one.choice.size)
        ]
    return tuple(cells)
