import numpy as np
import pytest
from scipy import stats

from otb_analysis.statistics import cluster_jackknife
from otb_analysis.statistics.intervals import Studentized


def test_symmetric_light_tails_leave_students_quantiles():
    law = Studentized.from_influence(np.concatenate([np.arange(8.0), -np.arange(8.0)]))
    assert (law.skew, law.degrees) == (pytest.approx(0), pytest.approx(15))
    assert law.quantiles(0.95) == pytest.approx((stats.t.ppf(0.975, 15), stats.t.ppf(0.975, 15)))


def test_quantiles_invert_halls_cubic():
    influence = np.random.default_rng(4).exponential(size=20)
    law = Studentized.from_influence(influence)
    a = stats.skew(influence, bias=False) / np.sqrt(20)
    kurtosis = stats.kurtosis(influence, bias=False)
    q = stats.t.ppf(0.975, 2 / (kurtosis / 20 + 2 / 19))
    down, up = law.quantiles(0.95)
    # Right-skewed: the lower end stays at the plain quantile, the upper one is where g(−up) = −q.
    assert down == pytest.approx(q)
    assert up > q
    assert -up + a * up**2 / 3 - a**2 * up**3 / 27 + a / 6 == pytest.approx(-q)


def test_mirrored_clusters_mirror_the_quantiles():
    x = np.random.default_rng(5).exponential(size=30)
    assert Studentized.from_influence(-x).quantiles(0.9) == pytest.approx(
        Studentized.from_influence(x).quantiles(0.9)[::-1]
    )
    assert Studentized.from_influence(7 * x - 3).quantiles(0.9) == pytest.approx(
        Studentized.from_influence(x).quantiles(0.9)
    )


def test_clusters_without_spread_are_students():
    assert Studentized.from_influence(np.full(20, 0.1)) == Studentized(0.0, 19.0)
    assert Studentized.from_influence(np.zeros(20)) == Studentized(0.0, 19.0)


def test_p_value_is_one_minus_the_level_that_just_excludes():
    for seed in range(4):
        law = Studentized.from_influence(np.random.default_rng(seed).exponential(size=20))
        for level in (0.5, 0.9, 0.99):
            down, up = law.quantiles(level)
            # θ₀ at the lower end lies `down` standard errors below θ̂, at the upper end `up` above.
            assert law.p_value(down) == pytest.approx(1 - level)
            assert law.p_value(-up) == pytest.approx(1 - level)
        assert law.p_value(0.0) == 1


def test_without_corrections_the_p_value_is_students():
    assert Studentized(0.0, 15.0).p_value(-2.0) == pytest.approx(2 * stats.t.sf(2, 15))


def test_interval_and_p_value_agree_about_one():
    rng = np.random.default_rng(6)
    for _ in range(50):
        rows = rng.lognormal(sigma=1, size=(20, 2)) * [1.5, 1]
        found = cluster_jackknife(rows, lambda r: r[..., 0] / r[..., 1], "ratio")
        assert found is not None and found.p_value is not None and found.low is not None and found.high is not None
        assert (found.p_value < 0.05) == (not found.low <= 1 <= found.high)
