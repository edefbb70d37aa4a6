"""What the page of Counting readout needs beyond its tables: means over seeds, differences of arms, and its figures."""

import math
from collections.abc import Mapping
from typing import Any

from otb_analysis.figures.styles import BLUE, GREEN, GREY, ORANGE
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import seed_mean
from studies.lib import Rows, column, distinct, interval_columns, select
from studies.lib.formats import interval_curve
from studies.lib.seeds import by_seed, paired_difference

POLICIES = {
    ("direct", "untrained"): "untrained",
    ("written", "start"): "`written`: counts aloud only",
    ("written", "rows"): "… its digit rows trained",
    ("written", "rest"): "… all but them trained",
    ("written", "all"): "… all trained",
    ("direct", "start"): "`direct`: stopped early",
    ("direct", "rows"): "… its digit rows trained",
    ("direct", "rest"): "… all but them trained",
    ("direct", "all"): "… all trained",
}
"""Small policies by start and by what was trained from there, in the words of the page."""
ARMS = {"rows": ("digit rows", ORANGE), "rest": ("all but the digit rows", GREEN), "all": ("all", BLUE)}
READINGS = {"r_squared": "linear", "exact": "logit", "cos_probe": "log", "cos_shift": "log"}
ANSWERS = {"right": "logit", "of_layer": "logit", "of_score": "logit"}
"""Quantities with the scales of their intervals over seeds, on which shares stay below 1."""


def chance(width: int) -> float:
    """Return E|cos| = Γ(d/2)/(√π·Γ((d+1)/2)) of a random direction with any fixed one in d dimensions."""
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)


def over_seeds(rows: Rows, scales: Mapping[str, str]) -> dict[str, Any]:
    """Return means over seeds with Student's intervals."""
    means = {name: seed_mean(column(rows, name), name, scale) for name, scale in scales.items()}
    return {key: x for name, interval in means.items() for key, x in interval_columns(name, interval).items()}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return what each small policy holds in its last layer and answers, the gains of training, and chance."""
    layers, answers, curves = tables["layers"], tables["answers"], tables["curves"]
    last = max(column(layers, "layer"))
    policies = [
        {"policy": words, "start": start, "arm": arm}
        | over_seeds(select(layers, start=start, arm=arm, layer=last), READINGS)
        | over_seeds(select(answers, start=start, arm=arm), ANSWERS)
        for (start, arm), words in POLICIES.items()
    ]
    gains = [gain(curves, start, arm) for start in distinct(curves, "start") for arm in ("rows", "all")]
    small = {"policies": policies, "gains": gains, "chance_small": chance(layers[0]["width"])}
    if "real_layers" not in tables:  # the quick setting has no pretrained model
        return small | {"real": None}
    real, learned = tables["real_layers"], tables["real_curves"]
    ends = {arm: select(learned, arm=arm)[-1] for arm in ("rows", "all")}
    return small | {
        "real": real[-1], "best": max(real, key=lambda row: row["r_squared"]), "ends": ends,
        "chance_real": chance(real[0]["width"]), "before": learned[0],
        "best_of_all": max(select(learned, arm="all"), key=lambda row: row["right"]),
    }  # fmt: skip


def gain(curves: Rows, start: str, arm: str) -> dict[str, Any]:
    """Return what training an arm adds to π of the right digit, seed by seed."""
    rows = select(curves, start=start, arm=arm)
    first, last = (by_seed(select(rows, step=end(column(rows, "step"))), "right") for end in (min, max))
    added = paired_difference(last, first, "gain in π of the right digit")
    return {"start": start, "arm": arm, "seeds": len(first)} | interval_columns("gain", added)


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw what the layers of the pretrained model hold, and the learning curves."""
    note = "π of the right digit"
    panels = [
        learning(select(tables["curves"], start=start), f"Small, from {start}", f"{note}, mean over seeds")
        for start in distinct(tables["curves"], "start")
    ]
    if "real_layers" not in tables:
        return {"training.svg": svg(panels, columns=3)}
    by_layer = {row["layer"]: dict(row) | {"c": chance(row["width"])} for row in tables["real_layers"]}
    held = [interval_curve(by_layer, "r_squared", "probe", BLUE)]
    angles = [
        interval_curve(by_layer, "cos_probe", "probe", BLUE),
        interval_curve(by_layer, "cos_shift", "movement of the state with the count", ORANGE),
        interval_curve(by_layer, "c", "chance", GREY, dashed=True),
    ]
    of, angle = "R² of a linear probe on new prompts", "mean |cos| over ten digits"
    layers = [
        Panel("SmolLM2: the count in its states", of, "layer", held, y_range=(0.0, 1.0)),
        Panel("SmolLM2: angle with the digit rows", angle, "layer", angles, y_range=(0.0, 0.2)),
    ]
    panels.append(learning(tables["real_curves"], "SmolLM2", f"{note}, 95 % over prompts"))
    return {"layers.svg": svg(layers), "training.svg": svg(panels, columns=3)}


def learning(rows: Rows, title: str, note: str) -> Panel:
    """Return learning curves by what was trained: over seeds, or of one run as its rows have it."""
    curves = []
    for arm in distinct(rows, "arm"):
        at = {step: select(rows, arm=arm, step=step) for step in distinct(select(rows, arm=arm), "step")}
        points = {k / 100: x[0] if "right_low" in x[0] else over_seeds(x, {"right": "logit"}) for k, x in at.items()}
        curves.append(interval_curve(points, "right", *ARMS[arm]))
    return Panel(title, note, "hundred steps of 16 prompts", curves, y_range=(0.0, 1.0), percent=True)
