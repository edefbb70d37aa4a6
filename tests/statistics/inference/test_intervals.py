import numpy as np
import pytest
from scipy import stats

from otb_analysis.errors import InputError
from otb_analysis.statistics import cluster_jackknife, jackknife_interval, log_ratio_t


def mean(rows):
    return rows[..., 0]


def ratio(rows):
    return rows[..., 0] / rows[..., 1]


def test_jackknife_of_a_mean_of_symmetric_light_tails_is_students_interval():
    x = 3 + np.concatenate([np.arange(1.0, 11), -np.arange(1.0, 11)])
    found = cluster_jackknife(x[:, None], mean, "mean", scale="linear")
    expected = stats.t.interval(0.95, 19, loc=x.mean(), scale=stats.sem(x))
    assert found is not None
    assert (found.low, found.high) == pytest.approx(expected)
    assert (found.estimate, found.n_clusters, found.estimand) == (pytest.approx(3), 20, "mean")


def test_the_jackknife_is_never_shorter_than_students_interval():
    rng = np.random.default_rng(0)
    for x in (rng.normal(3, 2, size=20), rng.exponential(size=30), -rng.exponential(size=30), rng.standard_cauchy(24)):
        found = cluster_jackknife(x[:, None], mean, "mean", scale="linear")
        low, high = stats.t.interval(0.95, x.size - 1, loc=x.mean(), scale=stats.sem(x))
        assert found is not None and found.low is not None and found.high is not None
        assert found.low <= low + 1e-9 and found.high >= high - 1e-9


def test_a_wider_level_gives_a_wider_interval():
    values = np.random.default_rng(6).gamma(2, size=20)
    deleted = (values.sum() - values) / 19
    narrow, wide = (jackknife_interval(values.mean(), deleted, "mean", level=level) for level in (0.95, 0.99))
    assert narrow is not None and narrow.low is not None and narrow.high is not None
    assert wide is not None and wide.low is not None and wide.high is not None
    assert wide.low < narrow.low and wide.high > narrow.high


def test_jackknife_equals_deleting_rows_one_by_one():
    rows = np.random.default_rng(1).gamma(2, size=(18, 2))
    slow = [ratio(np.delete(rows, k, axis=0).mean(axis=0)) for k in range(18)]
    fast = cluster_jackknife(rows, ratio, "ratio")
    twin = jackknife_interval(ratio(rows.mean(axis=0)), slow, "ratio")
    assert twin is not None and fast is not None
    assert (fast.low, fast.high) == pytest.approx((twin.low, twin.high))


def test_log_scale_intervals_do_not_depend_on_the_unit():
    rows = np.random.default_rng(2).gamma(2, size=(18, 1))
    one, thousand = cluster_jackknife(rows, mean, "mean"), cluster_jackknife(1000 * rows, mean, "mean")
    assert one is not None and one.low is not None and one.high is not None and thousand is not None
    assert (thousand.low, thousand.high) == pytest.approx((1000 * one.low, 1000 * one.high))
    assert one.low > 0


def test_an_end_that_overflows_gives_a_point():
    found = jackknife_interval(1.0, np.exp(np.linspace(-400, 400, 20)), "x")
    assert found is not None and found.low is None


def test_fifteen_clusters_give_a_point():
    found = cluster_jackknife(np.ones((15, 1)), mean, "mean")
    assert found is not None
    assert (found.estimate, found.low, found.high, found.n_clusters) == (1.0, None, None, 15)


def test_a_replicate_outside_the_scale_gives_a_point():
    found = jackknife_interval(0.5, [0.4] * 15 + [-0.1], "variance")
    assert found is not None and found.low is None
    share = jackknife_interval(0.9, [0.9] * 15 + [1.1], "share", scale="logit")
    assert share is not None and share.low is None


def test_undefined_estimates_give_none():
    assert jackknife_interval(np.nan, np.ones(20), "x") is None
    assert cluster_jackknife(np.zeros((0, 1)), mean, "x") is None
    assert cluster_jackknife(np.zeros((20, 2)), ratio, "x") is None
    assert log_ratio_t([], []) is None
    assert log_ratio_t([1, 0], [1, 1]) is None


def test_logit_intervals_stay_inside_the_unit_interval():
    found = jackknife_interval(0.95, np.linspace(0.90, 0.99, 20), "share", scale="logit")
    assert found is not None and found.low is not None and found.high is not None
    assert 0 < found.low < 0.95 < found.high < 1


def test_paired_t_names_the_geometric_mean():
    # log-ratios of 16 pairs: eight of log 2 and eight of log 8, mean log 4, s² = 8·2·(log 2)²/15.
    found = log_ratio_t([2.0] * 8 + [8.0] * 8, np.ones(16), "variance ratio")
    half = stats.t.ppf(0.975, 15) * np.log(2) * np.sqrt(16 / 15) / 4
    assert found is not None
    assert found.estimate == pytest.approx(4)
    assert (found.low, found.high) == pytest.approx((4 * np.exp(-half), 4 * np.exp(half)))
    assert "geometric mean" in found.estimand


def test_bad_arguments_are_named():
    with pytest.raises(InputError, match="did you mean 'log'"):
        jackknife_interval(1.0, np.ones(20), "x", scale="logs")
    with pytest.raises(InputError, match=r"table has shape \(3,\)"):
        cluster_jackknife(np.ones(3), mean, "x")
    with pytest.raises(InputError, match="denominator"):
        log_ratio_t([1, 2], [1])
