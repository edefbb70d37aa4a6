"""What the page of Training needs beyond its tables: goals, each run's ends, means over seeds, learning curves."""

from collections.abc import Mapping
from typing import Any

from otb_analysis.figures.styles import BLUE
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Rows, column, distinct, select
from studies.lib.formats import interval_curve, seed_curves

MINUTES = 20
"""What a seed may take."""
GOALS = {"chain_sum": {"target": 0.75, "aim": 0.90}, "calculator": {"target": 0.80, "aim": 0.90}}
"""Held-out success that training is to reach, and to aim at."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return every run with its cost, start and end, and functions for means over seeds."""
    curves, cost = tables["curves"], {row["cell"]: row for row in tables["cost"]}
    runs = []
    for run in tables["runs"]:
        first, *_, last = select(curves, task=run["task"], seed=run["seed"])
        names = {"": "success", "_low": "low", "_high": "high"}
        ends = {f"{end}{x}": row[of] for end, row in (("before", first), ("after", last)) for x, of in names.items()}
        runs.append({**run, **cost[run["cell"]], **ends, **GOALS[run["task"]]})
    return {"each_run": runs}


def over_seeds(rows: Rows, name: str = "success") -> Interval | None:
    """Return the mean over seeds of a share, with Student's interval on the logit scale."""
    return seed_mean(column(rows, name), "held-out success of a seed", scale="logit")


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw each task's learning curves: the seeds thin, their mean with its interval."""
    panels = []
    for task in distinct(tables["curves"], "task"):
        rows = select(tables["curves"], task=task)
        points = {step: over_seeds(select(rows, step=step)) for step in sorted(distinct(rows, "step"))}
        drawn = [interval_curve(points, "", "mean over seeds, 95 % interval", BLUE), *seed_curves(rows, "success")]
        rules, note = [(GOALS[task][name], name) for name in ("target", "aim")], "success on held-out prompts"
        panels.append(Panel(task, note, "step", drawn, rules, (0.0, 1.0), percent=True))
    return {"curves.svg": svg(panels)}
