import numpy as np
import pytest

from otb_analysis.statistics import fidelity, position_cells
from otb_analysis.statistics.energies import correlation


def drawn(seed=0, prompts=20, rollouts=6, length=5):
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(prompts), rollouts)
    level = rng.normal(size=(prompts, length))[group]  # every cell has its own level, which pools but says nothing
    x = level + rng.normal(size=level.shape)
    y = 3 * level + x - level + rng.normal(size=level.shape)
    return group, x, y, position_cells(group, length)


def test_estimates_are_those_of_fidelity_pooled_and_within():
    group, x, y, cells = drawn()
    same = fidelity(x, y, cell=cells)
    prompt = np.repeat(group, x.shape[1])
    pooled, within = correlation(x.ravel(), y.ravel(), prompt), correlation(x.ravel(), y.ravel(), prompt, cells.ravel())
    assert pooled is not None and within is not None and same.within is not None
    assert pooled.estimate == pytest.approx(same.pooled.pearson, abs=1e-12)
    assert within.estimate == pytest.approx(same.within.pearson, abs=1e-12)
    assert pooled.estimate - within.estimate > 0.1


def test_interval_over_prompts_covers_a_correlation_of_sqrt_half():
    # within cells y = x + ε with equal variances: corr = 1/√2
    held = 0
    for seed in range(60):
        group, x, y, cells = drawn(seed)
        found = correlation(x.ravel(), y.ravel(), np.repeat(group, x.shape[1]), cells.ravel())
        assert found is not None and found.low is not None and found.high is not None
        assert -1 < found.low < found.estimate < found.high < 1
        held += found.low < 2**-0.5 < found.high
    assert held >= 51  # 57 expected, standard deviation 1.7


def test_a_constant_has_no_correlation_and_few_prompts_no_interval():
    group, x, y, _ = drawn(prompts=3)
    prompt = np.repeat(group, x.shape[1])
    few = correlation(x.ravel(), y.ravel(), prompt)
    assert few is not None and few.low is None
    assert correlation(np.ones(x.size), y.ravel(), prompt) is None


def test_scale_and_shift_of_a_variable_change_nothing():
    group, x, y, cells = drawn()
    prompt = np.repeat(group, x.shape[1])
    one = correlation(x.ravel(), y.ravel(), prompt, cells.ravel())
    other = correlation(1e6 * x.ravel() + 7, y.ravel() / 3, prompt, cells.ravel())
    assert one is not None and other is not None
    assert one.estimate == pytest.approx(other.estimate) and one.low == pytest.approx(other.low)
