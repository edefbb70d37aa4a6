"""Estimates from sampled rollouts against the exact values of enumerated policies, in standard errors."""

import numpy as np
import pytest

from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.statistics import group_gradients, partitions, pool_gram, position_optimum
from studies.lib.enumeration import population
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.trees import TreeSpec, random_tree

NAMES = ("rloo", "group_mean", "otb", "otb_loo", "token_optimal")
LABELS = [(name, "none" if name in ("rloo", "group_mean") else "exact") for name in NAMES]


@pytest.fixture(scope="module")
def tree():
    return random_tree(TreeSpec(vocabulary=3, horizon=3, shared=6), np.random.default_rng(0))


def pool_of(tree, rng, n_rollouts, size, shuffles):
    """One prompt's pool: sampled completions, every estimator on disjoint groups."""
    rows = rng.choice(len(tree.prob), n_rollouts, p=tree.prob / tree.prob.sum())
    cuts = partitions(np.zeros(n_rollouts, dtype=int), size, shuffles, seed=int(rng.integers(1 << 31)))
    vectors = []
    for cut in cuts:
        inputs = tree.inputs(rows, cut.group)
        weights = np.stack([estimate(name, inputs).advantage for name in NAMES])
        vectors.append(group_gradients(tree.score[rows], weights, cut))
    return pool_gram(vectors, cuts, LABELS)


def test_pools_agree_with_enumeration(tree):
    rng = np.random.default_rng(1)
    pools = [pool_of(tree, rng, 32, 4, 2) for _ in range(400)]
    for label in LABELS:
        exact = group_moments(label[0], tree, 4)
        m = LABELS.index(label)
        # Products of disjoint groups of the one prompt; row 0 is rloo, the reference.
        found = {
            "variance": [pool.group_variance(label)[0] for pool in pools],
            "mean_sq": [pool.apart[m, m, 0] for pool in pools],
            "along": [pool.apart[m, 0, 0] for pool in pools],
            "truth_sq": [pool.apart[0, 0, 0] for pool in pools],
        }
        expected = {
            "variance": exact.variance,
            "mean_sq": exact.mean @ exact.mean,
            "along": exact.mean @ exact.gradient,
            "truth_sq": exact.gradient @ exact.gradient,
        }
        for name, values in found.items():
            stderr = np.std(values, ddof=1) / np.sqrt(len(values))
            assert abs(np.mean(values) - expected[name]) < 4 * stderr, (label, name)


def batch_gradients(trees, which, members, name):
    """Group gradients of one batch whose prompts are drawn from a few policies [P, D]."""
    reward = np.concatenate([trees[w].reward[rows] for w, rows in zip(which, members, strict=True)])
    inputs = EstimatorInputs(reward, np.ones(reward.shape, bool), np.repeat(np.arange(len(which)), members.shape[1]))
    advantage = estimate(name, inputs).advantage.reshape(*members.shape, -1)
    scores = np.stack([trees[w].score[rows] for w, rows in zip(which, members, strict=True)])
    return np.einsum("pnt,pntd->pd", advantage, scores) / members.shape[1]


@pytest.mark.slow
def test_batch_coupling_costs_the_jackknife_little_from_24_prompts_up():
    # standard error of log(V_batch_mean / V_rloo): advantages as they were against advantages without the prompt
    trees = [random_tree(TreeSpec(vocabulary=2, horizon=3, shared=6), np.random.default_rng(s)) for s in range(4)]
    rng, p = np.random.default_rng(0), 24

    def spread(g):
        return ((g - g.mean(axis=0)) ** 2).sum()

    fixed, again = [], []
    for _ in range(100):
        which = rng.integers(0, 4, p)
        members = np.stack([rng.choice(8, 4, p=trees[w].prob / trees[w].prob.sum()) for w in which])
        coupled, plain = (batch_gradients(trees, which, members, name) for name in ("batch_mean", "rloo"))
        kept = [np.arange(p) != i for i in range(p)]
        fixed.append(np.var([np.log(spread(coupled[k]) / spread(plain[k])) for k in kept]))
        anew = [batch_gradients(trees, which[k], members[k], "batch_mean") for k in kept]
        again.append(np.var([np.log(spread(g) / spread(plain[k])) for g, k in zip(anew, kept, strict=True)]))
    assert 0.93 < np.sqrt(np.mean(fixed) / np.mean(again)) < 1.02


def test_one_large_pool_finds_the_projection(tree):
    pool = pool_of(tree, np.random.default_rng(2), 40_000, 4, 1)
    for label in LABELS:
        exact = group_moments(label[0], tree, 4)
        projection = pool.apart[LABELS.index(label), 0, 0] / pool.apart[0, 0, 0]
        # 10,000 groups: the projection's standard error is of the order √(V/(10⁴‖∇J‖²)).
        tolerance = 4 * np.sqrt(exact.variance / 1e4 / (exact.gradient @ exact.gradient))
        assert projection == pytest.approx(exact.projection, abs=tolerance)


def test_sampled_optimum_tends_to_the_exact_one(tree):
    rng = np.random.default_rng(3)
    rows = rng.choice(len(tree.prob), 100_000, p=tree.prob / tree.prob.sum())
    optimum = position_optimum(tree.score[rows], tree.returns[rows], tree.mask[rows])
    assert optimum == pytest.approx(population.position_optimum(tree), abs=0.03)
