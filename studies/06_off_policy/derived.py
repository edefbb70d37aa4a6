"""What the page of Off-policy needs beyond its tables: ratios against `none`, which of them differ, and its figure."""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

from scipy import stats

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, SKY
from otb_analysis.figures.svg import Panel, svg
from studies.lib import Rows, distinct, interval_columns, rounded, select
from studies.lib.enumeration.off_policy import CASES
from studies.lib.formats import interval_curves, ratio_interval

from .study import BUDGETS, DIVERGENCES

PLAIN, RATE = "`none`", 0.05
"""What the others are compared with, and the rate of false discoveries."""
DRAWN = {
    "`none`": GREY, "`token`": BLUE, "`sequence`": ORANGE, "`cumulative`": GREEN, "`ppo`": PINK, "`tis`, cap 1.2": SKY,
    "`gspo` without its clip": AMBER,
}  # fmt: skip
"""Ratios that are drawn, and in which colour; the tables have all."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the comparisons with `none`, marked where they differ, and at how many distances they do."""
    pairs = over_none(tables["policies"])
    behind, names, (few, many) = select(pairs, drift="behind"), distinct(pairs, "ratio"), BUDGETS
    every = len(DIVERGENCES)

    def count(name: str, budget: int, word: str) -> int:
        return len(select(behind, budget=budget, ratio=name, differs=word))

    return {
        "pairs": pairs, "always_more": [name for name in names if count(name, many, "more") == every],
        "ever_more_in_small": [name for name in names if count(name, few, "more")],
        "always_less": [n for n in names if count(n, few, "less") == count(n, many, "less") == every],
    }  # fmt: skip


def over_none(policies: Rows) -> Rows:
    """Return every ratio's mean efficiency over that of `none`, paired by policy, with interval, p and q.

    The q-values are Benjamini–Yekutieli's over all comparisons of all drifts, divergences and budgets together: the
    least rate of false discoveries at which each stands. `differs` is `more` or `less` than 1, and nothing where no
    difference is shown or nothing was tested.
    """
    rows = []
    for drift, divergence in product(distinct(policies, "drift"), distinct(policies, "divergence")):
        same = select(policies, drift=drift, divergence=divergence)
        for budget, name in product(BUDGETS, [name for name in CASES if name != PLAIN]):
            above, below = ([row[f"efficiency_{budget} {which}"] for row in same] for which in (name, PLAIN))
            ratio = ratio_interval(above, below, f"efficiency of {name} over {PLAIN}")  # policies are the clusters
            row = {"drift": drift, "divergence": divergence, "budget": budget, "ratio": name}
            rows.append(row | interval_columns("over_none", ratio) | {"over_none_p": ratio and rounded(ratio.p_value)})
    tested = [row["over_none_p"] for row in rows if row["over_none_p"] is not None]
    qs = iter(stats.false_discovery_control(tested, method="by") if tested else ())
    for row in rows:
        q = None if row["over_none_p"] is None else float(next(qs))
        told = q is not None and q <= RATE
        row |= {"q": q, "differs": ("more" if row["over_none"] > 1 else "less") if told else ""}
    return rows


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw efficiency over divergence at both budgets."""
    behind = [dict(row) | {"ratio": row["ratio"].replace("`", "")} for row in select(tables["exact"], drift="behind")]
    colors, panels = {name.replace("`", ""): color for name, color in DRAWN.items()}, []
    note, x = "efficiency, sampler behind along ∇J", "log₁₀ KL of a completion, nats"
    for budget in BUDGETS:
        name = f"efficiency_{budget}"
        curves = interval_curves(behind, "ratio", lambda row: math.log10(row["divergence"]), name, colors)
        panels.append(Panel(f"Enumerated, {budget} rollouts", note, x, curves, y_range=(0.0, 1.0)))
    return {"efficiency.svg": svg(panels)}
