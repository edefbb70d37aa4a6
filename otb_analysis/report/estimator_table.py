"""The terminal's table of estimators: on the same rollouts, best variance at equal progress first."""

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from otb_analysis.figures.conclusion import noise_scale_line, shown_name, signal_sentence
from otb_analysis.figures.numbers import MISSING, formatted, interval_cell
from otb_analysis.report.designs import Design
from otb_analysis.report.terminal import terminal_table
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    REFERENCE,
    Conclusion,
    GradientStatistics,
    Interval,
    PairedRatios,
    paired_ratios,
    pooled_statistics,
)
from otb_analysis.statistics.comparisons.verdicts import names
from otb_analysis.statistics.moments.absolute import NOT_SHOWN
from otb_analysis.types import Gram, Label

MATTER = 8
"""Rows that are shown unless another number is asked for."""

COMMON: tuple[Label, ...] = (
    ("none", "none"),
    ("group_mean", "none"),
    ("grpo", "none"),
    ("otb", "proxy"),
    ("otb_loo", "proxy"),
    ("sequence_optimal_loo", "proxy"),
    ("value", "none"),
    ("batch_mean", "none"),
)
"""Estimators that fill the table after the reference, those that trained, and the best."""

ABSOLUTE = ("efficiency", "variance")
"""Columns of numbers that compare with other batches only: shown where all rows are asked for."""
COLUMNS = ("SF ×rloo", "efficiency ×rloo", "efficiency", "equiv.", "c", "bias", "variance ×rloo", "variance")

TWO = ".2f"
"""Digits of ratios and shares."""

_ONE = Interval(1.0, None, None, 0, "itself")
ITSELF = PairedRatios(*REFERENCE, REFERENCE, _ONE, _ONE, _ONE)

EXPLAINED = """\
SF: variance at equal progress, variance/c²; below 1 is better · ×rloo: ratio on the same rollouts [95 % over prompts]
efficiency: share of an update that points along the true gradient ∇J · equiv.: rollouts rloo would need for the same
c: step length along ∇J; proved: SF is then a ratio of variances alone; ≈: estimated · –: not known on these prompts
bias: distance of the mean update from the true gradient; 0 = none detectable.
energy: what an estimator weights tokens by: exact ‖∇ log π‖², its free proxy from the logits, or none.
Ratios are of averages, not averages of ratios.
"""


def estimator_table(design: Design, top: int | None = None) -> tuple[Table, str]:
    """Return one row per estimator on the same rollouts, all measured steps of a design pooled, and how to read it.

    Rows are in the order of the SF ratio, those without its interval after the others, as measured.

    Args:
        top: Rows that are kept, the first ones; 0 keeps all, None the eight that matter.
    """
    grams, conclusion = design.grams, design.conclusion
    rows = {(r.estimator, r.energy_source): r for r in pooled_statistics(grams, known=design.known)}
    ratios = {(r.estimator, r.energy_source): r for r in paired_ratios(grams, known=design.known)}
    ratios[REFERENCE] = ITSELF
    different = [label for label in rows if not _repeats(label, conclusion)]
    ordered = sorted(different, key=lambda label: _rank(label, ratios))
    shown = _chosen(ordered, conclusion, design.trained, top)
    most = max(rows.values(), key=lambda r: r.n_clusters)
    part = f"; {len(shown)} of {len(ordered)} rows, --top 0 shows all" if len(shown) < len(ordered) else ""
    cells = {label: _cells(rows[label], ratios.get(label)) for label in shown}
    others = [row for label, row in cells.items() if label != REFERENCE]
    asked = [k for k in range(len(COLUMNS)) if top is not None or COLUMNS[k] not in ABSOLUTE]
    columns = [k for k in asked if any(row[k] != MISSING for row in others)]
    table = terminal_table(
        f"Estimators on the same rollouts, the least noisy at equal progress first ({design.name}{part}): "
        f"one update of {most.n_prompts} prompts "
        f"({most.n_rollouts} rollouts), measured on {most.n_clusters} prompts over {len(grams)} steps of all runs",
        "",
        ("estimator", "energy"),
        [COLUMNS[k] for k in columns],
    )
    for label, row in cells.items():
        table.add_row(*label, *(row[k] for k in columns))
    left_out = [COLUMNS[k] for k in asked if k not in columns]
    notes = _notes(design, grams, left_out)
    if top is not None and any(rows[label].shown_efficiency is None for label in shown):
        notes.append(NOT_SHOWN)
    return table, EXPLAINED + "\n".join(notes)


def _repeats(label: Label, conclusion: Conclusion) -> bool:
    return conclusion.alike[label].of != label and conclusion.alike[label].identical


def _rank(label: Label, ratios: dict[Label, PairedRatios]) -> float:
    """Rank by a ratio that has an interval: a point without one may be best by chance."""
    if label == REFERENCE:
        return 1.0
    ratio = ratios[label].sf if label in ratios else None
    return float("inf") if ratio is None or ratio.low is None else ratio.estimate


def _chosen(ordered: list[Label], conclusion: Conclusion, trained: Sequence[Label], top: int | None) -> list[Label]:
    if top is not None:
        return ordered[: top or None]
    best = [conclusion.best.label] if conclusion.best else []
    told = {verdict.label for verdict in conclusion.different}
    different = sorted((one for one in ordered if one in told), key=lambda one: one[1] == "exact")  # dear ones last
    wanted = [REFERENCE, *trained, *best, *different, *COMMON, *ordered]
    named = dict.fromkeys(
        conclusion.alike[one].of if _repeats(one, conclusion) else one for one in wanted if one in conclusion.alike
    )
    kept = list(named)[:MATTER]
    return [label for label in ordered if label in kept]


def _cells(row: GradientStatistics, ratio: PairedRatios | None) -> list[str]:
    sf = row.intervals["sf"]
    judged = row.c_known or (sf is not None and sf.low is not None)
    c = f"{row.projection:.4g} proved" if row.c_known else f"≈{row.projection:.2f}" if row.projection else MISSING
    return [
        interval_cell(ratio.sf if ratio else None, TWO),
        interval_cell(ratio.efficiency if ratio else None, TWO),
        interval_cell(row.intervals["efficiency"], TWO),
        interval_cell(row.intervals["rollout_equivalents"] if judged else None, ".0f"),
        c if judged else MISSING,
        interval_cell(row.intervals["relative_bias"] if judged else None, ".2g"),
        interval_cell(ratio.variance if ratio else None, TWO),
        formatted(row.variance, ".3g"),
    ]


def _notes(design: Design, grams: Sequence[Gram], left_out: Sequence[str]) -> list[str]:
    conclusion = design.conclusion
    notes = [*_told(conclusion, design.trained), *_alike(conclusion), *_rarer(grams)]
    scale = noise_scale_line(grams, (REFERENCE, *design.trained), design.known)
    notes += [line for line in (scale, signal_sentence(conclusion, design.trained)) if line]
    if left_out:
        few = conclusion.n_prompts < MIN_CLUSTERS
        why = f"an interval takes {MIN_CLUSTERS} prompts" if few else "noise exceeds the signal"
        notes.append(f"Not shown, since {why}: {', '.join(left_out)}.")
    if design.unproved:
        notes.append(f"c is estimated for every estimator ({design.unproved}).")
    return notes


def _told(conclusion: Conclusion, trained: Sequence[Label]) -> list[str]:
    """Say which estimators differ after false discoveries are controlled, and which of those that trained do not."""
    if conclusion.cause:
        return []
    base = conclusion.against[0]
    better = ", ".join(shown_name(v.label) for v in conclusion.different if v.better)
    worse = ", ".join(shown_name(v.label) for v in conclusion.different if v.worse)
    lines = [f"{words} than {base}: {which}" for words, which in (("better", better), ("worse", worse)) if which]
    listed = "; ".join(lines) or f"none of {names(conclusion.tested)}"
    notes = [f"Shown to differ from {base} (5 % false discoveries allowed): {listed}."]
    tied = [v.label[0] for v in conclusion.tested if not v.differs_in and v.label in trained]
    notes += [f"Corrected for step length, {name} and {base} cannot be told apart here." for name in tied]
    if conclusion.best:
        notes.append("Intervals above hold one by one; the one in the sentences is wider, since it was chosen.")
    return notes


def _alike(conclusion: Conclusion) -> list[str]:
    others = [(label, one) for label, one in conclusion.alike.items() if one.of != label]
    same = dict.fromkeys(f"{label[0]} = {one.of[0]}" for label, one in others if one.identical)
    times = [f"{label[0]} = {one.factor:.4g} × {one.of[0]}" for label, one in others if not one.identical]
    notes = [f"Identical on these rollouts, shown once: {', '.join(same)}."] if same else []
    return notes + ([f"The same update with another step length: {', '.join(times)}."] if times else [])


def _rarer(grams: Sequence[Gram]) -> list[str]:
    """One line on estimators that were not measured at every step, whose figures are of other policies."""
    steps = Counter(label for gram in grams for label in gram.labels)
    fewer = [f"{'/'.join(label)} ({n} of {len(grams)} steps)" for label, n in steps.items() if n < len(grams)]
    if not fewer:
        return []
    return [f"Not measured at every step, so only their ×rloo compares with the others: {', '.join(fewer)}."]
