import numpy as np
import pytest
from scipy import stats

from otb_analysis.errors import InputError
from otb_analysis.statistics import fidelity, fidelity_by_part, position_cells, realized_fidelity
from otb_analysis.statistics.energies import cell_ranks, deviation


def test_pooled_figures_by_hand():
    # x = 1,2,3,4 and y = 1,3,2,4: Pearson = Spearman = 1 − 6·2/(4·15) = .8.
    found = fidelity([1, 2, 3, 4], [1, 3, 2, 4]).pooled
    assert found.n == 4
    assert found.pearson == pytest.approx(0.8)
    assert found.spearman == pytest.approx(0.8)
    assert found.log_pearson == pytest.approx(np.corrcoef(np.log([1, 2, 3, 4]), np.log([1, 3, 2, 4]))[0, 1])


def test_a_proxy_that_misses_only_each_cells_scale_is_perfect_within_cells():
    rng = np.random.default_rng(0)
    exact = rng.gamma(2, size=(40, 30))
    # Powers of two, so that scaling moves no value across the edge of a tie.
    scale = np.exp2(rng.integers(-6, 7, size=(5, 30)))[np.repeat(np.arange(5), 8)]
    found = fidelity(exact * scale, exact, cell=position_cells(np.repeat(np.arange(5), 8), 30))
    assert found.within is not None and found.n_cells == 150
    assert found.within.log_pearson == pytest.approx(1)
    assert found.within.spearman == pytest.approx(1)
    assert found.pooled.log_pearson is not None and found.pooled.log_pearson < 0.6


def test_within_figures_equal_deviations_taken_cell_by_cell():
    rng = np.random.default_rng(1)
    x, cell = rng.gamma(2, size=60), rng.integers(0, 9, size=60)
    y = x * rng.gamma(9, size=60)
    keep = [c for c in range(9) if (cell == c).sum() > 1]
    dx = np.concatenate([x[cell == c] - x[cell == c].mean() for c in keep])
    dy = np.concatenate([y[cell == c] - y[cell == c].mean() for c in keep])
    ranks = []
    for v in (x, y):
        parts = [stats.rankdata(v[cell == c]) / ((cell == c).sum() + 1) for c in keep]
        ranks.append(np.concatenate([p - p.mean() for p in parts]))
    found = fidelity(x, y, cell=cell).within
    assert found is not None
    assert found.pearson == pytest.approx(np.corrcoef(dx, dy)[0, 1])
    assert found.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_what_is_masked_or_not_measured_is_never_read():
    rng = np.random.default_rng(2)
    x, y, mask = rng.gamma(2, size=(6, 7)), rng.gamma(2, size=(6, 7)), rng.random((6, 7)) < 0.7
    cell = position_cells(np.array([0, 0, 0, 1, 1, 1]), 7)
    clean = fidelity(x, y, mask, cell)
    assert fidelity(np.where(mask, x, np.nan), np.where(mask, y, np.inf), mask, cell) == clean
    assert fidelity(x, np.where(mask, y, np.nan), None, cell) == clean


@pytest.mark.parametrize("x", [[], [1.0], [1.0, 2.0], [0.3] * 10])
def test_undefined_figures_are_none(x):
    found = fidelity(x, np.arange(len(x), dtype=float), cell=np.zeros(len(x), dtype=int))
    for part in (found.pooled, found.within):
        assert part is not None
        assert part.pearson is part.spearman is part.log_pearson is None


def test_cells_of_one_say_nothing_within():
    found = fidelity([1.0, 2, 3], [1.0, 2, 4], cell=[0, 1, 2])
    assert found.within is not None and found.within.n == 0 and found.within.pearson is None
    assert found.pooled.spearman == pytest.approx(1)


def test_constant_cells_leave_no_rounding_behind():
    x = np.repeat([0.1, 0.7, 1.3], 10) * (1 / 3)
    found = fidelity(x, x**2, cell=np.repeat([0, 1, 2], 10)).within
    assert found is not None and found.pearson is None


def test_zero_energies_count_except_in_logarithms():
    found = fidelity([0.0, 1, 2, 3], [0.0, 1, 2, 4]).pooled
    assert found.n == 4
    assert found.log_pearson == pytest.approx(np.corrcoef(np.log([1, 2, 3]), np.log([1, 2, 4]))[0, 1])


@pytest.mark.parametrize("n_parts", [1, 4])
def test_fidelity_by_part_is_that_of_each_part_alone(n_parts):
    rng = np.random.default_rng(5)
    part = rng.integers(0, n_parts, 600) * 7 - 3
    cell = (part + 3) * 100 + rng.integers(0, 40, 600)
    x = np.round(rng.lognormal(size=600), 1)  # ties and zeros
    y = x * rng.lognormal(sigma=0.4, size=600)
    x[::50], y[7::50] = np.nan, np.inf
    whole, by_part = fidelity_by_part(x, y, cell, part)
    assert list(by_part) == sorted(set(part.tolist()))
    for name, found in by_part.items():
        at = part == name
        assert found == fidelity(x[at], y[at], cell=cell[at])
    order = np.argsort(part, kind="stable")
    assert whole == fidelity(x[order], y[order], cell=cell[order])


def test_fidelity_by_part_of_nothing_has_no_parts():
    whole, by_part = fidelity_by_part([np.nan], [1.0], [0], [0])
    assert whole.pooled.n == 0 and by_part == {}


@pytest.mark.parametrize(("cell", "part", "said"), [([0, 0], [1, 2], "several parts"), ([0], [1, 2], r"\(1,\)")])
def test_fidelity_by_part_refuses_what_it_cannot_divide(cell, part, said):
    with pytest.raises(InputError, match=said):
        fidelity_by_part([1.0, 2.0], [1.0, 2.0], cell, part)


def test_realized_fidelity_is_fidelity_of_running_sums():
    proxy, exact = np.array([[1.0, 2, 3], [2, 1, 5]]), np.array([[1.0, 4, 2], [2, 2, 9]])
    found = realized_fidelity(proxy, exact, np.ones((2, 3), dtype=bool), [0, 0])
    direct = fidelity(proxy.cumsum(1), exact.cumsum(1), cell=position_cells(np.array([0, 0]), 3))
    assert found == direct


def test_realized_fidelity_stops_at_the_first_token_not_measured():
    exact = np.array([[1.0, np.nan, 2, 3], [1, 2, 3, 4]])
    found = realized_fidelity(np.ones((2, 4)), exact, np.ones((2, 4), dtype=bool), [0, 0])
    assert found.pooled.n == 1 + 4


def test_realized_positions_count_policy_tokens_only():
    mask = np.array([[True, False, True], [True, True, False]])
    proxy = np.array([[1.0, np.nan, 2], [2, 5, np.nan]])
    found = realized_fidelity(proxy, proxy, mask, [0, 0])
    assert found.n_cells == 2 and found.within is not None and found.within.n == 4


def test_ranks_within_cells_average_ties():
    # cell 0: 5,5,1 → 2.5,2.5,1 over 4; cell 1: 7 → 1 over 2.
    assert cell_ranks(np.array([5.0, 7, 5, 1]), np.array([0, 1, 0, 0])) == pytest.approx([0.625, 0.5, 0.625, 0.25])


def test_deviations_are_invariant_under_cell_shifts():
    rng = np.random.default_rng(5)
    x, cells = rng.normal(size=30), rng.integers(0, 4, size=30)
    assert deviation(x + 10 * cells, cells) == pytest.approx(deviation(x, cells))


def test_shapes_that_differ_are_named():
    with pytest.raises(InputError, match=r"proxy has shape \(2,\) but exact \(3,\)"):
        fidelity([1, 2], [1, 2, 3])
    with pytest.raises(InputError, match="mask has shape"):
        fidelity([1, 2], [1, 2], [True] * 3)
    with pytest.raises(InputError, match=r"\[N, T\]"):
        realized_fidelity([1.0, 2], [1.0, 2], [True, True], [0])


def test_rounding_of_equal_energies_is_no_disagreement_in_rank():
    # Five rollouts of a cell share a prefix, so proxy and exact energy are equal up to rounding; the sixth differs.
    noise = 1e-6 * np.random.default_rng(0).normal(size=(2, 200, 6))
    proxy, exact = np.ones((200, 6)) + noise[0], np.ones((200, 6)) + noise[1]
    proxy[:, 5], exact[:, 5] = 2.0, 3.0
    cell = np.repeat(np.arange(200), 6).reshape(200, 6)
    assert fidelity(proxy, exact, cell=cell).within.spearman == pytest.approx(1.0)
