"""Ratios against `none` on the same policies or prompts: which differ, once it counts how many were compared."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.enumeration.off_policy import CASES
from otb_analysis.statistics import Interval, cluster_jackknife
from otb_analysis.study import Rows, distinct, interval_columns, known, select
from otb_analysis.study.words import rounded

from .study import BUDGETS

PLAIN, OVER, RATE = "`none`", "over_none", 0.05
"""What the others are compared with, the column that holds it, and the rate of false discoveries."""


def over_none(policies: Rows) -> Rows:
    """Return every ratio's mean efficiency over that of `none`, paired by policy, with interval, p and q.

    The q-values are Benjamini–Yekutieli's over all comparisons of all drifts, divergences and budgets together.
    """
    rows = []
    for drift in distinct(policies, "drift"):
        for divergence in distinct(policies, "divergence"):
            own = select(policies, drift=drift, divergence=divergence)
            rows += [
                {"drift": drift, "divergence": divergence, "budget": budget, "ratio": name}
                | interval_columns(OVER, found)
                | {"p_value": None if found is None else rounded(found.p_value)}
                for budget in BUDGETS
                for name in CASES
                if name != PLAIN
                for found in [mean_ratio(own, budget, name)]
            ]
    return with_q(rows, "p_value")


def mean_ratio(policies: Rows, budget: int, name: str) -> Interval | None:
    """Return a ratio's mean efficiency over that of `none`; policies are the clusters."""
    columns = [f"efficiency_{budget} {which}" for which in (name, PLAIN)]
    pairs = np.array([[row[column] for column in columns] for row in policies])
    return cluster_jackknife(pairs, lambda means: means[..., 0] / means[..., 1], f"efficiency of {name} over {PLAIN}")


def with_q(rows: Rows, p_value: str) -> Rows:
    """Return rows with `q`: the least rate of false discoveries at which each stands among all; None where untested."""
    tested = [row[p_value] for row in rows if row[p_value] is not None]
    q = iter(stats.false_discovery_control(tested, method="by") if tested else ())
    return [dict(row) | {"q": None if row[p_value] is None else float(next(q))} for row in rows]


def shown(row: Mapping[str, Any], name: str) -> str:
    """Return `more`, `less`, or nothing where a comparison shows no difference."""
    if row["q"] is None or row["q"] > RATE:
        return ""
    return "more" if known(row[name]) > 1 else "less"


def at_distances(pairs: Rows, word: str) -> dict[str, list[float]]:
    """Return the distances at which each ratio is shown `more` or `less` efficient than none."""
    return {
        name: [row["divergence"] for row in select(pairs, ratio=name) if shown(row, OVER) == word]
        for name in distinct(pairs, "ratio")
    }
