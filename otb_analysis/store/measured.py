"""What pages and commands read of a run's measurements: exact norms, and the attribution of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import AttributedTokens, StepAttribution, attribute_step
from otb_analysis.errors import InputError
from otb_analysis.store.reader import RunStore
from otb_analysis.store.token_arrays import EXACT_ROWS, floats

MAX_TOKENS, LEAST_GROUPS = 500_000, 16
"""Tokens of measured prompts that are loaded at once; of more, whole prompts by chance, but as many as intervals need.

Comparing a million takes .4 GB, beside what Gram matrices take, and moves no correlation by .01.
"""
CHOSEN = f"Of more than {MAX_TOKENS:,} tokens, those of prompts chosen by chance."
"""What is said below numbers of `exact_groups`."""
_GROUPS = f"""SELECT step, "group", exact, sum(n) OVER by_chance - n AS before, row_number() OVER by_chance AS place
FROM (SELECT step, "group", count(*) FILTER (mask) AS n, count(*) FILTER ({EXACT_ROWS}) AS exact FROM tokens
      GROUP BY ALL HAVING exact > 0)
WINDOW by_chance AS (ORDER BY hash(step, "group"), step, "group")"""
KEYS = ("step", "group", "rollout", "t")
"""Read as numbers of 4 bytes: half of what a table of tokens takes are its keys."""
MEASURED_BY = "the level attribution measures it: --measure.attribution.every 1 of otb train, or of otb score"


def exact_groups(store: RunStore, columns: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """Return columns of the policy tokens of prompts with exact norms, and how many tokens of the run have one.

    Where these prompts have more than `MAX_TOKENS`, some of them are taken, the same at each call. Norms that are not
    exact are null, and `measured_by`, a text each, is left out.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    steps = store.steps_with("tokens", "grad_norm_sq")
    groups = store.sql(_GROUPS, steps=steps)
    taken = f'SELECT step, "group" FROM ({_GROUPS}) WHERE before < {MAX_TOKENS} OR place <= {LEAST_GROUPS}'
    read = {name: f'"{name}"::INTEGER AS "{name}"' for name in KEYS}
    read["grad_norm_sq"] = f"CASE WHEN {EXACT_ROWS} THEN grad_norm_sq END AS grad_norm_sq"
    names = ", ".join(read.get(name, f'"{name}"') for name in columns if name != "measured_by")
    query = f'SELECT {names} FROM tokens WHERE mask AND (step, "group") IN ({taken})'
    return store.sql(query, steps=steps), int(groups["exact"].to_numpy().sum())


def cheap_energies(store: RunStore, sources: Mapping[str, str]) -> list[str]:
    """Return which of some energies, by name and column, a run has at steps with exact norms; no token is read.

    Raises:
        StoreError: The catalogue has changed.
    """
    exact = set(store.steps_with("tokens", "grad_norm_sq"))
    return [name for name, column in sources.items() if exact & set(store.steps_with("tokens", column))]


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
    rows: Any = store.rows("steps", ["step", "n_measured_prompts"]).to_pandas()
    return rows["step"][rows["n_measured_prompts"] > 0].tolist()


def first_step(steps: Sequence[int], exact: Sequence[int]) -> int:
    """Return the step to begin with: the last one with exact norms where its tokens are stored, else the last one."""
    return exact[-1] if exact and exact[-1] in steps else steps[-1]


def attributed_steps(store: RunStore) -> list[int]:
    """Return the steps whose tokens carry their share of ‖ḡ‖², in order.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    return store.steps_with("tokens", "attribution")


def step_attribution(store: RunStore, step: int) -> StepAttribution:
    """Return who holds ‖ḡ‖² at a step.

    Raises:
        InputError: The step was not attributed; the sentence names those that were, or what measures them.
        StoreError: A part is broken or lacks a key column.
    """
    columns = ["group", "rollout", "t", "attribution", "signal", "noise"]
    tokens = store.tokens_df([step], columns, "attribution IS NOT NULL")
    if tokens.empty:
        steps = attributed_steps(store)
        have = f"steps {', '.join(map(str, steps))} have" if steps else "no step of this run has"
        raise InputError(f"step {step} of {store.path.name} has no attribution, {have}; {MEASURED_BY}.")
    norm = store.steps_df([step], ["grad_norm"])["grad_norm"].to_numpy(np.float64, na_value=np.nan)
    split = bool(tokens[["signal", "noise"]].notna().to_numpy().all())
    attributed = AttributedTokens(
        *(tokens[name].to_numpy(np.int64) for name in ("group", "rollout", "t")),
        *(floats(tokens, name) for name in ("attribution", "signal", "noise")[: 3 if split else 1]),
    )
    return attribute_step(step, attributed, float(norm[0]) if norm.size else None)
