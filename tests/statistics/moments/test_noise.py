import numpy as np
import pytest

from otb_analysis.statistics import Gram, gradient_noise_scale, pooled_statistics
from otb_analysis.types import Proved

RLOO, OTB = ("rloo", "none"), ("otb", "exact")


def test_two_prompts_by_hand(gram_of):
    # g = (3, 0) and (1, 0): ‖m‖² = 3·1 = 3, E‖g‖² = (9 + 1)/2 = 5, so B = (5 − 3)/3.
    found = gradient_noise_scale([Gram(gram_of(np.array([[[3.0, 0], [1, 0]]])), (RLOO,), 8)], RLOO)
    assert found is not None and found.low is None
    assert found.estimate == pytest.approx(2 / 3)


def test_it_equals_the_formula_of_two_batch_sizes(gram_of, noisy_prompts):
    # McCandlish et al.: |G|² = (B|G_B|² − |G_1|²)/(B − 1), S = (|G_1|² − |G_B|²)/(1 − 1/B), scale S/|G|².
    g = noisy_prompts(np.random.default_rng(0), [[2, 1]], 20)[0]
    gram = Gram(gram_of(g[None]), (RLOO,), 80)
    one, all_of_them = (g**2).sum(axis=1).mean(), (g.mean(axis=0) ** 2).sum()
    signal, noise = (20 * all_of_them - one) / 19, (one - all_of_them) / (1 - 1 / 20)
    found = gradient_noise_scale([gram], RLOO)
    assert found is not None and found.low is not None and found.high is not None
    assert found.estimate == pytest.approx(noise / signal)
    assert found.low < found.estimate < found.high


def test_an_unbiased_update_of_p_prompts_has_efficiency_p_over_p_plus_scale(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(0), [[2, 1], [2, 1]], 20)
    gram = Gram(gram_of(g), (RLOO, OTB), 80)
    for known in (Proved(), Proved({RLOO: 1.0, OTB: 1.0}, frozenset({RLOO, OTB}))):
        found, row = gradient_noise_scale([gram], RLOO, known), pooled_statistics([gram], known=known)[0]
        assert found is not None
        assert row.efficiency == pytest.approx(20 / (20 + found.estimate))


def test_a_proved_projection_takes_the_signal_from_the_unbiased_ones(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(3), [[2, 1], [0.5, 0.25]], 20)
    gram = Gram(gram_of(g), (RLOO, OTB), 80)
    known = Proved({RLOO: 1.0, OTB: 0.25}, frozenset({RLOO}))
    row = {r.estimator: r for r in pooled_statistics([gram], known=known)}["otb"]
    pairs = (g[0].sum(axis=0) ** 2).sum() - (g[0] ** 2).sum()
    found = gradient_noise_scale([gram], OTB, known)
    signal = 0.25**2 * pairs / (20 * 19)
    assert found is not None and row.total_power is not None
    assert found.estimate == pytest.approx((row.total_power - signal) / signal)


def test_a_projection_without_an_unbiased_estimator_is_not_used(gram_of, noisy_prompts):
    gram = Gram(gram_of(noisy_prompts(np.random.default_rng(3), [[2, 1]], 20)), (OTB,), 80)
    assert gradient_noise_scale([gram], OTB, Proved({OTB: 0.25})) == gradient_noise_scale([gram], OTB)


def test_a_constant_factor_does_not_change_it(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(1), [[2, 1]], 20)
    one, ten = (gradient_noise_scale([Gram(gram_of(c * g), (RLOO,), 20)], RLOO) for c in (1, 10))
    assert one is not None and ten is not None
    assert ten.estimate == pytest.approx(one.estimate)


def test_its_interval_covers_the_true_scale(gram_of, noisy_prompts):
    # Var of one prompt's gradient: (.5² + 1²) in each of two coordinates, 2.5; ‖m‖² = 5; B = .5.
    found = [
        gradient_noise_scale([Gram(gram_of(noisy_prompts(np.random.default_rng(s), [[2, 1]], 32)), (RLOO,), 32)], RLOO)
        for s in range(200)
    ]
    inside = [f is not None and f.low is not None and f.high is not None and f.low < 0.5 < f.high for f in found]
    assert np.mean(inside) > 0.95 - 4 * np.sqrt(0.95 * 0.05 / 200)


def test_too_little_data_has_no_noise_scale(gram_of):
    assert gradient_noise_scale([], RLOO) is None
    assert gradient_noise_scale([Gram(np.ones((1, 1, 1, 1)), (RLOO,), 4)], RLOO) is None
    assert gradient_noise_scale([Gram(np.zeros((1, 1, 4, 4)), (RLOO,), 4)], RLOO) is None
    # Two opposite gradients: the estimate of ‖m‖² is −1.
    assert gradient_noise_scale([Gram(gram_of(np.array([[[1.0], [-1]]])), (RLOO,), 4)], RLOO) is None


def test_steps_without_the_estimator_do_not_count(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(1), [[2, 1]], 20)
    with_it, without = Gram(gram_of(g), (RLOO,), 20), Gram(gram_of(g), (OTB,), 20)
    assert gradient_noise_scale([with_it, without], RLOO) == gradient_noise_scale([with_it], RLOO)
