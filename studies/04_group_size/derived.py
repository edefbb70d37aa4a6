"""What the page of Group size needs beyond its tables: differences over seeds, their reading, learning curves."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from otb_analysis.config import SampleConfig
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Rows, column, distinct, select
from studies.lib.formats import above, below, interval_curve, mean_curve
from studies.lib.seeds import best_rate, by_seed, later_success, paired_difference

from .study import ARMS, MARGIN, RIVALS, UPDATES
from .study import RIDGE as RIDGE
from .worlds import ADVICE, GROUP, LATER, advice_of

WORDS = {name: arm.words.replace(",", "") for name, arm in ARMS.items()}
ADVISED = dict(zip((*ADVICE, "any"), (INK, SKY, BLUE, ORANGE, PINK, AMBER, GREEN, GREY), strict=True))
"""Colours of the advice in toy worlds; `any` where no two differ."""
SMALL_GROUPS = tuple(name for name, arm in ARMS.items() if (arm.prompts, arm.group) == (16, 4))
LARGE = ("mean32", "rloo4-wide")
"""Arms with large updates that are compared after as many rollouts."""
LONG = ("mean32-long", "rloo32-long")
"""Arms with large updates that are compared after as many updates."""
CONTRASTS = {
    "rollouts": (
        ("otb4", "mean32"), ("otb4", "rloo4-wide"), ("otb4", "rloo4"), ("regression4", "rloo4"),
        ("regression4", "otb4"), ("blend4", "rloo4"), ("blend4", "otb4"), ("blend4", "regression4"),
        *((arm, "rloo4") for arm in RIVALS),
        *(("regression4", arm) for arm in RIVALS),
    ),
    "updates": (("otb4", "mean32-long"), ("regression4", "mean32-long"), ("rloo32-long", "mean32-long")),
}  # fmt: skip
"""What is made equal → pairs of arms: the first minus the second."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return what training made of every arm, over seeds, and which learning rate the sweep chose."""
    curves, sweep = tables["curves"], tables["sweep"]
    arms = distinct(curves, "arm")
    shared = {"rollouts": at_all(curves, LONG, "n_rollouts"), "updates": at_all(curves, LARGE, "step")}
    rates = {name: best_rate(select(sweep, arm=name), "mean") for name in distinct(sweep, "arm")}
    last = {name: max(column(select(curves, arm=name), "step")) for name in arms}
    later = {equal: {name: later_success(select(rows, arm=name)) for name in arms} for equal, rows in shared.items()}
    gains = {
        (arm, base): paired_difference(later[equal][arm], later[equal][base], f"success of {arm} minus that of {base}")
        for equal, pairs in CONTRASTS.items() for arm, base in pairs if {arm, base} <= set(arms)
    }  # fmt: skip
    ends = {name: column(select(curves, arm=name, step=last[name]), "success") for name in arms}
    late = {name: list(later["updates" if name in LONG else "rollouts"][name].values()) for name in arms}
    means, finals = (
        {name: seed_mean(values, "held-out success", "logit") for name, values in of.items()} for of in (late, ends)
    )
    worst, worlds = dict[tuple[str, int], float](), [dict(row) for row in tables.get("worlds", ())]
    for row in worlds:
        row["least"] = min(ADVICE, key=lambda name: row[name])
        row["ahead"] = row["energy_regression"] < row["james_stein"]
        row["before"] = advice_of({name: row[name] for name in ADVICE if name not in LATER})
        for name in ADVICE:
            worst[name, row["prompts"]] = max(row[name] / row[row["least"]], worst.get((name, row["prompts"]), 1.0))
    few = [row for row in worlds if row["prompts"] <= 16 and row["spread"] <= 1]
    alike = [row["energy_across_loo"] / row[row["least"]] - 1 for row in few]
    readings = {pair: reading(gain) for pair, gain in gains.items()}
    return {
        "LIMIT": SampleConfig().max_new_tokens, "shared": shared, "means": means, "finals": finals, "gains": gains,
        "readings": readings, "advised": advised(readings), "worst": worst, "told": worlds,
        "alike": max(alike, default=0.0), "chosen": rates,
        "at_the_edge": [name for name, rate in rates.items() if rate in (ARMS[name].rates[0], ARMS[name].rates[-1])],
    }  # fmt: skip


def at_all(curves: Rows, without: Sequence[str], name: str) -> Rows:
    """Return the evaluations of all but some arms at the values of a column at which every one of them has one."""
    rows = [row for row in curves if row["arm"] not in without]
    at = [set(column(select(rows, arm=arm), name)) for arm in distinct(rows, "arm")]
    return [row for row in rows if row[name] in set.intersection(*at)]


def reading(gain: Interval | None) -> str:
    """Read a difference against 0 and against the margin of non-inferiority."""
    if above(gain, -MARGIN):
        return "better" if above(gain, 0) else "no worse"
    return "worse" if below(gain, 0) else "not shown"


def advised(readings: Mapping[tuple[str, str], str]) -> str:
    """Return the arm that the rule of the page gives, settled before the rivals ran."""
    better = {pair for pair, words in readings.items() if words == "better"}
    rivals = [arm for arm in RIVALS if ("regression4", arm) in readings]
    enough = [arm for arm in rivals if (arm, "rloo4") in better and ("regression4", arm) not in better]
    return [*enough, "regression4" if ("regression4", "rloo4") in better else "rloo4"][0]


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw mean learning curves over rollouts and over updates, and how far small groups are ahead of large ones."""
    curves = [dict(row, thousands=row["n_rollouts"] / 1000) for row in tables["curves"]]
    names = distinct(curves, "arm")
    drawn: dict[str, list[Curve]] = {"thousands": [], "step": []}
    for name, (x, without) in product(names, (("thousands", LONG), ("step", LARGE))):
        if name not in without:
            looks = {"color": ARMS[name].color, "dashed": name in LONG or ARMS[name].updates < UPDATES}
            drawn[x].append(mean_curve(select(curves, arm=name), x, "success", WORDS[name], **looks))
    shared, base, ahead = at_all(curves, LARGE, "step"), "mean32-long", []
    for arm in ("otb4", "regression4"):
        points = {}
        for step in sorted(distinct(select(shared, arm=arm), "step")):
            one, other = (by_seed(select(shared, arm=name, step=step), "success") for name in (arm, base))
            points[step] = paired_difference(one, other, f"held-out success of {arm} minus that of {base}")
        ahead += [interval_curve(points, "", WORDS[arm], ARMS[arm].color)] if points else []
    note = "held-out success, mean over seeds"
    panels = [
        Panel("As many rollouts", note, "thousand rollouts", drawn["thousands"], percent=True),
        Panel("As many updates", note, "updates", drawn["step"], percent=True),
        Panel(f"Minus {WORDS['mean32-long']}", "points, same seeds, 95 % interval", "updates", ahead,
              rules=[(0.0, ""), (-MARGIN, "margin")], percent=True),
    ]  # fmt: skip
    pictures = {"learning.svg": svg(panels, columns=2)}
    worlds, grid = tables.get("worlds", []), list[Panel]()
    for prompts, mean in product(distinct(worlds, "prompts"), distinct(worlds, "mean")):
        won = {advice: select(worlds, mean=mean, prompts=prompts, advice=advice) for advice in ADVISED}
        points = [
            Curve(column(rows, "spread"), column(rows, "link"), advice, color=ADVISED[advice], width=0)
            for advice, rows in won.items() if rows
        ]  # fmt: skip
        title = f"Success near {1 / (1 + np.exp(-mean)):.0%}, {prompts} × {GROUP}"
        grid.append(Panel(title, "link of energy and reward", "spread of difficulty", points, y_range=(-2, 2)))
    return pictures | ({"worlds.svg": svg(grid, columns=3)} if grid else {})
