"""Efficiencies by themselves: where they are shown, and their lower end against the law it is made from."""

import numpy as np
import pytest
from scipy import stats

from otb_analysis.statistics import Gram, Proved, jackknife_interval, paired_ratios, pooled_statistics
from otb_analysis.statistics.gradients import MISS, _lower_end, may_be_shown, noise_scale, shown_efficiency
from otb_analysis.statistics.moments import Moments, pair_noise

RLOO = ("rloo", "none")
KNOWN = Proved({RLOO: 1.0}, frozenset((RLOO,)))


def efficiency_of(ratios, n_prompts):
    """Efficiency of P prompts from ‖∇J‖²/V of one prompt."""
    return n_prompts * ratios / (1 + n_prompts * ratios)


def test_it_is_shown_from_a_third_of_the_noise_scale_on_whatever_the_update():
    # With e = P/(P + B) the noise scale is B = 60: 20 measured prompts are a third of it.
    for n_prompts in (1, 8, 1024):
        e = n_prompts / (n_prompts + 60)
        assert may_be_shown(e, n_prompts, 21) and not may_be_shown(e, n_prompts, 19)
    assert may_be_shown(1.0, 8, 4)
    assert not any(may_be_shown(e, 8, 100) for e in (np.nan, -0.1, 0.0, 1.1))


def test_the_lower_end_leaves_a_chance_of_one_in_a_hundred_among_those_above_the_threshold():
    low = _lower_end(1.0, 0.2, 0.25, 0.25)
    law = stats.norm(low, 0.25)
    assert law.sf(1.0) / law.sf(0.2) == pytest.approx(MISS, rel=1e-6)
    # Far above the threshold it is the ordinary end; just above it nothing is known.
    assert _lower_end(5.0, 0.2, 0.25, 0.25) == pytest.approx(5 - 0.25 * stats.norm.isf(MISS), rel=1e-3)
    assert _lower_end(0.21, 0.2, 0.25, 0.25) == 0
    # A standard error that falls with the signal comes closer.
    assert _lower_end(1.0, 0.2, 0.25, 0.05) > low


def test_a_shown_interval_is_never_shorter_than_the_ordinary_one_and_lengthens_towards_the_threshold():
    rng = np.random.default_rng(0)
    deleted = rng.normal(size=40) * 0.002
    ends = []
    for ratio in (0.02, 0.05, 0.2):  # noise scales of 50, 20 and 5, of 40 measured prompts
        values = efficiency_of(np.append(ratio, ratio + deleted), 16)
        found = shown_efficiency(values, 16, 0.1, "")
        ordinary = jackknife_interval(values[0], values[1:], "", "logit")
        assert found is not None and found.low <= ordinary.low and found.high == ordinary.high
        assert found.low < found.estimate < found.high
        ends.append(found.low / found.estimate)
    assert ends[0] < ends[1] < ends[2]
    assert shown_efficiency(efficiency_of(np.append(0.005, 0.005 + deleted), 16), 16, 0.1, "") is None


def test_no_interval_where_a_single_prompt_makes_the_signal():
    values = efficiency_of(np.append(np.full(40, 0.05), -0.01), 16)
    assert shown_efficiency(values, 16, 0.1, "") is None
    assert shown_efficiency(values[:9], 16, 0.1, "").low is None  # too few prompts: a point


def test_the_noise_scale_has_an_interval_whatever_the_signal():
    power, rng = np.full(41, 2.0), np.random.default_rng(1)
    deleted = 0.03 * rng.normal(size=40)

    def scale(signal):
        mean_sq = np.append(signal, signal + deleted * 0.1)
        return noise_scale(Moments(power, mean_sq, mean_sq, mean_sq, power))

    strong, weak, lost = scale(1.0), scale(0.02), scale(-0.01)
    assert strong.estimate == pytest.approx(1) and 0.9 < strong.low < 1 < strong.high < 1.1
    assert (weak.estimate, weak.high) == (pytest.approx(1.98 / 0.02), np.inf) and weak.low > 9
    assert (lost.estimate, lost.high) == (np.inf, np.inf) and lost.low > 9


def test_noise_of_pairs_is_the_spread_of_the_signal_where_there_is_none():
    rng, found, estimated = np.random.default_rng(2), [], []
    for _ in range(400):
        g = rng.normal(size=(1, 24, 10))
        gram = Gram(np.einsum("mpd,nqd->mnpq", g, g), (RLOO,), 24)
        products = gram.inner[0, 0]
        found.append((products.sum() - np.trace(products)) / (24 * 23))
        estimated.append(pair_noise([gram], RLOO, RLOO))
    assert np.mean(estimated) == pytest.approx(np.std(found), rel=0.12)
    halves = [Gram(gram.inner[:, :, :12, :12], (RLOO,), 12)] * 2
    assert pair_noise(halves, RLOO, RLOO) == pytest.approx(pair_noise(halves[:1], RLOO, RLOO) / np.sqrt(2))


def test_every_row_has_its_noise_scale_and_intervals_of_bias_and_rollouts(gram_of, noisy_prompts):
    otb = ("otb", "proxy")
    g = noisy_prompts(np.random.default_rng(3), [[2, 1], [1, 0.9]], 40)
    rloo, biased = pooled_statistics([Gram(gram_of(g), (RLOO, otb), 160)], known=KNOWN)
    for row in (rloo, biased):
        scale, efficiency = row.intervals["noise_scale"], row.intervals["efficiency"]
        assert scale.low < scale.estimate < scale.high
        assert row.shown("efficiency") == efficiency and efficiency.estimate == row.efficiency
        assert efficiency.low < efficiency.estimate < efficiency.high
    bias, rollouts = (biased.intervals[name] for name in ("relative_bias", "rollout_equivalents"))
    assert bias.low < biased.relative_bias == bias.estimate < bias.high
    # ‖(1, .1)‖/‖(2, 1)‖ = .45.
    assert bias.low < 0.45 < bias.high
    assert rollouts.low < biased.rollout_equivalents == rollouts.estimate < rollouts.high
    assert (rloo.relative_bias, rloo.intervals["relative_bias"].low) == (0, None)
    assert rloo.intervals["rollout_equivalents"].low == pytest.approx(160)


def test_an_efficiency_is_hidden_and_the_ratio_stays_where_noise_is_too_large(gram_of):
    rng, none = np.random.default_rng(7), ("none", "none")
    shared = rng.normal(size=(40, 60))
    g = np.stack([shared, 0.5 * shared]) + np.eye(60)[0] * 0.3  # noise scales of 667 and 167 prompts
    gram, known = Gram(gram_of(g), (RLOO, none), 160), Proved({RLOO: 1.0, none: 1.0}, frozenset((RLOO, none)))
    row = pooled_statistics([gram], known=known)[0]
    assert row.shown("efficiency") is None and row.intervals["noise_scale"].estimate > 3 * 40
    (pair,) = paired_ratios([gram], known=known)
    assert pair.sf.high < 0.3 and pair.c_known
