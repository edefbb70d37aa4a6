"""Counting readout: what a probe finds, how far the output rows are from it, and what share of the score they hold."""

import numpy as np
import pytest
import torch

from otb_analysis.diagnostics.readout import count_shift, linear_probe, row_cosines, rows_share
from otb_analysis.errors import InputError


def states(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 10, 200)
    return rng.normal(size=(200, 4)), count, np.arange(200) % 2 == 0


def test_a_count_that_one_direction_holds_is_read_along_it():
    noise, count, fitted = states()
    hidden = noise * [0.0, 1.0, 1.0, 1.0] + np.outer(count, [2.0, 0.0, 0.0, 0.0]) + 5.0
    found = linear_probe(hidden, count, fitted, ridge=1e-9)
    # n = (h₀ − 5)/2, so the direction is (½, 0, 0, 0) and the offset −2.5.
    np.testing.assert_allclose(found.direction, [0.5, 0, 0, 0], atol=1e-6)
    assert found.offset == pytest.approx(-2.5, abs=1e-5)
    assert (found.r_squared, found.exact) == (pytest.approx(1.0), 1.0)


def test_noise_holds_no_count_on_prompts_that_were_not_fitted():
    noise, count, fitted = states()
    found = linear_probe(noise, count, fitted)
    assert found.r_squared < 0.1 and found.exact < 0.3


def test_the_scale_of_a_layer_changes_no_reading():
    noise, count, fitted = states()
    hidden = noise + np.outer(count, [0.3, 0.1, 0.0, 0.0])
    small, large = (linear_probe(hidden * scale, count, fitted, ridge=0.1) for scale in (1.0, 1000.0))
    assert large.r_squared == pytest.approx(small.r_squared)
    np.testing.assert_allclose(large.direction * 1000, small.direction, rtol=1e-8)


def test_a_row_that_follows_the_count_can_be_orthogonal_to_the_probe():
    noise, count, fitted = states()
    nuisance = 10 * noise[:, 0]
    hidden = np.stack([count + nuisance, nuisance], axis=1)
    # n = h₀ − h₁, so the probe is (1, −1). The row (1, 1) is orthogonal to it, and yet n moves h along (1, 0).
    probe = linear_probe(hidden, count, fitted, ridge=1e-9).direction
    np.testing.assert_allclose(probe, [1, -1], atol=1e-5)
    rows = [[1.0, 1.0], [-1.0, -1.0]]
    np.testing.assert_allclose(row_cosines(probe, rows), 0, atol=1e-5)
    balanced, both = np.repeat([0, 1], 2), np.tile([-1.0, 1.0], 2)  # the nuisance is the same at each count
    shift = count_shift(np.stack([balanced + both, both], axis=1), balanced)
    np.testing.assert_allclose(shift, [1, 0], atol=1e-12)
    np.testing.assert_allclose(row_cosines(shift, rows), [0.5**0.5, -(0.5**0.5)])


def test_cosines_leave_out_what_all_rows_share():
    # Without their mean (7, 0) the rows are (1, 0), (−1, 0), (0, 2) and (0, −2).
    rows = np.array([[8.0, 0.0], [6.0, 0.0], [7.0, 2.0], [7.0, -2.0]])
    np.testing.assert_allclose(row_cosines([3.0, 0.0], rows), [1, -1, 0, 0], atol=1e-12)


def test_a_row_that_is_the_mean_has_no_angle():
    assert np.isnan(row_cosines([1.0, 0.0], [[1.0, 1.0], [3.0, 1.0], [2.0, 1.0]])[2])


def test_share_of_rows_by_hand():
    # π = (.5, .3, .2) and y = 0: δ = (.5, −.3, −.2), δ² = (.25, .09, .04), so rows 1 and 2 hold .13/.38.
    found = rows_share(np.log([[0.5, 0.3, 0.2]]), [0], [1, 2])
    assert found[0] == pytest.approx(0.13 / 0.38)


def test_share_of_rows_is_that_of_the_gradient_of_an_output_layer():
    torch.manual_seed(0)
    weight, hidden = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.randn(3, dtype=torch.float64)
    logprob = (weight @ hidden).log_softmax(0)
    (gradient,) = torch.autograd.grad(logprob[2], weight)
    power = gradient.square().sum(dim=1)
    wanted = float(power[[1, 2, 4]].sum() / power.sum())
    assert rows_share(logprob.detach().numpy()[None], [2], [1, 2, 4])[0] == pytest.approx(wanted, rel=1e-12)


def test_a_sure_token_keeps_its_share():
    # 1 − π_y = 1e-20 is lost in a difference; half of δ² lies in row 0, half in row 1.
    assert rows_share([[0.0, np.log(1e-20)]], [0], [0])[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linear_probe(np.ones((4, 2)), [1, 2, 3], [True] * 4), r"count \(3,\)"),
        (lambda: linear_probe(np.eye(4), [1, 1, 1, 2], [True, True, False, False]), "2 fitted prompts have 1"),
        (lambda: linear_probe(np.eye(4), [1, 2, 1, 1], [True, True, False, False]), "2 held-out prompts have 1"),
        (lambda: linear_probe(np.ones((4, 2)), [1, 2, 1, 2], [True, True, False, False]), "same at every fitted"),
        (lambda: linear_probe(np.full((2, 2), np.nan), [1, 2], [True, False]), "NaN"),
        (lambda: linear_probe(np.eye(4), [1, 2, 1, 2], [True, True, False, False], 0.0), "ridge is 0"),
        (lambda: count_shift(np.eye(3), [1, 2]), r"count \(2,\)"),
        (lambda: count_shift(np.eye(3), [2, 2, 2]), "same count"),
        (lambda: row_cosines([0.0, 0.0], np.eye(2)), "direction is 0"),
        (lambda: row_cosines([1.0], np.eye(2)), r"rows \(2, 2\)"),
        (lambda: rows_share(np.zeros((1, 2)), [0], [2]), "outside 0…1"),
        (lambda: rows_share(np.zeros((1, 2)), [0], [1, 1]), "repeats"),
        (lambda: rows_share(np.zeros((1, 2)), [0, 1], [1]), r"token_id \(2,\)"),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises(InputError, match=words):
        call()
