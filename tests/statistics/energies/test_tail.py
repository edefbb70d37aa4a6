import numpy as np
import pytest
from scipy import stats

from otb_analysis.statistics import pareto_k, top_share


@pytest.mark.parametrize("k", [0.0, 0.3, 0.7])
def test_pareto_k_finds_the_shape_it_was_drawn_with(k):
    rng = np.random.default_rng(0)
    values = np.array([pareto_k(stats.genpareto.rvs(k, size=4000, random_state=rng)) for _ in range(40)], dtype=float)
    assert abs(values.mean() - k) < 4 * values.std(ddof=1) / np.sqrt(40)


def test_a_bounded_quantity_has_a_negative_index():
    k = pareto_k(np.random.default_rng(0).random(4000))
    assert k is not None and k < -0.5


def test_pareto_k_does_not_depend_on_the_unit():
    x = np.random.default_rng(1).pareto(2, size=2000)
    assert pareto_k(1e6 * x) == pytest.approx(pareto_k(x), rel=1e-6)


def test_pareto_k_needs_a_tail():
    assert pareto_k([]) is None
    assert pareto_k(np.ones(10_000)) is None
    assert pareto_k(np.arange(100.0)) is None
    assert pareto_k(np.full(300, np.nan)) is None


def test_pareto_k_ignores_what_was_not_measured():
    x = np.random.default_rng(2).pareto(2, size=(20, 100))
    assert pareto_k(np.where(np.arange(100) < 90, x, np.nan)) == pareto_k(x[:, :90])


def test_top_share_by_hand():
    assert top_share([1] * 150 + [25, 25]) == pytest.approx(0.25)  # the two largest of 152
    assert top_share(np.ones(200)) == pytest.approx(0.01)
    assert top_share([0, 0, 5]) == 1
    assert top_share([-3, 1]) == pytest.approx(0.75)
    assert top_share([]) is None
    assert top_share([0.0, 0]) is None
    assert top_share([np.nan, 2, 2]) == pytest.approx(0.5)
