import numpy as np
import pytest

from otb_analysis.diagnostics import DETECTORS, StepSeries
from otb_analysis.diagnostics import fall as fall_of

fall, vanished, not_finite = (DETECTORS[name] for name in ("reward_fall", "vanished_gradient", "not_finite"))


def test_a_fall_is_dated_by_the_second_low_step(series):
    # 20 steps of .75, then 0: the median of three is 0 from the second low step on, step 21. There the mean of 21
    # differences is .75/21, so the score is (.75 − 3·√π/2·.75/21)/.75.
    found = fall(series(reward_mean=[0.75] * 20 + [0.0] * 10))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 21, 21)
    assert found.evidence[0].score[21] == pytest.approx(1 - 3 * np.sqrt(np.pi) / 2 / 21)
    assert "reward was 0 (median of 3 steps up to step 21), after a highest lasting level of 0.75" in found.reason


def test_a_fall_from_rewards_below_zero_counts_against_their_size(series):
    # From −.5 to −1: a half of |−.5| and more is lost, 1 beyond noise of .5/21.
    found = fall(series(reward_mean=[-0.5] * 20 + [-1.0] * 10))
    assert found.level == "alarm" and found.evidence[0].score[21] == pytest.approx(1 - 3 * np.sqrt(np.pi) / 2 / 21)


def test_a_single_bad_step_and_a_gentle_decline_are_no_fall(series):
    assert fall(series(reward_mean=[0.75] * 20 + [0.0] + [0.75] * 20)).level == "ok"
    assert fall(series(reward_mean=np.linspace(0.75, 0.6, 60))).level == "ok"


def test_noise_of_the_run_raises_what_counts_as_a_fall(series):
    noisy = 0.5 + 0.3 * np.resize([1.0, -1.0], 40)
    assert fall(series(reward_mean=np.concatenate([noisy, noisy - 0.2]))).level == "ok"


def test_rewards_that_are_always_zero_have_not_fallen(series):
    found = fall(series(reward_mean=np.zeros(30)))
    assert found.level == "ok" and found.evidence[0].score[-1] == 0


def test_a_short_run_is_too_short(series):
    assert fall(series(reward_mean=[0.5] * 7)).level == "too short"
    assert vanished(series(grad_norm=[0.0] * 4)).level == "too short"


def test_a_vanished_gradient_is_watched_at_three_of_five_steps_and_alarms_at_five(series):
    found = vanished(series(grad_norm=[1.0] * 10 + [0.0] * 10))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 12, 14)
    assert "exactly 0 at 10 of 20 steps of the run, 5 of them among the 5 up to step 14" in found.reason
    assert "at every step since step 10" in found.reason


def test_zeros_of_long_ago_are_told_without_counting_the_last_steps(series):
    found = vanished(series(grad_norm=[0.0] * 2 + [1.0] * 10))
    assert found.level == "ok" and "0 of" not in found.reason.replace("exactly 0", "")
    assert "at 2 of 12 steps of the run, none of them among the 5 up to step" in found.reason


def test_a_gradient_that_never_vanished_is_said_to_be_above_0(series):
    assert vanished(series(grad_norm=[1.0] * 10)).reason == "the gradient norm was above 0 at all 10 steps."


def test_a_gradient_that_was_not_recorded_is_no_zero(series):
    norm = np.full(20, np.nan)
    norm[::2] = 1.0
    assert vanished(series(grad_norm=norm)).level == "ok"


def test_a_gradient_that_came_back_is_not_said_to_be_gone_since(series):
    found = vanished(series(grad_norm=[1.0] * 5 + [0.0] * 6 + [1.0] * 5))
    assert found.level == "alarm" and "since" not in found.reason


def test_a_fall_is_dated_in_hindsight_by_its_first_low_step(series):
    assert fall_of(fall(series(reward_mean=[0.75] * 20 + [0.0] * 10))) == (20, 0.75, 0.0)
    # 0, .75, 0: the second low step of three, 22, makes the median low; its own value is low, that before it is not.
    assert fall_of(fall(series(reward_mean=[0.75] * 20 + [0.0, 0.75] + [0.0] * 9)))[0] == 22


def test_a_number_that_is_not_finite_is_an_alarm_at_its_step_and_what_was_not_recorded_is_none():
    norm, loss = np.ones(30), np.full(30, 0.1)
    assert not_finite(StepSeries(np.arange(30), {"grad_norm": norm, "loss": loss})).level == "ok"
    norm[[7, 9]], loss[[3, 7]] = (np.nan, np.inf), (np.nan, -np.inf)  # NaN: not recorded
    found = not_finite(StepSeries(np.arange(30), {"grad_norm": norm, "loss": loss}))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 7, 7)
    assert found.reason == "NaN or infinite at step 7: loss. 2 of 30 steps have such numbers."
    assert found.evidence[0].column == "loss" and not_finite(StepSeries(np.arange(3), {})).level == "not measured"
