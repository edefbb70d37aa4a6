"""The numbers of the pages Triage and Run for JSON, and the list of Triage for the terminal."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from otb_analysis.diagnostics import LEVELS, change_points, diagnose
from otb_analysis.errors import InputError
from otb_analysis.figures.alarms import fired_first
from otb_analysis.figures.attribution import (
    attribution_command,
    attribution_info,
    attribution_line,
    attribution_table,
    not_attributed,
)
from otb_analysis.figures.collapse import degenerate_table
from otb_analysis.figures.conclusion import advice_line
from otb_analysis.figures.detector_rates import RATES, foresight
from otb_analysis.figures.numbers import cell
from otb_analysis.figures.timeline import first_look, timeline_info
from otb_analysis.figures.triage import Triage, triage, triage_row, triage_table, verdict, worst_first
from otb_analysis.report.record import written
from otb_analysis.report.runs import config_of, estimator_of
from otb_analysis.report.terminal import terminal_table
from otb_analysis.report.verdicts import finding_record, opened
from otb_analysis.store import RunStore, attributed_steps, runs_df, step_attribution, step_series
from otb_analysis.store.measured import measured_grams
from otb_analysis.store.runs import can_be_opened, estimator_names

TOP = 50
"""Holders of a step's gradient that are listed per level, as on the page Run."""


def triaged(root: Path) -> list[Triage]:
    """Return every run of a folder as the page Triage lists them, the worst first.

    Raises:
        StoreError: The folder cannot be listed.
    """
    table = runs_df(root)
    names, readable = estimator_names(table), can_be_opened(table)

    def judged(run: str) -> tuple[pd.DataFrame, Any]:
        steps = RunStore(root / run).steps_df()
        return steps, diagnose(step_series(steps))

    return worst_first([
        triage_row(row, names.get(run, ""), (lambda run=run: judged(run)) if can else None)
        for run, can, (_, row) in zip(map(str, table["run"]), readable, table.iterrows(), strict=True)
    ])  # fmt: skip


def triage_record(rows: list[Triage]) -> dict[str, object]:
    """Return the sentence and the list of the page Triage for JSON."""
    return {"verdict": verdict(rows), "runs": [_listed(row) for row in rows]}


def _listed(row: Triage) -> dict[str, Any]:
    named = {"sentence": "what_happened", "reward": "reward_thinned", "age": "age_seconds"}
    return written({named.get(name, name): value for name, value in asdict(row).items()})


def triage_parts(rows: list[Triage]) -> list[Table | str]:
    """Return the same for the terminal."""
    table = triage_table(rows).drop(columns=["reward", "status"], errors="ignore")
    shown = terminal_table("", "", (), ())
    for name in table:
        shown.add_column(str(name), overflow="fold" if name in ("run", "what happened") else "ellipsis")
    for row in table.itertuples(index=False):
        shown.add_row(*(Text(cell(None if value != value else value)) for value in row))
    return [verdict(rows), shown] if rows else [verdict(rows)]


def diagnosis_record(path: Path, step: int | None = None, top: int = TOP, curves: bool = False) -> dict[str, object]:
    """Return the numbers of the page Run, and the run's line of Triage, for JSON; null where nothing fired.

    Args:
        step: A step whose attribution to add; None adds none.
        top: Prompts, rollouts and tokens of that attribution.
        curves: Add the curves of all panels, and what the n tokens with the largest shares hold.

    Raises:
        InputError: The run does not exist, has no complete step, or not this one.
        StoreError: It cannot be read.
    """
    store, steps = opened(path)
    series, config = step_series(steps), config_of(store)
    findings, points, (status, reason) = diagnose(series), change_points(series), store.standing
    row = triage(path.name, estimator_of(config), status, steps, findings, reason=reason)
    fired, others = fired_first(findings)
    info = timeline_info(steps, findings, points, more=True)
    record: dict[str, object] = {
        "run": row.run, "estimator": row.estimator, "status": status, "state": row.state,
        "what_happened": row.sentence, "first_warning": row.first_warning,
        "steps": {"count": row.steps, "first": int(series.step[0]), "last": int(series.step[-1])},
        "look_first_at": first_look([int(s) for s in series.step], findings),
        "detectors": [
            finding_record(f) | {"false_alarms": RATES[f.detector].false_alarms, "study_05": foresight(f.detector)}
            for f in [*fired, *others]
        ],
        "events": info.events, "change_points": points,
        "degenerate": degenerate_table({row.run: steps}).drop(columns="run").iloc[0].to_dict(),
        "advice": advice_line(measured_grams(store), store.subgroup_grams(), config),
    }  # fmt: skip
    if step is not None:
        record["attribution"] = _attribution(store, step, top, curves, [int(s) for s in series.step])
    if curves:
        record["panels"] = [
            {"column": s.quantity.column, "title": s.quantity.title, "step": s.step, "value": s.value, "mean": s.mean}
            for s in info.series
        ]
    return written(record)


def _attribution(store: RunStore, step: int, top: int, curves: bool, steps: list[int]) -> dict[str, object]:
    """Return who holds the gradient of a step, or why that is not known and what measures it."""
    if step not in steps:
        raise InputError(f"--step is {step}, but {store.path.name} has steps {steps[0]} to {steps[-1]}; pass one.")
    attributed = attributed_steps(store)
    if step not in attributed:
        missing, near = not_attributed(step, attributed)
        how, command = attribution_command(str(store.path), config_of(store), step)
        return {"step": step, "missing": f"{missing} {how}", "command": command, "nearest": near}
    shares = step_attribution(store, step)
    tokens = store.tokens_df([step], ["rollout", "t", "token"])
    rollouts = store.rollouts_df([step], ["group", "rollout", "prompt", "reward"])
    holders = {level: shares.at(level) for level in LEVELS}
    record: dict[str, object] = {
        "step": step, "grad_norm_sq": shares.norm_sq, "says": attribution_line(shares),
        "holders": {level: len(held) for level, held in holders.items()},
    }  # fmt: skip
    tables = {f"{level}s": attribution_table(shares, of.head(top), tokens, rollouts) for level, of in holders.items()}
    return record | tables | ({"held_by_n_tokens": attribution_info(shares).held} if curves else {})
