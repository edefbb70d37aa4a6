"""Default options of the estimators that a study names: those its tables were made with, and those of today.

A default may change after a table was committed. The table then belongs to another estimator of the same name; its
page must say so. Beside the tables lies `defaults.csv`, which holds the defaults of the day on which they were made.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from otb_analysis.estimators import ESTIMATORS
from otb_analysis.estimators.spec import AUTO, LEAST_RIDGE, RIDGES
from studies.lib.cache import Finished
from studies.lib.record import Cell, Rows

DEFAULTS = "defaults"
"""Name of the table of a study that names an estimator with options."""
UNKNOWN = "not recorded"


def default_options() -> dict[str, str]:
    """Return today's defaults of every estimator with options, as in `tail = own_return; decay = 0.9`."""
    options = {name: spec.options() for name, spec in ESTIMATORS.items() if fields(spec.options)}
    return {
        name: "; ".join(f"{field.name} = {_words(getattr(own, field.name))}" for field in fields(own))
        for name, own in options.items()
    }


def _words(value: Any) -> str:
    if value == AUTO:
        return ", ".join([*(f"{ridge:g} below {most} prompts" for most, ridge in RIDGES), f"then {LEAST_RIDGE:g}"])
    return " ".join(value) if isinstance(value, tuple) else str(value)


def named_estimators(facts: Any) -> list[str]:
    """Return the estimators with options that a cell's settings or a table's rows name, also within a portfolio."""
    words = set(re.findall(r"\w+", json.dumps(facts, default=str)))
    return [name for name in default_options() if name in words]


def defaults_table(cells: Sequence[Cell], results: Sequence[Finished]) -> Rows:
    """Return which defaults the estimators that cells name had when the cells' tables were measured."""
    found = dict[tuple[str, str], dict[str, None]]()
    for cell, one in zip(cells, results, strict=True):
        for name in named_estimators([cell.settings, one.tables]):
            tables = found.setdefault((name, one.defaults.get(name, UNKNOWN)), {})
            tables |= dict.fromkeys(one.tables)
    return [{"estimator": name, "defaults": then, "tables": " ".join(of)} for (name, then), of in found.items() if of]


def outdated_defaults(rows: Rows) -> Rows:
    """Return the rows of `recorded` whose defaults are not today's, with what differs `then` and `today`."""
    today = {name: words.split("; ") for name, words in default_options().items()}
    out = list[dict[str, str]]()
    for row in rows:
        then, now = row["defaults"].split("; "), today.get(row["estimator"], ["no such estimator"])
        if then != now:
            differ = {"then": [o for o in then if o not in now], "today": [o for o in now if o not in then]}
            out.append(dict(row) | {when: "; ".join(which) for when, which in differ.items()})
    return out
