"""What the page of Progress needs beyond its tables: its correlations by name, batches wanted, and the scatter."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Rows, column, distinct, select

from .points import BEST, STEPS
from .setup import OPTIMIZE

COLORS: dict[str, str] = dict(zip((*BEST, *STEPS), (BLUE, SKY, ORANGE, AMBER, GREEN, GREY), strict=True))
WITHIN: Mapping[str, Sequence[str]] = {"best length": BEST} | {name: (name,) for name in (*BEST, *STEPS)}
"""Optimisers over which the rank correlation of a checkpoint is averaged; the two steps of AdamW are kept apart."""
CUT = (-1.0, 5.0)
"""Ratios at which the figure cuts points and intervals."""
PANELS = {
    "Trained policies, best length": ("model", BEST),
    "Trained policies, AdamW's own step": ("model", STEPS),
    "Derailment process, best length": ("derailment", BEST),
}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the rows of the correlations by kind and optimiser, and what the pilot said."""
    return {
        "by": {(row["kind"], row["optimiser"]): row for row in tables["correlations"]},
        "wanted": sorted(column(tables["pilot"], "wanted")),
        "overlong": overlong(tables),
        "ess": min(column(tables["checks"], "ess")),
        "within": {name: within(tables["points"], which) for name, which in WITHIN.items()},
        "foremost": foremost(tables["points"]),
    }


def within(points: Rows, optimisers: Sequence[str]) -> tuple[Interval | None, list[float]]:
    """Return the rank correlation over the arms of one checkpoint, averaged over optimisers: its mean, and each.

    Arms are chosen within a checkpoint. Ranks over all checkpoints also compare points of different ones, whose
    predictions were never about each other.
    """
    rows = select(points, kind="model")
    each = [
        float(np.mean([_rank_correlation(select(rows, policy=policy, optimiser=name)) for name in optimisers]))
        for policy in distinct(rows, "policy")
    ]
    return seed_mean(each, "rank correlation within a checkpoint"), each


def _rank_correlation(rows: Rows) -> float:
    ranks = [stats.rankdata(column(rows, name)) for name in ("predicted", "realised")]
    return float(np.corrcoef(*ranks)[0, 1])


def foremost(points: Rows) -> dict[str, Rows]:
    """Return of every optimiser the point of each checkpoint's arm with the highest predicted efficiency."""
    rows = select(points, kind="model")
    return {
        name: [
            max(select(rows, policy=policy, optimiser=name), key=lambda row: row["predicted"])
            for policy in distinct(rows, "policy")
        ]
        for name in (*BEST, *STEPS)
    }


def overlong(tables: Mapping[str, Rows]) -> dict[str, float]:
    """Return how much longer all of what training makes of a batch is than the best step of `rloo` along AdamW's line.

    AdamW spreads a batch over later steps; together they move by rate·ĝ·(clipping)/(√v + ε).
    """
    best = {row["policy"]: row["length"] for row in select(tables["pilot"], line="adamw", arm="rloo")}
    rate = OPTIMIZE.learning_rate
    return {row["policy"]: rate / max(1.0, row["grad_norm"]) / best[row["policy"]] for row in tables["policies"]}


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw realised against predicted gain over that of `rloo`, with the diagonal on which they are equal."""
    panels = []
    for title, (kind, optimisers) in PANELS.items():
        rows = [row for row in tables["points"] if row["kind"] == kind and row["arm"] != "rloo"]
        curves = [scatter(select(rows, optimiser=name), name) for name in optimisers if select(rows, optimiser=name)]
        if curves:
            ends = [min(x for c in curves for x in c.x), max(x for c in curves for x in c.x)]
            line = Curve(ends, ends, "", color=GREY, width=1.0, dashed=True)
            note = "realised gain over rloo's, 95 % over batches; dashed: equal"
            panels.append(Panel(title, note, "predicted: efficiency over rloo's", [line, *curves], y_range=CUT))
    return {"scatter.svg": svg(panels, columns=3)}


def scatter(rows: Rows, name: str) -> Curve:
    """Return the points of an optimiser, cut where the figure ends."""
    y, low, high = (
        [min(max(row[k], CUT[0]), CUT[1]) for row in rows] for k in ("realised", "realised_low", "realised_high")
    )
    return Curve([row["predicted"] for row in rows], y, name, low, high, COLORS[name], width=0)
