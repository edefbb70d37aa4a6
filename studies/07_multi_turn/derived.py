"""What the page of Many turns needs beyond its tables: differences over seeds, and its figure."""

import math
from collections.abc import Mapping
from typing import Any

from otb_analysis.figures.styles import SKY
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import seed_mean
from studies.lib import Rows, distinct, select
from studies.lib.formats import above, below, interval_curve, looks_of, mean_curve
from studies.lib.seeds import later_success, paired_difference

TURNS = ("otb_turn", "otb_turn_loo", "trloo")
"""The estimators for turns that the question asks about."""
DRAWN = ("group_mean", "trloo", "otb_turn", "otb_turn_loo", "sequence_optimal_loo")


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return success in training, differences from `rloo` over seeds, and what tells the estimators for turns apart."""
    points, rows = tables["curves"], [row for row in tables["estimators"] if row["estimator"] in TURNS]
    means = {name: later_success(select(points, estimator=name)) for name in distinct(points, "estimator")}
    success = {name: seed_mean(list(of.values()), "mean held-out success", "logit") for name, of in means.items()}
    others, words = [name for name in means if name != "rloo"], "held-out success minus that of rloo"
    gains = {name: paired_difference(means[name], means["rloo"], words) for name in others}
    calmer, noisier = (
        {name: [row for row in select(rows, estimator=name) if told(row, 1, "sf_ratio")] for name in TURNS}
        for told in (below, above)
    )
    return {
        "success": success, "gains": gains, "calmer": calmer, "noisier": noisier, "cells": len(rows) // len(TURNS),
        "learns_more": [name for name in gains if above(gains[name], 0)],
        "learns_less": [name for name in gains if below(gains[name], 0)],
        "over_none": paired_difference(means["energy_regression"], means["none"], "success minus that of none"),
    }  # fmt: skip


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw variance at equal progress over `rloo`'s by group size for each stage, and the mean learning curves."""
    rows, points, panels = tables["estimators"], tables["curves"], []
    # `trloo` beside its relative `rloo` has a colour of its own
    looks = {name: looks_of(name) for name in {*DRAWN, *distinct(points, "estimator")}}
    looks["trloo"] = looks["trloo"] | {"color": SKY}
    for stage in distinct(rows, "stage"):
        by_size = {n: {row["size"]: row for row in select(rows, stage=stage, estimator=n)} for n in DRAWN}
        curves = [interval_curve(own, "sf_ratio", name, **looks[name]) for name, own in by_size.items()]
        note = "variance at equal progress over rloo's"
        if any(math.isfinite(y) for curve in curves for y in curve.y):
            panels.append(Panel(f"Rollouts: {stage}", note, "N", curves, ((1.0, "rloo"),)))
    learned = {name: select(points, estimator=name) for name in distinct(points, "estimator")}
    learning = [mean_curve(own, "step", "success", name, **looks[name]) for name, own in learned.items()]
    panels.append(Panel("Training", "held-out success", "step", learning, percent=True))
    return {"variance.svg": svg(panels)}
