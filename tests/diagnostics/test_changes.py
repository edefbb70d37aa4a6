import numpy as np
import pytest

from otb_analysis.diagnostics import DETECTORS, StepSeries, diagnose
from otb_analysis.errors import InputError

surge, collapse, drift = (DETECTORS[name] for name in ("gradient_surge", "entropy_collapse", "length_drift"))
rise = DETECTORS["entropy_rise"]


def test_surge_fires_when_three_of_the_last_five_steps_are_high(series):
    # The median of five steps is 6 from the third high step on, step 52; before it, 1. With a constant past the spread
    # is the least one, .05, so the score is 6·e^(−2·.05) = 5.43: above both thresholds at once.
    found = surge(series(grad_norm=[1.0] * 50 + [6.0] * 10))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 52, 52)
    assert found.evidence[0].score[52] == pytest.approx(6 * np.exp(-0.1))
    assert (
        "gradient norm was 6 " in found.reason and "6 times the usual 1 " in found.reason and "step 52" in found.reason
    )


def test_doubling_is_watched_and_no_alarm(series):
    # 2·e^(−.1) = 1.81 lies between 1.5 and 3.
    found = surge(series(grad_norm=[1.0] * 50 + [2.0] * 10))
    assert (found.level, found.watch_step, found.alarm_step) == ("watch", 52, None)


def test_a_single_spike_is_no_surge(series):
    assert surge(series(grad_norm=[1.0] * 50 + [100.0, 100.0] + [1.0] * 20)).level == "ok"


def test_a_surge_that_ended_is_still_reported_with_the_step_it_began(series):
    found = surge(series(grad_norm=[1.0] * 50 + [6.0] * 10 + [1.0] * 200))
    assert (found.level, found.alarm_step) == ("alarm", 52)


def test_noise_of_the_run_raises_what_counts_as_a_surge(series):
    # log ‖ḡ‖ alternates between ±1: median 0 or ±1 and spread 1.48, so a factor 6 is within two spreads.
    noisy = np.exp(np.resize([1.0, -1.0], 60)) * np.where(np.arange(60) < 50, 1, 6)
    assert surge(series(grad_norm=noisy)).level == "ok"


def test_steps_without_gradient_or_record_are_left_out_of_a_surge(series):
    norm = np.full(60, 1.0)
    norm[:20:2], norm[1:20:2] = 0.0, np.nan
    found = surge(series(grad_norm=norm))
    assert found.level == "ok" and found.evidence[0].step[0] == 20


def test_entropy_collapse_is_dated_by_its_running_median(series):
    # The median of ten logarithms is ½·log .2 with five low steps (step 34): a fall by 2.24·e^(−1.5·.05) = 2.07, above
    # 2; with six of them (step 35) by 5·e^(−.075) = 4.64, above 4.
    found = collapse(series(entropy_mean=[1.0] * 30 + [0.2] * 20))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 34, 35)
    assert found.evidence[0].score[35] == pytest.approx(5 * np.exp(-0.075))
    assert "20% of its highest lasting level of 1" in found.reason


def test_entropy_that_rises_is_no_collapse(series):
    assert collapse(series(entropy_mean=np.linspace(0.2, 2, 80))).level == "ok"


def test_entropy_of_zero_is_a_collapse_and_no_infinity(series):
    found = collapse(series(entropy_mean=[1.0] * 30 + [0.0] * 20))
    assert found.level == "alarm" and np.isfinite(found.evidence[0].score[-1])


def test_entropy_rise_is_held_against_the_lowest_lasting_level(series):
    # Level 1, then .2 for 30 steps, then .6: the lowest median of twenty is .2. With five steps at .6 (step 64) the
    # median of ten is .2·√3, a rise by 1.73·e^(−1.5·.05) = 1.61, above 1.5; with six (step 65) 3·e^(−.075), below 3.
    found = rise(series(entropy_mean=[1.0] * 30 + [0.2] * 30 + [0.6] * 10))
    assert (found.level, found.watch_step, found.alarm_step) == ("watch", 64, None)
    assert found.evidence[0].score[65] == pytest.approx(3 * np.exp(-0.075))
    assert "0.346 nats" in found.reason and "1.7 times its lowest lasting level of 0.2" in found.reason
    assert rise(series(entropy_mean=[1.0] * 30 + [0.2] * 30 + [0.7] * 10)).level == "alarm"


def test_entropy_that_falls_or_returns_for_a_few_steps_is_no_rise(series):
    assert rise(series(entropy_mean=np.linspace(2, 0.2, 80))).level == "ok"
    assert rise(series(entropy_mean=[0.2] * 40 + [2.0] * 4 + [0.2] * 30)).level == "ok"


def test_entropy_below_a_hundredth_of_a_nat_does_not_rise(series):
    # .0001 and .009 both count as .01; .03 is three times that: 3·e^(−.075) = 2.78, a watch
    assert rise(series(entropy_mean=[1e-4] * 40 + [9e-3] * 20)).level == "ok"
    assert rise(series(entropy_mean=[1e-4] * 40 + [0.03] * 20)).level == "watch"


@pytest.mark.parametrize(("factor", "said"), [(3.0, "3 times the 10 "), (1 / 3, "0.33 times the 10 ")])
def test_length_drifts_in_both_directions(series, factor, said):
    # With five of ten steps changed the median has moved by √3 = 1.73·e^(−.075) = 1.61 ≥ 1.5 (step 44), with six by 3.
    found = drift(series(length_mean=[10.0] * 40 + [10 * factor] * 20))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 44, 45)
    assert said in found.reason


def test_slow_drift_fires_too(series):
    found = drift(series(length_mean=10 * 1.02 ** np.arange(120)))
    assert found.level == "alarm"


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_without_its_columns_says_what_measures_them(name):
    found = DETECTORS[name](StepSeries(np.arange(50), {}))
    assert found.level == "not measured" and not found.fired
    assert "never recorded" in found.reason and ("otb train" in found.reason or "--measure" in found.reason)


def test_too_few_steps_are_counted(series):
    found = surge(series(grad_norm=np.ones(12)))
    assert found.level == "too short" and not found.fired
    assert found.reason == "grad_norm was recorded at 12 steps, 25 are needed; the run has 12."


def test_a_long_run_that_recorded_too_little_is_not_measured_enough(series):
    found = surge(series(grad_norm=[1.0] * 12 + [np.nan] * 20))
    assert found.level == "not measured"
    assert "recorded at 12 steps, 25 are needed; otb train and OTBGRPOTrainer record it at every step" in found.reason


def test_an_empty_run_is_not_measured():
    findings = diagnose(StepSeries(np.arange(0), {"grad_norm": np.zeros(0)}))
    assert {f.level for f in findings} == {"not measured"} and len(findings) == len(DETECTORS)


def test_the_worst_finding_comes_first(series):
    findings = diagnose(
        series(grad_norm=[1.0] * 50 + [6.0] * 10, entropy_mean=[1.0] * 60, clipped=[0] * 35 + [1] * 15 + [0] * 10)
    )
    assert [f.level for f in findings[:3]] == ["alarm", "watch", "not measured"]
    assert findings[-1].detector == "entropy_rise"


def test_steps_out_of_order_and_columns_of_another_length_are_refused():
    with pytest.raises(InputError, match="step is not ascending"):
        StepSeries(np.array([1, 0]), {})
    with pytest.raises(InputError, match=r"grad_norm has shape \(3,\) .* 2 steps"):
        StepSeries(np.arange(2), {"grad_norm": np.ones(3)})


def median_and_spread(x):
    return np.median(x), max(1.4826 * np.median(np.abs(x - np.median(x))), 0.05)


def test_a_surge_is_held_against_the_20_to_100_steps_before_the_last_five(series):
    log = np.random.default_rng(3).normal(size=150)
    score = surge(series(grad_norm=np.exp(log))).evidence[0].score
    for t in range(24, 150):
        centre, spread = median_and_spread(log[max(0, t - 104) : t - 4])
        assert score[t] == pytest.approx(np.exp(np.median(log[t - 4 : t + 1]) - centre - 2 * spread), rel=1e-12)
    assert np.isnan(score[:24]).all()


def test_a_fall_of_the_entropy_is_beyond_the_noise_of_the_last_100_steps(series):
    log = np.random.default_rng(4).normal(size=150)
    score = collapse(series(entropy_mean=np.exp(log))).evidence[0].score
    recent = np.array([np.nan] * 9 + [np.median(log[t - 9 : t + 1]) for t in range(9, 150)])
    for t in range(19, 150):
        top = max(np.median(log[s - 19 : s + 1]) for s in range(19, t + 1))
        noise = max(1.4826 * np.median(np.abs(log - recent)[max(9, t - 99) : t + 1]), 0.05)
        assert score[t] == pytest.approx(np.exp(top - recent[t] - 1.5 * noise), rel=1e-12)
    assert np.isnan(score[:19]).all()
