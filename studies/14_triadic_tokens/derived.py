"""What the page of Numbers in triads needs beyond its tables: differences and ratios over seeds, and its figure."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, ORANGE
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import seed_mean
from studies.lib import Rows, column, distinct, interval_columns, select
from studies.lib.formats import mean_curve
from studies.lib.seeds import by_seed, paired_difference

COLORS = {"characters": BLUE, "triads": ORANGE}
QUANTITIES = {
    "step": "steps until measured",
    "digit_tokens": "tokens with digits in an answer",
    "norm_digit": "mean ‖s‖² of a token with digits",
    "norm_answer": "Σ‖s‖² at the digits of an answer",
    "variance_digits": "V at the digits",
    "variance": "V, all tokens",
    "noise_scale": "noise scale V/‖∇J‖², prompts",
}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return success at the end and its differences by task, and ratios of what was measured."""
    curves = tables["curves"]
    return {"ends": [end_of(curves, task) for task in distinct(curves, "task")], "ratios": ratios(tables["policies"])}


def end_of(curves: Rows, task: str) -> dict[str, Any]:
    """Return success and −log π of a demonstration at the last check, and triads − characters seed by seed."""
    last = max(column(select(curves, task=task), "step"))
    row: dict[str, Any] = {"task": task, "step": last}
    for name in ("success", "nats"):
        by_tokens = {tokens: by_seed(select(curves, task=task, tokens=tokens, step=last), name) for tokens in COLORS}
        row |= {f"{name}_{tokens}": float(np.mean(list(values.values()))) for tokens, values in by_tokens.items()}
        difference = paired_difference(by_tokens["triads"], by_tokens["characters"], f"difference in {name}")
        row |= interval_columns(f"{name}_difference", difference)
        row["seeds"] = len(by_tokens["triads"].keys() & by_tokens["characters"].keys())
    return row


def ratios(policies: Rows) -> list[dict[str, Any]]:
    """Return the mean over seeds of triads over characters, of the seeds in which both were good enough."""
    rows = []
    for name, words in QUANTITIES.items():
        known = [row for row in policies if row[name] is not None]
        triads, characters = (by_seed(select(known, tokens=tokens), name) for tokens in ("triads", "characters"))
        known = [(triads[k], characters[k]) for k in sorted(triads.keys() & characters.keys())]
        if known:
            means = dict(zip(("triads", "characters"), map(float, np.mean(known, axis=0)), strict=True))
            row = {"quantity": name, "words": words, "seeds": len(known)} | means
            ratio = seed_mean([a / b for a, b in known], f"ratio of {words}", "log")
            rows.append(row | interval_columns("ratio", ratio))
    return rows


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw mean held-out success over steps."""
    curves = [dict(row) | {"step": row["step"] / 1000} for row in tables["curves"]]
    panels, note = [], "held-out success, mean over seeds"
    for task in distinct(curves, "task"):
        by_tokens = {tokens: select(curves, task=task, tokens=tokens) for tokens in COLORS}
        means = [mean_curve(rows, "step", "success", tokens, COLORS[tokens]) for tokens, rows in by_tokens.items()]
        title = f"Sums of terms up to {task}"
        panels.append(Panel(title, note, "thousand steps", means, y_range=(0.0, 1.0), percent=True))
    return {"success.svg": svg(panels, columns=3)}
