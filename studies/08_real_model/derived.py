"""What the page of A real model needs beyond its tables: the small models' numbers beside it, and training by seed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.estimators.spec import RegressionOptions
from otb_analysis.figures.styles import BLUE
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Rows, column, distinct, select
from studies.lib.formats import above, below, interval_curve, looks_of
from studies.lib.record import read_tables
from studies.lib.seeds import mean_by_seed, paired_difference

from .compare import ACROSS, SIZES
from .study import FULL as POOL
from .training import AGAINST, ARMS, FULL, MEMORY

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
LATE = 8
"""Updates at the end of training whose rewards are also shown alone."""
STUDIES = Path(__file__).parent.parent


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return what differs from `rloo`, what small models showed in other studies, and training over seeds."""
    rows = tables["estimators"]
    arms = arms_of(tables)
    others = [row for row in arms if row["arm"] != AGAINST]
    # Arms of which an interval of the difference from `rloo`, held out or in reward, leaves 0 out
    over = {row["arm"]: [row["after_over"], row["reward_over"], row["late_over"]] for row in others}
    told = [arm for arm, three in over.items() if any(above(x, 0) or below(x, 0) for x in three)]
    # Policies all of whose parameters are measured, in groups of 4, and where an interval shows a ratio below 1
    full = [row for row in select(rows, size=4) if not row["policy"].endswith("-lora")]
    across, toy = select(full, estimator="energy_regression", source="proxy"), toy_agreement()
    spent = [0.0, 0.0]  # Minutes of processor time before training and for it
    for row in tables["cost"]:
        spent[row["cell"].startswith(("sweep-", "run-", "untrained"))] += row["processor_minutes"]
    memory = MEMORY[ACROSS]["memory"]
    # The default ridge of that memory in the first update, and later
    ridges = [RegressionOptions(memory=memory).ridge_for(FULL.prompts, later) for later in (False, True)]
    return {
        "spent": spent, "edge": [row["arm"] for row in arms if row["rate"] == max(FULL.rates)], "memory": memory,
        "ridges": ridges, "arms": arms, "told": told, "trained": {row["arm"]: row for row in arms},
        "longest": POOL.tokens, "regression": [row for row in across if below(row, 1, "sf")],
        "regression_bare": [row for row in across if below(row, 1, "sf_bare")],
        "none_rows": select(full, estimator="none"), "otb_rows": select(full, estimator="otb", source="proxy"),
        "proxy_log": column(select(tables["agreement"], source="proxy", of="w"), "log_within"),
        "toy_log": column(select(toy, source="proxy", of="w"), "log_within"),
        "lengths": [row["tokens"] / row["rollouts"] for row in tables["policies"]], "toy_agreement": toy,
    }  # fmt: skip


def listed(rows: Rows) -> Rows:
    """Return the rows of the page, unbiased ones first: no baseline that needs exact norms but forms of `otb`."""
    kept = [row for row in rows if row["estimator"] in LISTED]
    kept = [row for row in kept if row["source"] != "exact" or row["estimator"].startswith("otb")]
    return sorted(kept, key=lambda row: (not row["c_known"], row["sf"] or 0))


def toy_agreement() -> Rows:
    """Return study 02's correlations of trained models at temperature 1; its hybrid sketch under this page's name."""
    rows = read_tables(STUDIES / "02_proxy_fidelity" / "results").get("agreement", [])
    kept = [row for row in rows if row["stage"] != "init" and row["temperature"] == 1]
    return [dict(row) | {"source": "hybrid" if row["source"] == "sketch" else row["source"]} for row in kept]


def arms_of(tables: Mapping[str, Rows]) -> Rows:
    """Return a row per arm: its rate, held-out success after training, rewards, clipping, differences from `rloo`."""
    training = tables["training"]
    last = max((row["step"] for row in training), default=0)
    measures = {
        "after": ("success", tables["heldout"]),
        "reward": ("reward", training),
        "late": ("reward", [row for row in training if row["step"] > last - LATE]),
    }
    arms = []
    for arm in distinct(training, "arm"):
        mine = select(training, arm=arm)
        row = {"arm": arm, "rate": mine[0]["rate"], "clipped": float(np.mean(column(mine, "clipped")))}
        for name, (column_of, rows) in measures.items():
            of_arm, base = (mean_by_seed(select(rows, arm=which), column_of) for which in (arm, AGAINST))
            row[name] = seed_mean(list(of_arm.values()), name, "logit")
            row[f"{name}_over"] = paired_difference(of_arm, base, name)
        arms.append(row)
    return arms


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw variance over that of `rloo` by group size, and the rewards of training."""
    rows, panels = tables["estimators"], []
    for policy in distinct(rows, "policy"):
        dots, note = [], "variance over rloo's, 95 %, cut at 2"
        for place, name in enumerate(SHOWN):  # a point per group size, with the proxy
            known = [row for row in select(rows, policy=policy, estimator=name) if row["source"] != "exact"]
            known = [row for row in known if row["sf_low"] is not None]
            x = [place + (len(SHOWN) + 2) * SIZES.index(row["size"]) for row in known]
            y, low, high = ([min(row[k], CUT) for row in known] for k in ("sf", "sf_low", "sf_high"))
            dots.append(Curve(x, y, name, low, high, COLORS.get(name) or looks_of(name)["color"], width=0))
        panels.append(Panel(policy, note, "groups of 4, then groups of 8", dots, [(1.0, "")], (0.0, CUT)))
    curves = []
    for arm in ARMS:
        mine, points = select(tables["training"], arm=arm), dict[float, Interval | None]()
        for start in range(0, max((row["step"] for row in mine), default=-1) + 1, 4):
            some = [row for row in mine if start <= row["step"] < start + 4]
            points[start + 1.5] = seed_mean(list(mean_by_seed(some, "reward").values()), "reward", "logit")
        curves.append(interval_curve(points, "", arm, **looks_of(arm)))
    over = {row["arm"]: row["after_over"] for row in arms_of(tables) if row["arm"] != AGAINST}
    marks = [
        interval_curve({place: x}, "", arm, looks_of(arm)["color"], width=0)
        for place, (arm, x) in enumerate(over.items()) if x is not None and x.low is not None
    ]  # fmt: skip
    note, across = "mean reward of 4 updates over seeds, 95 %", "otb, energy_regression, none"
    learned = [
        Panel("Each arm at its own rate", note, "update", curves, percent=True),
        Panel("Held-out success − rloo's", "paired by seed, 95 %", across, marks, [(0.0, "")], percent=True),
    ]
    return {"variance.svg": svg(panels, columns=3), "training.svg": svg(learned, columns=2)}
