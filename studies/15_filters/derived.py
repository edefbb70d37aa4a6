"""What the page of Filters of sampling needs beyond its tables: medians, means with intervals, its figure."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from otb_analysis.figures.styles import BLUE, GREY, ORANGE
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Rows, column, distinct, select
from studies.lib.formats import side_by_side

LABELS = {"dynamic, other prompts": BLUE, "dynamic, same prompt again": ORANGE, "prs": GREY}


def middle(rows: Rows, name: str) -> float | None:
    """Return the median of a column."""
    return float(np.median(values)) if (values := column(rows, name)) else None


def cosines(rows: Rows, label: str, estimator: str) -> Interval | None:
    """Return the mean cosine over batches, with its interval where batches differ."""
    return seed_mean(column(select(rows, filter=label, estimator=estimator), "cosine"), "cosine")


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return functions for the cells of the page."""

    def values(kind: str, name: str, what: str) -> list[float]:
        return column(select(tables["filters"], filter=kind, estimator=name), what)

    return {
        "cosines": partial(cosines, tables["batches"]), "worst": lambda *of: max(values(*of)), "labels": list(LABELS),
        "gain": lambda kind, name, what: seed_mean(values(kind, name, what), what, "log"),
    }  # fmt: skip


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the cosine of the mean update of several prompts and ∇J, for every estimator and filter."""
    names = distinct(tables["batches"], "estimator")
    by_label = {label: [cosines(tables["batches"], label, name) for name in names] for label in LABELS}
    curves = [side_by_side(by_label[label], k, "", label, color) for k, (label, color) in enumerate(LABELS.items())]
    note = "1: the filter changes lengths at most"
    axis = ", ".join(f"{k} {name}" for k, name in enumerate(names, 1))
    return {"filters.svg": svg([Panel("Cosine of the mean update and ∇J", note, axis, curves, ((1.0, ""),))])}
