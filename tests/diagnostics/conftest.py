import numpy as np
import pytest

from otb_analysis.diagnostics import StepSeries


@pytest.fixture(scope="session")
def series():
    """Build a run from columns; step numbers count from 0."""

    def build(**columns):
        arrays = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
        return StepSeries(np.arange(len(next(iter(arrays.values())))), arrays)

    return build
