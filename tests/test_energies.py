"""Energies against worked values and against distributions written out."""

import numpy as np
import pytest

from otb_analysis.energies import decayed_energy, lm_head_energy, logit_energy, realized_energy, token_weight
from otb_analysis.errors import InputError

NAN = np.nan


def test_logit_energy_is_the_norm_of_onehot_minus_pi():
    # π = .5 .3 .2, y = 0: (−.5)² + .3² + .2² = .38 and Σπ² = .38
    np.testing.assert_allclose(logit_energy(np.log(0.5), 0.38), 0.38, rtol=1e-14)
    pi = np.random.default_rng(0).dirichlet(np.ones(5), size=200)
    onehot = np.eye(5)[np.arange(200) % 5]
    expected = ((onehot - pi) ** 2).sum(axis=1)
    np.testing.assert_allclose(logit_energy(np.log(pi[onehot == 1]), (pi**2).sum(axis=1)), expected, rtol=1e-12)


def test_logit_energy_of_a_peaked_token_is_not_negative_in_float32():
    # π_y = 1 − 2e-8 rounds to 1 in float32, and so may Σπ²; textbook 1 − 2π + Σπ² gives 0 or below
    missed = 10.0 ** np.linspace(-12, -1, 300)
    logprob = np.log1p(-missed).astype(np.float32)
    sum_pi_sq = ((1 - missed) ** 2 + missed**2).astype(np.float32)
    got = logit_energy(logprob, sum_pi_sq)
    assert (got >= 0).all()
    large = missed > 1e-6
    ratio = got[large] / (2 * missed[large] ** 2)
    assert (ratio > 0.45).all() and (ratio < 1.1).all()  # at worst the second half is lost to rounding


def test_certain_token_has_no_energy():
    assert logit_energy(0.0, 1.0) == 0.0


def test_lm_head_energy_is_the_norm_of_the_output_matrix_gradient():
    # ∂ log π(y)/∂W = (e_y − π) hᵀ/τ
    rng = np.random.default_rng(1)
    head, h, tau = rng.normal(size=(6, 4)), rng.normal(size=4), 0.7
    z = head @ h / tau
    pi = np.exp(z - z.max())
    pi /= pi.sum()
    gradient = np.outer(np.eye(6)[2] - pi, h) / tau
    energy = logit_energy(np.log(pi[2]), (pi**2).sum())
    np.testing.assert_allclose(lm_head_energy(energy, h @ h, tau), (gradient**2).sum(), rtol=1e-13)
    with pytest.raises(InputError, match="temperature is 0 but must be above 0"):
        lm_head_energy(energy, h @ h, 0)


def test_realized_energy_accumulates_over_policy_tokens():
    mask = np.array([[True, False, True], [True, False, False]])
    w = np.array([[1, NAN, 2], [3, NAN, NAN]])
    np.testing.assert_array_equal(realized_energy(w, mask), [[1, 1, 3], [3, 3, 3]])
    ratio = np.array([[2, NAN, 1], [1, NAN, NAN]])
    np.testing.assert_array_equal(realized_energy(w, mask, ratio), [[4, 4, 6], [3, 3, 3]])
    np.testing.assert_array_equal(token_weight(w, mask, ratio), [[4, 0, 2], [3, 0, 0]])


@pytest.mark.parametrize(("decay", "expected"), [(0.0, [4, 1, 1]), (1.0, [4, 5, 6]), (0.5, [4, 3, 2.5])])
def test_decayed_energy_forgets_at_its_rate(decay, expected):
    np.testing.assert_allclose(decayed_energy(np.array([[4.0, 1.0, 1.0]]), decay)[0], expected)
