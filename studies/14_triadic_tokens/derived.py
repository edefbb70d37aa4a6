"""What the page of Numbers in triads needs beyond its tables: differences and ratios over seeds, and its figure."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, ORANGE
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import seed_mean
from studies.lib import Rows, column, distinct, interval_columns, select
from studies.lib.formats import mean_curve

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
        found = {
            tokens: {one["seed"]: one[name] for one in select(curves, task=task, tokens=tokens, step=last)}
            for tokens in COLORS
        }
        seeds = sorted(found["triads"].keys() & found["characters"].keys())
        row |= {f"{name}_{tokens}": float(np.mean(list(values.values()))) for tokens, values in found.items()}
        difference = seed_mean([found["triads"][k] - found["characters"][k] for k in seeds], f"difference in {name}")
        row |= interval_columns(f"{name}_difference", difference) | {"seeds": len(seeds)}
    return row


def ratios(policies: Rows) -> list[dict[str, Any]]:
    """Return the mean over seeds of triads over characters, of the seeds in which both were good enough."""
    by_seed = {tokens: {row["seed"]: row for row in select(policies, tokens=tokens)} for tokens in COLORS}
    seeds = sorted(by_seed["triads"].keys() & by_seed["characters"].keys())
    rows = []
    for name, words in QUANTITIES.items():
        pairs = [(by_seed["triads"][seed][name], by_seed["characters"][seed][name]) for seed in seeds]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not known:
            continue
        found = seed_mean([a / b for a, b in known], f"ratio of {words}", "log")
        means = {
            f"{tokens}": float(np.mean([pair[k] for pair in known]))
            for k, tokens in enumerate(("triads", "characters"))
        }
        rows.append({"quantity": name, "words": words, "seeds": len(known)} | means | interval_columns("ratio", found))
    return rows


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw mean held-out success over steps."""
    curves = [dict(row) | {"step": row["step"] / 1000} for row in tables["curves"]]
    panels = [
        Panel(
            f"Sums of terms up to {task}",
            "held-out success, mean over seeds",
            "thousand steps",
            [
                mean_curve(select(curves, task=task, tokens=tokens), "step", "success", tokens, color)
                for tokens, color in COLORS.items()
            ],
            y_range=(0.0, 1.0),
            percent=True,
        )
        for task in distinct(curves, "task")
    ]
    return {"success.svg": svg(panels, columns=3)}
