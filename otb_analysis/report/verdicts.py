"""A run's verdicts in the terminal: alarms with their reasons, change points, advice, who holds a step's gradient."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.table import Table
from rich.text import Text

from otb_analysis.diagnostics import LEVELS, ChangePoint, Finding, StepAttribution, change_points, diagnose
from otb_analysis.errors import InputError
from otb_analysis.figures.attribution import attribution_line, attribution_table
from otb_analysis.figures.conclusion import advice_line
from otb_analysis.figures.numbers import MISSING, number
from otb_analysis.report.runs import config_of
from otb_analysis.report.terminal import terminal_table
from otb_analysis.store import RunStore, largest_attributed_step, step_attribution, step_series
from otb_analysis.store.measured import measured_grams

STYLE = {"alarm": "bold red", "watch": "yellow", "not measured": "dim", "too short": "dim", "ok": "green"}

Held = tuple[pd.DataFrame, int]
"""The rows of one level that are shown, and how many there are."""


def diagnosis(path: Path) -> list[Table | str]:
    """Return what `otb diagnose` prints about one run: its findings, change points, advice.

    Raises:
        InputError: The run does not exist or has no complete step.
        StoreError: It cannot be read.
    """
    store, steps = opened(path)
    series = step_series(steps)
    title = f"{path.name}, steps {series.step[0]} to {series.step[-1]}"
    table = terminal_table(title, "", ("level", "detector"), ("first watch", "first alarm"))
    table.add_column("why", overflow="fold")
    for finding in diagnose(series):
        fired = [MISSING if step is None else str(step) for step in (finding.watch_step, finding.alarm_step)]
        table.add_row(Text(finding.level, STYLE[finding.level]), finding.detector, *fired, Text(finding.reason))
    advice = advice_line(measured_grams(store), store.subgroup_grams(), config_of(store))
    return [table, change_line(change_points(series)), f"Advice. {advice}"]


def finding_record(finding: Finding) -> dict[str, object]:
    """Return a finding as JSON can write it."""
    return {
        "detector": finding.detector,
        "level": finding.level,
        "first_watch": finding.watch_step,
        "first_alarm": finding.alarm_step,
        "why": finding.reason,
    }


def opened(path: Path) -> tuple[RunStore, pd.DataFrame]:
    """Open a run and read its steps.

    Raises:
        InputError: The run does not exist or has no complete step.
        StoreError: It cannot be read.
    """
    store = RunStore(path)
    steps = store.steps_df()
    if steps.empty:
        raise InputError(f"run {path.name} has no complete step yet; wait for one, or train it again.")
    return store, steps


def change_line(points: Sequence[ChangePoint]) -> str:
    """Return the change points in one sentence."""
    if not points:
        return "Change points: none of gradient norm, entropy, length and tail changed its level for good."
    listed = [f"{p.column} at step {p.step} ({number(p.before)} → {number(p.after)})" for p in points]
    return f"Change points: {', '.join(listed)}."


def attribution(path: Path, step: int | None, top: int) -> list[Table | str]:
    """Return what `otb attribution` prints: the prompts, rollouts and tokens that hold a step's ‖ḡ‖².

    `step` is by default the attributed one with the largest gradient.

    Raises:
        InputError: The run does not exist or the step was not attributed; the sentence says what measures it.
        StoreError: The run cannot be read.
    """
    shares, holders = attributed(RunStore(path), step, top)
    tables = [holders_table(level, *rows) for level, rows in holders.items()]
    gap = "" if shares.gap is None else f" The shares add up to ‖ḡ‖² to {abs(shares.gap):.0e} of it."
    return [f"{path.name}. {attribution_line(shares)}{gap}", *tables]


def attributed(store: RunStore, step: int | None, top: int) -> tuple[StepAttribution, dict[str, Held]]:
    """Return the attribution of a step, and the `top` rows of each level, in per cent, with the number of all."""
    chosen = largest_attributed_step(store) if step is None else step
    shares = step_attribution(store, chosen)
    tokens = store.tokens_df([chosen], ["rollout", "t", "token"])
    rollouts = store.rollouts_df([chosen], ["group", "rollout", "prompt", "reward"])
    by_level = {level: shares.at(level) for level in LEVELS}
    return shares, {
        level: (_percent(attribution_table(shares, holders.head(top), tokens, rollouts)), len(holders))
        for level, holders in by_level.items()
    }


def _percent(rows: pd.DataFrame) -> pd.DataFrame:
    shares = [name for name in ("share", "signal", "noise") if name in rows]
    return rows.assign(**{name: [f"{value:.2%}" for value in rows[name]] for name in shares})


def holders_table(level: str, rows: pd.DataFrame, total: int) -> Table:
    """Return one level of an attribution, of `total` holders those in `rows`."""
    table = terminal_table(f"The {len(rows)} {level}s with the largest |share| of {total:,}", "", (), ())
    for name in rows:
        table.add_column(str(name), justify="left" if name in ("token", "text") else "right", no_wrap=True)
    for row in rows.to_dict("records"):
        table.add_row(*(Text(number(value) if name == "reward" else str(value)) for name, value in row.items()))
    return table
