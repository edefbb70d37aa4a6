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


@pytest.mark.parametrize("k", [-0.4, -0.2, 0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("n", [300, 5000])
def test_no_shape_and_scale_fit_better(k, n):
    x = stats.genpareto.rvs(k, size=n, random_state=3)
    excess = x[x > np.quantile(x, 0.9)] - np.quantile(x, 0.9)
    found = pareto_k(x)
    scales = np.geomspace(1e-3, 1e3, 20_001) * np.median(excess)

    def best(shape):
        with np.errstate(invalid="ignore"):  # beyond the end of the law
            loss = np.log(scales) + (1 + 1 / shape) * np.log1p(shape * excess[:, None] / scales).mean(axis=0)
        return np.nanmin(loss)

    assert found is not None and best(found) <= min(best(shape) for shape in found + np.array([-0.3, -0.1, 0.1, 0.3]))


def test_a_tail_that_falls_off_faster_than_any_law_is_at_the_bound():
    assert pareto_k(1 - np.random.default_rng(0).random(4000) ** 3) == -1


def test_values_that_crowd_at_their_bound_give_an_index():
    # The search looks so far below 0 on these that θ = eᵘ − 1 rounds to −1, where the largest value has log 0.
    for seed in range(300):
        k = pareto_k(np.random.default_rng(seed).beta(0.2, 0.2, size=700))
        assert k is not None and -1 <= k < 0


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
