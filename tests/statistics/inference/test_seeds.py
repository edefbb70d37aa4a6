import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import seed_mean


def test_three_seeds_have_students_interval_by_hand():
    # mean 2, s = 1, t_{2, .975} = 4.302653: 2 ∓ 4.302653/√3 = 2 ∓ 2.484138.
    found = seed_mean([1.0, 2.0, 3.0], "value")
    assert found is not None
    assert (found.estimate, found.n_clusters) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((-0.484138, 4.484138), abs=1e-6)


def test_order_of_seeds_does_not_matter():
    a, b = seed_mean([0.8, 0.9, 0.85], "x", "logit"), seed_mean([0.9, 0.85, 0.8], "x", "logit")
    assert a is not None and b is not None
    assert (a.low, a.high) == pytest.approx((b.low, b.high))


def test_a_share_keeps_its_interval_inside_0_and_1():
    found = seed_mean([0.9, 0.99, 0.97], "share", scale="logit")
    assert found is not None and found.low is not None and found.high is not None
    assert 0 < found.low < found.estimate < found.high < 1


@pytest.mark.parametrize("values", [[0.5], [0.7, 0.7, 0.7], [1.0, 1.0, 0.0]])
def test_without_spread_or_inside_the_domain_only_the_point_is_given(values):
    # [1, 1, 0]: the mean without the last seed is 1, which has no logit.
    found = seed_mean(values, "share", scale="logit")
    assert found is not None and found.low is None and found.estimate == pytest.approx(np.mean(values))


@pytest.mark.parametrize("values", [[], [0.5, float("nan")], [float("inf")]])
def test_what_is_not_finite_has_no_mean(values):
    assert seed_mean(values, "value") is None


def test_unknown_scale_is_one_sentence():
    with pytest.raises(InputError, match=r"scale is 'logg'; .*'log'"):
        seed_mean([1.0, 2.0], "value", scale="logg")


@pytest.mark.parametrize("seeds", [3, 8])
def test_interval_of_success_over_few_seeds_covers_nineteen_in_twenty(seeds):
    # True success of a seed: Beta(36, 4), mean .9, sd .047; measured on 256 prompts. 3,000 repetitions: s.e. .004.
    rng = np.random.default_rng(0)
    success = rng.binomial(256, rng.beta(36, 4, size=(3000, seeds))) / 256
    found = [seed_mean(row, "success", "logit") for row in success]
    covered = np.mean([f is not None and f.low is not None and f.low <= 0.9 <= (f.high or 0) for f in found])
    assert 0.95 - 3 * 0.004 < covered < 0.97
