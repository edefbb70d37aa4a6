"""What the page of Group size needs beyond its tables: differences over seeds, tokens to a success, learning curves."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import Rows, column, distinct, mean, select
from otb_analysis.study.formats import interval_curve, mean_curve
from otb_analysis.study.seeds import later_success, paired_difference

from .arms import ARMS, LARGE_GROUP
from .study import chosen_rate

BASE = "otb4"
"""The arm that the question is about: all others are measured against it."""
WORDS = {name: arm.words.replace(",", "") for name, arm in ARMS.items()}
AHEAD_OF = ("mean32", "rloo4")
"""Arms whose distance from it the figure shows."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return what training made of every arm, over seeds, and which learning rate the sweep chose."""
    curves, sweep = tables["curves"], tables["sweep"]
    shared, arms = shared_evaluations(curves), distinct(curves, "arm")
    rates = {name: chosen_rate(select(sweep, arm=name)) for name in distinct(sweep, "arm")}
    last = {name: max(column(select(curves, arm=name), "step")) for name in arms}
    finals = {name: column(select(curves, arm=name, step=last[name]), "success") for name in arms}
    swept = sorted(distinct(sweep, "rate"))
    return {
        "shared": shared,
        "means": {name: _mean(list(later_success(select(shared, arm=name)).values())) for name in arms},
        "finals": {name: _mean(finals[name]) for name in arms},
        "gains": {name: gained(shared, name) for name in arms if name != BASE},
        "chosen": rates,
        "at_the_edge": [name for name, rate in rates.items() if rate in (swept[0], swept[-1])],
        "tokens_to_mean32": {name: tokens_to(select(curves, arm=name), mean(finals["mean32"])) for name in arms},
    }


def shared_evaluations(curves: Rows) -> Rows:
    """Return the evaluations after numbers of rollouts at which every arm has one."""
    at = [set(column(select(curves, arm=name), "n_rollouts")) for name in distinct(curves, "arm")]
    return [row for row in curves if row["n_rollouts"] in set.intersection(*at)]


def gained(shared: Rows, name: str) -> Interval | None:
    """Return the paired difference of the small `otb` groups' mean held-out success from an arm's."""
    otb, other = (later_success(select(shared, arm=arm)) for arm in (BASE, name))
    return paired_difference(otb, other, f"held-out success of {BASE} minus that of {name}")


def tokens_to(rows: Rows, success: float | None) -> float | None:
    """Return after how many sampled tokens an arm's mean learning curve first reaches a success, between points too."""
    curve = mean_curve(rows, "n_tokens", "success", "", "")
    best = np.maximum.accumulate(curve.y)
    return None if success is None or best[-1] < success else float(np.interp(success, best, curve.x))


def _mean(values: Any) -> Interval | None:
    return seed_mean(values, "held-out success", "logit")


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw mean learning curves over thousands of sampled tokens, and how far the small `otb` groups are ahead."""
    curves = [dict(row, thousands=row["n_tokens"] / 1000) for row in tables["curves"]]
    names, shared = distinct(curves, "arm"), shared_evaluations(curves)
    learning = [
        mean_curve(
            select(curves, arm=name), "thousands", "success", WORDS[name], ARMS[name].color,
            dashed=ARMS[name].group == LARGE_GROUP,
        )
        for name in names
    ]  # fmt: skip
    ahead = [_gap_curve(shared, name) for name in names if name in AHEAD_OF]
    panels = [
        Panel("Held-out success", "mean over seeds", "thousand tokens sampled", learning, percent=True),
        Panel(f"{WORDS[BASE]} minus others", "points, same seeds, 95 % interval",
              "thousand rollouts", ahead, rules=[(0.0, "")], percent=True),
    ]  # fmt: skip
    return {"learning.svg": svg(panels, columns=2)}


def _gap_curve(shared: Rows, name: str) -> Any:
    """The paired difference of the small `otb` groups from an arm at each evaluation that both have."""
    points = {}
    for count in sorted(distinct(select(shared, arm=BASE), "n_rollouts")):
        otb, other = (
            {row["seed"]: row["success"] for row in select(shared, arm=arm, n_rollouts=count)} for arm in (BASE, name)
        )
        points[count / 1000] = paired_difference(otb, other, f"held-out success of {BASE} minus {name}")
    return interval_curve(points, "", f"minus {WORDS[name]}", ARMS[name].color)
