"""Weights of a portfolio: against brute force on exact and on estimated moments, and judged on other prompts."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import (
    Proved,
    best_weights,
    deleted_moments,
    efficiency,
    fitted_weights,
    pooled_statistics,
    with_portfolio,
)
from otb_analysis.types import Gram
from studies.lib.enumeration.groups import group_gradients, multisets
from studies.lib.enumeration.trees import TreeSpec, random_tree

MEMBERS = (("otb", "exact"), ("otb_loo", "exact"), ("rloo", "none"))


def best(mean, spread, along, p, ridge=0.0):
    weights = best_weights(mean, spread, along, p, ridge)
    assert weights is not None
    return weights


def fitted(*args, ridge=0.0):
    weights = fitted_weights(*args, ridge=ridge)
    assert weights is not None
    return weights


def exact_moments(seed, names=("otb", "none", "rloo"), n=3):
    """M, V and c of enumerated estimators on one random policy, and ‖∇J‖²."""
    tree = random_tree(TreeSpec(horizon=2, shared=4, end_token=True), np.random.default_rng(seed))
    members, prob = multisets(tree, n)
    g = np.stack([group_gradients(name, tree, members) for name in names])
    mean = np.einsum("kgd,g->kd", g, prob)
    power = np.einsum("kgd,lgd,g->kl", g, g, prob)
    return mean @ mean.T, power - mean @ mean.T, mean @ tree.gradient, tree.gradient @ tree.gradient


def exact_efficiency(a, mean, spread, along, truth_sq, p):
    return (a @ along) ** 2 / truth_sq / (a @ (mean + spread / p) @ a)


@pytest.mark.parametrize("p", [1, 8, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_no_weights_on_a_grid_are_more_efficient(seed, p):
    mean, spread, along, truth_sq = exact_moments(seed)
    weights = best(mean, spread, along, p)
    assert abs(weights.sum() - 1) < 1e-12
    most = exact_efficiency(weights, mean, spread, along, truth_sq, p)
    steps = np.linspace(-2, 3, 101)
    grid = np.array([(a, b, 1 - a - b) for a in steps for b in steps])
    every = np.array([exact_efficiency(a, mean, spread, along, truth_sq, p) for a in grid])
    assert most >= every.max() - 1e-12
    # unless the optimum lies outside the grid, the best of it is close
    if np.abs(weights).max() < 1.9:
        assert every.max() > most - 0.01
        assert np.abs(grid[every.argmax()] - weights).max() < 0.5
    assert most > max(exact_efficiency(row, mean, spread, along, truth_sq, p) for row in np.eye(3)) - 1e-12


def test_two_unbiased_members_by_hand():
    # V = [[2, 0], [0, 1]]: V⁻¹1 = (½, 1), so a = (⅓, ⅔); with a covariance of 1, (0, 1) is left: V⁻¹1 ∝ (1 − 1, 2 − 1)
    ones, truth = np.ones((2, 2)), np.ones(2)
    for p in (1, 50):
        np.testing.assert_allclose(best(0.3 * ones, np.diag([2.0, 1]), 0.3 * truth, p), [1 / 3, 2 / 3])
        np.testing.assert_allclose(best(0.3 * ones, np.array([[2.0, 1], [1, 1]]), 0.3 * truth, p), [0, 1], atol=1e-12)


def test_biased_quiet_member_loses_its_weight_as_prompts_grow():
    # m_1 = (½, ½), V_1 = 1; m_2 = ∇J = (1, 0), V_2 = 4: a ∝ (M + V/P)⁻¹(½, 1)
    mean, spread, along = np.array([[0.5, 0.5], [0.5, 1]]), np.diag([1.0, 4]), np.array([0.5, 1])
    # P = 1: [[1.5, .5], [.5, 5]]⁻¹(½, 1) ∝ (5·½ − ½, 1.5 − ¼) = (2, 1.25)
    np.testing.assert_allclose(best(mean, spread, along, 1), [2 / 3.25, 1.25 / 3.25])
    shares = [best(mean, spread, along, p)[0] for p in (1, 8, 64, 1e9)]
    assert shares == sorted(shares, reverse=True)
    assert abs(shares[-1]) < 1e-6


def test_members_that_are_alike_share_their_weight():
    mean, spread = np.full((3, 3), 0.2), np.array([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
    np.testing.assert_allclose(best(mean, spread, np.full(3, 0.2), 1), [0.25, 0.25, 0.5])


def test_a_ridge_pulls_weights_towards_equal_ones_by_hand():
    # V = diag(2, 1), c = (1, 1), ρ = 1: τ = 1.5, so a ∝ (1/3.5, 1/2.5) = (5/12, 7/12) where ρ = 0 gives (1/3, 2/3)
    none, truth = np.zeros((2, 2)), np.ones(2)
    np.testing.assert_allclose(best(none, np.diag([2.0, 1]), truth, 1, 1.0), [5 / 12, 7 / 12])
    # of biased members too: U = [[1.5, .5], [.5, 5]], c = (½, 1), e = 1.5/7.5 = .2; ρ = 1: τ = 3.25,
    # [[4.75, .5], [.5, 8.25]]⁻¹(1.15, 1.65) ∝ (1.15·8.25 − 1.65·.5, 4.75·1.65 − .5·1.15) = (8.6625, 7.2625)
    biased = np.array([[0.5, 0.5], [0.5, 1]]), np.diag([1.0, 4]), np.array([0.5, 1])
    np.testing.assert_allclose(best(*biased, 1, 1.0), np.array([8.6625, 7.2625]) / 15.925)
    np.testing.assert_allclose(best(*biased, 1, 1e12), [0.5, 0.5])
    assert best_weights(np.diag([-2.0, 1]), none, truth, 1, 1.0) is None


def test_fitted_weights_have_a_ridge_unless_it_is_taken_away():
    gram = simulated(2, 40, (1.0, 2.0, 2.5), (TRUTH, TRUTH, TRUTH), TRUTH)
    known = Proved(dict.fromkeys(MEMBERS, 1.0), frozenset(MEMBERS))
    plain, pulled = fitted([gram], MEMBERS, 16, known), fitted_weights([gram], MEMBERS, 16, known)
    assert pulled is not None and abs(pulled.sum() - 1) < 1e-12  # so unbiased members stay unbiased together
    assert np.abs(pulled - 1 / 3).max() < 0.6 * np.abs(plain - 1 / 3).max()


def test_noise_that_hides_the_answer_gives_none():
    assert best_weights(np.array([[-1.0, 0], [0, 1]]), np.diag([0.1, 1]), np.ones(2), 1) is None
    assert best_weights(np.zeros((2, 2)), np.eye(2), np.array([-1.0, 0.5]), 1) is None
    assert best_weights(np.full((2, 2), np.nan), np.eye(2), np.ones(2), 1) is None


def simulated(seed, prompts, spread, means, truth, dim=6):
    """A Gram matrix of unbiased `rloo` and two others with given means, noises of given standard deviations."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(prompts, dim))
    noise = rng.normal(size=(3, prompts, dim))
    g = np.stack([m + s * (0.5 * common + n) for m, s, n in zip(means, spread, noise, strict=True)])
    inner = np.einsum("kpd,lqd->klpq", g, g)
    return Gram(inner, MEMBERS, 4 * prompts)


TRUTH = np.array([1.0, 0, 0, 0, 0, 0])
SIDEWAYS = np.array([0.5, 0.3, 0, 0, 0, 0])


def test_fit_is_the_most_efficient_on_its_own_prompts():
    gram = simulated(0, 60, (1.0, 2.0, 2.5), (SIDEWAYS, TRUTH, TRUTH), TRUTH)
    weights = fitted([gram], MEMBERS, 16)

    def of(a):
        rows = np.einsum("k,l,klpq->pq", a, a, gram.inner), np.einsum("k,kpq->pq", a, gram.inner[:, 2])
        inner = np.array([[rows[0], rows[1]], [rows[1].T, gram.inner[2, 2]]])
        one = Gram(inner, (("one", "none"), ("rloo", "none")), 240)
        return float(efficiency(deleted_moments([one], ("one", "none")), 16)[0])

    most = of(weights)
    rng = np.random.default_rng(1)
    others = [weights + s * rng.normal(size=3) for s in (0.001, 0.1, 1) for _ in range(300)]
    assert most >= max(map(of, others)) - 1e-12


def test_fit_finds_the_weights_of_the_law_as_prompts_grow():
    # noises s_k(½ z + n_k) in 6 dimensions: V_kl = 6·s_k·s_l·(¼ + [k = l])
    s = np.array([1.0, 2.0, 2.5])
    spread = 6 * np.outer(s, s) * (0.25 + np.eye(3))
    means = np.stack([SIDEWAYS, TRUTH, TRUTH])
    law = best(means @ means.T, spread, means @ TRUTH, 16)
    fits = np.array([
        fitted([simulated(seed, 400, s, means, TRUTH)], MEMBERS, 16) for seed in range(12)
    ])  # fmt: skip
    off = (fits.mean(axis=0) - law) / (fits.std(axis=0, ddof=1) / 12**0.5)
    assert np.abs(off).max() < 4 and fits.std(axis=0).max() < 0.1


def test_proved_projections_leave_only_the_variance_to_fit():
    gram = simulated(2, 40, (1.0, 2.0, 2.5), (TRUTH, TRUTH, TRUTH), TRUTH)
    known = Proved(dict.fromkeys(MEMBERS, 1.0), frozenset(MEMBERS))
    flat = np.stack([np.einsum("pp->p", gram.inner[k, m]) for k in range(3) for m in range(3)]).mean(axis=1)
    mean = np.array([(b.sum() - np.trace(b)) / (40 * 39) for b in gram.inner.reshape(9, 40, 40)])
    spread = ((flat - mean) + (flat - mean).reshape(3, 3).T.reshape(9)).reshape(3, 3) / 2
    expected = np.linalg.solve(spread, np.ones(3))
    for p in (1, 1000):
        np.testing.assert_allclose(fitted([gram], MEMBERS, p, known), expected / expected.sum(), rtol=1e-9)
    # one proved member of three: its products with others stand for those of ∇J
    some = Proved({MEMBERS[2]: 1.0}, frozenset({MEMBERS[2]}))
    np.testing.assert_allclose(fitted([gram], MEMBERS, 16, some), fitted([gram], MEMBERS, 16), rtol=1e-9)


def test_row_of_a_portfolio_is_that_of_its_group_gradients():
    rng = np.random.default_rng(3)
    g = rng.normal(size=(3, 12, 5)) + 1
    gram = Gram(np.einsum("kpd,lqd->klpq", g, g), MEMBERS, 48)
    (got,) = with_portfolio([gram], MEMBERS[:2], 4, ("fitted", "exact"), folds=3)
    combined = np.empty((12, 5))
    for fold in range(3):
        own = np.arange(12) % 3 == fold
        other = g[:, ~own]
        part = Gram(np.einsum("kpd,lqd->klpq", other, other), MEMBERS, 32)
        weights = fitted_weights([part], MEMBERS[:2], 4)
        weights = np.full(2, 0.5) if weights is None else weights
        combined[own] = np.einsum("k,kpd->pd", weights, g[:2, own])
    whole = np.concatenate([g, combined[None]])
    np.testing.assert_allclose(got.inner, np.einsum("kpd,lqd->klpq", whole, whole), atol=1e-10)
    assert got.labels == (*MEMBERS, ("fitted", "exact"))


def test_weights_judged_on_their_own_prompts_look_better_than_they_are():
    # three members of one law: no weights beat equal ones but by averaging, so a fit can only chase noise
    own, cross = [], []
    known = Proved(dict.fromkeys(MEMBERS, 1.0), frozenset(MEMBERS))
    for seed in range(200):
        gram = simulated(seed, 8, (1.0, 1.0, 1.0), (TRUTH, TRUTH, TRUTH), TRUTH, dim=6)
        weights = fitted([gram], MEMBERS, 8, known)
        same = np.full(3, 1 / 3)
        value = [np.einsum("k,l,klpq->pq", a, a, gram.inner) for a in (weights, same)]
        variance = [(np.trace(v) - v.mean() * 8) / 7 for v in value]
        own.append(np.log(variance[0] / variance[1]))
        (with_row,) = with_portfolio([gram], MEMBERS, 8, ("fitted", "none"), known, folds=4)
        v = with_row.inner[3, 3]
        cross.append(np.log((np.trace(v) - v.mean() * 8) / 7 / variance[1]))
    assert np.mean(own) < -4 * np.std(own) / 200**0.5
    # on other prompts the chase costs a little, which the ridge keeps small
    assert 2 * np.std(cross) / 200**0.5 < np.mean(cross) < 0.02


def test_prompt_that_comes_back_is_never_in_its_own_fit():
    grams = []
    for seed in range(2):
        gram = simulated(seed, 10, (1.0, 2.0, 2.5), (TRUTH, TRUTH, TRUTH), TRUTH)
        grams.append(Gram(gram.inner, gram.labels, 40, prompt=tuple(range(10))))
    got = with_portfolio(grams, MEMBERS, 8, ("fitted", "none"), folds=10)
    # what prompt 0 gives at either step moves no weight of its own: scale its gradients and compare its row
    scaled = []
    for gram in grams:
        size = np.where(np.arange(10) == 0, 3.0, 1.0)
        scaled.append(Gram(gram.inner * np.outer(size, size), gram.labels, 40, prompt=gram.prompt))
    again = with_portfolio(scaled, MEMBERS, 8, ("fitted", "none"), folds=10)
    for one, other in zip(got, again, strict=True):
        np.testing.assert_allclose(other.inner[3, 3, 0, 0], 9 * one.inner[3, 3, 0, 0], rtol=1e-12)
    rows = pooled_statistics(got)
    assert rows[3].estimator == "fitted" and rows[3].variance is not None


def test_what_cannot_be_fitted_is_refused():
    gram = simulated(0, 6, (1.0, 1.0, 1.0), (TRUTH, TRUTH, TRUTH), TRUTH)
    with pytest.raises(InputError, match=r"label is \('otb_lo', 'exact'\); did you mean"):
        fitted_weights([gram], [("otb_lo", "exact")], 4)
    with pytest.raises(InputError, match="folds is 7 but 6 prompts"):
        with_portfolio([gram], MEMBERS, 4, ("fitted", "none"), folds=7)
    with pytest.raises(InputError, match="is measured already; choose another"):
        with_portfolio([gram], MEMBERS, 4, MEMBERS[0])
