"""The divergence estimators against enumerated distributions."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.objectives.aggregation import DIVERGENCES, divergence, divergence_slope

P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.3, 0.5])
KL = float((P * np.log(P / Q)).sum())
SCORES = np.eye(3) - P
"""∇_z log π(y) = e_y − π, one row per token."""


def expected(values: np.ndarray) -> np.ndarray:
    return np.tensordot(P, values, axes=1)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_value_is_unbiased(name):
    assert expected(divergence(name, np.log(P), np.log(Q))) == pytest.approx(KL, rel=1e-12)


def test_k2_differs_from_the_divergence_in_third_order_only():
    tilted = P * np.exp(0.01 * np.array([1.0, -2.0, 0.5]))
    close = tilted / tilted.sum()
    truth = float((P * np.log(P / close)).sum())
    assert abs(expected(divergence("k2", np.log(P), np.log(close))) - truth) < 0.02 * truth


def test_literals_at_a_log_ratio_of_log_two():
    # l = log 2: k1 = .6931, k2 = .2402, k3 = 1/2 − 1 + .6931 = .1931; slopes 1, .6931, 1 − 1/2.
    values = [float(divergence(n, np.log(0.5), np.log(0.25))) for n in DIVERGENCES]
    slopes = [float(divergence_slope(n, np.log(0.5), np.log(0.25))) for n in DIVERGENCES]
    assert values == pytest.approx([0.693147, 0.240227, 0.193147], abs=1e-6)
    assert slopes == pytest.approx([1.0, 0.693147, 0.5], abs=1e-6)


def test_expected_gradients_as_losses():
    slopes = {n: divergence_slope(n, np.log(P), np.log(Q)) for n in DIVERGENCES}
    gradients = {n: expected(s[:, None] * SCORES) for n, s in slopes.items()}
    # ∂KL(π‖q)/∂z_k = π_k (log π_k/q_k − KL);  ∂KL(q‖π)/∂z = π − q.
    assert np.abs(gradients["k1"]).max() < 1e-15
    np.testing.assert_allclose(gradients["k2"], P * (np.log(P / Q) - KL), atol=1e-15)
    np.testing.assert_allclose(gradients["k3"], P - Q, atol=1e-15)


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_slope_is_the_derivative_of_the_value(name):
    at, step = np.linspace(-2, 2, 9), 1e-6
    numeric = (divergence(name, at + step, 0.0) - divergence(name, at - step, 0.0)) / (2 * step)
    np.testing.assert_allclose(divergence_slope(name, at, 0.0), numeric, rtol=1e-8, atol=1e-9)


def test_unknown_name_is_one_sentence():
    with pytest.raises(InputError, match="divergence 'k4'"):
        divergence("k4", 0.0, 0.0)
