import numpy as np
import pandas as pd
import pytest

from otb_analysis.diagnostics import DETECTORS
from otb_analysis.store import RunStore, compact, step_series
from otb_analysis.store import writer as writing

NAMED = ["grad_norm", "loss", None, "grad_norm"]


def test_series_holds_numbers_and_flags_and_leaves_gaps_unmeasured(writer, tables):
    writer.write_step(0, tables(0, grad_norm=1.5, clipped=True))
    writer.write_step(1, tables(1, grad_norm=None, clipped=False, heldout_reward=0.25))
    series = step_series(RunStore(writer.path).steps_df())
    assert series.step.tolist() == [0, 1]
    np.testing.assert_array_equal(series.columns["grad_norm"], [1.5, np.nan])
    np.testing.assert_array_equal(series.columns["clipped"], [1.0, 0.0])
    np.testing.assert_array_equal(series.columns["heldout_reward"], [np.nan, 0.25])
    assert all(values.dtype == np.float64 for values in series.columns.values())


def test_series_of_a_run_without_steps_is_empty(writer):
    assert len(step_series(RunStore(writer.path).steps_df()).step) == 0


def test_recorded_nan_and_infinity_are_told_from_what_was_not_recorded(writer, tables):
    writer.write_step(0, tables(0, grad_norm=float("nan"), loss=None))
    writer.write_step(1, tables(1, grad_norm=float("-inf"), loss=float("nan")))
    writer.write_step(2, tables(2, grad_norm=1.0, loss=0.5))
    steps = RunStore(writer.path).steps_df()
    assert steps["not_finite"].tolist()[:2] == ["grad_norm", "loss, grad_norm"] and steps["not_finite"].isna()[2]
    for table in (steps, steps.iloc[::-1], RunStore(writer.path).steps_df([0, 1, 2])):
        series = step_series(table)
        np.testing.assert_array_equal(series.columns["grad_norm"], [np.inf, -np.inf, 1.0])
        np.testing.assert_array_equal(series.columns["loss"], [np.nan, np.inf, 0.5])


@pytest.mark.parametrize("in_footers", [True, False])
def test_recorded_nan_of_versions_that_did_not_name_it_is_told_from_what_was_not_recorded(
    writer, tables, monkeypatch, in_footers
):
    with monkeypatch.context() as earlier:
        earlier.setattr(writing, "with_not_finite", lambda rows: rows.drop_columns(["not_finite"]))
        if not in_footers:
            earlier.setattr(writing, "row_text", lambda rows: "")
        writer.write_step(0, tables(0, grad_norm=float("nan"), loss=None))
        writer.write_step(1, tables(1, grad_norm=1.0, loss=float("-inf")))
        writer.write_step(2, tables(2, grad_norm=1.0, loss=0.5))
    writer.write_step(3, tables(3, grad_norm=float("nan"), loss=0.5))
    writer.finish()
    for _ in range(2):  # as it is, and compacted
        steps = RunStore(writer.path).steps_df()
        assert [None if pd.isna(names) else names for names in steps["not_finite"]] == NAMED
        series = step_series(steps)
        np.testing.assert_array_equal(series.columns["grad_norm"], [np.inf, 1.0, 1.0, np.inf])
        np.testing.assert_array_equal(series.columns["loss"], [np.nan, -np.inf, 0.5, 0.5])
        found = DETECTORS["not_finite"](series)
        assert (found.level, found.alarm_step) == ("alarm", 0) and "3 of 4 steps" in found.reason
        compact(writer.path)
