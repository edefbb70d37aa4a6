"""B over A in gradient noise: ratios of efficiency, SF and variance on shared measured steps, with 95 % intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import trained_labels
from otb_analysis.figures.comparison import RATIOS, Row, compared
from otb_analysis.figures.curves import Quantity
from otb_analysis.figures.gradient_table import MEASURES
from otb_analysis.figures.intervals import columns_of
from otb_analysis.figures.numbers import interval_cell, shown_name
from otb_analysis.figures.pair_curves import BLOCKS, PairPanel, differs
from otb_analysis.figures.pairing import Pairing
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    NOTHING,
    REFERENCE,
    Interval,
    Update,
    decide,
    is_informative,
    update_ratios,
)
from otb_analysis.statistics.moments.absolute import has_signal
from otb_analysis.statistics.moments.gram import deleted_moments, prompts_of, truth_of, typical
from otb_analysis.types import Gram, Label, Proved

NOT_MEASURED = (
    "No gradient noise is compared: no step was measured in both. Give both the same --measure settings, or "
    "compare estimators of one run."
)
OTHER_PROMPTS = "The runs' own updates are not compared: at shared measured steps they answered other prompts."
UNLIKE = "No gradient noise is compared: the runs differ in {}, and such gradients do not compare."
FEWEST = 4
"""Blocks of measured steps that two estimators are compared in, where so many steps were measured."""

TITLES = {"efficiency": "efficiency", "sf": "variance at equal progress", "variance": "variance"}


@dataclass(frozen=True)
class RunGrams:
    """What one run measured of gradients: Gram matrices by step, reduced ones suffice."""

    config: Mapping[str, Any]
    grams: Mapping[int, Gram]
    scope: str

    @property
    def trained(self) -> Label | None:
        """The estimator that the run trains with; None where it was not measured."""
        return next(iter(trained_labels(self.config, self.grams.values())), None)


@dataclass(frozen=True)
class NoiseRow:
    """One comparison of gradient noise."""

    what: str
    ratios: tuple[Interval | None, ...]  # In the order of `RATIOS`: B over A; None where undefined
    n_steps: int
    n_prompts: int

    decides: str  # Which of them is judged: `sf` where both step lengths are proved, else `efficiency`
    together: Interval | None = None  # What is judged, where A was compared with more than B: it holds with all others
    looked_at: int = 1  # How many A was compared with

    @property
    def judged(self) -> Interval | None:
        """The ratio that says which of the two is less noisy."""
        if self.looked_at > 1:
            return self.together
        return self.ratios[[name for name, *_ in RATIOS].index(self.decides)]


@dataclass(frozen=True)
class NoiseInfo:
    """All comparisons of gradient noise of A and B, and why one is missing."""

    rows: tuple[NoiseRow, ...]
    notes: tuple[str, ...] = ()


def compare_noise(pairing: Pairing, runs: Mapping[str, RunGrams], known: Proved) -> NoiseInfo:
    """Compare what A and B train with, on the measured steps that the runs of a pair share.

    Each run's own update over the other's, on the same prompts; and, where the estimators differ, the one over the
    other on the same rollouts, those of both. Prompts are the clusters of both intervals.
    """
    sides = [[runs[pair[side]] for pair in pairing.pairs] for side in (0, 1)]
    steps = [sorted(set(one.grams) & set(other.grams)) for one, other in zip(*sides, strict=True)]
    labels = [{one.trained for one in side} for side in sides]
    if not any(steps) or any(len(some) != 1 or None in some for some in labels):
        return NoiseInfo((), (NOT_MEASURED,))
    every = [one for side in sides for one in side]
    for name, values in (("task", {str(r.config.get("task")) for r in every}), ("scope", {r.scope for r in every})):
        if len(values) > 1:
            return NoiseInfo((), (UNLIKE.format(name),))
    (a,), (b,) = labels
    assert a is not None and b is not None
    grams = [[one.grams[step] for one, shared in zip(side, steps, strict=True) for step in shared] for side in sides]
    own = _own((grams[0], a), (grams[1], b), known)
    same = None if a == b else _same([*grams[0], *grams[1]], a, b, known)
    return NoiseInfo(tuple(row for row in (own, same) if row), () if own else (OTHER_PROMPTS,))


def _own(a: tuple[Sequence[Gram], Label], b: tuple[Sequence[Gram], Label], known: Proved) -> NoiseRow | None:
    """One update over the other, each on its own rollouts; None where these answer other prompts."""
    named = all(gram.prompt is not None for grams, _ in (a, b) for gram in grams)
    if not named or prompts_of(a[0]) != prompts_of(b[0]):
        return None
    above, below = (Update(grams, label, typical([g.n_prompts for g in grams])) for grams, label in (b, a))
    truth = truth_of([*a[0], *b[0]], REFERENCE, known)
    pair = update_ratios(above, below, truth, known)
    along = all(has_signal(deleted_moments(grams, label, truth)) for grams, label in (a, b))
    may = {"variance": True, "sf": pair.c_known or along, "efficiency": along}
    ratios = tuple(one if is_informative(one := getattr(pair, name)) and may[name] else None for name, *_ in RATIOS)
    what, decides = "updates as trained, each run on its own rollouts", "sf" if pair.c_known else "efficiency"
    return NoiseRow(what, ratios, len(a[0]), len(prompts_of(a[0])), decides)


def _same(grams: Sequence[Gram], a: Label, b: Label, known: Proved) -> NoiseRow | None:
    """One estimator over another on the same rollouts; None where no step measured both, or group sizes differ."""
    both = [gram for gram in grams if a in gram.labels and b in gram.labels]
    if not both or len({round(gram.n_rollouts / max(gram.n_prompts, 1)) for gram in both}) > 1:
        return None
    row = _row(both, a, b, known)
    what = f"{shown_name(b)} ÷ {shown_name(a)} on the same rollouts"
    return NoiseRow(what, row.ratios, len(both), row.n_prompts, row.decides or "sf")  # a multiple is judged by nothing


def _rows(grams: Sequence[Gram], a: Label, b: Label, known: Proved) -> list[Row]:
    return compared(grams, decide(grams, a, known, only=[b]), [a, b], known)


def _row(grams: Sequence[Gram], a: Label, b: Label, known: Proved) -> Row:
    return _rows(grams, a, b, known)[1]


def default_estimators(names: Mapping[str, Label], trained: str) -> tuple[str, str]:
    """Return the two of at least two estimators, by name, to begin with: rloo, and the one that trained or otb."""
    base = "rloo" if "rloo" in names else next(iter(names))
    other = next((n for n, label in names.items() if label[0] in (trained, "otb") and n != base), None)
    return base, other or next(n for n in names if n != base)


def compare_estimators(
    grams: Mapping[int, Gram], a: Label, b: Label, known: Proved = NOTHING
) -> tuple[tuple[PairPanel, ...], NoiseInfo]:
    """Compare two estimators of one run on the same rollouts: over blocks of measured steps, and over all of them.

    A block has at least 16 prompts, and so an interval, where that leaves four blocks; else four blocks are points.
    """
    steps = sorted(step for step, gram in grams.items() if a in gram.labels and b in gram.labels)
    if not steps:
        return (), NoiseInfo((), (NOT_MEASURED,))
    prompts = sum(grams[step].n_prompts for step in steps)
    count = min(BLOCKS, len(steps), max(prompts // MIN_CLUSTERS, FEWEST))
    blocks = [[grams[steps[k]] for k in part] for part in np.array_split(np.arange(len(steps)), count)]
    at = np.array([float(np.mean(part)) for part in np.array_split(steps, count)])
    rows = [_rows(block, a, b, known) for block in blocks]
    whole = _row([grams[step] for step in steps], a, b, known)
    panels = [
        panel
        for index, (name, *_) in enumerate(RATIOS)
        if (panel := _panel(name, at, rows, (index, whole))) is not None
    ]
    what = f"{shown_name(b)} ÷ {shown_name(a)} on the same rollouts"
    row = NoiseRow(what, whole.ratios, len(steps), whole.n_prompts, whole.decides or "sf")
    return tuple(panels), NoiseInfo((row,))


def _panel(name: str, at: np.ndarray, rows: Sequence[Sequence[Row]], of: tuple[int, Row]) -> PairPanel | None:
    """One measure over blocks; None where no block shows both values."""
    index, whole = of
    shown = [k for k, (a, b) in enumerate(rows) if a.values[name] is not None and b.values[name] is not None]
    if not shown:
        return None
    values = np.array([[row.values[name] for row in rows[k]] for k in shown], float)
    measure = next(measure for measure in MEASURES if measure.column == name)
    quantity = Quantity(measure.title, measure.line, name, share=not measure.log, rare=True)
    ratios = tuple(rows[k][1].ratios[index] for k in shown)
    return PairPanel(
        quantity, at[shown], values[:, :1].T, values[:, 1:].T, at[shown], ratios, whole.ratios[index], ratio=True
    )


def noise_table(info: NoiseInfo) -> pd.DataFrame:
    """Return every ratio with its ends, as numbers."""
    rows = []
    for row in info.rows:
        record: dict[str, object] = {"what": row.what, "steps": row.n_steps, "prompts": row.n_prompts}
        for (name, *_), ratio in zip(RATIOS, row.ratios, strict=True):
            record |= columns_of(name, ratio)
        rows.append(record)
    return pd.DataFrame(rows)


def noise_display(info: NoiseInfo) -> pd.DataFrame:
    """Return every ratio as it is read: `not distinguishable` stands where its interval holds 1."""
    return pd.DataFrame(
        {
            "B ÷ A": row.what,
            **{TITLES[name]: ratio_words(ratio) for (name, *_), ratio in zip(RATIOS, row.ratios, strict=True)},
            "measured on": f"{row.n_prompts} prompts, {row.n_steps} steps",
        }
        for row in info.rows
    )


def ratio_words(ratio: Interval | None) -> str:
    """Return a ratio with its interval, and whether it is told from 1."""
    words = interval_cell(ratio)
    if ratio is None or ratio.low is None:
        return words
    return words if differs(ratio, 1.0) else f"{words}, not distinguishable"
