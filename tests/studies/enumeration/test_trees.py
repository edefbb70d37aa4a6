"""The enumeration itself: probabilities, scores and the gradient by a second route."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from studies.lib.enumeration.population import values
from studies.lib.enumeration.trees import TreeSpec, random_tree


def test_probabilities_of_all_completions_sum_to_one(tree):
    assert abs(tree.prob.sum() - 1) < 1e-13


@pytest.mark.parametrize(
    ("spec", "n"), [(TreeSpec(3, 4), 81), (TreeSpec(3, 3, end_token=True), 15), (TreeSpec(2, 1), 2)]
)
def test_every_completion_is_there_once(spec, n):
    # with an end token: 1 of length 1, 2 of length 2, 4·3 of length 3
    tree = random_tree(spec, np.random.default_rng(0))
    assert len(tree.prob) == n
    assert abs(tree.prob.sum() - 1) < 1e-13


def test_completions_end_at_the_end_token(draw):
    tree = draw(0, horizon=3, end_token=True)
    assert sorted(tree.mask.sum(axis=1).tolist()) == [1, 2, 2] + [3] * 12
    assert not tree.score[~tree.mask].any()


def test_terminal_rewards_are_paid_once_and_differ(draw):
    for seed in range(20):
        tree = draw(seed, horizon=3, end_token=True)
        assert set(np.unique(tree.total)) == {0.0, 1.0}
        assert (tree.reward[np.arange(15), tree.mask.sum(axis=1) - 1] == tree.total).all()


def test_scores_have_mean_zero_at_every_position(tree):
    np.testing.assert_allclose(tree.expect(tree.score), 0, atol=1e-14)


def test_tabular_score_norm_is_the_logit_space_proxy(draw):
    tree = draw(1, horizon=3)
    np.testing.assert_allclose(tree.energy, tree.proxy, atol=1e-14)


def test_gradient_is_the_policy_gradient_theorem(tree):
    # ∇J = Σ_t E[s_t (G_t − V(h_t))], and E over y_t of s_t·(anything of h_t) vanishes
    centred = np.einsum("m,mtd,mt->d", tree.prob, tree.score, tree.returns - values(tree))
    np.testing.assert_allclose(centred, tree.gradient, atol=1e-14)


def test_gradient_of_one_token_is_known_in_closed_form(draw):
    # π = (p, 1 − p), R = (a, b): ∂J/∂z = p(1 − p)(a − b)·(1, −1)
    tree = draw(2, vocabulary=2, horizon=1)
    p, (a, b) = tree.prob[0], tree.total
    np.testing.assert_allclose(tree.gradient, p * (1 - p) * (a - b) * np.array([1, -1]), atol=1e-15)


def test_scores_are_the_derivative_of_log_probabilities(draw):
    # a log-linear policy has constant features, so log π changes along −θ̂ by s·Δθ to first order: compare two scales
    step = 1e-6
    low, high = draw(3, horizon=2, shared=4, scale=1 - step), draw(3, horizon=2, shared=4, scale=1 + step)
    theta = np.random.default_rng(3)
    theta.normal(size=(4, 3, 4))  # the features come first in the stream
    theta = theta.normal(size=4)
    slope = (high.logprob - low.logprob) / (2 * step)
    np.testing.assert_allclose(draw(3, horizon=2, shared=4).score @ theta, slope, atol=1e-8)


def test_sampling_policy_changes_probabilities_but_not_the_gradient(draw):
    target, behavior = draw(4, horizon=3, shared=5), draw(5, horizon=3, shared=5)
    off = target.sampled_by(behavior)
    np.testing.assert_array_equal(off.prob, behavior.prob)
    np.testing.assert_array_equal(off.gradient, target.gradient)
    np.testing.assert_allclose(off.prob * off.ratio.prod(axis=1), target.prob, rtol=1e-12)


def test_trees_too_large_to_enumerate_are_refused():
    with pytest.raises(InputError, match="10000000000 completions"):
        random_tree(replace(TreeSpec(), vocabulary=10, horizon=10), np.random.default_rng(0))
