"""What the page of Token weights needs beyond its tables: its default thresholds, its arms, and its figure."""

import math
from collections.abc import Mapping
from typing import Any

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.objectives.aggregation import StapoOptions
from studies.lib import Rows, distinct, select
from studies.lib.formats import interval_curves, side_by_side

from .study import LOT as LOT

DEFAULT = StapoOptions()
COLORS = (BLUE, GREEN, PINK)
DRAWN = {"stapo": AMBER, "drawn": GREY, "delightful": ORANGE}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the rows at the default thresholds, the small policies, and the arms that are compared with `rloo`."""
    at = {"probability": DEFAULT.probability, "entropy": DEFAULT.entropy}
    small, real = ([r for r in tables["policies"] if (r["silenced"] is None) == of_real] for of_real in (False, True))
    return {
        "shares": clipped(tables["thresholds"]),
        "default": {row["policy"]: row for row in select(tables["thresholds"], **at)}, "small": small, "real": real,
        "names": distinct(tables["arms"], "policy"),
        "compared": [row for row in tables["arms"] if row["arm"] != "rloo"],
        "scored": sum(row["tokens"] for row in small),
    }  # fmt: skip


def clipped(rows: Rows) -> Rows:
    """Return shares whose intervals begin at 0 at the least: a few tokens give one that is symmetric."""
    return [dict(row) | {"share_low": max(row["share_low"], 0.0)} for row in rows]


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the share of silenced tokens over τ_p, and every arm's efficiency over that of `rloo`."""
    ends, rows = ("share", "share_low", "share_high"), clipped(select(tables["thresholds"], entropy=DEFAULT.entropy))
    thresholds = [dict(row) | {end: 10_000 * row[end] for end in ends} for row in rows]
    policies = distinct(tables["arms"], "policy")  # the small ones
    colors = dict(zip(policies, COLORS, strict=False))
    shares = interval_curves(thresholds, "policy", lambda row: math.log10(row["probability"]), "share", colors)
    by_arm = {arm: select(tables["arms"], arm=arm) for arm in DRAWN}
    arms = [side_by_side(by_arm[arm], k, "efficiency", arm, color) for k, (arm, color) in enumerate(DRAWN.items())]
    note, rule = f"of 10,000; H < {DEFAULT.entropy} nats, A > 0", ((1.0, "the paper's 0.01 %"),)
    panels = [
        Panel("Tokens that STAPO silences", note, "log₁₀ τ_p", shares, rule),
        Panel("Efficiency over rloo's", ", ".join(policies), "policy", arms, ((1.0, "rloo"),)),
    ]
    return {"weights.svg": svg(panels)}
