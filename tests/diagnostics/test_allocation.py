"""Rollouts per prompt: the exact minimiser, VIP's proportion, and what must be refused."""

from itertools import product

import numpy as np
import pytest

from otb_analysis.diagnostics.allocation import allocate, bernoulli_variance, vip_variance
from otb_analysis.errors import InputError


def test_sizes_follow_the_root_of_p_times_one_minus_p():
    # √(p(1 − p)) is .5, .4 and .3 at p = .5, .2 and .1; n − 1 = 50, 40, 30 sums to 120, so n sums to 123
    assert allocate(vip_variance([0.25, 0.16, 0.09], 100), 123).tolist() == [51, 41, 31]


def test_equal_prompts_get_equal_groups_and_the_bounds_hold():
    assert allocate(vip_variance([0.2] * 4, 16), 32).tolist() == [8] * 4
    assert allocate(vip_variance([0.25, 0.0, 0.0], 8), 12).tolist() == [8, 2, 2]
    assert allocate(vip_variance([0.25, 0.0], 4), 8).tolist() == [4, 4]


def test_no_other_allocation_has_less_variance():
    rng = np.random.default_rng(0)
    n = np.arange(2, 9)
    for _ in range(20):
        a, b = rng.exponential(size=(2, 4))
        table = np.full((4, 9), np.inf)
        table[:, 2:] = a[:, None] / n + b[:, None] / (n * (n - 1))
        size = allocate(table, 18)
        others = (one for one in product(range(2, 9), repeat=4) if sum(one) == 18)
        least = min(sum(table[p, k] for p, k in enumerate(one)) for one in others)
        assert size.sum() == 18
        assert table[range(4), size].sum() == pytest.approx(least, rel=1e-12)


def test_posterior_mean_of_the_variance():
    # α = 4, β = 2: 4·2/(6·7); without a rollout E[p(1 − p)] of a uniform p is 1/6
    np.testing.assert_allclose(bernoulli_variance([3, 0], [4, 0]), [8 / 42, 1 / 6])


@pytest.mark.parametrize(
    ("table", "budget", "words"),
    [
        (vip_variance([0.2, 0.1], 8), 3, "from 4 to 16"),
        (vip_variance([0.2, 0.1], 8), 17, "from 4 to 16"),
        ([[0, 0, 1, 2]], 3, "variance of prompt 0"),
        ([[0, 0, 3.0, 2.5, 1.0]], 3, "variance of prompt 0"),
        ([[0, 0, np.nan, 1.0]], 3, "variance of prompt 0"),
        ([1.0, 2.0], 3, "shape"),
    ],
)
def test_bad_input_gets_a_sentence(table, budget, words):
    with pytest.raises(InputError, match=words):
        allocate(table, budget)


def test_more_successes_than_rollouts_are_refused():
    with pytest.raises(InputError, match="successes"):
        bernoulli_variance([5], [4])
