"""A run's verdicts in the terminal: alarms with their reasons, change points, advice, who holds a step's gradient."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from otb_analysis.diagnostics import (
    LEVELS,
    ChangePoint,
    advise_run,
    change_points,
    diagnose,
    trained_label,
    update_rollouts,
)
from otb_analysis.errors import InputError
from otb_analysis.figures import attribution_line, attribution_table, number
from otb_analysis.store import RunStore, largest_attributed_step, step_attribution, step_series

STYLE = {"alarm": "bold red", "watch": "yellow", "not measured": "dim", "too short": "dim", "ok": "green"}
NONE = "–"
NO_GRAMS = (
    "Not known: no step measured every estimator's gradient; the level exact does: "
    "otb train --measure.exact.every 10 --measure.exact.prompts 16."
)


def diagnosis(path: Path) -> list[Table | str]:
    """Return what `otb diagnose` prints about one run: its findings, change points, advice.

    Raises:
        InputError: The run does not exist or has no complete step.
        StoreError: It cannot be read.
    """
    store = RunStore(path)
    steps = store.steps_df()
    if steps.empty:
        raise InputError(f"run {path.name} has no complete step yet; wait for one, or train it again.")
    series = step_series(steps)
    title = f"{path.name}, steps {series.step[0]} to {series.step[-1]}"
    table = _table(title, ("level", "detector"), ("first watch", "first alarm"))
    table.add_column("why", overflow="fold")
    for found in diagnose(series):
        fired = [NONE if step is None else str(step) for step in (found.watch_step, found.alarm_step)]
        table.add_row(Text(found.level, STYLE[found.level]), found.detector, *fired, Text(found.reason))
    return [table, change_line(change_points(series)), f"Advice. {advice_line(store)}"]


def change_line(points: Sequence[ChangePoint]) -> str:
    """Return the change points in one sentence."""
    if not points:
        return "Change points: none of gradient norm, entropy, length and tail changed its level for good."
    said = [f"{p.column} at step {p.step} ({number(p.before)} → {number(p.after)})" for p in points]
    return f"Change points: {', '.join(said)}."


def advice_line(store: RunStore) -> str:
    """Return which estimator and group size to train with, or why that is not known.

    Raises:
        StoreError: The run cannot be read.
    """
    grams = store.grams()
    config = store.info.get("config")
    if not grams:
        return NO_GRAMS
    try:
        config = config if isinstance(config, dict) else {}
        present = trained_label(config, [label for gram in grams.values() for label in gram.labels])
        found = advise_run(grams, store.subgroup_grams(), present, n_rollouts=update_rollouts(config))
    except InputError as error:
        return f"Not known: {error}"
    return f"{found.reason} {found.sizes_line}"


def attribution(path: Path, step: int | None, top: int) -> list[Table | str]:
    """Return what `otb attribution` prints: the prompts, rollouts and tokens that hold a step's ‖ḡ‖².

    Raises:
        InputError: The run does not exist or the step was not attributed; the sentence says what measures it.
        StoreError: The run cannot be read.
    """
    store = RunStore(path)
    chosen = largest_attributed_step(store) if step is None else step
    found = step_attribution(store, chosen)
    tokens = store.tokens_df([chosen], ["rollout", "t", "token"])
    rollouts = store.rollouts_df([chosen], ["group", "rollout", "prompt", "reward"])
    tables = [
        holders_table(level, attribution_table(found, holders.head(top), tokens, rollouts), len(holders))
        for level in LEVELS
        for holders in [found.at(level)]
    ]
    gap = "" if found.gap is None else f" The shares add up to ‖ḡ‖² to {abs(found.gap):.0e} of it."
    return [f"{path.name}. {attribution_line(found)}{gap}", *tables]


def holders_table(level: str, rows: pd.DataFrame, total: int) -> Table:
    """Return one level of an attribution."""
    texts = [name for name in ("token", "text") if name in rows]
    table = _table(f"The {len(rows)} {level}s with the largest |share| of {total:,}", (), ())
    for name in rows:
        table.add_column(str(name), justify="left" if name in texts else "right", no_wrap=True)
    for _, row in rows.iterrows():
        table.add_row(*(_cell(str(name), row[name]) for name in rows))
    return table


def _cell(name: str, value: object) -> Text:
    if name in ("share", "signal", "noise"):
        return Text(f"{value:.2%}")
    return Text(number(float(str(value))) if name == "reward" else str(value))


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title), title_justify="left")
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
