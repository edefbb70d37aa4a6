"""A run's alarms with their reasons, change points, what its rollouts say; who holds a step's gradient; all runs."""

from typing import Any

import pandas as pd

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.holders import Attributed, NotAttributed
from otb_analysis.answers.triage import Triage, triage_table, verdict
from otb_analysis.diagnostics import LEVELS
from otb_analysis.errors import InputError
from otb_analysis.figures.alarms import TITLES
from otb_analysis.figures.styles import MISSING
from otb_analysis.report.document import Grid, Part


def diagnosis_parts(run: RunAnswers) -> list[Part]:
    """Return what `otb diagnose` prints about one run: alarm of its sampler, findings, changes, outliers, lines."""
    series = run.series
    rows = pd.DataFrame(
        {
            "level": finding.level, "detector": TITLES[finding.detector],
            "first watch": MISSING if finding.watch_step is None else str(finding.watch_step),
            "first alarm": MISSING if finding.alarm_step is None else str(finding.alarm_step), "why": finding.reason,
        }
        for finding in run.findings
    )  # fmt: skip
    title = f"{run.name}, steps {series.step[0]} to {series.step[-1]}"
    grid = Grid("", rows, title, texts=("detector",), folds=("why",))
    alarm, lines = ([run.lines[0]], run.lines[1:]) if run.alarm else ([], run.lines)
    seen = [run.change_line, *filter(None, [run.outlier_line, run.mismatch_line])]
    return [*alarm, grid, "\n".join(seen), "\n".join(lines)]


def attribution_parts(run: RunAnswers, step: int | None, top: int) -> list[Part]:
    """Return what `otb attribution` prints: the prompts, rollouts and tokens that hold a step's ‖ḡ‖², else their sizes.

    `step` is by default the one to look at first.

    Raises:
        InputError: The step was not attributed, and no size is known; the sentence says what measures it.
        StoreError: The run cannot be read.
    """
    holding = run.attribution(step := run.look if step is None else step)
    if isinstance(holding, NotAttributed):
        measured_by = f"{holding.missing} {holding.command}".strip()
        if (large := run.sizes(step)) is None:
            raise InputError(measured_by)
        return [f"{run.name}. {large.says}", *holder_grids(large, top), measured_by]
    gap = "" if holding.shares.gap is None else f" The shares add up to ‖ḡ‖² to {abs(holding.shares.gap):.0e} of it."
    return [f"{run.name}. {holding.says}{gap}", *holder_grids(holding, top)]


def holder_grids(found: Attributed, top: int) -> list[Grid]:
    """Return one table per level of an attribution, the largest shares or sizes first, in per cent."""
    grids = []
    for level in LEVELS:
        rows, total = found.holders(level, top), len(found.shares.at_level(level))
        shares = [name for name in ("share", "signal", "noise") if name in rows]
        rows = rows.assign(**{name: [f"{value:.2%}" for value in rows[name]] for name in shares})
        rows, largest = rows.rename(columns={"share": found.part}), {"share": "|share|"}.get(found.part, found.part)
        title = f"The {len(rows)} {level}s with the largest {largest} of {total:,}"
        grids.append(Grid("", rows, title, texts=("token", "text")))
    return grids


def triage_parts(rows: list[Triage]) -> list[Part]:
    """Return the list of Triage for the terminal."""
    if not rows:
        return [verdict(rows)]
    table: Any = triage_table(rows).drop(columns=["reward", "status"], errors="ignore")
    table = table.astype(object).where(table.notna(), None)
    return [verdict(rows), Grid("", table, texts=("state", "estimator"), folds=("run", "what happened"))]
