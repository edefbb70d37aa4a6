import numpy as np
import pytest

from otb_analysis.diagnostics import change_points


def noisy(level, seed=0, spread=0.1):
    return np.exp(np.log(level) + spread * np.random.default_rng(seed).normal(size=len(level)))


def test_two_changes_are_dated_with_the_levels_on_their_sides(series):
    points = change_points(series(grad_norm=noisy(np.repeat([1.0, 4.0, 0.5], 50))))
    assert [p.column for p in points] == ["grad_norm", "grad_norm"]
    assert [p.step for p in points] == [50, 100]
    levels = [(p.before, p.after) for p in points]
    assert levels == [
        (pytest.approx(1, rel=0.1), pytest.approx(4, rel=0.1)),
        (pytest.approx(4, rel=0.1), pytest.approx(0.5, rel=0.1)),
    ]


def test_a_change_of_a_fifth_is_none_however_clear(series):
    assert change_points(series(grad_norm=noisy(np.repeat([1.0, 1.2], 100), spread=0.001))) == []


def test_a_spike_is_no_change_point(series):
    level = np.ones(120)
    level[60] = 50
    assert change_points(series(grad_norm=noisy(level))) == []


def test_short_and_missing_columns_have_none(series):
    assert change_points(series(grad_norm=noisy(np.repeat([1.0, 9.0], 14)))) == []
    assert change_points(series(loss=np.ones(100))) == []


def test_a_constant_series_has_none(series):
    assert change_points(series(grad_norm=np.ones(100), energy_tail_k=np.zeros(100))) == []


def test_steps_not_recorded_are_skipped_and_dates_stay_step_numbers(series):
    value = np.full(400, np.nan)
    value[::4] = noisy(np.repeat([1.0, 5.0], 50))
    (point,) = change_points(series(grad_norm=value))
    assert point.step == 200
