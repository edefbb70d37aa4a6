"""Single-step outliers: planted ones are found, and noise of many kinds has hardly any."""

from itertools import product

import numpy as np
import pytest

from otb_analysis.diagnostics import Outlier, single_step_outliers


def test_two_spikes_are_named_with_their_multiple_of_the_usual(series):
    norm = 0.3 * np.exp(0.1 * np.random.default_rng(0).normal(size=60))
    norm[[41, 47]] = 37.5
    found = single_step_outliers(series(grad_norm=norm, length_max=np.full(60, 512.0)))
    assert sorted((one.column, one.step, one.value) for one in found) == [
        ("grad_norm", 41, pytest.approx(37.5)),
        ("grad_norm", 47, pytest.approx(37.5)),
    ]
    assert [one.multiple for one in found] == pytest.approx([125, 125], rel=0.1)


def test_the_usual_is_the_median_of_the_steps_around_without_the_step_itself(series):
    # Constant 2 beside one 20: 10 times the usual; 5 is the least, 4.9 none.
    (one,) = single_step_outliers(series(length_max=[2.0] * 10 + [20.0] + [2.0] * 10))
    assert one == Outlier("length_max", 10, pytest.approx(20.0), pytest.approx(2.0)) and one.multiple == pytest.approx(
        10
    )
    for factor, n in ((5.0, 1), (4.9, 0)):
        assert len(single_step_outliers(series(advantage_max=[1.0] * 20 + [factor + 1e-9]))) == n


@pytest.mark.parametrize("late", [3, 10, 30])
def test_a_new_level_is_no_outlier_however_late_it_begins(series, late):
    assert single_step_outliers(series(grad_norm=[1.0] * 30 + [50.0] * late)) == []


def test_zeros_missing_steps_and_short_runs_are_no_evidence(series):
    assert single_step_outliers(series(grad_norm=[1.0] * 9 + [99.0])) == []
    value = np.where(np.arange(60) % 2, 1.0, 0.0)
    value[[21, 30]] = 40.0, np.nan
    assert [one.step for one in single_step_outliers(series(grad_norm=value))] == [21]
    assert single_step_outliers(series(loss=np.ones(40))) == []


NOISE = {
    "lognormal, σ .3": (lambda r, n: np.exp(0.3 * r.normal(size=n)), 0.0),
    "lognormal, σ 1": (lambda r, n: np.exp(r.normal(size=n)), 0.01),
    "exponential": (lambda r, n: r.exponential(size=n), 0.01),
    "|Student t₃|": (lambda r, n: np.abs(r.standard_t(3, size=n)), 0.01),
    "Pareto, tail index 2": (lambda r, n: 1 + r.pareto(2, size=n), 0.05),
    "random walk of the logarithm": (lambda r, n: np.exp(0.1 * r.normal(size=n).cumsum()), 0.0),
}
SERIES = 100


@pytest.mark.parametrize("kind", NOISE)
def test_runs_of_pure_noise_seldom_have_one(series, kind):
    draw, rate = NOISE[kind]
    for length in (50, 200):
        runs = (draw(np.random.default_rng([length, k]), length) for k in range(SERIES))
        had = sum(bool(single_step_outliers(series(grad_norm=values))) for values in runs)
        assert had <= rate * SERIES + 3 * (rate * SERIES) ** 0.5, length


def test_tenfold_spikes_are_found_in_usual_noise_wherever_they_are(series):
    found, planted = 0, list(product((0, 7, 50, 99), range(20)))
    for at, seed in planted:
        value = np.exp(0.2 * np.random.default_rng(seed).normal(size=100))
        value[at] = 15.0
        found += [one.step for one in single_step_outliers(series(grad_norm=value))] == [at]
    assert found >= 0.9 * len(planted)
