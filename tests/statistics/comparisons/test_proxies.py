import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import Gram, gain_lost, pooled_statistics, position_optimum


def coin():
    """Four rollouts of one token, exactly in the proportions of π = (1/4, 3/4); reward 1 for the first token."""
    score = np.array([[0.75, -0.75], [-0.25, 0.25], [-0.25, 0.25], [-0.25, 0.25]])
    return score[:, None, :], np.array([[1.0], [0], [0], [0]]), np.ones((4, 1), dtype=bool)


def test_the_optimum_of_a_coin_is_one_minus_p():
    # B* = p·2(1−p)²/(p·2(1−p)² + (1−p)·2p²) = 1 − p.
    assert position_optimum(*coin()) == pytest.approx([0.75])


def test_positions_that_share_no_parameters_have_the_energy_weighted_return():
    rng = np.random.default_rng(0)
    features = np.zeros((10, 2, 4))
    features[:, 0, :2], features[:, 1, 2:] = rng.normal(size=(2, 10, 2))
    returns = rng.random((10, 2))
    w = (features**2).sum(axis=2)
    found = position_optimum(features, returns, np.ones((10, 2), dtype=bool))
    assert found == pytest.approx((w * returns).sum(axis=0) / w.sum(axis=0))


def test_padding_is_never_read():
    rng = np.random.default_rng(1)
    features, returns = rng.normal(size=(6, 3, 4)), rng.random((6, 3))
    mask = np.arange(3) < rng.integers(1, 3, size=(6, 1))
    clean = position_optimum(features, returns, mask)
    dirty = position_optimum(np.where(mask[..., None], features, np.nan), np.where(mask, returns, np.inf), mask)
    np.testing.assert_array_equal(clean, dirty)
    assert clean[2] == 0


def test_gain_lost_is_the_share_of_the_efficiency_difference(gram_of, noisy_prompts):
    rng = np.random.default_rng(2)
    g = noisy_prompts(rng, [[2, 1]] * 3, 400, noise=0.0)
    for m, scale in enumerate((2.0, 0.5, 1.0)):
        g[m] += scale * rng.normal(size=g[m].shape)
    labels = (("rloo", "none"), ("otb", "exact"), ("otb", "proxy"))
    gram = Gram(gram_of(g), labels, 400)
    rloo, exact, proxy = (row.efficiency for row in pooled_statistics([gram], n_prompts=8))
    found = gain_lost([gram], labels[2], labels[1], n_prompts=8)
    assert found is not None and rloo is not None and exact is not None and proxy is not None
    assert found.estimate == pytest.approx((exact - proxy) / (exact - rloo))
    # V = .5 + 2·scale² is 8.5, 1, 2.5 and ‖∇J‖² = 5: efficiencies at P = 8 are .825, .976, .941, the share .229.
    assert found.low is not None and found.high is not None
    assert found.low < 0.229 < found.high and found.n_clusters == 400


def test_a_perfect_proxy_loses_nothing(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(3), [[2, 1]] * 3, 20)
    g[1] *= 0.5
    g[0] += 3 * np.random.default_rng(4).normal(size=g[0].shape)
    g[2] = g[1]
    labels = (("rloo", "none"), ("otb", "exact"), ("otb", "proxy"))
    found = gain_lost([Gram(gram_of(g), labels, 20)], labels[2], labels[1])
    assert found is not None and (found.estimate, found.low, found.high) == (0, 0, 0)


def test_without_a_gain_there_is_no_share(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(5), [[2, 1]] * 3, 20)
    g[1:] = g[0]
    labels = (("rloo", "none"), ("otb", "exact"), ("otb", "proxy"))
    gram = Gram(gram_of(g), labels, 20)
    assert gain_lost([gram], labels[2], labels[1]) is None
    assert gain_lost([gram], ("opo", "proxy"), labels[1]) is None
    assert gain_lost([], labels[2], labels[1]) is None


def test_bad_shapes_are_named():
    with pytest.raises(InputError, match=r"pass \[R, T, K\]"):
        position_optimum(np.zeros((2, 3)), np.zeros((2, 3)), np.ones((2, 3), dtype=bool))
