"""The measures that follow from mean and variance, on numbers worked by hand."""

import numpy as np

from studies.lib.enumeration.trees import GroupMoments, sampled_moments, weighted_moments


def test_measures_of_a_shrunk_estimate():
    # m = (3, 1), ∇J = (4, 0), V = 2, N = 4: bias √(1 + 1)/4, c = 12/16, SF = 2/(9/16), efficiency(2) = 144/16/(10 + 1)
    m = GroupMoments(np.array([3.0, 1.0]), 2.0, np.array([4.0, 0.0]), 4)
    assert abs(m.relative_bias - 2**0.5 / 4) < 1e-15
    assert m.projection == 0.75
    assert m.n_variance == 8
    assert abs(m.sf - 32 / 9) < 1e-14
    assert abs(m.efficiency(2) - 9 / 11) < 1e-15


def test_scaling_an_estimate_changes_neither_sf_nor_efficiency():
    a = GroupMoments(np.array([3.0, 1.0]), 2.0, np.array([4.0, 0.0]), 4)
    b = GroupMoments(0.5 * a.mean, 0.25 * a.variance, a.gradient, 4)
    assert abs(a.sf - b.sf) < 1e-14
    assert abs(a.efficiency(3) - b.efficiency(3)) < 1e-15


def test_moments_of_two_outcomes():
    # (0, 0) and (4, 0) with .75 and .25: mean (1, 0), variance .75·1 + .25·9 = 3; as a sample of two: mean 2, 8
    outcomes, gradient = np.array([[0.0, 0.0], [4.0, 0.0]]), np.array([1.0, 0.0])
    exact = weighted_moments(outcomes, np.array([0.75, 0.25]), gradient, 1)
    assert (exact.mean[0], exact.variance) == (1, 3)
    assert sampled_moments(outcomes, gradient, 1).variance == 8
