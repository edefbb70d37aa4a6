"""Infinitely many rollouts: the optimum, the regret identity, and how much of the gap each baseline closes."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import DecayOptions
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.population import (
    POPULATION,
    gap_closed,
    population_baseline,
    population_moments,
    position_optimum,
    prefix_optimum,
    regret,
    values,
)


def variance(tree, baseline):
    return population_moments(tree, baseline).variance


def test_scores_at_different_positions_are_uncorrelated(tree):
    products = np.einsum("mtd,mkd->mtk", tree.score, tree.score)
    off_diagonal = tree.expect(products) * (1 - np.eye(tree.mask.shape[1]))
    np.testing.assert_allclose(off_diagonal, 0, atol=1e-14)


def test_path_energy_has_the_mean_of_realized_energy(tree):
    # E‖S_t‖² = E W_t with finished rollouts carried along; completion by completion they differ
    path = (np.cumsum(tree.score, axis=1) ** 2).sum(axis=2)
    realized = np.cumsum(tree.energy, axis=1)
    np.testing.assert_allclose(tree.expect(path), tree.expect(realized), atol=1e-13)


def test_variance_above_the_optimum_is_the_regret(tree):
    best = variance(tree, position_optimum(tree))
    rng = np.random.default_rng(0)
    for baseline in [rng.normal(size=tree.mask.shape[1]) for _ in range(5)]:
        assert abs(variance(tree, baseline) - best - regret(tree, baseline)) < 1e-10


@pytest.mark.parametrize("name", sorted(set(POPULATION) - {"value"}))
def test_regret_of_every_population_baseline_is_exact(name, tree):
    baseline = population_baseline(name, tree)
    excess = variance(tree, baseline) - variance(tree, position_optimum(tree))
    assert abs(excess - regret(tree, baseline)) < 1e-10
    assert excess > -1e-12


def test_no_baseline_moves_the_mean(tree):
    for name in POPULATION:
        assert population_moments(tree, population_baseline(name, tree)).relative_bias < 1e-12


def test_prefix_optimum_beats_every_function_of_the_prefix(tree):
    best = prefix_optimum(tree)
    least = variance(tree, best)
    assert least <= variance(tree, position_optimum(tree)) + 1e-12
    off = values(tree) - best
    excess = tree.expect(tree.energy * off**2).sum()
    assert abs(variance(tree, values(tree)) - least - excess) < 1e-10


def test_without_shared_parameters_token_optimal_is_the_optimum(draw):
    for seed in range(5):
        tree = draw(seed, horizon=3, end_token=seed % 2 == 0, dense=seed % 3 == 0)
        assert regret(tree, population_baseline("token_optimal", tree)) < 1e-28


def test_without_shared_parameters_otb_is_the_optimum_at_the_first_token(draw):
    tree = draw(3, horizon=3, end_token=True)
    otb = population_baseline("otb", tree)
    np.testing.assert_allclose(otb[:, 0], position_optimum(tree)[0], atol=1e-14)
    assert abs(otb[:, 1:] - position_optimum(tree)[1:])[tree.mask[:, 1:]].max() > 1e-3


def test_otb_minimises_its_own_objective(tree):
    # E[W_t (G_t − B_t)²] over completions alive at t: moving B_t either way raises it
    realized = np.cumsum(tree.energy, axis=1)
    otb = population_baseline("otb", tree)

    def objective(baseline):
        return tree.expect(tree.mask * realized * (tree.returns - baseline) ** 2)

    for shift in (-1e-3, 1e-3):
        assert (objective(otb + shift) > objective(otb)).all()


def test_classic_and_sequence_optimum_agree_when_tokens_share_nothing(draw):
    # ‖S‖² = W_T completion by completion when no two scores overlap
    tree = draw(6, horizon=3)
    np.testing.assert_allclose(
        population_baseline("classic_optimal", tree), population_baseline("sequence_optimal", tree), atol=1e-14
    )


@pytest.mark.parametrize("name", ["otb", "otb_carry", "token_optimal", "opo", "sequence_optimal", "energy_ema"])
def test_large_groups_approach_the_population(name, draw):
    # bias of a ratio estimator falls as 1/N: from N = 4 to N = 8 it halves on the way to the population's zero
    tree = draw(1, vocabulary=2, horizon=2, end_token=True)
    bias = [group_moments(name, tree, n).relative_bias for n in (8, 16, 32)]
    assert 1.7 < bias[0] / bias[1] < 2.3 and 1.85 < bias[1] / bias[2] < 2.15


@pytest.mark.parametrize("name", ["otb_loo", "token_optimal_loo", "sequence_optimal_loo", "opo_loo", "otb_carry_loo"])
def test_leave_one_out_variance_approaches_the_population(name, draw):
    tree = draw(1, vocabulary=2, horizon=2)
    limit = population_moments(tree, population_baseline(name.removesuffix("_loo"), tree)).variance
    excess = [group_moments(name, tree, n).n_variance - limit for n in (16, 32)]
    assert abs(excess[1]) < 0.15 * limit
    assert 0.4 < excess[1] / excess[0] < 0.6  # falls as 1/N


def test_groups_with_the_optimal_constants_have_no_regret(tree):
    best = variance(tree, position_optimum(tree))
    assert abs(group_moments("position_optimal", tree, 3).n_variance - best) < 1e-12
    assert group_moments("rloo", tree, 3).n_variance > best


def test_median_gap_closed_orders_the_baselines(draw):
    # terminal rewards, no shared parameters, 60 policies: mean < classic < OTB < token_optimal = 1
    trees = [draw(seed) for seed in range(60)]
    closed = {
        name: np.array([gap_closed(name, tree) for tree in trees])
        for name in ("classic_optimal", "otb", "token_optimal")
    }
    otb_over_classic = closed["otb"] - closed["classic_optimal"]
    assert otb_over_classic.mean() > 5 * otb_over_classic.std(ddof=1) / 60**0.5
    assert np.median(closed["classic_optimal"]) > 0.1
    np.testing.assert_allclose(closed["token_optimal"], 1, atol=1e-9)


def test_shared_parameters_can_make_otb_worse_than_the_mean(draw):
    closed = np.array([gap_closed("otb", draw(seed, shared=6)) for seed in range(60)])
    assert 0 < (closed < 0).mean() < 0.5
    assert np.median(closed) > 0.1


def test_value_is_not_the_variance_optimal_baseline(draw):
    ratio = [variance(tree, values(tree)) / variance(tree, position_optimum(tree)) for tree in map(draw, range(30))]
    assert min(ratio) < 1 < max(ratio)  # a function of the prefix may beat a constant, and may not


def test_energy_ema_runs_from_token_optimal_to_otb(tree):
    for decay, name in ((0.0, "token_optimal"), (1.0, "otb")):
        np.testing.assert_allclose(
            population_baseline("energy_ema", tree, decay=decay), population_baseline(name, tree), atol=1e-14
        )
    assert DecayOptions().decay == 0.9


def test_leave_one_out_names_have_no_limit_of_their_own(draw):
    with pytest.raises(InputError, match=r"'otb_loo' .* mean 'otb'"):
        population_baseline("otb_loo", draw(0, horizon=2))
