from itertools import combinations
from math import comb

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import pass_at_k, passing
from otb_analysis.statistics.intervals import share_interval


def test_pass_at_five_of_ten_answers_with_three_right():
    # 1 − C(7,5)/C(10,5) = 1 − 21/252 = 0.91667
    assert pass_at_k([3], 10, 5) == pytest.approx([1 - 21 / 252])
    assert pass_at_k([3], 10, 5)[0] == pytest.approx(0.9167, abs=5e-5)


def test_pass_at_one_is_the_share_and_at_n_whether_any_answer_is_right():
    assert pass_at_k([0, 1, 3, 4], 4, 1) == pytest.approx([0, 0.25, 0.75, 1])
    assert pass_at_k([0, 1, 3, 4], 4, 4).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("n", [3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for c in range(n + 1):
        answers = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in combinations(answers, k)]
            assert pass_at_k([c], n, k)[0] == pytest.approx(np.mean(subsets))


def test_pass_at_k_of_thousands_of_answers_does_not_overflow():
    expected = 1 - comb(3990, 2000) / comb(4000, 2000)  # exact integers
    assert pass_at_k([10], 4000, 2000)[0] == pytest.approx(expected)


def test_pass_at_k_is_unbiased():
    # p = 0.2: 1 − 0.8^4 = 0.5904; 40,000 prompts of 6 answers
    counts = np.random.default_rng(0).binomial(6, 0.2, size=40_000)
    values = pass_at_k(counts, 6, 4)
    assert abs(values.mean() - 0.5904) < 4 * values.std() / 200


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_answers_are_given_in_powers_of_two(n, expected):
    assert list(passing(np.ones((3, n), bool)).at) == expected


def test_passing_of_a_hand_worked_table():
    # 16 prompts of two answers, half with one right, half with none: avg 1/4, pass@1 1/4, pass@2 1/2
    found = passing([[True, False], [False, False]] * 8)
    assert found.average.estimate == pytest.approx(0.25)
    assert {k: i.estimate for k, i in found.at.items()} == pytest.approx({1: 0.25, 2: 0.5})
    assert found.largest == 2


def test_order_of_prompts_and_of_answers_changes_nothing():
    rng = np.random.default_rng(1)
    table = rng.random((32, 4)) < rng.random((32, 1))
    shuffled = rng.permuted(table, axis=1)[rng.permutation(32)]
    for one, other in zip(passing(table).at.values(), passing(shuffled).at.values(), strict=True):
        assert (one.low, one.estimate, one.high) == pytest.approx((other.low, other.estimate, other.high))


def test_answers_that_repeat_a_prompt_add_no_certainty():
    table = (np.random.default_rng(2).random(64) < 0.4)[:, None]
    once, eightfold = passing(table).average, passing(np.repeat(table, 8, axis=1)).average
    assert (eightfold.low, eightfold.high) == pytest.approx((once.low, once.high))


def test_interval_where_nothing_is_right_is_the_exact_one():
    # P(no success in 128 draws) = (1 − p)^128 = 0.025 at p = 1 − 0.025^(1/128)
    found = passing(np.zeros((128, 4), bool)).at[4]
    assert (found.estimate, found.low) == (0, 0)
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 128))
    mirrored = passing(np.ones((128, 4), bool)).at[4]
    assert (mirrored.estimate, mirrored.low, mirrored.high) == pytest.approx((1, 0.025 ** (1 / 128), 1))


def test_interval_of_a_single_right_prompt_is_clopper_and_pearsons():
    from scipy.stats import binomtest

    found = share_interval([1.0] + [0.0] * 63, "share")
    expected = binomtest(1, 64).proportion_ci()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_fewer_than_sixteen_prompts_give_a_point_alone():
    for table in (np.zeros((15, 2), bool), np.eye(15, 2, dtype=bool)):
        assert passing(table).average.low is None and passing(table).average.high is None


def test_interval_covers_the_truth_of_prompts_that_differ():
    # p ~ Beta(1, 3): avg 1/4; pass@4 = 1 − E(1−p)^4 = 1 − 3/7
    rng, missed = np.random.default_rng(3), np.zeros(2)
    for _ in range(400):
        found = passing(rng.random((64, 4)) < rng.beta(1, 3, size=(64, 1)))
        for i, (interval, truth) in enumerate([(found.average, 1 / 4), (found.at[4], 4 / 7)]):
            assert interval.low is not None and interval.high is not None
            missed[i] += not interval.low <= truth <= interval.high
    # 5 % of 400 is 20, with a standard deviation of 4.4
    assert (missed < 20 + 4 * 4.4).all()


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_of_the_answers_is_refused(k):
    with pytest.raises(InputError, match=rf"k is {k} .* has 4 answers"):
        pass_at_k([1], 4, k)


def test_counts_and_tables_of_another_shape_are_refused():
    with pytest.raises(InputError, match=r"correct holds 1 to 5 of 4 answers"):
        pass_at_k([1, 5], 4, 2)
    with pytest.raises(InputError, match=r"success has shape \(3,\)"):
        passing([True, False, True])
