"""The variance at other group sizes: against every group of tiny policies, enumerated."""

import numpy as np
import pytest

from otb_analysis.statistics.group_sizes import pair_law, single_law
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.trees import TreeSpec, random_tree

SPECS = {
    "shared": TreeSpec(horizon=2, shared=5),
    "end token": TreeSpec(horizon=2, shared=None, end_token=True),
    "a reward at every token": TreeSpec(horizon=2, shared=5, dense=True),
}
SIZES = (2, 3, 4, 5, 6)


@pytest.fixture(params=SPECS)
def trees(request):
    """Three prompts: policies of one shape that differ in everything else."""
    return [random_tree(SPECS[request.param], np.random.default_rng(seed)) for seed in (1, 2, 3)]


def powers(name, trees, sizes=SIZES):
    """E‖g_p‖² over the prompts by size, and ‖m‖² of each: all by enumeration."""
    moments = {n: [group_moments(name, tree, n) for tree in trees] for n in sizes}
    return {n: np.mean([m.mean @ m.mean + m.variance for m in each]) for n, each in moments.items()}


def between(name, trees):
    means = [group_moments(name, tree, 2).mean for tree in trees]
    return np.mean([m @ m for m in means]), np.sum(np.mean(means, axis=0) ** 2)


def test_the_mean_of_single_rollouts_follows_from_two_sizes(trees):
    power = powers("none", trees)
    law = single_law({n: power[n] for n in (2, 4)})
    assert law.square == pytest.approx(between("none", trees)[0])
    for n in SIZES:
        assert law.power(n) == pytest.approx(power[n])


def test_the_leave_one_out_mean_follows_from_three_sizes(trees):
    power = powers("rloo", trees)
    law = pair_law({n: power[n] for n in (2, 3, 4)})
    assert law.square == pytest.approx(between("rloo", trees)[0])
    assert law.pair >= 0 and law.single >= 0
    for n in SIZES:
        assert law.power(n) == pytest.approx(power[n])


def test_two_sizes_do_with_the_square_of_no_baseline(trees):
    power, single = powers("rloo", trees), single_law(powers("none", trees))
    law = pair_law({n: power[n] for n in (2, 4)}, single.square)
    for n in SIZES:
        assert law.power(n) == pytest.approx(power[n])
    assert pair_law({n: power[n] for n in (2, 4)}) is None and single_law({2: power[2]}) is None


def test_a_mean_over_triples_does_not_follow(trees):
    # The law is not a fit that takes anything: a group-normalised estimator leaves it.
    power = powers("grpo", trees)
    law = pair_law({n: power[n] for n in (2, 3, 4)})
    assert abs(law.power(6) / power[6] - 1) > 1e-3


def test_the_best_size_has_the_least_variance_at_the_same_rollouts(trees):
    power = powers("rloo", trees)
    law, mean_sq = pair_law({n: power[n] for n in (2, 3, 4)}), between("rloo", trees)[1]
    best = float(law.best_size(mean_sq))
    spent = {n: n * (law.power(n) - mean_sq) for n in range(2, 200)}
    assert abs(min(spent, key=lambda n: spent[n]) - max(best, 2)) < 1


def test_no_best_size_where_prompts_do_not_differ():
    law = pair_law({2: np.array(3.0), 3: np.array(2.0), 4: np.array(5 / 3)})
    assert np.isnan(law.best_size(law.square + 1))
