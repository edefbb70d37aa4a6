"""What pages and commands read of a run's measurements to compare its estimators and energies."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from otb_analysis.estimators import standing_for_truth
from otb_analysis.statistics import REFERENCE
from otb_analysis.store.reader import RunStore
from otb_analysis.store.token_arrays import EXACT_ROWS
from otb_analysis.types import Gram

MAX_TOKENS = 1_000_000
"""Most measured tokens that are loaded at once; beyond it a seeded choice of whole prompts is taken."""


def stored_config(store: RunStore) -> dict[str, Any]:
    """Return a run's configuration, nested; empty where it stored none."""
    config = store.info.get("config")
    return config if isinstance(config, dict) else {}


def measured_grams(store: RunStore, config: Mapping[str, Any] | None = None) -> dict[int, Gram]:
    """Return of every measured step what compares its estimators; a second call reads only new steps.

    Args:
        config: What may be believed of the run's configuration; by default all of it.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    config = stored_config(store) if config is None else config
    return store.reduced_grams((REFERENCE, standing_for_truth(store.stored_labels(), config)))


def exact_groups(store: RunStore, columns: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """Return columns of the policy tokens of prompts with exact norms, and how many tokens of the run have one.

    Of more than `MAX_TOKENS` a seeded choice of whole prompts is taken.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    steps = store.steps_with("tokens", "grad_norm_sq")
    count = store.sql(f"SELECT count(*) AS n FROM tokens WHERE {EXACT_ROWS}", steps=steps)
    total = int(count["n"].iloc[0])
    share = min(1000, 1000 * MAX_TOKENS // max(total, 1))
    groups = f'SELECT DISTINCT step, "group" FROM tokens WHERE {EXACT_ROWS} AND hash(step, "group") % 1000 < {share}'
    names = ", ".join(f'"{name}"' for name in columns)
    query = f'SELECT {names} FROM tokens WHERE mask AND (step, "group") IN ({groups})'
    return store.sql(query, steps=steps), total


def cheap_energies(store: RunStore, sources: Mapping[str, str]) -> list[str]:
    """Return which of some energies, by name and column, a run has beside exact norms.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    counts = ", ".join(f'count("{column}") AS "{name}"' for name, column in sources.items())
    recorded = store.sql(
        f"SELECT {counts} FROM tokens WHERE {EXACT_ROWS}", steps=store.steps_with("tokens", "grad_norm_sq")
    )
    return [name for name in sources if recorded[name].iloc[0]]


def token_steps(store: RunStore) -> list[int]:
    """Return the steps whose tokens and rollouts are stored.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    return sorted(set(store.steps_with("tokens", "step")) & set(store.steps_with("rollouts", "step")))


def exact_steps(store: RunStore) -> list[int]:
    """Return the steps at which some groups were measured exactly.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    query = "SELECT step FROM steps WHERE n_measured_prompts > 0 ORDER BY step"
    return [int(step) for step in store.sql(query)["step"]]


def first_step(steps: Sequence[int], exact: Sequence[int]) -> int:
    """Return the step to begin with: the last one with exact norms where its tokens are stored, else the last one."""
    return exact[-1] if exact and exact[-1] in steps else steps[-1]
