"""What the page of Soft tokens needs beyond its tables: means and ratios over policies, and its figure."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, ORANGE
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Rows, column, distinct, select
from studies.lib.formats import ends, or_nan
from studies.lib.seeds import by_seed

PARTS = {"": ("all parameters", BLUE), "_rest": ("without the table of embeddings", ORANGE)}


def over_discrete(rows: Rows, arm: str, name: str, against: str = "") -> Interval | None:
    """Return the mean over policies of a number over that of the discrete arm, policy by policy."""
    base = by_seed(select(rows, arm="discrete"), against or name)
    return seed_mean([row[name] / base[row["seed"]] for row in select(rows, arm=arm)], name, "log")


def large(of: Interval | None, digits: int = 0) -> str:
    """Return an interval with its thousands, where `interval` says only that they are more than 999."""
    shown = ["–" if value is None else f"{value:,.{digits}f}" for value in ends(of)]
    return shown[0] if "–" in shown[1:] else f"{shown[0]} ({shown[1]}–{shown[2]})"


def mean_of(rows: Rows, arm: str, name: str, scale: str = "linear") -> Interval | None:
    """Return the mean of a column over policies, with Student's interval."""
    values = column(select(rows, arm=arm), name)
    return seed_mean(values, name, scale) if values else None


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return functions for the cells of the page, and its arms."""
    rows, slopes = tables["arms"], tables["slopes"]

    def table_share(arm: str) -> Interval | None:
        """Return the share of V that lies in the table of embeddings, the mean over policies."""
        return seed_mean([1 - row["variance_rest"] / row["variance"] for row in select(rows, arm=arm)], "share")

    def slope_ratio(arm: str) -> Interval | None:
        """Return the mean over policies of the slope of J over that of the discrete arm."""
        base = by_seed(select(slopes, arm="discrete"), "slope")
        own = by_seed(select(slopes, arm=arm), "slope")
        return seed_mean([slope / base[seed] for seed, slope in own.items()], "slope over discrete")

    def progress(arm: str) -> Interval | None:
        """Return the mean over policies of V/slope² over that of the discrete arm."""
        cost = [
            {seed: v / slope[seed] ** 2 for seed, v in by_seed(select(rows, arm=name), "variance").items()}
            for name in (arm, "discrete")
            for slope in [by_seed(select(slopes, arm=name), "slope")]
        ]
        return seed_mean([cost[0][seed] / cost[1][seed] for seed in distinct(rows, "seed")], "V over slope²", "log")

    return {
        "over_discrete": partial(over_discrete, rows), "mean_of": partial(mean_of, rows), "table_share": table_share,
        "slope_of": lambda arm: mean_of(slopes, arm, "slope"), "slope_ratio": slope_ratio, "progress": progress,
        "names": distinct(rows, "arm"),
    }  # fmt: skip


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw V over that of discrete tokens, and success, against the noise of eight soft tokens."""
    rows = tables["arms"]
    arms = {row["arm"]: float(np.log10(row["noise"])) for row in rows if row["soft"] == 8}

    def curve(found: list[Interval | None], words: str, color: str, log: bool) -> Curve:
        y, low, high = ([or_nan(ends(one)[end]) for one in found] for end in range(3))
        if log:
            y, low, high = (np.log10(values).tolist() for values in (y, low, high))
        return Curve(list(arms.values()), y, words, low, high, color)

    curves = [
        curve([over_discrete(rows, arm, f"variance{part}") for arm in arms], words, color, log=True)
        for part, (words, color) in PARTS.items()
    ]
    success = [mean_of(rows, arm, "success") for arm in arms]
    discrete = mean_of(rows, "discrete", "success")
    rule = ((discrete.estimate, "discrete"),) if discrete else ()
    axis = "noise of 8 soft tokens, powers of ten"
    panels = [
        Panel("Variance over that of discrete tokens", "powers of ten", axis, curves, y_range=(0.0, 3.5)),
        Panel(
            "Success", "mean over policies", axis, [curve(success, "8 soft tokens", BLUE, log=False)], rule, (0.0, 1.0),
            percent=True,
        ),
    ]  # fmt: skip
    return {"variance.svg": svg(panels, columns=2)}
