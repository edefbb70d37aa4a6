import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks import alarms
from benchmarks.alarms import calm_series, replaced
from benchmarks.config import AlarmsConfig
from benchmarks.publish import markdown, run_bench
from otb_analysis.diagnostics import DETECTORS
from otb_analysis.errors import InputError

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_committed_rates_of_false_alarms_are_at_most_5_percent_at_every_length_with_their_intervals():
    rows = json.loads((RESULTS / "alarms.json").read_text())["rows"]
    assert {row["detector"] for row in rows} == {*DETECTORS, alarms.CHANGE_POINTS, alarms.ANY}
    for row in rows:
        assert list(row["lengths"]) == [str(length) for length in alarms.LENGTHS]
        for rate in (row, *row["lengths"].values()):
            assert rate["calm"] >= 600
            interval = stats.binomtest(rate["fired"], rate["calm"]).proportion_ci(method="exact")
            assert (rate["rate_low"], rate["rate_high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))
            assert rate["rate_high"] <= 0.05, row["detector"]


@pytest.mark.slow
def test_detectors_keep_their_rate_on_other_calm_runs():
    rates = alarms.calm_rates(100, seed=1)
    # A rate of 5 % is refuted by more than 11 of 100 (one-sided, 1 %).
    by_length = {(name, n): at["fired"] for name, found in rates.items() for n, at in found["lengths"].items()}
    assert len(by_length) == (len(DETECTORS) + 2) * len(alarms.LENGTHS)
    assert {at: fired for at, fired in by_length.items() if fired > 11} == {}


def test_every_detector_has_a_known_change():
    assert {case.detector for case in alarms.CASES} == set(DETECTORS)


def test_a_report_of_few_runs_has_a_row_per_change_and_names_its_command():
    report = run_bench(AlarmsConfig(series=1, changed=2))
    assert report.command == "otb bench alarms --series 1 --changed 2 --seed 0"
    assert len(report.rows) == len(report.cells) == len(alarms.CASES) + 3
    assert "gradient_surge" in markdown(report)


def test_no_series_are_refused():
    with pytest.raises(InputError, match="series is 0"):
        run_bench(AlarmsConfig(series=0))


def test_calm_runs_are_autocorrelated_heavy_tailed_and_bounded():
    runs = [calm_series(np.random.default_rng(seed), 400) for seed in range(40)]
    logs = [np.log(run.columns["grad_norm"]) for run in runs]
    lag = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in logs]
    assert np.mean(lag) > 0.2
    assert np.mean([stats.kurtosis(x) for x in logs]) > 0.5
    falls = [run.columns["entropy_mean"] for run in runs]
    assert min(np.median(x[-50:]) / np.median(x[:20]) for x in falls) > 0.45


def test_calm_runs_hold_what_healthy_runs_were_seen_to_do():
    runs = [calm_series(np.random.default_rng(seed), 200).columns for seed in range(200)]
    shares = [run["clipped"].mean() for run in runs]
    assert min(shares) < 0.05 and max(shares) > 0.95 and np.mean(np.array(shares) > 0.8) > 0.1
    exact = [run["exact_tail_k"][np.isfinite(run["exact_tail_k"])] for run in runs]
    assert np.quantile([k[-10:].mean() for k in exact], 0.9) > 0.7
    assert np.mean([k.max() > 1 for k in exact]) > 0.3
    proxy = [run["energy_tail_k"].mean() for run in runs]
    assert min(proxy) < -0.4 and max(proxy) > 1.7


def test_same_seed_same_run_and_a_change_touches_only_what_follows():
    run, again = (calm_series(np.random.default_rng(4), 60) for _ in range(2))
    np.testing.assert_equal(dict(run.columns), dict(again.columns))
    later = replaced(run, 30, grad_norm=3 * run.columns["grad_norm"])
    np.testing.assert_allclose(later.columns["grad_norm"][:30], run.columns["grad_norm"][:30])
    np.testing.assert_allclose(later.columns["grad_norm"][30:], 3 * run.columns["grad_norm"][30:])
