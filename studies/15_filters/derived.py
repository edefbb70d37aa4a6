"""What the page of Filters needs beyond its table: each filter's turn of the mean, and what it pays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, ORANGE
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import cluster_jackknife
from otb_analysis.study import Rows, column, distinct, interval_columns, select
from otb_analysis.study.formats import interval_curve

from .study import ARMS, FILTERS

COLORS = {"dynamic": ORANGE, "profiled": BLUE}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return one row per group size, filter and estimator, with intervals over populations."""
    worlds = tables["worlds"]
    rows = []
    for size in distinct(worlds, "size"):
        for kind in FILTERS:
            for arm in ARMS:
                own = select(worlds, size=size, filter=kind, estimator=arm)
                bare = select(worlds, size=size, filter="none", estimator=arm)
                row = {"size": size, "filter": kind, "estimator": arm}
                for name in ("sideways", "paid_sideways", "projection", "drawn"):
                    row |= interval_columns(name, _mean(column(own, name), name))
                pairs = np.array([column(own, "efficiency"), column(bare, "efficiency")], float).T
                found = cluster_jackknife(pairs, lambda m: m[..., 0] / m[..., 1], "efficiency over no filter's")
                rows.append(row | interval_columns("efficiency", found) | {"most": max(column(own, "sideways"))})
    return {"rows": rows, "n_worlds": len(distinct(worlds, "world"))}


def _mean(values: Any, words: str) -> Any:
    table = np.array([values, np.ones(len(values))], float).T
    return cluster_jackknife(table, lambda m: m[..., 0] / m[..., 1], words, "linear")


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw how far each filter turns the mean of each estimator, at the largest group size."""
    rows = numbers(tables)["rows"]
    size = max(row["size"] for row in rows)
    curves = [
        interval_curve({i: row for i, row in enumerate(select(rows, size=size, filter=kind))}, "sideways", kind, color)
        for kind, color in COLORS.items()
    ]
    names = ", ".join(f"{i} {arm}" for i, arm in enumerate(ARMS))
    title = f"Part of the mean that is not along ∇J, groups of {size}"
    return {"sideways.svg": svg([Panel(title, "sine of the angle", names, curves)])}
