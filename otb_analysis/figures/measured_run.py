"""What one run's Gram matrices say, as the page Estimators shows it: conclusion, planner, how many steps to pool."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from otb_analysis.diagnostics.dead_groups import reward_groups
from otb_analysis.diagnostics.planner import Planner, plan
from otb_analysis.figures.conclusion import conclusion_sentences, trained_labels
from otb_analysis.figures.gradient_table import evenly, statistics_table
from otb_analysis.statistics import conclude
from otb_analysis.types import Gram, Proved

MAX_WINDOW = 10
"""Most measured steps that one point pools."""

NO_CONCLUSION = "No Gram matrix was measured, so no intervals are known."

PLANNED = ("step", "group", "reward", "prompt_id")
"""Columns of `rollouts` that the planner reads."""

Grams = Mapping[int, Gram]


def first_of(names: list[str]) -> str:
    """Return what the other estimators are compared with to begin with."""
    return "rloo" if "rloo" in names else names[0]


def conclusion_of(grams: Grams, known: Proved, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a run's comparisons with rloo say, in three sentences; none where no step was measured."""
    measured = list(grams.values())
    if not measured:
        return ()
    trained = trained_labels(config, measured)
    return conclusion_sentences(conclude(measured, known, first=trained), trained, config)


def planner_of(
    grams: Grams,
    subgroups: Mapping[int, Grams],
    rollouts: pd.DataFrame,
    steps: int,
    known: Proved,
    config: Mapping[str, Any],
) -> Planner:
    """Return how efficient a run's rollouts would be in groups of other sizes.

    Args:
        subgroups: Gram matrices of smaller groups, by size and step.
        rollouts: Columns `PLANNED` of all its rollouts, from so many complete `steps`.
    """
    trained = next(iter(trained_labels(config, grams.values())), None)
    return plan(grams, subgroups if grams else {}, trained, reward_groups(rollouts), steps, known)


def default_window(grams: Grams, known: Proved) -> int:
    """Return the fewest measured steps to pool with which most points have an efficiency; at most `MAX_WINDOW`."""
    for window in (1, 2, 3, 5):
        table: Any = statistics_table(grams, window, known, at=evenly(list(grams), 4))
        if table.empty or table["efficiency"].notna().mean() > 2 / 3:
            return window
    return MAX_WINDOW
