import numpy as np
import pytest
from scipy import stats

from otb_analysis.diagnostics import DETECTORS

zero, clip, ratios, tail, certificate = (
    DETECTORS[n] for n in ("zero_variance_groups", "clip_fraction", "ratio_tails", "tail_index", "sampling_certificate")
)


def test_equal_groups_are_judged_by_the_exact_lower_bound_of_their_share(series):
    found = zero(series(n_zero_variance_groups=[12.0] * 20, n_prompts=[16.0] * 20, reward_mean=[0.1] * 20))
    exact = stats.binomtest(240, 320, alternative="greater").proportion_ci(0.99, "exact").low
    assert found.evidence[0].score[19] == pytest.approx(exact)
    assert (found.level, found.watch_step) == ("watch", 19)
    assert "240 of 320 groups (75%)" in found.reason and "mean reward 0.1" in found.reason


def test_no_equal_groups_are_no_finding(series):
    assert zero(series(n_zero_variance_groups=np.zeros(40), n_prompts=np.full(40, 8.0))).level == "ok"


def test_a_run_that_clips_from_the_start_is_watched_and_no_alarm(series):
    found = clip(series(clipped=[1.0] * 60))
    assert (found.level, found.watch_step, found.alarm_step) == ("watch", 19, None)
    assert "100% of the 20 steps up to step 19" in found.reason


def test_clipping_that_sets_in_is_an_alarm(series):
    # 40 steps without, then all: the rise is 13/20 = .65 at step 52 (watch) and 17/20 = .85 at step 56 (alarm), where
    # all steps before the window, up to step 36, were unclipped.
    found = clip(series(clipped=[0.0] * 40 + [1.0] * 30))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 52, 56)
    assert "85% of the 20 steps up to step 56 were clipped, 0% of all steps before" in found.reason


def test_large_ratios_are_told_as_ratios(series):
    found = ratios(
        series(mismatch_max=[0.1] * 10 + [3.0] * 10)
    )  # the median of five is 3 from step 12 on; log 10 = 2.3
    assert (found.level, found.watch_step, found.alarm_step) == ("watch", 12, None)
    assert "a ratio of up to 20.1" in found.reason


def test_clipped_tokens_decide_where_ratios_are_small(series):
    found = ratios(series(mismatch_max=[0.1] * 30, ratio_clip_share=[0.0] * 10 + [0.5] * 20))
    # The mean of ten is .2 with four steps of .5 (step 13) and .4 with eight (step 17).
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 13, 17)
    assert found.evidence[0].column == "ratio_clip_share" and len(found.evidence) == 2


def test_on_policy_runs_are_judged_by_the_mismatch_alone(series):
    found = ratios(series(mismatch_max=[1e-6] * 30, ratio_clip_share=[np.nan] * 30))
    assert found.level == "ok" and len(found.evidence) == 1


def test_a_constant_heavy_tail_is_exactly_its_index(series):
    found = tail(series(energy_tail_k=[0.7] * 30))
    assert (found.level, found.watch_step) == ("watch", 4)
    assert found.evidence[0].score[10] == pytest.approx(0.7)


def test_exact_norms_count_at_the_steps_that_measured_them(series):
    k = np.full(60, np.nan)
    k[::10] = [1.1, 1.3, 1.2, 1.2, 1.3, 1.1]
    found = tail(series(energy_tail_k=np.zeros(60), exact_tail_k=k))
    # t(4) at 99 %: 3.747; five records have mean 1.22 and standard deviation .0837, so the bound is 1.08 at step 40.
    assert (found.level, found.alarm_step) == ("alarm", 40)
    assert found.evidence[0].score[4] == pytest.approx(1.22 - 3.7469 * 0.083666 / np.sqrt(5), abs=1e-4)
    assert "Pareto-k of exact norms" in found.reason


def test_certificate_of_one_step_is_the_mixture_written_out(series):
    # ρ = 4, n = 1, S = 6: E = √(4/5)·exp(36/10) = 32.74, of weight ½ beside the ½ not started yet.
    found = certificate(series(certificate_prob_z=[6.0]))
    assert found.evidence[0].score[0] == pytest.approx(np.log10(0.5 * np.sqrt(0.8) * np.exp(3.6) + 0.5))


def test_a_wrong_temperature_is_an_alarm_within_a_few_steps(series):
    found = certificate(series(certificate_prob_z=[0.0] * 50 + [-6.0] * 10, certificate_logprob_z=np.zeros(60)))
    # The sum that starts at step 50 has weight 1/42: S = 12 after two steps gives log₁₀ E = (12 − ½ log 1.5)/log 10 −
    # log₁₀ 42 = 3.5 (watch from 2.3), S = 18 after three gives 8.2 (alarm from 6.3).
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 51, 52)
    assert "certificate_prob_z" in found.reason


def test_an_exact_sampler_reaches_the_watch_as_rarely_as_promised(series):
    # At most 1 in 100 over both columns, whatever the length: of 300 runs, 3 expected at most, 9 is beyond 3.4 errors.
    random = np.random.default_rng(0)
    runs = [random.normal(size=(2, 150)) for _ in range(300)]
    fired = sum(certificate(series(certificate_prob_z=a, certificate_logprob_z=b)).fired for a, b in runs)
    assert fired < 9
