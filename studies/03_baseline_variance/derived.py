"""What the page of Baselines and variance needs beyond its tables: who is ahead of whom, and the figure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.figures.styles import BLUE
from otb_analysis.figures.svg import Curve, Panel, svg
from studies.lib import Row, Rows, column, distinct, select
from studies.lib.formats import above, below, interval, looks_of

from .entries import ASKED_SIZES, HALF, OFFSET, UPDATES
from .study import AGAINST, AHEAD, BEST, FULL, FULL_COMPARED, HEAD, KINDS, LENGTHS, LESSON, MARGIN, REGIME_SIZE, REGIMES

SHOWN = (
    *("none", "group_mean", "grpo", "sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "token_optimal"),
    *("value", "james_stein", "energy_across_loo", BEST, HALF),
)
"""Entries of the tables by size and of the figure; `estimators.csv` has all."""
UNBIASED = ("rloo", "none", "value")
"""Those of `AGAINST` that are proved unbiased, as `BEST` is."""
DRAWN = ("none", "value", "sequence_optimal", "otb", "energy_across_loo", BEST)
COLORS: dict[str, dict[str, Any]] = {"energy_across_loo": {"color": BLUE}}
"""Where two entries of the figure have one colour."""
CONSTANTS = {
    "AGAINST": AGAINST, "AHEAD": AHEAD, "BEST": BEST, "HEAD": HEAD, "KINDS": KINDS, "MARGIN": MARGIN, "OFFSET": OFFSET,
    "REGIMES": REGIMES, "REGIME_SIZE": REGIME_SIZE, "SHOWN": SHOWN, "UPDATES": UPDATES, "cuts": FULL_COMPARED.shuffles,
    "pilot": FULL.pilot, "lessons": FULL.lessons, "buckets": FULL.buckets, "lesson": LESSON,
    "LENGTHS": LENGTHS, "UNBIASED": UNBIASED,
}  # fmt: skip
"""Settings that the page names."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the answer to the study's question, and the rows that the page shows."""
    rows = binary_rows(tables["estimators"])
    asked = [row for row in tables["pairs"] if row["estimator"] == BEST and row["size"] in ASKED_SIZES]
    asked = [row for row in asked if row["pool"] == "wide" and row["rewards"] == "0/1"]
    every = select(asked, mixed=False)
    marked = set[int]()
    # Rows whose efficiency differs from that of `rloo`: false-discovery rate 5 % in each policy, pool and group size
    for policy, pool, size in dict.fromkeys((row["policy"], row["pool"], row["size"]) for row in rows):
        tested = [row for row in select(rows, policy=policy, pool=pool, size=size) if row["p_value"] is not None]
        q = stats.false_discovery_control([row["p_value"] for row in tested], method="by") if tested else ()
        marked |= {id(row) for row, x in zip(tested, q, strict=True) if x <= 0.05}
    return CONSTANTS | {
        "plain": rows, "asked": asked, "cells": len(every) // len(AGAINST), "policies_of": distinct(rows, "policy"),
        "count": lambda against, word: sum(decision(row) == word for row in select(every, against=against)),
        "small": {word: sum(shown_order(row, UPDATES[0]) == word for row in every) for word in ("ahead", "behind")},
        "differs": lambda row: id(row) in marked,
        # With its source where it was measured with exact norms
        "entry_name": lambda row: f"`{row['estimator']}`{' (exact)' if row['source'] == 'exact' else ''}",
        "best_first": lambda rows: sorted(rows, key=lambda row: -(row[f"gain{HEAD}"] or 1)),
        "sizes": sorted({(row["size"], row["pool"]) for row in rows if row["pool"] == "wide" or row["size"] > 16}),
    }  # fmt: skip


def binary_rows(rows: Rows) -> Rows:
    """Return the rows of rewards 0 and 1: all prompts of the wide pool, and the deep one."""
    return [row for row in rows if row["rewards"] == "0/1" and (not row["mixed"] or row["pool"] == "deep")]


def shown_order(row: Row, update: int) -> str:
    """Return what an interval of a ratio of efficiencies shows: ahead, behind, equal within the margin, or open."""
    name = f"gain{update}"
    if above(row, 1, name) or below(row, 1, name):
        return "ahead" if above(row, 1, name) else "behind"
    return "equal" if above(row, 1 - MARGIN, name) and below(row, 1 + MARGIN, name) else "open"


def decision(row: Row) -> str:
    """Return the one answer for a policy and a group size, at updates of `HEAD` prompts.

    Where both are unbiased the variance decides: with the same variances the ratio of efficiencies is above 1 at every
    number of prompts if it is at one, so that further numbers are no further tests.
    """
    if row["against"] not in UNBIASED:
        return shown_order(row, HEAD)
    return "ahead" if below(row, 1, "variance") else "behind" if above(row, 1, "variance") else "open"


def gain(row: Row, update: int) -> str:
    """Return a ratio of efficiencies with a mark, nothing without one: ▲ ahead, ▼ behind, = equal within the margin."""
    mark = {"ahead": " ▲", "behind": " ▼", "equal": " =", "open": ""}[shown_order(row, update)]
    return interval(row, f"gain{update}") + mark if row else ""


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw efficiency over that of `rloo` against the group size, for each policy and two sizes of the update."""
    rows, panels = select(binary_rows(tables["estimators"]), pool="wide"), []
    for update in (UPDATES[0], UPDATES[2]):
        for policy in distinct(rows, "policy"):
            same = [row for row in rows if row["policy"] == policy and row["source"] != "exact"]
            curves = []
            for name in DRAWN:
                known = [row for row in select(same, estimator=name) if row[f"gain{update}"] is not None]
                x, y = [float(np.log2(row["size"])) for row in known], column(known, f"gain{update}")
                curves += [Curve(x, y, name, **looks_of(name) | COLORS.get(name, {}))] if x else []
            note = f"efficiency over rloo's, update of {update} prompts"
            panels.append(Panel(policy, note, "log₂ of the group size N", curves, [(1.0, "")]))
    return {"gains.svg": svg(panels, columns=3)}
