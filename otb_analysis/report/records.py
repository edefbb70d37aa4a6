"""Answers for JSON: the same records that tables are made of; null where a number is unknown or infinite."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.answers import MeasuredSteps, RunAnswers, designs
from otb_analysis.answers.measured import forest_words
from otb_analysis.answers.pairs import Sides, estimator_pair, pair_of, pairing_of
from otb_analysis.answers.triage import Triage, finding_record, headline, verdict
from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.alarms import RATES, fired_first, foresight
from otb_analysis.figures.comparison import comparison_table, planner_table
from otb_analysis.figures.curves import curves_table, degenerate_table, grouped_info, learning_info
from otb_analysis.figures.pairs import block_rows, curves_rows, noise_table, pair_table
from otb_analysis.figures.runs import config_differences, grouped
from otb_analysis.figures.timeline import timeline_info

SCHEMA = "urn:otb-analysis:{}:1"
"""What JSON for scripts follows: the name of a file in docs/schemas, and its version, raised where a key is no more."""


def jsonable(value: Any) -> Any:
    """Return a value as JSON can write it: null for every number that is unknown, NaN or infinite.

    Dataclasses become objects, arrays lists, tables lists of one object per row; what JSON has no word for becomes
    text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): jsonable(part) for name, part in value.items()}
    if isinstance(value, pd.DataFrame):
        return [jsonable(row) for row in value.astype(object).to_dict("records")]
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(part) for part in value]
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) else str(value)


def following(schema: str, record: Any) -> Any:
    """Return a record, or each of a list, with the schema that it follows as its first key (docs/schemas)."""
    if isinstance(record, list):
        return [following(schema, one) for one in record]
    return {"schema": SCHEMA.format(schema)} | record


def comparison_record(
    runs: Mapping[str, RunAnswers], sides: Sides | None = None, curves: bool = False, window: int = 10, by: str = ""
) -> dict[str, object]:
    """Return what each run learned and says, what each design of them decides, B against A, settings that differ.

    Args:
        sides: What `pair` compares; of one run, which estimators.
        curves: Add learning curves with running means over `window` steps, and the curves behind `pair`.
        by: A setting in which the runs differ: the curves are means over the runs of each of its values.

    Raises:
        InputError: A setting, side or estimator does not exist.
        StoreError: A run cannot be read.
    """
    sides = sides or Sides()
    steps = {name: run.steps for name, run in runs.items()}
    pairing, (only, *others) = pairing_of(runs, sides if sides.setting else None), runs.values()
    pair = None if pairing is None else pair_of(runs, pairing)
    if not others and only.measured is not None:
        pair = estimator_pair(only.measured, sides.a, sides.b)
    differences = config_differences({name: run.config for name, run in runs.items()})
    rows = [
        {
            **dict(zip(("status", "reason"), run.store.live_status, strict=True)),
            "run": name, "estimator": run.estimator, "steps": len(run.steps), **asdict(headline(run.steps)),
            "alarm": run.alarm, "conclusion": run.lines,
            "proxy": run.proxy, "proxy_words": run.proxy_line,
            "planner": asdict(run.planner) | {"cells": planner_table(run.planner)},
            "fidelity": [{"of": title} | asdict(fidelity) for title, fidelity in run.fidelity],
        }
        for name, run in runs.items()
    ]  # fmt: skip
    record: dict[str, object] = {
        "runs": rows, "estimators": [decision_record(of) for of in designs(runs).values()],
        "settings": differences.table, "pair": pair and {
            "a": pair.a, "b": pair.b, "verdict": pair.verdict, "quantities": pair_table(pair.panels),
            "blocks": block_rows(pair.panels), "gradient_noise": noise_table(pair.noise), "notes": pair.notes,
        },
    }  # fmt: skip
    if curves:
        settings = list(differences.table["setting"])
        if by and by not in settings:
            raise InputError(f"--by is {by!r}, in which these runs do not differ; {nearest(by, settings)}")
        info = grouped_info(steps, grouped(differences, by), window) if by else learning_info(steps, {}, window)
        record["learning"] = curves_table(info)
        record["pair_curves"] = None if pair is None else curves_rows(pair.panels)
    return record


def decision_record(steps: MeasuredSteps) -> dict[str, object]:
    """Return a decision with its sentences and every estimator over `rloo`."""
    decision, beside = steps.decision, steps.against_rloo
    info = None if steps.over_rloo.cause == "no reference" else steps.comparison()
    return {
        "design": steps.name, "steps": len(steps.grams), "prompts": decision.n_prompts, "conclusion": steps.lines,
        "reservations": steps.reservations, "alarm": steps.alarm, "recommended": decision.best,
        "compared_with": decision.against, "looked_at": decision.looked_at, "n_needed": decision.n_needed,
        "comparisons": decision.comparisons,
        "beside_rloo": None if beside is None else {"recommended": beside.best, "comparisons": beside.comparisons},
        "against": steps.over_rloo.against[0], "words": info and forest_words(info), "noise_scale": steps.noise_scale(),
        "rows": [] if info is None else comparison_table(info),
    }  # fmt: skip


def triage_record(rows: list[Triage]) -> dict[str, object]:
    """Return the sentence and the list of the page Triage."""
    named = {"sentence": "what_happened", "reward": "reward_thinned", "age": "age_seconds"}
    listed = [{named.get(name, name): value for name, value in vars(row).items()} for row in rows]
    return {"verdict": verdict(rows), "runs": listed}


def diagnosis_record(run: RunAnswers, step: int | None = None, top: int = 50, curves: bool = False) -> dict[str, Any]:
    """Return the numbers of the page Run, and the run's line of Triage; null where nothing fired.

    Args:
        step: A step whose attribution to add, or else the sizes of its tokens; None adds none.
        top: Prompts, rollouts and tokens of that attribution.
        curves: Add the curves of all panels.

    Raises:
        InputError: The run has no complete step, or not this one.
        StoreError: It cannot be read.
    """
    row, steps = run.triage, [int(s) for s in run.series.step]
    fired, others = fired_first(run.findings)
    info = timeline_info(run.steps, run.findings, run.changes, more=True, outliers=run.outliers)
    record: dict[str, Any] = {
        "run": row.run, "estimator": row.estimator, "status": row.status, "state": row.state,
        "what_happened": row.sentence, "first_warning": row.first_warning, "reward_fell": row.reward_fell,
        "steps": {"count": row.steps, "first": steps[0], "last": steps[-1]},
        "look_first_at": run.look,
        "detectors": [
            finding_record(f) | {"false_alarms": RATES[f.detector].false_alarms, "study_05": foresight(f.detector)}
            for f in [*fired, *others]
        ],
        "events": info.events, "change_points": run.changes,
        "outliers": run.outliers, "outlier_words": run.outlier_line, "mismatch_words": run.mismatch_line,
        "degenerate": degenerate_table({row.run: run.steps}).drop(columns="run").iloc[0].to_dict(),
        "alarm": run.alarm, "conclusion": run.lines,
    }  # fmt: skip
    if step is not None:
        record |= run.held_record(step, top)
    if curves:
        record["panels"] = [
            {"column": s.quantity.column, "title": s.quantity.title, "step": s.step, "value": s.value, "mean": s.mean}
            for s in info.series
        ]
    return record
