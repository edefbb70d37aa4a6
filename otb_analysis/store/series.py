"""A run's steps table as the series that detectors read."""

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import StepSeries
from otb_analysis.schema import TABLES

NUMBERS = tuple(c.name for c in TABLES["steps"] if c.dtype in ("DOUBLE", "BIGINT", "BOOLEAN") and not c.key)


def step_series(steps: pd.DataFrame) -> StepSeries:
    """Return the scalars of a run by step, NaN where a step did not record one; flags become 0 and 1."""
    ordered = steps.sort_values("step")
    columns = {
        name: ordered[name].astype("Float64").to_numpy(np.float64, na_value=np.nan)
        for name in NUMBERS
        if name in ordered
    }
    return StepSeries(ordered["step"].to_numpy(np.int64), columns)
