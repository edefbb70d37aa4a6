"""What the page of Baselines and variance needs beyond its tables: what differs from `rloo`, on which prompts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.figures.styles import estimator_style
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import log_ratio_t
from otb_analysis.statistics.energies.correlation import correlation
from otb_analysis.study import Row, Rows, column, distinct, select
from otb_analysis.study.formats import above, below

from .study import FAMILY, HEAD, UPDATES

SHOWN = ("rloo", "none", "value", "grpo", "sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "token_optimal")
KINDS = {"success": "success rate", "corr": "corr(W_T, R)", "spread": "length spread"}
"""What tells prompts apart: where baselines are looked at in the lowest and in the highest third."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return which rows differ from `rloo`, what raw variance says, and variance by kind of prompt."""
    rows = tables["estimators"]
    policies, sizes = distinct(rows, "policy"), sorted(distinct(rows, "size"))
    small, large = (4 if 4 in sizes else sizes[0]), (16 if 16 in sizes else sizes[-1])
    found = [r for p in policies for n in (small, large) for r in differing(select(rows, policy=p, size=n))]
    family = [row for row in rows if row["estimator"] in FAMILY and row["size"] == small]
    lower = [row for row in rows if row["sf_high"] is not None and below(row, 1, "variance")]
    return {
        "differs": lambda row: row in found,
        "shown": [dict(row) | {"more": row[f"gain{HEAD}"] > 1} for row in differing(family)],
        "bare": select(family, estimator="otb"),
        "compared": [row for row in rows if row["variance_high"] is not None and row["sf_high"] is not None],
        "raw_lower": lower,
        "sf_lower": [row for row in lower if below(row, 1, "sf")],
        "sf_higher": [row for row in lower if above(row, 1, "sf")],
        "regimes": regimes(tables),
        "best_first": lambda rows: sorted(rows, key=lambda row: -(row[f"efficiency{HEAD}"] or 0)),
        "chosen": [row for row in rows if row["estimator"] in SHOWN and row["source"] != "proxy"],
        "small": small,
        "large": large,
    }


def differing(rows: Rows) -> Rows:
    """Return the rows whose efficiency differs from that of `rloo`, false-discovery rate 5 % over all of them."""
    tested = [row for row in rows if row["p_value"] is not None]
    q = stats.false_discovery_control([row["p_value"] for row in tested], method="by") if tested else ()
    return [row for row, x in zip(tested, q, strict=True) if x <= 0.05]


def efficiency_at(row: Row, prompts: float) -> float | None:
    """Return the efficiency at any P from those at two: 1/e is linear in 1/P."""
    low, high = UPDATES[0], UPDATES[-1]
    if not row[f"efficiency{low}"] or not row[f"efficiency{high}"]:
        return None
    a, b = 1 / row[f"efficiency{low}"], 1 / row[f"efficiency{high}"]
    slope = (a - b) / (1 / low - 1 / high)
    return 1 / (b + slope * (1 / prompts - 1 / high))


def regimes(tables: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Return variance over that of `rloo` in the lowest and the highest third of prompts, and rank correlations.

    Prompts of one policy are distinct, so each is a cluster; policies share some of theirs and are not pooled.
    """
    kinds, usable = {(row["policy"], row["prompt"]): row for row in tables["prompts"]}, []
    for row in tables["variances"]:
        kind = kinds[row["policy"], row["prompt"]]
        positive = row["variance"] is not None and row["rloo"] is not None and min(row["variance"], row["rloo"]) > 0
        if positive and all(kind[name] is not None for name in KINDS):
            usable.append(dict(row) | {name: kind[name] for name in KINDS})
    return [
        {"estimator": estimator, "kind": kind, "policy": policy, "prompts": len(distinct(same, "prompt"))}
        | _regime(select(same, estimator=estimator), kind)
        for estimator in distinct(usable, "estimator")
        for kind in KINDS
        for policy in distinct(usable, "policy")
        for same in [select(usable, policy=policy)]
    ]


def _regime(rows: Rows, kind: str) -> dict[str, Any]:
    """Geometric mean ratios of both thirds with the range of the kind there, and the rank correlation."""
    value, variance, rloo = (np.array(column(rows, name)) for name in (kind, "variance", "rloo"))
    low, _, high = np.array_split(np.argsort(value, kind="stable"), 3)
    ranks = [stats.rankdata(x) for x in (value, variance / rloo)]
    thirds = [
        {"ratio": log_ratio_t(variance[part], rloo[part], "variance"), "values": value[part].tolist()}
        for part in (low, high)
    ]
    return {"thirds": thirds, "rank": correlation(ranks[0], ranks[1], np.arange(len(rows)))}


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw efficiency, and raw variance and SF over `rloo`'s, against the group size, for each policy."""
    rows, panels = tables["estimators"], []
    for policy in distinct(rows, "policy"):
        same = [row for row in select(rows, policy=policy) if row["source"] != "proxy"]
        for name, note in (
            (f"efficiency{HEAD}", f"efficiency, {HEAD} prompts"),
            ("sf", "SF over rloo's"),
            ("variance", "raw variance over rloo's"),
        ):
            curves = [_curve(estimator, select(same, estimator=estimator), name) for estimator in SHOWN]
            if any(c.x for c in curves):
                panels.append(Panel(policy, note, "log₂ of the group size N", [c for c in curves if c.x]))
    return {"sizes.svg": svg(panels, columns=3)}


def _curve(estimator: str, rows: Rows, name: str) -> Curve:
    known = [row for row in rows if row[name] is not None]
    style = estimator_style(estimator)
    x = [float(np.log2(row["size"])) for row in known]
    return Curve(x, column(known, name), estimator, color=style.color, dashed=style.dash != "solid")
