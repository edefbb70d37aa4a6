"""What the page of A real model needs beyond its tables: the small models' numbers beside it, and training by seed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, estimator_style
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import Rows, column, distinct, select
from otb_analysis.study.formats import below, interval_curve
from otb_analysis.study.results import read_tables
from otb_analysis.study.seeds import paired_difference

from .compare import SIZES
from .training import ARMS

SHOWN = ("none", "value", "otb_loo", "sequence_optimal_loo", "energy_across_loo", "energy_regression")
"""Unbiased estimators of the figure, with the proxy: their variance needs no correction by c."""
LISTED = (
    *("group_mean", "grpo", "opo_loo", "james_stein", "batch_mean_loo", "tvm", "otb", "sequence_optimal", *SHOWN),
    *("otb_carry_loo", "token_optimal_loo", "energy_ema_loo"),
)
"""Estimators of the tables on the page; `estimators.csv` has all."""
COLORS = {"energy_across_loo": BLUE}
"""Where two estimators of the figure have one colour."""
CUT = 2.0
"""Ratio at which the figure cuts intervals."""
AGAINST = "rloo"
STUDIES = Path(__file__).parent.parent


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return what differs from `rloo`, what small models showed in other studies, and training over seeds."""
    rows = tables["estimators"]
    return {
        "listed": listed,
        "regression": shown_lower(select(rows, estimator="energy_regression", source="proxy", size=4), "sf"),
        "regression_bare": shown_lower(select(rows, estimator="energy_regression", source="proxy", size=4), "sf_bare"),
        "none_rows": whole(select(rows, estimator="none", size=4)),
        "loo_rows": whole(select(rows, estimator="otb_loo", source="proxy", size=4)),
        "otb_rows": whole(select(rows, estimator="otb", source="proxy", size=4)),
        "proxy_log": column(select(tables["agreement"], source="proxy", of="w"), "log_within"),
        "toy_log": column(select(toy_agreement(), source="proxy", of="w"), "log_within"),
        "lengths": [row["tokens"] / row["rollouts"] for row in tables["policies"]],
        "toy_agreement": toy_agreement(),
        "toy_gains": toy_gains(),
        **(trained(tables["training"], tables["sweep"]) if "training" in tables else {}),
    }


def whole(rows: Rows) -> Rows:
    """Return the rows of policies all of whose parameters are measured."""
    return [row for row in rows if not row["policy"].endswith("-lora")]


def shown_lower(rows: Rows, name: str) -> Rows:
    """Return the rows of whole policies of which an interval shows a ratio below 1."""
    return [row for row in whole(rows) if below(row, 1, name)]


def listed(rows: Rows) -> Rows:
    """Return the rows of the page, unbiased ones first: no baseline that needs exact norms but forms of `otb`."""
    kept = [
        r for r in rows if r["estimator"] in LISTED and (r["source"] != "exact" or r["estimator"].startswith("otb"))
    ]
    return sorted(kept, key=lambda row: (not row["c_known"], row["sf"] or 0))


def toy_agreement() -> Rows:
    """Return study 02's correlations of trained models at temperature 1; its hybrid sketch under this page's name."""
    rows = read_tables(STUDIES / "02_proxy_fidelity" / "results").get("agreement", [])
    kept = [row for row in rows if row["stage"] != "init" and row["temperature"] == 1]
    return [dict(row) | {"source": "hybrid" if row["source"] == "sketch" else row["source"]} for row in kept]


def toy_gains() -> Rows:
    """Return study 03's efficiencies over `rloo` in groups of the sizes measured here."""
    rows = read_tables(STUDIES / "03_baseline_variance" / "results").get("estimators", [])
    return [row for row in rows if row["size"] in SIZES]


def trained(training: Rows, sweep: Rows) -> dict[str, Any]:
    """Return held-out success before and after, the mean reward, clipping, and differences from `rloo`, by arm."""
    last = max(row["step"] for row in training)
    arms = [arm for arm in ARMS if select(training, arm=arm)]

    def by_seed(arm: str, name: str, steps: Rows) -> dict[int, float]:
        return {
            seed: float(np.mean(column(select(steps, arm=arm, seed=seed), name)))
            for seed in distinct(select(training, arm=arm), "seed")
        }

    first, final = select(training, step=0), select(training, step=last)
    measures = {"before": ("heldout", first), "after": ("heldout", final), "reward": ("reward", training)}
    values = {arm: {word: by_seed(arm, *what) for word, what in measures.items()} for arm in arms}
    return {
        "arms": arms,
        "outcome": {
            arm: {word: seed_mean(list(seeds.values()), word, "logit") for word, seeds in values[arm].items()}
            for arm in arms
        },
        "over_rloo": {
            arm: {word: paired_difference(values[arm][word], values[AGAINST][word], word) for word in values[arm]}
            for arm in arms
            if arm != AGAINST
        },
        "clipped": {arm: float(np.mean(column(select(training, arm=arm), "clipped"))) for arm in arms},
        "rates": {arm: select(training, arm=arm)[0]["rate"] for arm in arms},
        "swept": sorted(distinct(sweep, "rate")),
        "seeds": len(distinct(training, "seed")),
        "updates": last + 1,
    }


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw variance over that of `rloo` by group size, and the rewards of training."""
    rows, panels = tables["estimators"], []
    for policy in distinct(rows, "policy"):
        own = [variance_points(select(rows, policy=policy, estimator=name), name) for name in SHOWN]
        note = "variance over rloo's, 95 %, cut at 2"
        panels.append(Panel(policy, note, "groups of 4, then groups of 8", own, [(1.0, "")], (0.0, CUT)))
    drawn = {"variance.svg": svg(panels, columns=3)}
    if "training" in tables:
        curves = [reward_curve(select(tables["training"], arm=arm), arm) for arm in ARMS]
        panel = Panel("Training", "reward of a batch, mean over seeds and 5 updates", "update", curves, percent=True)
        drawn["training.svg"] = svg([panel], columns=1)
    return drawn


def variance_points(rows: Rows, name: str) -> Curve:
    """Return an unbiased estimator's variance over that of `rloo`, a point per group size, with the proxy."""
    place = SHOWN.index(name)
    known = [row for row in rows if row["source"] != "exact" and row["sf_low"] is not None]
    x = [place + (len(SHOWN) + 2) * SIZES.index(row["size"]) for row in known]
    y, low, high = ([min(row[k], CUT) for row in known] for k in ("sf", "sf_low", "sf_high"))
    return Curve(x, y, name, low, high, COLORS.get(name, estimator_style(name).color), width=0)


def reward_curve(rows: Rows, arm: str) -> Curve:
    """Return the mean reward over seeds of every five updates, with its interval."""
    style, points = estimator_style(arm), dict[float, Interval | None]()
    for start in range(0, max((row["step"] for row in rows), default=-1) + 1, 5):
        own = [row for row in rows if start <= row["step"] < start + 5]
        by_seed = [float(np.mean(column(select(own, seed=seed), "reward"))) for seed in distinct(own, "seed")]
        points[start + 2.0] = seed_mean(by_seed, "reward", "logit")
    return interval_curve(points, "", arm, style.color, dashed=style.dash != "solid")
