"""The four measures of gradient estimators as one table, with intervals, and what estimators are called in figures."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from otb_analysis.figures.styles import Style, estimator_style
from otb_analysis.statistics import NOTHING, pooled_statistics
from otb_analysis.types import Gram, Label, Proved

MAX_WINDOW = 10
"""Most measured steps that one point pools."""

MAX_POINTS = 40
"""Most measured steps at which estimators are drawn over time."""


@dataclass(frozen=True)
class Measure:
    """One way to compare gradient estimators: a column, how its panel is titled, what it is in one line."""

    column: str
    title: str
    line: str
    formula: str
    log: bool = False


MEASURES = (
    Measure(
        "efficiency", "Efficiency", "share of the update along the true gradient",
        "⟨m, ∇J⟩² / (‖∇J‖² · (‖m‖² + variance)): share of an update of P prompts along ∇J, the true gradient.",
    ),
    Measure(
        "sf", "Variance at equal progress", "variance ÷ c², norm²; lower is better",
        "Variance at equal progress: SF = batch variance ÷ projection²; the variance itself where c is 1.", log=True,
    ),
    Measure(
        "variance", "Batch variance", "norm², smaller for shorter steps, too",
        "Σ_p ‖ḡ_p − ḡ‖² / (P(P − 1)) over the P measured prompts, ḡ_p the mean gradient of prompt p's group.", log=True,
    ),
    Measure(
        "projection", "Step length c", "along the true gradient; 1 is as long as it",
        "⟨m, ∇J⟩ / ‖∇J‖², m the estimator's mean gradient, ∇J from unbiased ones on other prompts; 1 where proved.",
    ),
)  # fmt: skip


NOISE_SCALE = (
    "Noise scale",
    "V / ‖m‖² in prompts, V the variance of one prompt's group gradient: at this many prompts the noise of an update "
    "is as large as its signal. An unbiased estimator with P prompts has efficiency P / (P + noise scale). It is not "
    "shown by itself where fewer prompts were measured than a third of the noise scale.",
)
"""Name of the noise scale, and what it is in one line."""


def labels(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return how estimators are called side by side: `otb · proxy` where several energy sources meet, else `otb`."""
    pairs = list(pairs)
    several = len({source for _, source in pairs if source != "none"}) > 1
    return {(e, s): f"{e} · {s}" if several and s != "none" else e for e, s in pairs}


def trace_style(estimator: str, energy_source: str) -> Style:
    """Return the estimator's style; anything but exact energies is drawn dotted."""
    style = estimator_style(estimator)
    if energy_source in ("none", "exact"):
        return style
    return Style(style.color, "dot" if style.dash == "solid" else "dashdot", style.symbol)


def evenly(steps: Sequence[int], most: int = MAX_POINTS) -> list[int]:
    """Return at most so many of the steps, evenly spread, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int)
    return [steps[place] for place in places]


def statistics_table(
    grams: Mapping[int, Gram],
    window: int = 1,
    known: Proved = NOTHING,
    at: Collection[int] | None = None,
    only: Collection[Label] | None = None,
) -> pd.DataFrame:
    """Return the four measures of every estimator at measured steps, with intervals clustered by prompt.

    Row (step, estimator) pools the last `window` measured steps: sums over steps first, then ratios. Where these hold
    fewer than 16 prompts there is a point and no interval; where ‖∇J‖² is lost in the noise there is not even a point
    of what is measured against it, nor of the efficiency where fewer prompts were measured than a third of the noise
    scale.

    Args:
        at: Only these measured steps; None means all.
        only: The estimators that get rows; None means all.
    """
    records = []
    steps = sorted(grams)
    for last in (i for i, step in enumerate(steps) if at is None or step in at):
        pooled = [grams[s] for s in steps[max(0, last + 1 - window) : last + 1]]
        for statistics in pooled_statistics(pooled, known=known, only=only):
            shown = {name: statistics.shown(name) for name in (*(m.column for m in MEASURES), "relative_bias")}
            record: dict[str, object] = {
                "step": steps[last],
                **statistics.as_row(),
                "n_clusters": statistics.n_clusters,
            }
            record |= {name: None for name, interval in shown.items() if interval is None}
            for measure in MEASURES:
                interval = shown[measure.column]
                record[f"{measure.column}_low"] = None if interval is None else interval.low
                record[f"{measure.column}_high"] = None if interval is None else interval.high
            records.append(record)
    table = pd.DataFrame(records)
    numeric = [f"{m.column}{end}" for m in MEASURES for end in ("", "_low", "_high")]
    return table.astype(dict.fromkeys(numeric, float)) if len(table) else table


def default_window(grams: Mapping[int, Gram], known: Proved) -> int:
    """Return the fewest measured steps to pool with which most points have an efficiency; at most `MAX_WINDOW`.

    One, if no point has one with any of these.
    """
    shares = {}
    for window in (1, 2, 3, 5, MAX_WINDOW):
        table = statistics_table(grams, window, known, at=evenly(list(grams), 4))
        shares[window] = 1.0 if table.empty else table["efficiency"].notna().to_numpy().mean()
        if shares[window] > 2 / 3:
            return window
    return MAX_WINDOW if any(shares.values()) else 1
