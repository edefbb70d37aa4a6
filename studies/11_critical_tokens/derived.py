"""What the page of critical tokens needs beyond its tables: rank correlations over prompts, and its figure."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, GREY, ORANGE
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, cluster_jackknife
from otb_analysis.types import Float
from studies.lib import Rows, column, distinct, interval_columns, select
from studies.lib.formats import ratio_interval

from .study import DECISIVE, DRAWN, FINDERS, KINDS, LOWEST, SCORES, SIZES

COLORS: dict[str, str] = dict(zip(DRAWN, (ORANGE, GREY, BLUE), strict=True))
FEW = 30
"""Decisive tokens below which their share has no interval."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return rank correlations with a token's effect and with its size, by policy and kind of rollout."""
    policies = distinct(tables["found"], "policy")
    targets, rows = (("effect", SCORES, "logprob"), ("size", SIZES, "uncertain")), list[dict[str, Any]]()
    # Spearman's correlation of each score with the effect, and of each size with |effect|, less that of π
    for policy, kind, (target, names, plain) in product(policies, KINDS, targets):
        sums = select(tables["sums"], policy=policy, kind=kind)
        for name, words in names.items():
            key = {"policy": policy, "kind": kind, "target": target, "score": name, "words": words}
            more = None if name == plain else correlation(sums, name, target, plain)
            columns = interval_columns("correlation", correlation(sums, name, target))
            rows.append(key | columns | interval_columns("over_plain", more))
    decided = [decisive(select(tables["found"], policy=policy), policy) for policy in policies]
    return {"correlations": rows, "decisive": decided, "DECISIVE": DECISIVE, "LOWEST": LOWEST, "FEW": FEW}


def correlation(sums: Rows, name: str, target: str, less: str = "") -> Interval | None:
    """Return the correlation of a score's and its target's ranks, less that of another score where one is named.

    Ranks were taken within a seed; intervals delete one prompt at a time.
    """
    names = [f"{target}_sq", *(part for one in (name, less) if one for part in (f"{one}_sq", f"{one}_{target}"))]
    table = np.array([column(sums, part) for part in names], dtype=float).T

    def found(s: Float) -> Float:
        one = s[..., 2] / np.sqrt(s[..., 0] * s[..., 1])
        return one - s[..., 4] / np.sqrt(s[..., 0] * s[..., 3]) if less else one

    return cluster_jackknife(table, found, "rank correlation", "linear")


def decisive(rows: Rows, policy: str) -> dict[str, Any]:
    """Return how many tokens of wrong rollouts cost at least half of the success, and where scores rank them.

    `found_by` is the share of them among the tenth of these tokens that a score ranks lowest; by lot it is a tenth.
    `more` is that share by the contrast less that by log π.
    """
    there = np.array(column(rows, "decisive"))
    by_finder = {f"found_by_{name}": np.array(column(rows, name)) for name in FINDERS}
    by_finder["more"] = by_finder["found_by_contrast"] - by_finder["found_by_logprob"]
    row: dict[str, Any] = {"policy": policy, "tokens": sum(column(rows, "tokens")), "decisive": int(there.sum())}
    for name, counts in by_finder.items():
        share = ratio_interval(counts, there, "share found", "linear") if there.any() else None
        if share and there.sum() < FEW:
            share = replace(share, low=None, high=None)
        row |= interval_columns(name, share)
    return row


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the mean effect of the tokens of wrong rollouts by fifths of each score."""
    panels = []
    for policy in distinct(tables["fifths"], "policy"):
        curves = []
        for name, color in COLORS.items():  # the mean effect of each fifth over all seeds' tokens
            rows = select(tables["fifths"], policy=policy, score=name)
            parts = {float(part): select(rows, fifth=part) for part in distinct(rows, "fifth")}
            means = [np.average(column(x, "effect"), weights=column(x, "tokens")) for x in parts.values()]
            curves.append(Curve(list(parts), means, SCORES[name], color=color))
        title, note = f"{policy}: tokens of wrong rollouts", "mean effect on success"
        panels.append(Panel(title, note, "fifth of the score, lowest first", curves))
    return {"effects.svg": svg(panels, columns=2)}
