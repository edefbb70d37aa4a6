"""What the page of Progress needs beyond its tables: its correlations by name, batches wanted, and the scatter."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Rows, column, distinct, select
from studies.lib.formats import find

from .checkpoint import OPTIMIZE
from .points import BEST, STEPS

COLORS: dict[str, str] = dict(zip((*BEST, *STEPS), (BLUE, SKY, ORANGE, AMBER, GREEN, GREY), strict=True))
WITHIN: Mapping[str, Sequence[str]] = {"best length": BEST} | {name: (name,) for name in (*BEST, *STEPS)}
"""Optimisers over which the rank correlation of a checkpoint is averaged; the two steps of AdamW are kept apart."""
ASKED: Mapping[str, Sequence[str]] = {
    "AdamW's own step, clipped": ("adamw_step",), "SGD, best length": ("sgd", "sgd_clipped"),
    "AdamW, best length": ("adamw", "adamw_clipped"), "AdamW's own step, unclipped": ("adamw_step_unclipped",),
}  # fmt: skip
"""What is asked of new checkpoints, in this order, each only where the one before held; nothing of the last."""
CUT = (-1.0, 5.0)
"""Ratios at which the figure cuts points and intervals."""
PANELS = {
    "New checkpoints, AdamW's own step": ("new", STEPS),
    "New checkpoints, best length": ("new", BEST),
    "First checkpoints, AdamW's own step": ("model", STEPS),
    "First checkpoints, best length": ("model", BEST),
    "Derailment process, best length": ("derailment", BEST),
}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the rows of the correlations by kind and optimiser, and what the pilot said."""
    new, later = tables.get("new_points", ()), distinct(tables.get("new_points", ()), "policy")
    # How much longer all of what training makes of a batch is than the best step of `rloo` along AdamW's line: AdamW
    # spreads a batch over later steps, which together move by rate·ĝ·(clipping)/(√v + ε).
    best = {row["policy"]: row["length"] for row in select(tables["pilot"], line="adamw", arm="rloo")}
    policies = [row for row in tables["policies"] if row["policy"] not in later]
    norms = {row["policy"]: max(1.0, row["grad_norm"]) for row in tables["policies"] if row["policy"] in best}
    # By optimiser, the point of each checkpoint's arm with the highest predicted efficiency
    best_first = sorted(select(tables["points"], kind="model"), key=lambda row: -row["predicted"])
    names = distinct(policies, "policy")
    foremost = {name: [find(best_first, policy=k, optimiser=name) for k in names] for name in (*BEST, *STEPS)}
    return {
        "by": {(row["kind"], row["optimiser"]): row for row in tables["correlations"]},
        "wanted": sorted(column(tables["pilot"], "wanted")), "policies": policies,
        "new_policies": [row for row in tables["policies"] if row not in policies],
        "overlong": {policy: OPTIMIZE.learning_rate / norm / best[policy] for policy, norm in norms.items()},
        "ess": min(column(tables["checks"], "ess")), "foremost": foremost,
        "within": {name: rank_correlation(tables["points"], which) for name, which in WITHIN.items()},
        "asked": {name: rank_correlation(new, which) for name, which in ASKED.items()} if new else {},
    }  # fmt: skip


def rank_correlation(points: Rows, optimisers: Sequence[str]) -> tuple[Interval | None, list[float]]:
    """Return the rank correlation over the arms of one checkpoint, averaged over optimisers: its mean, and each.

    Arms are chosen within a checkpoint. Ranks over all checkpoints also compare points of different ones, whose
    predictions were never about each other.
    """
    rows, each = select(points, kind="model"), list[float]()
    for policy in distinct(rows, "policy"):
        by_optimiser = [select(rows, policy=policy, optimiser=name) for name in optimisers]
        ranks: Any = [stats.spearmanr(column(one, "predicted"), column(one, "realised"))[0] for one in by_optimiser]
        each.append(float(np.mean(ranks)))
    return seed_mean(each, "rank correlation within a checkpoint"), each


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw realised against predicted gain over that of `rloo`, with the diagonal on which they are equal."""
    panels, later = [], [{**row, "kind": "new"} for row in tables.get("new_points", ())]
    for title, (kind, optimisers) in PANELS.items():
        rows = [row for row in (*tables["points"], *later) if row["kind"] == kind and row["arm"] != "rloo"]
        curves = []
        for name in optimisers:
            points = select(rows, optimiser=name)
            y, low, high = (np.clip(column(points, f"realised{end}"), *CUT) for end in ("", "_low", "_high"))
            # Of very few batches a percentile interval may leave its estimate out, and a bar cannot.
            heights = y.tolist(), name, np.minimum(low, y).tolist(), np.maximum(high, y).tolist()
            curves += [Curve(column(points, "predicted"), *heights, COLORS[name], width=0)] if points else []
        if curves:
            ends = [min(x for c in curves for x in c.x), max(x for c in curves for x in c.x)]
            line = Curve(ends, ends, "", color=GREY, width=1.0, dashed=True)
            note = "realised gain over rloo's, 95 % over batches; dashed: equal"
            panels.append(Panel(title, note, "predicted: efficiency over rloo's", [line, *curves], y_range=CUT))
    return {"scatter.svg": svg(panels, columns=2)}
