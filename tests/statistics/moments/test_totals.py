"""Samples with known probabilities: designs keep their promises, totals are unbiased, standard errors are honest."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import (
    difference_total,
    horvitz_thompson,
    inclusion_probabilities,
    systematic_sample,
)

NAN = np.nan


def heavy(k=400, seed=0):
    """Energies with a tail like those of a trained model, and a size measure that half knows them."""
    rng = np.random.default_rng(seed)
    values = np.exp(2.5 * rng.standard_normal(k))
    return values, values * np.exp(0.8 * rng.standard_normal(k))


def test_probabilities_are_proportional_and_sum_to_the_sample():
    # Σx = 10, n = 2: 2·x/10.
    np.testing.assert_allclose(inclusion_probabilities([1, 2, 3, 4], 2, 0.0), [0.2, 0.4, 0.6, 0.8])


def test_units_too_large_are_taken_for_certain_and_the_rest_share_what_is_left():
    # n = 2 of x = (8, 1, 1): 2·8/10 > 1, so the first is certain and one more is shared by two equals.
    np.testing.assert_allclose(inclusion_probabilities([8, 1, 1], 2, 0.0), [1, 0.5, 0.5])
    # n = 3 of (90, 6, 2, 1, 1): 90 is certain; then 2·6/10 > 1 is too; then 1·2/4 for the third.
    np.testing.assert_allclose(inclusion_probabilities([90, 6, 2, 1, 1], 3, 0.0), [1, 1, 0.5, 0.25, 0.25])


def test_uniform_share_is_drawn_whatever_the_size_says():
    # n = 1, u = ½: ½·x/Σx + ½·¼ with x = (1, 0, 0, 0).
    np.testing.assert_allclose(inclusion_probabilities([1, 0, 0, 0], 1, 0.5), [0.625, 0.125, 0.125, 0.125])
    np.testing.assert_allclose(inclusion_probabilities([0, 0, 0, 0], 2), [0.5] * 4)
    np.testing.assert_allclose(inclusion_probabilities([3, 1], 5), [1, 1])


def test_sums_and_bounds_hold_for_heavy_tails():
    size = heavy()[1]
    for n in (1, 7, 40, 200, 399):
        prob = inclusion_probabilities(size, n)
        assert prob.sum() == pytest.approx(n)
        assert (prob > 0).all() and (prob <= 1).all()


def test_sample_has_fixed_size_and_the_promised_probabilities():
    prob = inclusion_probabilities([90.0, 6, 2, 1, 1, 3, 0.5], 3)
    draws = np.array([systematic_sample(prob, seed) for seed in range(4000)])
    assert (draws.sum(axis=1) == 3).all()
    error = np.sqrt(prob * (1 - prob) / len(draws))
    assert (np.abs(draws.mean(axis=0) - prob) <= 4 * error).all()
    assert draws[:, 0].all()  # certain


def test_sample_of_a_fractional_size_has_a_neighbouring_size():
    sizes = {int(systematic_sample(np.full(5, 0.5), seed).sum()) for seed in range(50)}
    assert sizes == {2, 3}


def test_same_seed_draws_the_same_sample():
    prob = np.full(50, 0.2)
    assert (systematic_sample(prob, 3) == systematic_sample(prob, 3)).all()
    assert (systematic_sample(prob, 3) != systematic_sample(prob, 4)).any()


def test_expanded_total_by_hand():
    # Drawn: 3 with π = 1, 2 with π = ½, 1 with π = ¼: 3 + 4 + 4.
    found = horvitz_thompson([3, 2, 1, NAN], [1, 0.5, 0.25, 0.25])
    assert found.estimate.tolist() == [11]
    # u = (4, 4) among the two left to chance: no spread, V = 0.
    assert found.stderr.tolist() == [0]


def test_equal_probabilities_give_the_textbook_variance_of_a_simple_random_sample():
    y = np.array([2.0, 5.0, 9.0, NAN, NAN, NAN])
    found = horvitz_thompson(y, np.full(6, 0.5))
    assert found.estimate[0] == pytest.approx(2 * 16)
    # K²(1 − f)s²/n with s² = Var(2, 5, 9) = 37/3, f = ½, K = 6, n = 3.
    assert found.stderr[0] ** 2 == pytest.approx(36 * 0.5 * (37 / 3) / 3)


def test_measuring_everything_is_exact():
    found = horvitz_thompson([1, 2, 4], [1, 1, 1], [7, 7, 9])
    assert found.labels.tolist() == [7, 9]
    assert found.estimate.tolist() == [3, 4]
    assert found.stderr.tolist() == [0, 0]


def test_values_proportional_to_the_probabilities_have_no_error():
    prob = inclusion_probabilities([1.0, 2, 3, 4], 2, 0.0)
    for seed in range(5):
        y = np.where(systematic_sample(prob, seed), 10 * prob, NAN)
        found = horvitz_thompson(y, prob)
        assert found.estimate[0] == pytest.approx(20) and found.stderr[0] == pytest.approx(0, abs=1e-6)


def test_domain_of_which_nothing_was_drawn_has_an_unknown_error_not_none():
    found = horvitz_thompson([1, 3, NAN, NAN, 5], [0.5, 0.5, 0.5, 0.5, 1], [0, 0, 1, 1, 2])
    assert found.estimate.tolist() == [8, 0, 5]
    assert np.isnan(found.stderr[1]) and found.stderr[2] == 0 and found.stderr[0] > 0


def test_one_unit_left_to_chance_has_an_unknown_error():
    assert np.isnan(horvitz_thompson([1, NAN, 3], [0.5, 0.5, 1]).stderr[0])


def test_prediction_of_zero_is_horvitz_thompson_and_a_perfect_one_has_no_error():
    y, prob = np.array([3.0, 2.0, NAN, NAN]), np.array([0.5, 0.25, 0.5, 0.75])
    plain, zero = horvitz_thompson(y, prob), difference_total(y, np.zeros(4), prob)
    assert plain.estimate == zero.estimate and plain.stderr == zero.stderr
    perfect = difference_total(y, [3, 2, 7, 8], prob)
    assert perfect.estimate.tolist() == [20] and perfect.stderr.tolist() == [0]


def test_difference_total_by_hand():
    # Σŷ = 4; residuals 3 − 1 at π = ½ and 1 − 1 at π = ½: 4 + 4 + 0.
    found = difference_total([3, 1, NAN, NAN], [1, 1, 1, 1], [0.5] * 4)
    assert found.estimate.tolist() == [8]
    # u = (4, 0), mean 2, c = ½ each, Σc(u − 2)²/(1 − ½) = 4/½.
    assert found.stderr[0] ** 2 == pytest.approx(8)


@pytest.mark.parametrize("uniform_share", [0.1, 1.0])
def test_totals_are_unbiased_and_their_errors_cover(uniform_share):
    values, size = heavy()
    group = np.arange(400) % 4
    prob = inclusion_probabilities(size, 80, uniform_share)
    draws = [horvitz_thompson(np.where(systematic_sample(prob, s), values, NAN), prob, group) for s in range(1500)]
    whole = [horvitz_thompson(np.where(systematic_sample(prob, s), values, NAN), prob) for s in range(1500)]
    truth = np.bincount(group, values)
    for found, true in ((draws, truth), (whole, truth.sum())):
        estimate, stderr = np.array([f.estimate for f in found]), np.array([f.stderr for f in found])
        spread = estimate.std(axis=0)
        assert (np.abs(estimate.mean(axis=0) - true) < 4 * spread / np.sqrt(len(found))).all()
        np.testing.assert_allclose(np.sqrt((stderr**2).mean(axis=0)), spread, rtol=0.1)
        if uniform_share < 1:  # a uniform sample of a heavy tail misses it and its error: that is what sizes are for
            cover = (np.abs(estimate - true) < 1.96 * stderr).mean(axis=0)
            assert (cover > 0.85).all()


def test_a_size_measure_is_worth_many_times_its_tokens():
    values, size = heavy()
    spread = {}
    for name, u in (("sized", 0.1), ("uniform", 1.0)):
        prob = inclusion_probabilities(size, 40, u)
        found = [horvitz_thompson(np.where(systematic_sample(prob, s), values, NAN), prob) for s in range(400)]
        spread[name] = np.std([f.estimate[0] for f in found])
    assert spread["uniform"] > 5 * spread["sized"]


def test_prediction_from_the_size_measure_helps_where_it_knows_something():
    values, size = heavy()
    prob = inclusion_probabilities(size, 60, 0.5)
    guess = size * values.sum() / size.sum()
    plain, helped = [], []
    for s in range(400):
        y = np.where(systematic_sample(prob, s), values, NAN)
        plain.append(horvitz_thompson(y, prob).estimate[0])
        helped.append(difference_total(y, guess, prob).estimate[0])
    assert abs(np.mean(helped) - values.sum()) < 4 * np.std(helped) / 20
    assert np.std(helped) < np.std(plain)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: inclusion_probabilities([1, -1], 1), "negative or not finite"),
        (lambda: inclusion_probabilities([1, NAN], 1), "negative or not finite"),
        (lambda: inclusion_probabilities([1, 1], 0), "n is 0"),
        (lambda: inclusion_probabilities([1, 1], 1, 1.5), "uniform_share 1.5"),
        (lambda: systematic_sample([0.5, 1.5]), "outside"),
        (lambda: systematic_sample([0.5, NAN]), "outside"),
        (lambda: horvitz_thompson([1, 2], [0.5]), r"shape \(2,\), inclusion_prob \(1,\)"),
        (lambda: horvitz_thompson([1, 2], [0.5, 0]), r"inclusion_prob is 0\.0 at unit 1"),
        (lambda: difference_total([1, 2], [1, NAN], [0.5, 0.5]), "one finite prediction"),
    ],
)
def test_bad_input_is_one_sentence(run, said):
    with pytest.raises(InputError, match=said):
        run()
