"""What the page of Many turns needs beyond its tables: differences over seeds, and its figure."""

import math
from collections.abc import Mapping
from typing import Any

from otb_analysis.figures.styles import ESTIMATOR_STYLES, SKY
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import seed_mean
from studies.lib import Rows, distinct, select
from studies.lib.formats import above, below, interval_curve, mean_curve
from studies.lib.seeds import later_success, paired_difference

TURNS = ("otb_turn", "otb_turn_loo", "trloo")
"""The estimators for turns that the question asks about."""
DRAWN = ("group_mean", "trloo", "otb_turn", "otb_turn_loo", "sequence_optimal_loo")


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return success in training, differences from `rloo` over seeds, and what tells the estimators for turns apart."""
    points, rows = tables["curves"], [row for row in tables["estimators"] if row["estimator"] in TURNS]
    means = {name: later_success(select(points, estimator=name)) for name in distinct(points, "estimator")}
    success = {name: seed_mean(list(of.values()), "mean held-out success", "logit") for name, of in means.items()}
    gains = {
        name: paired_difference(means[name], means["rloo"], "held-out success minus that of rloo")
        for name in means
        if name != "rloo"
    }
    calmer = {name: [row for row in select(rows, estimator=name) if below(row, 1, "sf_ratio")] for name in TURNS}
    noisier = {name: [row for row in select(rows, estimator=name) if above(row, 1, "sf_ratio")] for name in TURNS}
    return {
        "success": success, "gains": gains, "calmer": calmer, "noisier": noisier, "cells": len(rows) // len(TURNS),
        "learns_more": [name for name in gains if above(gains[name], 0)],
        "learns_less": [name for name in gains if below(gains[name], 0)],
        "over_none": paired_difference(means["energy_regression"], means["none"], "success minus that of none"),
    }  # fmt: skip


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw variance at equal progress over `rloo`'s by group size for each stage, and the mean learning curves."""
    rows, points, panels = tables["estimators"], tables["curves"], []
    for stage in distinct(rows, "stage"):
        curves = [
            interval_curve(
                {row["size"]: row for row in select(rows, stage=stage, estimator=name)}, "sf_ratio", name,
                **_looks(name),
            )
            for name in DRAWN
        ]  # fmt: skip
        if any(math.isfinite(y) for curve in curves for y in curve.y):
            panels.append(
                Panel(f"Rollouts: {stage}", "variance at equal progress over rloo's", "N", curves, ((1.0, "rloo"),))
            )
    learning = [
        mean_curve(select(points, estimator=name), "step", "success", name, **_looks(name))
        for name in distinct(points, "estimator")
    ]
    panels.append(Panel("Training", "held-out success", "step", learning, percent=True))
    return {"variance.svg": svg(panels)}


def _looks(name: str) -> dict[str, Any]:
    """An estimator's usual colour and dash, but `trloo` beside its relative `rloo` has a colour of its own."""
    style = ESTIMATOR_STYLES[name]
    return {"color": SKY if name == "trloo" else style.color, "dashed": style.dash != "solid"}
