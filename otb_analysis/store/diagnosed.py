"""What a diagnosis reads of a stored run: its scalars as series, and the attribution of a step."""

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import AttributedTokens, StepAttribution, StepSeries, attribute_step
from otb_analysis.errors import InputError
from otb_analysis.schema import TABLES
from otb_analysis.store.reader import RunStore
from otb_analysis.store.token_arrays import floats

MEASURED_BY = "the level attribution measures it: --measure.attribution.every 1 of otb train, or of otb score"


NUMBERS = tuple(c.name for c in TABLES["steps"] if c.dtype in ("DOUBLE", "BIGINT", "BOOLEAN") and not c.key)


def step_series(steps: pd.DataFrame) -> StepSeries:
    """Return the scalars of a run by step, NaN where a step did not record one; flags become 0 and 1.

    A recorded NaN is ∞: frames do not tell it from what was not recorded, so the column `not_finite` names it.
    """
    ordered = steps.sort_values("step")
    columns = {name: floats(ordered, name) for name in NUMBERS if name in ordered}
    named = ordered["not_finite"].dropna() if "not_finite" in ordered else ordered["step"].iloc[:0]
    for at, names in zip(ordered.index.get_indexer(named.index), named, strict=True):
        for name in set(str(names).split(", ")) & set(columns):
            columns[name][at] = np.inf if np.isnan(columns[name][at]) else columns[name][at]
    return StepSeries(ordered["step"].to_numpy(np.int64), columns)


def attributed_steps(store: RunStore) -> list[int]:
    """Return the steps whose tokens carry their share of ‖ḡ‖², in order.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    return store.steps_with("tokens", "attribution")


def largest_attributed_step(store: RunStore) -> int:
    """Return the attributed step with the largest gradient, the one to look at first.

    Raises:
        InputError: No step was attributed; the sentence says what measures it.
    """
    steps = attributed_steps(store)
    if not steps:
        raise InputError(f"{store.path.name} has no attributed step; {MEASURED_BY}.")
    norms = store.steps_df(steps, ["step", "grad_norm"]).dropna()
    return steps[-1] if norms.empty else int(norms.loc[norms["grad_norm"].idxmax(), "step"])  # pyright: ignore


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
