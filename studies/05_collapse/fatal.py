"""Who held the fatal gradient, and whether that differs from the largest gradient of a usual stretch of the run."""

import numpy as np

from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import Rows, distinct, markdown_table, select
from otb_analysis.study.seeds import difference_words
from otb_analysis.study.words import span_words

from .study import ARMS

SHARES = {
    "top_tokens": "top 1 % of tokens",
    "top_prompt": "largest prompt",
    "failed": "failed rollouts' share",
    "failed_tokens": "failed rollouts' tokens",
    "noise": "noise",
}
"""Columns that are shown in percent."""


def middle(values: list[float], form: str, scale: float = 1.0) -> str:
    """Return the median and the range, a dash without any."""
    scaled = [scale * value for value in values]
    return f"{np.median(scaled):{form}} ({span_words(scaled, form)})" if scaled else "–"


def paired(attribution: Rows) -> list[tuple[dict, dict]]:
    """Return the fatal and the control step of every run that has both."""
    control = {(row["arm"], row["seed"]): row for row in select(attribution, window="control")}
    fatal = select(attribution, window="fatal")
    return [(dict(row), dict(control[key])) for row in fatal if (key := (row["arm"], row["seed"])) in control]


def paired_change(attribution: Rows, name: str) -> Interval | None:
    """Return by how much fatal steps exceed control steps: the median over a seed's runs, then Student's over seeds."""
    pairs = paired(attribution)
    seeds = dict.fromkeys(fatal["seed"] for fatal, _ in pairs)
    changes = [
        float(np.median([fatal[name] - control[name] for fatal, control in pairs if fatal["seed"] == seed]))
        for seed in seeds
    ]
    return seed_mean(changes, f"fatal minus control {name}")


def fatal_table(attribution: Rows) -> str:
    """Return who held the fatal gradient, arm by arm."""
    lines = []
    for name in (arm for arm in ARMS if arm in distinct(attribution, "arm")):
        own = select(attribution, arm=name, window="fatal")
        before = middle([row["collapse"] - row["step"] for row in own], ".0f")
        surge = [row["grad_norm"] / row["usual_norm"] for row in own if row["usual_norm"]]
        shares = [middle([row[key] for row in own], ".0f", 100) for key in SHARES]
        lines.append([f"`{name}`", str(len(own)), before, middle(surge, ".1f"), *shares])
    headers = ["arm", "runs", "steps before", "‖ḡ‖ over the usual", *(f"{words}, %" for words in SHARES.values())]
    return markdown_table(headers, lines)


def control_table(attribution: Rows) -> str:
    """Return the fatal steps beside the control steps of the same runs, all arms together."""
    pairs = paired(attribution)
    lines = []
    for name, words in ({"grad_norm": "‖ḡ‖"} | SHARES).items():
        form, scale = (".1f", 1.0) if name == "grad_norm" else (".0f", 100.0)
        sides = [middle([pair[side][name] for pair in pairs], form, scale) for side in (0, 1)]
        change = difference_words(paired_change(attribution, name), scale, 1 if name == "grad_norm" else 0)
        higher = sum(fatal[name] > control[name] for fatal, control in pairs)
        unit = words if name == "grad_norm" else f"{words}, %"
        lines.append([unit, *sides, f"{higher} of {len(pairs)}", change])
    headers = ["quantity", "fatal step", "control step", "fatal higher", "difference over seeds"]
    return markdown_table(headers, lines)
