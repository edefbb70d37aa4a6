"""Smaller groups cut from whole ones: what is cut, and that their moments are those of groups of that size."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import cut_groups, deleted_moments, efficiency, mean_over_subgroups, smaller_sizes
from otb_analysis.statistics.group_sizes import Partition, pool_gram
from otb_analysis.types import Gram

RLOO, OTB = ("rloo", "none"), ("otb", "proxy")


@pytest.mark.parametrize(("size", "found"), [(8, [4, 2]), (6, [3]), (4, [2]), (3, []), (2, []), (12, [6, 3])])
def test_halves_and_quarters_of_at_least_two_rollouts(size, found):
    assert smaller_sizes(np.repeat([7, 2, 5], size)) == found


def test_groups_of_unequal_sizes_are_not_cut():
    assert smaller_sizes(np.array([0, 0, 0, 0, 1, 1])) == []


def test_a_group_is_cut_in_the_order_of_its_rollouts_wherever_they_stand():
    # Rollouts of prompt 5: places 0, 2, 3, 5; of prompt 2: places 1, 4, 6, 7.
    cut = cut_groups(np.array([5, 2, 5, 5, 2, 5, 2, 2]), 2)
    assert [np.flatnonzero(cut == a).tolist() for a in np.unique(cut)] == [[1, 4], [6, 7], [0, 2], [3, 5]]


def test_what_is_left_over_is_a_smaller_group_of_its_own():
    cut = cut_groups(np.array([0, 0, 0, 1, 1]), 2)
    assert len(np.unique(cut)) == 3 and cut[0] == cut[1] != cut[2] and cut[3] == cut[4]
    with pytest.raises(InputError, match="size is 0"):
        cut_groups(np.array([0]), 0)


def test_moments_of_two_prompts_of_two_smaller_groups_by_hand():
    # One parameter; smaller groups' gradients 1, 3 of the first prompt and 2, 4 of the second: means 2 and 3.
    # Between prompts 2·3 = 6; within the first (1 + 9)/2 = 5, within the second (4 + 16)/2 = 10.
    g = np.array([1.0, 3.0, 2.0, 4.0])
    inner = mean_over_subgroups(np.multiply.outer(g, g)[None, None], 2)
    np.testing.assert_array_equal(inner[0, 0], [[5.0, 6.0], [6.0, 10.0]])
    moments = deleted_moments([Gram(inner, (RLOO,), 8)], RLOO)
    # E‖g‖² = (5 + 10)/2, ‖m‖² = ‖∇J‖² = 6: V = 1.5, and an update of 4 smaller groups has efficiency 6/(6 + 1.5/4).
    assert (moments.power[0], moments.mean_sq[0]) == (7.5, 6.0)
    assert efficiency(moments, 4)[0] == pytest.approx(6 / 6.375)


def vectors(parts, prompts=6, seed=0):
    """Gradients [M, kP, K] of smaller groups, with a truth, a part of the prompt and one of the group."""
    random = np.random.default_rng(seed)
    own = np.eye(5)[0] + 0.5 * np.repeat(random.normal(size=(2, prompts, 5)), parts, axis=1)
    return own + random.normal(size=own.shape)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_products_are_those_of_a_pool_cut_at_that_size(parts):
    g = vectors(parts)
    found = mean_over_subgroups(np.einsum("mak,nbk->mnab", g, g), parts)
    if parts == 1:
        np.testing.assert_allclose(found, np.einsum("mak,nbk->mnab", g, g))
        return
    cut = Partition(np.repeat(np.arange(6 * parts), 2), np.repeat(np.arange(6), parts))
    pool = pool_gram([g], [cut], [RLOO, OTB]).gram()
    np.testing.assert_allclose(found[0, 0], pool.inner[0, 0])
    np.testing.assert_allclose(found[1, 1], pool.inner[1, 1])
    off = ~np.eye(6, dtype=bool)
    np.testing.assert_allclose(found[0, 1][off], pool.inner[0, 1][off])


def test_efficiency_of_smaller_groups_is_that_of_plain_loops_over_pairs():
    parts, prompts = 2, 6
    g = vectors(parts)
    gram = Gram(mean_over_subgroups(np.einsum("mak,nbk->mnab", g, g), parts), (RLOO, OTB), prompts * 8)
    pairs = [(a, b) for a in range(12) for b in range(12) if a // parts != b // parts]
    power = np.mean([g[1, a] @ g[1, a] for a in range(12)])
    mean_sq, along, truth = (np.mean([g[m, a] @ g[n, b] for a, b in pairs]) for m, n in ((1, 1), (1, 0), (0, 0)))
    direct = along**2 / (truth * (mean_sq + (power - mean_sq) / 12))
    assert efficiency(deleted_moments([gram], OTB), 12)[0] == pytest.approx(direct)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="3 smaller groups; pass 2"):
        mean_over_subgroups(np.zeros((1, 1, 3, 3)), 2)
