import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import Gram, gradient_noise, gradient_statistics, noise_scale, norm_test

RLOO = ("rloo", "none")


def test_noise_scale_literal():
    # |G_1|² = 5, |G_10|² = 1.4: |G|² = (14 − 5)/9 = 1, S = 3.6/.9 = 4.
    found = noise_scale(5, 1, 1.4, 10)
    assert (found.grad_sq, found.noise, found.scale) == pytest.approx((1, 4, 4))


def test_norms_are_averaged_over_steps_before_dividing():
    assert noise_scale([4, 6], 1, [1, 1.8], 10) == noise_scale(5, 1, 1.4, 10)


def test_a_signal_that_is_not_positive_has_no_scale():
    assert noise_scale(5, 1, 0.4, 10).scale is None


def test_gram_scale_equals_the_two_batch_formula(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(0), [[2, 1]], 20)[0]
    gram = Gram(gram_of(g[None]), (RLOO,), 80)
    found = gradient_noise([gram], RLOO)
    twin = noise_scale((g**2).sum(axis=1), 1, (g.mean(axis=0) ** 2).sum(), 20)
    assert found is not None and found.scale is not None and found.scale.low is not None
    assert (found.grad_sq, found.noise, found.scale.estimate) == pytest.approx((twin.grad_sq, twin.noise, twin.scale))
    # For an unbiased estimator: efficiency = P/(P + scale) = SNR/(1 + SNR).
    efficiency = gradient_statistics(gram.inner, gram.labels, 80)[0].efficiency
    assert efficiency == pytest.approx(20 / (20 + found.scale.estimate))
    assert found.signal_to_noise == pytest.approx(20 / found.scale.estimate)


def test_a_constant_factor_changes_neither_scale_nor_signal_to_noise(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(1), [[2, 1]], 20)
    one, ten = (gradient_noise([Gram(gram_of(c * g), (RLOO,), 20)], RLOO) for c in (1, 10))
    assert one is not None and ten is not None and one.scale is not None and ten.scale is not None
    assert ten.scale.estimate == pytest.approx(one.scale.estimate)
    assert ten.signal_to_noise == pytest.approx(one.signal_to_noise)


def test_too_little_data_has_no_noise_scale():
    assert gradient_noise([], RLOO) is None
    assert gradient_noise([Gram(np.ones((1, 1, 1, 1)), (RLOO,), 4)], RLOO) is None
    still = gradient_noise([Gram(np.zeros((1, 1, 4, 4)), (RLOO,), 4)], RLOO)
    assert still is not None and still.scale is None and still.signal_to_noise is None


def test_norm_test_by_hand():
    # variance 4, ‖ḡ‖² 1, ratio 2; at θ = .5 the variance must fall by 16: 8 prompts become 128.
    found = norm_test(4, 1, 8, theta=0.5)
    assert found is not None
    assert (found.ratio, found.passes, found.prompts_needed) == (2, False, 128)
    assert norm_test(0.2, 1, 8, theta=0.5) == norm_test(0.2, 1, 8, 0.5)
    passed = norm_test(0.2, 1, 8, theta=0.5)
    assert passed is not None and passed.passes and passed.prompts_needed == 7
    assert norm_test(0, 0, 8) is None


def test_bad_batches_are_named():
    with pytest.raises(InputError, match="batches are 10 and 1"):
        noise_scale(5, 10, 1.4, 1)
    with pytest.raises(InputError, match="empty"):
        noise_scale([], 1, [], 2)
    with pytest.raises(InputError, match="theta is 0"):
        norm_test(1, 1, 1, theta=0)
