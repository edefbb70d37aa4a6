import numpy as np
import pytest

from otb_analysis.statistics import gradient_statistics, sketch_noise


def count_sketches(vectors, dim, seed):
    """Independent buckets and signs: the hash's slow twin."""
    rng = np.random.default_rng(seed)
    buckets, signs = rng.integers(0, dim, vectors.shape[-1]), rng.choice([-1.0, 1.0], vectors.shape[-1])
    out = np.zeros((*vectors.shape[:-1], dim))
    np.add.at(np.moveaxis(out, -1, 0), buckets, np.moveaxis(vectors * signs, -1, 0))
    return out


def gram_from_sketch(sketch):
    return np.einsum("pmk,qnk->mnpq", sketch, sketch, optimize=True)


def test_the_noise_of_one_pair_is_that_of_one_direction():
    # Gradients (1, 0) and (−1, 0): V = Σ‖g_p − ḡ‖²/(P(P−1)) = 2/2 = 1, one direction, so SE = √(2/dim).
    noise = sketch_noise(np.array([[[[1.0, -1.0], [-1.0, 1.0]]]]), 50)
    assert noise.variance == pytest.approx([(2 / 50) ** 0.5]) and noise.log_ratio == pytest.approx(np.zeros((1, 1)))


def test_orthogonal_gradients_share_the_noise_out():
    # G = I for P prompts: K = H/(P(P−1)), V = 1/P, tr K² = 1/(P²(P−1)); SE/V = √(2/(dim (P−1))).
    noise = sketch_noise(np.eye(9)[None, None], 100)
    assert noise.variance * 9 == pytest.approx([(2 / (100 * 8)) ** 0.5])


def test_a_multiple_of_an_estimator_has_a_ratio_without_noise():
    gradients = np.random.default_rng(0).normal(size=(5, 1, 40)) * [[[1.0]], [[2.0]], [[1.0]], [[3.0]], [[1.0]]]
    gram = gram_from_sketch(np.concatenate([gradients, 3 * gradients], axis=1))
    noise = sketch_noise(gram, 64)
    np.testing.assert_allclose(noise.log_ratio, 0, atol=1e-7)
    assert noise.variance[1] == pytest.approx(9 * noise.variance[0])


@pytest.mark.parametrize("seed", [0, 1])
def test_variances_from_sketches_are_unbiased_with_the_stated_error(seed):
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(6, 1, 400))
    gradients = shared + 0.5 * rng.normal(size=(6, 3, 400)) + 0.3
    exact, dim, seeds = gram_from_sketch(gradients), 128, 600
    labels = [("rloo", "none"), ("a", "none"), ("b", "none")]

    def variances(gram):
        return np.array([row.variance for row in gradient_statistics(gram, labels, 12)])

    found = np.array([variances(gram_from_sketch(count_sketches(gradients, dim, s))) for s in range(seeds)])
    noise = sketch_noise(exact, dim)
    z = (found.mean(0) - variances(exact)) / (noise.variance / seeds**0.5)
    assert np.abs(z).max() < 4
    close = 4 * (1 / (2 * seeds)) ** 0.5 + 0.03  # sampling error of a standard deviation, and what the bound leaves out
    assert found.std(0, ddof=1) == pytest.approx(noise.variance, rel=close)
    ratio = np.log(found[:, 1] / found[:, 0])
    assert ratio.std(ddof=1) == pytest.approx(noise.log_ratio[0, 1], rel=close)


def test_without_two_prompts_or_a_positive_variance_the_noise_is_unknown():
    assert np.isnan(sketch_noise(np.ones((2, 2, 1, 1)), 8).variance).all()
    gram = np.zeros((2, 2, 2, 2))
    gram[0, 0] = np.eye(2)
    noise = sketch_noise(gram, 8)
    assert noise.variance[1] == 0 and np.isnan(noise.log_ratio[0, 1])
