"""What the page of Allocation needs beyond its tables: every arm over equal groups, on populations and on pools."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from otb_analysis.diagnostics.allocation import allocate, bernoulli_variance, vip_variance
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, ORANGE, PINK
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import Interval, cluster_jackknife, jackknife_interval
from otb_analysis.types import Float
from studies.lib import Rows, column, distinct, interval_columns, mean, select
from studies.lib.formats import interval_curves, ratio_interval, with_deleted

from .study import EARLIER, MOST, SIZES, UPDATE

WORDS = {
    "vip8": "VIP, p from 8 earlier rollouts",
    "vip32": "VIP, p from 32",
    "vip": "VIP, p known",
    "best": "variances known",
    "averaged": "VIP from 8, averaged over rollouts",
    "half": "groups of N/2, twice the prompts",
}
COLORS = {"vip8": ORANGE, "vip32": AMBER, "vip": PINK, "best": GREEN, "half": BLUE}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return efficiency and variance within prompts over those of equal groups, by population or task, N and arm."""
    worlds, prompts, rows = tables["worlds"], tables["prompts"], list[dict[str, Any]]()
    for law, size, arm in product(distinct(worlds, "law"), distinct(worlds, "size"), WORDS):
        of_arm, equal = (select(worlds, law=law, size=size, arm=which) for which in (arm, "equal"))
        row: dict[str, Any] = {"where": f"enumerated, {law}", "size": size, "arm": arm}
        for name in ("efficiency", "within"):  # populations are the clusters
            over = ratio_interval(column(of_arm, name), column(equal, name), f"{name} over equal")
            row |= interval_columns(name, over)
        rows.append(row | {name: mean(column(of_arm, name)) for name in ("bias", "projection")})
    for task in distinct(prompts, "task"):  # prompts are the clusters, sizes stay as they were chosen for all of them
        pool = select(prompts, task=task)
        q, a, b, along = (np.array(column(pool, name)) for name in ("q", "a", "b", "along"))
        for size in SIZES:
            sizes = {"half": np.full(len(pool), size // 2)}
            for k in EARLIER:
                guess = vip_variance(bernoulli_variance(np.array(column(pool, f"won{k}")), k), MOST * size)
                sizes[f"vip{k}"] = allocate(guess, len(pool) * size)
            for arm in (name for name in WORDS if name in sizes):
                within = [a / k + b / (k * (k - 1)) for k in (np.full(len(pool), size), sizes[arm])]
                update = (UPDATE, 2 * UPDATE if arm == "half" else UPDATE)
                key = {"where": f"pool, {task}", "size": size, "arm": arm, "bias": None, "projection": None}
                own_row = key | interval_columns("efficiency", efficiency_ratio(q, along, within, update))
                rows.append(own_row | interval_columns("within", ratio_interval(within[1], within[0], "within")))
    return {"ratios": rows, "words": WORDS, "thirds": thirds(prompts)}


def efficiency_ratio(q: Float, along: Float, within: list[Float], update: tuple[int, int]) -> Interval | None:
    """Return efficiency over that of equal groups: E‖g‖² of an update with them over E‖g‖² with the arm's.

    Both have the mean ∇J, so ‖∇J‖² cancels but for its part in E‖g‖² = ‖∇J‖² + (q + V − ‖∇J‖²)/U.
    """
    # Each product of two prompts is in the rows of both
    truth = np.concatenate([[along.mean()], (along.sum() - 2 * along) / (len(q) - 2)])
    equal, arm = (truth + (with_deleted(q + v) - truth) / u for v, u in zip(within, update, strict=True))
    return jackknife_interval(float(equal[0] / arm[0]), equal[1:] / arm[1:], "efficiency over equal groups")


def thirds(prompts: Rows) -> list[dict[str, Any]]:
    """Return of each pool and third of its prompts by success: mean p, and V(8)/(p(1 − p)) over that of the last third.

    VIP takes this quotient to be the same for all prompts.
    """
    rows = []
    for task in distinct(prompts, "task"):
        pool = sorted(select(prompts, task=task), key=lambda row: row["success"])
        p, variance = np.array(column(pool, "success")), np.array([row["a"] / 8 + row["b"] / 56 for row in pool])
        third = np.arange(len(pool)) * 3 // len(pool)
        for k in range(3):
            sums = np.stack([x * (third == j) for j in (k, 2) for x in (variance, p * (1 - p))], 1)
            ratio = cluster_jackknife(sums, lambda m: m[..., 0] / m[..., 1] / (m[..., 2] / m[..., 3]), "V/(p(1 − p))")
            rows.append({"task": task, "success": float(p[third == k].mean())} | interval_columns("relative", ratio))
    return rows


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the efficiency of every arm over that of equal groups, against N."""
    rows, panels = numbers(tables)["ratios"], []
    for where in distinct(rows, "where"):
        arms = select(rows, where=where)
        curves = interval_curves(arms, "arm", lambda row: float(np.log2(row["size"])), "efficiency", COLORS)
        curves = [replace(curve, name=WORDS[curve.name]) for curve in curves]
        panels.append(Panel(where, "efficiency over that of equal groups", "log₂ N", curves, rules=((1.0, "equal"),)))
    return {"efficiency.svg": svg(panels)}
