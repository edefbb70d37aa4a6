import numpy as np

from otb_analysis.store import RunStore, step_series


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
