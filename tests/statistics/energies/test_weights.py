import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import weight_statistics


def worked_group():
    # theory: w rows [.02,.02], [.5]*4, [.02,.02,1.28,1.28], [.02,.02]; R = [1,0,0,1]; final W .04, 2, 2.6, .04.
    w = np.full((4, 4), np.nan)
    w[0, :2] = w[3, :2] = 0.02
    w[1] = 0.5
    w[2] = [0.02, 0.02, 1.28, 1.28]
    return w, np.isfinite(w), np.array([1.0, 0, 0, 1])


def test_worked_group():
    w, mask, reward = worked_group()
    found = weight_statistics(w, mask, reward, np.zeros(4, dtype=int))
    # ΣW = 4.68, ΣW² = .0016 + 4 + 6.76 + .0016 = 10.7632.
    assert found.effective_size == pytest.approx([4.68**2 / 10.7632])
    assert found.largest_weight == pytest.approx([2.6 / 4.68])
    assert found.pooled_total_reward_corr == pytest.approx(np.corrcoef([0.04, 2, 2.6, 0.04], reward)[0, 1])
    # positions 0 and 1 hold w = .02,.5,.02,.02, deviations (−.12,.36,−.12,−.12); R deviations ±.5. Positions 2 and 3
    # hold two failures each: their reward deviations are 0, their w deviations ±.39.
    xy, xx, yy = 2 * -0.24, 2 * 0.1728 + 4 * 0.39**2, 2 * 1.0
    assert found.token_reward_corr == pytest.approx([xy / np.sqrt(xx * yy)])
    assert found.mean_effective_share == pytest.approx(4.68**2 / 10.7632 / 4)


def test_figures_per_prompt_are_those_of_the_prompt_alone():
    rng = np.random.default_rng(0)
    w, mask = rng.gamma(1, size=(15, 6)), rng.random((15, 6)) < 0.8
    reward, group = rng.random(15), rng.integers(0, 3, size=15)
    both = weight_statistics(w, mask, reward, group)
    for index, name in enumerate(both.group):
        rows = group == name
        alone = weight_statistics(w[rows], mask[rows], reward[rows], group[rows])
        for field in ("token_reward_corr", "total_reward_corr", "effective_size", "largest_weight"):
            assert getattr(both, field)[index] == pytest.approx(getattr(alone, field)[0])
        total = np.where(mask, w, 0).sum(axis=1)[rows]
        assert both.total_reward_corr[index] == pytest.approx(np.corrcoef(total, reward[rows])[0, 1])


def test_equal_energies_give_every_rollout_the_same_weight():
    found = weight_statistics(np.ones((4, 3)), np.ones((4, 3), dtype=bool), [0, 1, 0, 1], [7, 7, 7, 7])
    assert found.effective_size == pytest.approx([4])
    assert found.largest_weight == pytest.approx([0.25])
    assert np.isnan(found.total_reward_corr).all() and found.pooled_total_reward_corr is None


def test_prompts_with_equal_rewards_do_not_dilute_the_pooled_correlation():
    rng = np.random.default_rng(1)
    w, mask, group = rng.gamma(1, size=(16, 3)), np.ones((16, 3), dtype=bool), np.repeat([0, 1], 8)
    reward = np.concatenate([rng.random(8), np.zeros(8)])
    both = weight_statistics(w, mask, reward, group)
    assert both.pooled_total_reward_corr == pytest.approx(both.total_reward_corr[0])
    assert np.isnan(both.total_reward_corr[1])


def test_figures_do_not_depend_on_units_or_padding():
    w, mask, reward = worked_group()
    group = np.zeros(4, dtype=int)
    base = weight_statistics(w, mask, reward, group)
    scaled = weight_statistics(np.where(mask, 3 * w, 1e9), mask, 5 * reward + 2, group)
    assert scaled.token_reward_corr == pytest.approx(base.token_reward_corr)
    assert scaled.effective_size == pytest.approx(base.effective_size)


def test_degenerate_groups_are_nan_and_never_warn():
    found = weight_statistics(np.zeros((2, 3)), np.zeros((2, 3), dtype=bool), [1, 0], [0, 1])
    assert np.isnan(found.effective_size).all() and found.mean_effective_share is None
    empty = weight_statistics(np.zeros((0, 3)), np.zeros((0, 3), dtype=bool), [], [])
    assert empty.size.shape == (0,) and empty.pooled_total_reward_corr is None


def test_bad_input_is_named():
    w, mask, reward = worked_group()
    with pytest.raises(InputError, match=r"energy\[1, 2\] is -1"):
        bad = w.copy()
        bad[1, 2] = -1
        weight_statistics(bad, mask, reward, np.zeros(4, dtype=int))
    with pytest.raises(InputError, match="there are 4 rollouts"):
        weight_statistics(w, mask, reward[:2], np.zeros(4, dtype=int))
    with pytest.raises(InputError, match=r"\[N, T\]"):
        weight_statistics(w[0], mask[0], reward, np.zeros(4, dtype=int))
