"""Baselines of other methods: values worked by hand, special cases, and what they aim at."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import EstimatorInputs, QuantileOptions, estimate, options_from_dict
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.trees import TreeSpec, random_tree
from tests.enumerated_batches import batch_means


def paid(*returns, group=None, length=None):
    """Rollouts with a reward at the end, of one token each unless lengths are given."""
    length = np.ones(len(returns), int) if length is None else np.array(length)
    mask = np.arange(length.max()) < length[:, None]
    reward = np.zeros(mask.shape)
    reward[np.arange(len(returns)), length - 1] = returns
    return EstimatorInputs(reward, mask, np.zeros(len(returns), int) if group is None else np.array(group))


def advantages(name, inputs, options=None):
    return estimate(name, inputs, options).advantage[:, 0]


def test_maxrl_divides_by_the_mean():
    # r̄ = ¼: (1 − ¼)/¼ = 3 and −1; a group that earns nothing has no scale
    np.testing.assert_allclose(advantages("maxrl", paid(1, 0, 0, 0)), [3, -1, -1, -1])
    got = estimate("maxrl", paid(0, 0))
    assert not got.advantage.any() and got.fallback.all()


def test_mc_grpo_drops_the_median_of_an_odd_group():
    # median of 0 1 5 is 1: (−1, 0, 4)·3/2; of 0 1 5 9 it is 3, and nobody is dropped
    np.testing.assert_allclose(advantages("mc_grpo", paid(5, 0, 1)), [6, -1.5, 0])
    np.testing.assert_allclose(advantages("mc_grpo", paid(5, 0, 9, 1)), [2, -3, 6, -2])
    np.testing.assert_allclose(advantages("mc_grpo", paid(5, 0, 9, 1, 3, group=[7, 7, 4, 7, 4])), [6, -1.5, 3, 0, -3])


def test_qae_moves_rare_successes_or_rare_failures():
    # q = .4: at most 3 successes of 5 give B = 0, more give B = 1
    np.testing.assert_allclose(advantages("qae", paid(1, 0, 0, 1, 1)), [1, 0, 0, 1, 1])
    np.testing.assert_allclose(advantages("qae", paid(1, 1, 0, 1, 1)), [0, 0, -1, 0, 0])
    np.testing.assert_allclose(advantages("qae", paid(3, 1, 2), QuantileOptions(0.0)), [2, 0, 1])
    np.testing.assert_allclose(advantages("qae", paid(3, 1, 2), QuantileOptions(1.0)), [0, -2, -1])
    # .7 · 10 is 7.000000000000001 in floating point: the seventh, not the eighth
    np.testing.assert_allclose(estimate("qae", paid(*range(10)), QuantileOptions(0.7)).baseline[:, 0], 6)
    with pytest.raises(InputError, match=r"quantile is 1\.2 .*\[0, 1\]"):
        options_from_dict("qae", {"quantile": "1.2"})


def test_gpg_multiplies_by_rollouts_over_those_that_were_paid():
    # α = 6/2: two of six are paid; means ½ and ¼
    got = advantages("gpg", paid(1, 0, 1, 0, 0, 0, group=[0, 0, 1, 1, 1, 1]))
    np.testing.assert_allclose(got, np.array([0.5, -0.5, 0.75, -0.25, -0.25, -0.25]) * 3)
    assert not advantages("gpg", paid(0, 0)).any()


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    # x = ½ −½ on 1 and 3 tokens: μ = (½ − 3/2)/4 = −¼; σ² = ((¾)² + 3·(¼)²)/3 = ¼; A = (x + ¼)/½
    got = estimate("reinforce_plus_plus_baseline", paid(1, 0, length=[1, 3]))
    np.testing.assert_allclose(got.advantage, [[1.5, 0, 0], [-0.5] * 3], rtol=1e-7)
    equal = estimate("reinforce_plus_plus_baseline", paid(0.1, 0.1, 0.1))
    assert not equal.advantage.any() and equal.fallback.all()


def test_corrected_james_stein_takes_the_noise_out_of_the_spread():
    # others of the first prompt: means ¼ and 1, variances ¼ and 0: σ² = ⅛, s² = 2·(3/8)² = 9/32, τ² = 9/32 − 1/32 = ¼,
    # v² = ⅛/3 = 1/24, λ = (1/24)/(1/24 + ¼) = 1/7; first sample: ⅔ of its own, ⅝ elsewhere: (6·⅔ + ⅝)/7 = 37/56
    inputs = paid(1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, group=np.repeat([4, 2, 9], 4))
    got = estimate("james_stein_corrected", inputs)
    np.testing.assert_allclose(got.baseline[0, 0], 37 / 56)
    assert not got.fallback.any()


def test_corrected_james_stein_shrinks_more_than_the_published_one():
    # prompts of one law: all spread of their means is noise, and the mean over all of them is best
    rng = np.random.default_rng(0)
    off = {"rloo": [], "james_stein": [], "james_stein_corrected": []}
    for _ in range(200):
        inputs = paid(*rng.integers(0, 2, 64), group=np.repeat(np.arange(16), 4))
        for name, errors in off.items():
            errors.append(((estimate(name, inputs).baseline - 0.5) ** 2).mean())
    errors = {name: np.array(e) for name, e in off.items()}
    for worse, better in (("rloo", "james_stein"), ("james_stein", "james_stein_corrected")):
        lead = errors[worse] - errors[better]
        assert lead.mean() > 5 * lead.std() / 200**0.5
    # λ near ⅖ and near 1 of the way to the others' mean
    assert errors["james_stein_corrected"].mean() < 0.35 * errors["james_stein"].mean()


def test_corrected_james_stein_without_two_other_prompts_is_rloo():
    for groups in ([0] * 4, [0, 0, 1, 1], [0, 0, 1, 2]):
        inputs = paid(1, 0, 1, 5, group=groups)
        got = estimate("james_stein_corrected", inputs)
        own = np.bincount(groups)[groups] > 1
        rows = own if len(set(groups)) == 3 else np.ones(4, bool)
        np.testing.assert_array_equal(got.baseline[rows], estimate("rloo", inputs).baseline[rows])
        assert got.fallback.all()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_maxrl_aims_at_a_truncated_log_likelihood(seed, n):
    tree = random_tree(TreeSpec(vocabulary=2, horizon=2, shared=3, end_token=True), np.random.default_rng([seed, 3]))
    p = tree.objective
    target = sum((1 - p) ** (k - 1) for k in range(1, n)) * tree.gradient
    np.testing.assert_allclose(group_moments("maxrl", tree, n).mean, target, atol=1e-13)


@pytest.mark.parametrize("name", ["mc_grpo", "qae"])
def test_biased_centre_of_two_rollouts(name):
    # N = 2: the median is the mean, so (1 − ½)·∇J; the .4-quantile of two is the less, so A = R − min: R₁(1 − R₂)
    # for rewards 0 or 1, of which the mean over both is (1 − p)·∇p
    tree = random_tree(TreeSpec(vocabulary=2, horizon=2, shared=3, end_token=True), np.random.default_rng(11))
    factor = 0.5 if name == "mc_grpo" else 1 - tree.objective
    np.testing.assert_allclose(group_moments(name, tree, 2).mean, factor * tree.gradient, atol=1e-14)


def test_mean_of_gpg_in_batches_is_not_the_gradient():
    rng = np.random.default_rng(5)
    trees = [random_tree(TreeSpec(vocabulary=2, horizon=2, shared=3), rng) for _ in range(2)]
    for mean, tree in zip(batch_means("gpg", trees, 2), trees, strict=True):
        assert np.linalg.norm(mean - tree.gradient) > 0.02 * np.linalg.norm(tree.gradient)
