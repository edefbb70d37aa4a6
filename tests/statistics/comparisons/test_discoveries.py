import numpy as np
import pytest
from scipy import stats

from otb_analysis.errors import InputError
from otb_analysis.statistics import Gram, Interval, PairedRatios, discoveries, log_ratio_t, paired_ratios


def test_p_value_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    a, b = rng.gamma(9, size=20), rng.gamma(8, size=20)
    ratio = log_ratio_t(a, b)
    assert ratio is not None
    assert ratio.p_value == pytest.approx(stats.ttest_rel(np.log(a), np.log(b)).pvalue)


def test_only_true_differences_stand(gram_of, noisy_prompts):
    rng = np.random.default_rng(1)
    g = noisy_prompts(rng, [[2, 1]] * 12, 40)
    g[10:] += 2 * rng.normal(size=g[10:].shape)
    labels = (("rloo", "none"), *((f"same{i}", "none") for i in range(9)), ("noisy0", "none"), ("noisy1", "none"))
    found = discoveries(paired_ratios([Gram(gram_of(g), labels, 40)]), "variance")
    assert {d.estimator for d in found if d.different} == {"noisy0", "noisy1"}
    assert len(found) == 11
    assert [d.q_value for d in found] == sorted(d.q_value for d in found)
    assert all(d.q_value >= d.p_value for d in found)


def test_false_discoveries_under_the_null_are_as_rare_as_stated():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        pairs = [
            PairedRatios(str(i), "none", ("rloo", "none"), None, None, log_ratio_t(*np.exp(rng.normal(size=(2, 16)))))
            for i in range(8)
        ]
        hits += any(d.different for d in discoveries(pairs, method="bh"))
    # Under the global null the family-wise rate of Benjamini–Hochberg is .05.
    assert hits / 300 < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 300)


def test_comparisons_without_an_interval_are_left_out():
    point = Interval(1.2, None, None, 5, "", "")
    assert discoveries([PairedRatios("otb", "exact", ("rloo", "none"), point, None, point)], "variance") == []
    assert discoveries([]) == []


def test_ratios_without_spread_are_certain():
    same, half = log_ratio_t(np.ones(20), np.ones(20)), log_ratio_t(np.ones(20), np.full(20, 2.0))
    assert same is not None and half is not None
    assert (same.p_value, half.p_value) == (1, 0)


def test_unknown_measures_are_named():
    with pytest.raises(InputError, match="did you mean 'efficiency'"):
        discoveries([], "eficiency")
