"""Energies against worked values and against distributions written out."""

import numpy as np
import pytest

from otb_analysis.energies import (
    calibrate,
    decayed_energy,
    lm_head_energy,
    realized_energy,
)
from otb_analysis.errors import InputError
from otb_analysis.statistics import difference_total, horvitz_thompson, inclusion_probabilities, systematic_sample

NAN = np.nan


def test_lm_head_energy_is_the_norm_of_the_output_matrix_gradient():
    # ∂ log π(y)/∂W = (e_y − π) hᵀ/τ
    rng = np.random.default_rng(1)
    head, h, tau = rng.normal(size=(6, 4)), rng.normal(size=4), 0.7
    z = head @ h / tau
    pi = np.exp(z - z.max())
    pi /= pi.sum()
    gradient = np.outer(np.eye(6)[2] - pi, h) / tau
    energy = ((np.eye(6)[2] - pi) ** 2).sum()
    np.testing.assert_allclose(lm_head_energy(energy, h @ h, tau), (gradient**2).sum(), rtol=1e-13)
    with pytest.raises(InputError, match="temperature is 0"):
        lm_head_energy(energy, h @ h, 0)


def test_realized_energy_accumulates_over_policy_tokens():
    mask = np.array([[True, False, True], [True, False, False]])
    w = np.array([[1, NAN, 2], [3, NAN, NAN]])
    np.testing.assert_array_equal(realized_energy(w, mask), [[1, 1, 3], [3, 3, 3]])


@pytest.mark.parametrize(("decay", "expected"), [(0.0, [4, 1, 1]), (1.0, [4, 5, 6]), (0.5, [4, 3, 2.5])])
def test_decayed_energy_forgets_at_its_rate(decay, expected):
    np.testing.assert_allclose(decayed_energy(np.array([[4.0, 1.0, 1.0]]), decay)[0], expected)


def test_calibration_finds_an_exact_power_law_and_needs_no_smearing():
    proxy = np.array([0.1, 0.5, 2.0, 4.0])
    found = calibrate(3 * proxy**1.5, proxy)
    assert (np.exp(found.intercept), found.slope, found.factor) == pytest.approx((3, 1.5, 1))
    assert found.log_error == pytest.approx(0, abs=1e-12) and found.n == 4
    np.testing.assert_allclose(found.predict([[1.0, 0.0]]), [[3, 0]])


def test_calibration_by_hand():
    # log₂: (0, 0), (0, 2), (2, 2), (2, 4): slope 1, intercept 1; fitted 2, 2, 8, 8 sum to 20, exact ones to 25.
    found = calibrate([1, 4, 4, 16], [1, 1, 4, 4])
    assert (found.intercept, found.slope, found.factor) == pytest.approx((np.log(2), 1, 1.25))
    assert found.log_error == pytest.approx(np.log(2))


def test_tokens_stand_for_those_that_were_not_drawn():
    # The second token stands for three of its kind: the same fit as with three copies of it.
    weighted = calibrate([2, 7, 9, NAN], [1, 2, 3, 5], [1, 1 / 3, 1, 0.5])
    copied = calibrate([2, 7, 7, 7, 9], [1, 2, 2, 2, 3])
    for name in ("intercept", "slope", "factor", "log_error"):
        assert getattr(weighted, name) == pytest.approx(getattr(copied, name))


def test_zero_energies_count_in_the_total_only():
    proxy = np.random.default_rng(0).lognormal(size=50)
    exact = 2 * proxy**0.7
    np.testing.assert_allclose(calibrate(exact, proxy).predict(proxy), exact)
    exact[0] = 0
    assert calibrate(exact, proxy).slope == pytest.approx(0.7)
    assert calibrate(exact, proxy).predict(proxy).sum() == pytest.approx(exact.sum())


def test_calibrated_energies_add_up_to_the_model_assisted_total_and_are_unbiased():
    rng = np.random.default_rng(1)
    proxy = np.exp(2 * rng.standard_normal(600))
    exact = 5 * proxy**1.2 * np.exp(0.8 * rng.standard_normal(600))
    prob = inclusion_probabilities(proxy, 120)
    totals, plain = [], []
    for seed in range(400):
        seen = np.where(systematic_sample(prob, seed), exact, NAN)
        guess = calibrate(seen, proxy, prob).predict(proxy)
        helped = difference_total(seen, guess, prob)
        assert helped.estimate[0] == pytest.approx(guess.sum())
        totals.append(guess.sum() / exact.sum())
        plain.append(horvitz_thompson(seen, prob).estimate[0] / exact.sum())
    assert abs(np.mean(totals) - 1) < 0.01  # the bias of a ratio is of order 1/n
    assert np.std(totals) < np.std(plain) < 0.2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([1, 2], [1, 2, 3]), r"exact has shape \(2,\), proxy \(3,\)"),
        (([1, 2, 3], [1, 2, 3], [1, 1, 0]), "outside"),
        (([1, NAN, NAN], [1, 2, 3]), "1 tokens with 1 different proxies"),
        (([1, 2, 3], [2, 2, 2]), "3 tokens with 1 different proxies"),
    ],
)
def test_calibration_refuses_what_cannot_be_fitted(arguments, said):
    with pytest.raises(InputError, match=said):
        calibrate(*arguments)
