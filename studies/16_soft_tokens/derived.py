"""What the page of Soft tokens needs beyond its tables: means and ratios over policies, and its figure."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, ORANGE
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.statistics.moments import quotient
from studies.lib import Rows, column, distinct, select
from studies.lib.formats import ends, hidden, interval_curve, or_nan
from studies.lib.seeds import by_seed

PARTS = {"": ("all parameters", BLUE), "_rest": ("without the table of embeddings", ORANGE)}


def over_discrete(rows: Rows, arm: str, name: str, against: str = "", scale: Any = "log") -> Interval | None:
    """Return the mean over policies of a number over that of the discrete arm, policy by policy."""
    base = by_seed(select(rows, arm="discrete"), against or name)
    return seed_mean([row[name] / base[row["seed"]] for row in select(rows, arm=arm)], name, scale)


def large(of: Interval | None, digits: int = 0) -> str:
    """Return an interval with its thousands, where `interval` says only that they are more than 999."""
    lost = hidden(*ends(of)[1:])
    shown = ["–" if value is None or lost else f"{value:,.{digits}f}" for value in ends(of)]
    return shown[0] if "–" in shown[1:] else f"{shown[0]} ({shown[1]}–{shown[2]})"


def mean_of(rows: Rows, arm: str, name: str, scale: str = "linear") -> Interval | None:
    """Return the mean of a column over policies, with Student's interval."""
    return seed_mean(column(select(rows, arm=arm), name), name, scale)


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return functions for the cells of the page, and its arms."""
    rows, slopes = tables["arms"], tables["slopes"]
    slope = {(row["arm"], row["seed"]): row["slope"] for row in slopes}

    def table_share(arm: str) -> Interval | None:
        """Return the share of V that lies in the table of embeddings, the mean over policies."""
        return seed_mean([1 - row["variance_rest"] / row["variance"] for row in select(rows, arm=arm)], "share")

    def progress(arm: str) -> Interval | None:
        """Return the mean over policies of V/slope² over that of the discrete arm: variance at equal progress."""
        both = [row for row in rows if row["arm"] in (arm, "discrete")]
        costs = [dict(row) | {"cost": quotient(row["variance"], slope[row["arm"], row["seed"]] ** 2)} for row in both]
        return over_discrete(costs, arm, "cost")

    return {
        "over_discrete": partial(over_discrete, rows), "mean_of": partial(mean_of, rows), "table_share": table_share,
        "slope_of": partial(mean_of, slopes, name="slope"), "progress": progress, "names": distinct(rows, "arm"),
        "slope_ratio": partial(over_discrete, slopes, name="slope", scale="linear"),
    }  # fmt: skip


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw V over that of discrete tokens, and success, against the noise of eight soft tokens."""
    rows = tables["arms"]
    arms = {row["arm"]: float(np.log10(row["noise"])) for row in rows if row["soft"] == 8}

    curves = []
    for part, (words, color) in PARTS.items():
        ratios = [over_discrete(rows, arm, f"variance{part}") for arm in arms]
        y, low, high = (np.log10([or_nan(ends(one)[end]) for one in ratios]).tolist() for end in range(3))
        curves.append(Curve(list(arms.values()), y, words, low, high, color))
    success = interval_curve({at: mean_of(rows, arm, "success") for arm, at in arms.items()}, "", "8 soft tokens", BLUE)
    discrete = mean_of(rows, "discrete", "success")
    rule = ((discrete.estimate, "discrete"),) if discrete else ()
    axis = "noise of 8 soft tokens, powers of ten"
    panels = [
        Panel("Variance over that of discrete tokens", "powers of ten", axis, curves, y_range=(0.0, 3.5)),
        Panel("Success", "mean over policies", axis, [success], rule, (0.0, 1.0), percent=True),
    ]  # fmt: skip
    return {"variance.svg": svg(panels, columns=2)}
