import numpy as np
import pytest
from scipy import stats

from otb_analysis.diagnostics import DETECTORS

zero, clip, ratios, tail, certificate = (
    DETECTORS[n] for n in ("zero_variance_groups", "clip_fraction", "ratio_tails", "tail_index", "sampling_certificate")
)


def test_equal_groups_are_judged_by_the_exact_lower_bound_of_their_share(series):
    found = zero(series(n_zero_variance_groups=[12.0] * 20, n_prompts=[16.0] * 20, reward_mean=[0.1] * 20))
    exact = stats.binomtest(240, 320, alternative="greater").proportion_ci(0.999, "exact").low
    assert found.evidence[0].score[19] == pytest.approx(exact)
    assert (found.level, found.watch_step) == ("watch", 19)
    assert "240 of 320 groups (75%)" in found.reason and "mean reward 0.1" in found.reason


def test_no_equal_groups_are_no_finding(series):
    assert zero(series(n_zero_variance_groups=np.zeros(40), n_prompts=np.full(40, 8.0))).level == "ok"


def test_a_run_that_clips_from_the_start_is_told_so_and_nothing_fires(series):
    found = clip(series(clipped=[1.0] * 60))
    assert (found.level, found.fired) == ("ok", False)
    assert "100% of the 20 steps up to step 59 were clipped, 100% of all before; the maximal norm" in found.reason
    assert [one.statistic for one in found.evidence][1] == "share of clipped steps"
    assert found.evidence[1].score[19] == 1


@pytest.mark.parametrize("clipped, unclipped", [(52, 9), (59, 2)])
def test_shares_of_healthy_runs_with_a_small_maximal_norm_do_not_fire(series, clipped, unclipped):
    # The demo's two runs: 61 steps, 85 % and 97 % of them clipped.
    random = np.random.default_rng(0)
    runs = (random.permutation([1.0] * clipped + [0.0] * unclipped) for _ in range(50))
    assert not any(clip(series(clipped=run)).fired for run in runs)


@pytest.mark.parametrize("steps", [50, 200, 500])
def test_a_constant_share_of_clipped_steps_rarely_fires_however_high(series, steps):
    # At 5 % each, more than 6 of 40 would have probability .3 %; a share of .2 to .3 comes closest to a rise of .65.
    random = np.random.default_rng(steps)
    for share in (0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 0.9, 0.98, 1.0):
        runs = ((random.random(steps) < share).astype(float) for _ in range(40))
        assert sum(clip(series(clipped=run)).fired for run in runs) <= 6


def test_a_run_with_nothing_to_compare_clipping_with_is_too_short(series):
    assert clip(series(clipped=[1.0] * 39)).level == "too short"


def test_clipping_that_sets_in_is_an_alarm(series):
    # 40 steps without, then all: the rise is 13/20 = .65 at step 52 (watch) and 17/20 = .85 at step 56 (alarm), where
    # all steps before the window, up to step 36, were unclipped.
    found = clip(series(clipped=[0.0] * 40 + [1.0] * 30))
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 52, 56)
    assert "85% of the 20 steps up to step 56 were clipped, 0% of all before" in found.reason


def test_large_ratios_are_told_as_ratios(series):
    found = ratios(
        series(mismatch_max=[0.1] * 10 + [3.0] * 10)
    )  # the median of five is 3 from step 12 on; log 10 = 2.3
    assert (found.level, found.watch_step, found.alarm_step) == ("watch", 12, None)
    assert "a factor of up to 20.1 (3 nats" in found.reason


def test_clipped_tokens_decide_where_ratios_are_small(series):
    found = ratios(series(mismatch_max=[0.1] * 30, ratio_clip_share=[0.0] * 10 + [0.5] * 20))
    # The mean of ten is .2 with four steps of .5 (step 13) and .4 with eight (step 17).
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 13, 17)
    assert found.evidence[0].column == "ratio_clip_share" and len(found.evidence) == 2


def test_on_policy_runs_are_judged_by_the_mismatch_alone(series):
    found = ratios(series(mismatch_max=[1e-6] * 30, ratio_clip_share=[np.nan] * 30))
    assert found.level == "ok" and len(found.evidence) == 1


@pytest.mark.parametrize("level", [-1.6, 0.3, 1.8])
def test_the_proxy_alone_is_no_measurement_of_the_tail_however_large_its_index(series, level):
    # A healthy run had 1.7 to 1.9, and the same run collapsed −1.4 to −1.9.
    k = np.random.default_rng(0).normal(level, 0.1, 100)
    found = tail(series(energy_tail_k=k))
    assert (found.level, found.fired) == ("not measured", False)
    assert "exact_tail_k never recorded" in found.reason and "--measure.exact.every 10" in found.reason
    assert found.evidence[0].column == "energy_tail_k"
    assert found.evidence[0].score[-1] == pytest.approx(k[-10:].mean())


def test_exact_norms_decide_and_the_proxy_stands_beside_them(series):
    found = tail(series(energy_tail_k=np.full(60, 1.9), exact_tail_k=np.full(60, 0.7)))
    assert (found.level, found.fired) == ("ok", False)
    assert [one.column for one in found.evidence] == ["exact_tail_k", "energy_tail_k"]
    assert "from 0.5 on intervals of variances are unreliable" in found.reason


def test_a_constant_heavy_tail_is_exactly_its_index(series):
    found = tail(series(exact_tail_k=[1.2] * 30))
    assert (found.level, found.watch_step, found.alarm_step) == ("watch", 4, None)
    assert found.evidence[0].score[10] == pytest.approx(1.2)


def test_norms_without_a_mean_are_an_alarm(series):
    assert tail(series(exact_tail_k=[2.1] * 30)).alarm_step == 4


def test_exact_norms_count_at_the_steps_that_measured_them(series):
    k = np.full(60, np.nan)
    k[::10] = [1.4, 1.6, 1.5, 1.5, 1.6, 1.4]
    found = tail(series(energy_tail_k=np.zeros(60), exact_tail_k=k))
    # t(4) at 99.9 %: 7.173; five records have mean 1.52 and standard deviation .0837, so the bound is 1.25 at step 40.
    assert (found.level, found.watch_step) == ("watch", 40)
    assert found.evidence[0].score[4] == pytest.approx(1.52 - 7.1732 * 0.083666 / np.sqrt(5), abs=1e-4)
    assert found.reason.startswith("a few tokens have gradients so large that averages over tokens do not settle")
    assert "was 1.52 on average over 5 measured steps up to step 40, at least 1.25 (99.9% sure)" in found.reason


def test_records_of_a_healthy_run_on_either_side_of_1_do_not_fire(series):
    # Five records of the demo, every 15 steps, and twice as many of a run that goes on at its end's mean and spread.
    demo = [0.49, 0.73, 0.52, 0.90, 1.23]
    for k in (demo, [*demo, 0.7, 1.1, 0.4, 1.2, 0.9]):
        assert tail(series(exact_tail_k=k)).level == "ok"


def test_certificate_of_one_step_is_the_mixture_written_out(series):
    # ρ = 4, n = 1, S = 6: E = √(4/5)·exp(36/10) = 32.74, of weight ½ beside the ½ not started yet.
    found = certificate(series(certificate_prob_z=[6.0]))
    assert found.evidence[0].score[0] == pytest.approx(np.log10(0.5 * np.sqrt(0.8) * np.exp(3.6) + 0.5))


def test_a_wrong_temperature_is_an_alarm_within_a_few_steps(series):
    found = certificate(series(certificate_prob_z=[0.0] * 50 + [-6.0] * 10, certificate_logprob_z=np.zeros(60)))
    # The sum that starts at step 50 has weight 1/42: S = 12 after two steps gives log₁₀ E = (12 − ½ log 1.5)/log 10 −
    # log₁₀ 42 = 3.5 (watch from 2.3), S = 18 after three gives 8.2 (alarm from 6.3).
    assert (found.level, found.watch_step, found.alarm_step) == ("alarm", 51, 52)
    assert found.reason.startswith("the sampled tokens were less probable than the policy's own would be")


def test_an_exact_sampler_reaches_the_watch_as_rarely_as_promised(series):
    # At most 1 in 100 over both columns, whatever the length: of 300 runs, 3 expected at most, 9 is beyond 3.4 errors.
    random = np.random.default_rng(0)
    runs = [random.normal(size=(2, 150)) for _ in range(300)]
    fired = sum(certificate(series(certificate_prob_z=a, certificate_logprob_z=b)).fired for a, b in runs)
    assert fired < 9
