"""What the page of Off-policy needs beyond its tables: ratios against `none`, which of them differ, and its figure."""

import math
from collections.abc import Mapping
from typing import Any

from scipy import stats

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval
from studies.lib import Row, Rows, distinct, interval_columns, rounded, select
from studies.lib.enumeration.off_policy import CASES
from studies.lib.formats import interval_curve, ratio_interval

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
    behind = select(pairs, drift="behind")
    names, (few, many), every = distinct(pairs, "ratio"), BUDGETS, len(DIVERGENCES)
    more, less = (
        {(n, b): len(select(behind, budget=b, ratio=n, differs=word)) for n in names for b in BUDGETS}
        for word in ("more", "less")
    )
    return {
        "pairs": pairs,
        "always_more": [name for name in names if more[name, many] == every],
        "ever_more_in_small": [name for name in names if more[name, few]],
        "always_less": [name for name in names if less[name, few] == less[name, many] == every],
    }


def over_none(policies: Rows) -> Rows:
    """Return every ratio's mean efficiency over that of `none`, paired by policy, with interval, p and q.

    The q-values are Benjamini–Yekutieli's over all comparisons of all drifts, divergences and budgets together.
    """
    rows = []
    for drift in distinct(policies, "drift"):
        for divergence in distinct(policies, "divergence"):
            same = select(policies, drift=drift, divergence=divergence)
            rows += [
                {"drift": drift, "divergence": divergence, "budget": budget, "ratio": name}
                | interval_columns("over_none", found)
                | {"over_none_p": None if found is None else rounded(found.p_value)}
                for budget in BUDGETS
                for name in CASES
                if name != PLAIN
                for found in [mean_ratio(same, budget, name)]
            ]
    return with_q(rows, "over_none")


def mean_ratio(policies: Rows, budget: int, name: str) -> Interval | None:
    """Return a ratio's mean efficiency over that of `none`; policies are the clusters."""
    above, below = ([row[f"efficiency_{budget} {which}"] for row in policies] for which in (name, PLAIN))
    return ratio_interval(above, below, f"efficiency of {name} over {PLAIN}")


def with_q(rows: Rows, name: str) -> list[dict[str, Any]]:
    """Return rows with `q`, the least rate of false discoveries at which each stands among all, and how it `differs`.

    `differs` is `more` or `less` than 1, and nothing where no difference is shown or nothing was tested.
    """
    tested = [row[f"{name}_p"] for row in rows if row[f"{name}_p"] is not None]
    q = iter(stats.false_discovery_control(tested, method="by") if tested else ())
    judged = [dict(row) | {"q": None if row[f"{name}_p"] is None else float(next(q))} for row in rows]
    return [row | {"differs": _differs(row, name)} for row in judged]


def _differs(row: Row, name: str) -> str:
    if row["q"] is None or row["q"] > RATE:
        return ""
    return "more" if row[name] > 1 else "less"


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw efficiency over divergence at both budgets."""
    exact, panels = tables["exact"], []
    for budget in BUDGETS:
        curves = [_curve(name, select(exact, drift="behind", ratio=name), f"efficiency_{budget}") for name in DRAWN]
        note, x = "efficiency, sampler behind along ∇J", "log₁₀ KL of a completion, nats"
        panels.append(Panel(f"Enumerated, {budget} rollouts", note, x, curves, y_range=(0.0, 1.0)))
    return {"efficiency.svg": svg(panels)}


def _curve(name: str, rows: Rows, column: str) -> Curve:
    points = {math.log10(row["divergence"]): row for row in rows}
    return interval_curve(points, column, name.replace("`", ""), DRAWN[name])
