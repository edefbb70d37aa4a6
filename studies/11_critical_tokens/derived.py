"""What the page of critical tokens needs beyond its tables: rank correlations over prompts, and its figure."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import rankdata

from otb_analysis.figures.styles import BLUE, GREY, ORANGE
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, cluster_jackknife
from otb_analysis.study import Rows, column, distinct, interval_columns, select
from otb_analysis.types import Float, Int

SCORES = {
    "contrast": "contrast",
    "lift": "contrast ÷ π",
    "logprob": "log π",
    "attribution": "attribution",
    "signal": "signal",
    "noise": "noise",
}
"""What may tell a token that helps from one that harms."""
SIZES = {
    "uncertain": "1 − π",
    "far": "log(contrast ÷ π), size",
    "norm": "exact ‖s‖²",
    "attribution_size": "attribution, size",
    "noise_size": "noise, size",
}
"""What may tell a token that matters, either way, from one that does not."""
KINDS = {"all": None, "right": True, "wrong": False}
COLORS = {"contrast": ORANGE, "logprob": GREY, "attribution": BLUE}
BINS = 5
FINDERS = ("contrast", "lift", "logprob", "attribution")
DECISIVE, LOWEST = -0.5, 0.1
"""Effect from which a token is decisive for the worse, and the share of tokens that a score may point at."""
FEW = 30
"""Decisive tokens below which their share has no interval."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return rank correlations with a token's effect and with its size, by policy and kind of rollout."""
    rows = [
        row
        for policy in distinct(tables["tokens"], "policy")
        for kind, right in KINDS.items()
        for row in correlations(of_kind(select(tables["tokens"], policy=policy), right), policy, kind)
    ]
    return {
        "correlations": rows,
        "decisive": [decisive(tables["tokens"], p) for p in distinct(tables["tokens"], "policy")],
    }


def of_kind(rows: Rows, right: bool | None) -> Rows:
    """Return the tokens of right or of wrong rollouts, or all."""
    return rows if right is None else select(rows, right=right)


def values(rows: Rows) -> dict[str, Float]:
    """Return scores, sizes and the measured effect of tokens, each [n]."""
    x = {
        name: np.array(column(rows, name), float)
        for name in ("contrast", "logprob", "attribution", "signal", "noise", "norm")
    }
    x["effect"] = np.array(column(rows, "kept"), float) - np.array(column(rows, "replaced"), float)
    # 0 where a float64 probability underflows; ranks need no more.
    x["lift"] = np.log(np.maximum(x["contrast"], 1e-300)) - x["logprob"]
    x |= {"uncertain": 1 - np.exp(x["logprob"]), "far": np.abs(x["lift"]), "size": np.abs(x["effect"])}
    return x | {f"{name}_size": np.abs(x[name]) for name in ("attribution", "noise")}


def clusters(rows: Rows) -> tuple[Int, Int]:
    """Return each token's seed, and its prompt as a number that no other seed has."""
    seed = np.array(column(rows, "seed"), dtype=np.int64)
    return seed, seed * 1_000_000 + np.array(column(rows, "prompt"), dtype=np.int64)


def correlations(rows: Rows, policy: str, kind: str) -> list[dict[str, Any]]:
    """Return Spearman's correlation of each score with the effect, and of each size with |effect|, less that of π.

    Ranks are taken within a seed; intervals delete one prompt at a time.
    """
    x, (seed, cluster) = values(rows), clusters(rows)
    ranks = {name: within(value, seed) for name, value in x.items()}
    out = []
    for target, names, plain in (("effect", SCORES, "logprob"), ("size", SIZES, "uncertain")):
        for name, words in names.items():
            found = correlation(ranks[name], ranks[target], cluster)
            more = None if name == plain else correlation(ranks[name], ranks[target], cluster, ranks[plain])
            out.append(
                {"policy": policy, "kind": kind, "target": target, "score": name, "words": words, "tokens": len(rows)}
                | interval_columns("correlation", found) | interval_columns("over_plain", more)
            )  # fmt: skip
    return out


def within(x: Float, seed: Int) -> Float:
    """Return ranks from −½ to ½ among the tokens of one seed."""
    out = np.empty(len(x))
    for s in np.unique(seed):
        part = seed == s
        out[part] = (rankdata(x[part]) - 0.5) / part.sum() - 0.5
    return out


def correlation(x: Float, y: Float, cluster: Int, plain: Float | None = None) -> Interval | None:
    """Return the correlation of two ranks, less that of `plain` with the second where that is given."""
    columns = [x * x, y * y, x * y, np.ones(len(x))]
    columns += [] if plain is None else [plain * plain, plain * y]
    names = np.unique(cluster)
    table = np.array([[c[cluster == k].sum() for c in columns] for k in names])
    return cluster_jackknife(table, partial(_correlation, less=plain is not None), "rank correlation", "linear")


def _correlation(sums: Float, less: bool) -> Float:
    found = sums[..., 2] / np.sqrt(sums[..., 0] * sums[..., 1])
    return found - sums[..., 5] / np.sqrt(sums[..., 4] * sums[..., 1]) if less else found


def decisive(tokens: Rows, policy: str) -> dict[str, Any]:
    """Return how many tokens of wrong rollouts cost at least half of the success, and where scores rank them.

    `found_by` is the share of them among the tenth of these tokens that a score ranks lowest; by lot it is a tenth.
    `more` is that share by the contrast less that by log π.
    """
    rows = select(tokens, policy=policy, right=False)
    x, (seed, cluster) = values(rows), clusters(rows)
    bad, names = x["effect"] <= DECISIVE, np.unique(cluster)
    low = {name: (within(x[name], seed) < LOWEST - 0.5) & bad for name in FINDERS}
    table = np.array([[c[cluster == k].sum() for c in (bad, *low.values())] for k in names], dtype=float)
    row: dict[str, Any] = {"policy": policy, "tokens": len(rows), "decisive": int(bad.sum())}
    for place, name in enumerate(FINDERS, start=1):
        row |= interval_columns(f"found_by_{name}", shares(table, lambda s, k=place: s[..., k]))
    by = {name: place for place, name in enumerate(FINDERS, start=1)}
    return row | interval_columns("more", shares(table, lambda s: s[..., by["contrast"]] - s[..., by["logprob"]]))


def shares(table: Float, found: Callable[[Float], Float]) -> Interval | None:
    """Return what was found over what there was to find, column 0 of the table of prompts; of few, without ends."""
    if not table[:, 0].any():
        return None
    whole = cluster_jackknife(table, lambda s: found(s) / s[..., 0], "share found", "linear")
    return whole if whole is None or table[:, 0].sum() >= FEW else replace(whole, low=None, high=None)


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the mean effect of the tokens of wrong rollouts by fifths of each score."""
    panels = []
    for policy in distinct(tables["tokens"], "policy"):
        rows = select(tables["tokens"], policy=policy, right=False)
        x, (seed, _) = values(rows), clusters(rows)
        curves = []
        for name, color in COLORS.items():
            fifth = np.clip(((within(x[name], seed) + 0.5) * BINS).astype(int), 0, BINS - 1)
            means = [float(x["effect"][fifth == k].mean()) for k in range(BINS)]
            curves.append(Curve([float(k + 1) for k in range(BINS)], means, SCORES[name], color=color))
        panels.append(
            Panel(
                f"{policy}: tokens of wrong rollouts",
                "mean effect on success",
                "fifth of the score, lowest first",
                curves,
            )
        )
    return {"effects.svg": svg(panels, columns=2)}
