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
    assert found.pooled_total_reward_corr == pytest.approx(np.corrcoef([0.04, 2, 2.6, 0.04], reward)[0, 1])
    assert found.total_reward_corr == pytest.approx([found.pooled_total_reward_corr])


def test_figures_per_prompt_are_those_of_the_prompt_alone():
    rng = np.random.default_rng(0)
    w, mask = rng.gamma(1, size=(15, 6)), rng.random((15, 6)) < 0.8
    reward, group = rng.random(15), rng.integers(0, 3, size=15)
    both = weight_statistics(w, mask, reward, group)
    for index, name in enumerate(np.unique(group)):
        rows = group == name
        alone = weight_statistics(w[rows], mask[rows], reward[rows], group[rows])
        assert both.total_reward_corr[index] == pytest.approx(alone.total_reward_corr[0])
        total = np.where(mask, w, 0).sum(axis=1)[rows]
        assert both.total_reward_corr[index] == pytest.approx(np.corrcoef(total, reward[rows])[0, 1])


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
    assert scaled.total_reward_corr == pytest.approx(base.total_reward_corr)
    assert scaled.pooled_total_reward_corr == pytest.approx(base.pooled_total_reward_corr)


def test_degenerate_groups_are_nan_and_never_warn():
    equal = weight_statistics(np.ones((4, 3)), np.ones((4, 3), dtype=bool), [0, 1, 0, 1], [7, 7, 7, 7])
    single = weight_statistics(np.zeros((2, 3)), np.zeros((2, 3), dtype=bool), [1, 0], [0, 1])
    for found in (equal, single):
        assert np.isnan(found.total_reward_corr).all() and found.pooled_total_reward_corr is None
    empty = weight_statistics(np.zeros((0, 3)), np.zeros((0, 3), dtype=bool), [], [])
    assert empty.total_reward_corr.shape == (0,) and empty.pooled_total_reward_corr is None


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
