"""The statistics of sampled groups against the enumerated moments they estimate."""

from dataclasses import astuple

import numpy as np
import pytest

from otb_analysis.statistics import moments as measures
from otb_analysis.statistics.moments import deleted_moments
from otb_analysis.types import Gram
from studies.lib.enumeration.groups import group_gradients, group_moments
from studies.lib.enumeration.trees import TreeSpec, random_tree

NAMES = ("rloo", "otb", "grpo", "sequence_optimal_loo")
LABELS = tuple((name, "none") for name in NAMES)
N = 3


@pytest.fixture(scope="module")
def policy():
    return random_tree(TreeSpec(horizon=3, shared=5, end_token=True), np.random.default_rng(11))


def gram_of_sampled_groups(tree, prompts, rng):
    members = rng.choice(len(tree.prob), size=(prompts, N), p=tree.prob / tree.prob.sum())
    gradients = np.stack([group_gradients(name, tree, members) for name in NAMES])
    return Gram(np.einsum("apd,bqd->abpq", gradients, gradients), LABELS, prompts * N)


@pytest.mark.parametrize("name", NAMES)
def test_measures_of_exact_moments_are_the_enumerated_ones(name, policy):
    exact, reference = group_moments(name, policy, N), group_moments("rloo", policy, N)
    moments = exact.measured(reference)
    assert abs(measures.batch_variance(moments, 5) - exact.variance / 5) < 1e-13
    assert abs(measures.projection(moments) - exact.projection) < 1e-12
    assert abs(measures.relative_bias(moments) - exact.relative_bias) < 1e-6
    assert abs(measures.sf(moments, 1) - exact.sf) < 1e-12
    assert abs(measures.efficiency(moments, 7) - exact.efficiency(7)) < 1e-12


def test_rollout_equivalents_of_exact_moments_reach_the_same_efficiency(policy):
    exact, reference = group_moments("otb", policy, N), group_moments("rloo", policy, N)
    rollouts = float(measures.rollout_equivalents(exact.measured(reference), 7, 7 * N))
    assert abs(reference.efficiency(rollouts / N) - exact.efficiency(7)) < 1e-12


def test_rankings_by_efficiency_cross_where_stated(policy):
    exact, reference = group_moments("otb", policy, N), group_moments("rloo", policy, N)
    p = float(measures.crossing(exact.measured(reference)))
    assert abs(exact.efficiency(p) - reference.efficiency(p)) < 1e-12
    assert exact.efficiency(p / 2) > reference.efficiency(p / 2)
    assert exact.efficiency(2 * p) < reference.efficiency(2 * p)


def test_an_unbiased_direction_never_crosses(policy):
    reference = group_moments("rloo", policy, N)
    quieter, same = (group_moments(name, policy, N).measured(reference) for name in ("position_optimal", "group_mean"))
    assert measures.crossing(quieter) == np.inf
    assert measures.crossing(same) == 0


@pytest.mark.parametrize("label", LABELS, ids=NAMES)
def test_moments_of_sampled_groups_are_unbiased(label, policy):
    rng = np.random.default_rng(3)
    exact = astuple(group_moments(label[0], policy, N).measured(group_moments("rloo", policy, N)))
    grams = [gram_of_sampled_groups(policy, 8, rng) for _ in range(400)]
    found = np.array([[field[0] for field in astuple(deleted_moments([gram], label))] for gram in grams])
    error = found.std(axis=0, ddof=1) / len(grams) ** 0.5
    assert (np.abs(found.mean(axis=0) - exact) < 4 * error).all()
