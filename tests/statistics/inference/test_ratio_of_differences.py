"""Fieller's interval of a ratio whose denominator may be near 0, against a scan over all ratios and by simulation."""

import numpy as np
import pytest

from otb_analysis.statistics.intervals import jackknife_interval, ratio_of_differences


def values(x, y):
    """Means of two columns, from all clusters and without each of them, 2 × [1 + K]."""
    return (np.append(z.mean(), (z.sum() - z) / (z.size - 1)) for z in (x, y))


def test_its_ends_are_where_the_difference_is_just_told_from_nothing():
    rng = np.random.default_rng(0)
    y = 1 + rng.normal(size=40)
    x = 0.3 * y + 0.5 * rng.normal(size=40)
    numerator, denominator = values(x, y)
    found = ratio_of_differences(numerator, denominator, "")
    assert found is not None and found.low is not None and found.high is not None
    assert found.estimate == pytest.approx(x.mean() / y.mean())
    # At an end, Student's interval of the mean of x − θy just touches 0.
    for end in (found.low, found.high):
        difference = x - end * y
        t = difference.mean() / (difference.std(ddof=1) / np.sqrt(40))
        assert abs(t) == pytest.approx(2.0227, abs=1e-4)  # Student's, 39 degrees of freedom
    assert found.low < 0.3 < found.high


@pytest.mark.parametrize("mean", [0.2, 0.6, 3.0])
def test_it_covers_where_the_denominator_is_weak_and_is_given_where_it_is_shown(mean):
    rng, given, inside = np.random.default_rng(1), 0, 0
    for _ in range(1500):
        y = mean + rng.normal(size=24)
        x = 0.5 * y + rng.normal(size=24)
        numerator, denominator = values(x, y)
        found = ratio_of_differences(numerator, denominator, "")
        shown = jackknife_interval(denominator[0], denominator[1:], "", "linear")
        if found is None or found.low is None or found.high is None:
            continue
        assert shown is not None and shown.estimate > 0
        given += 1
        inside += found.low <= 0.5 <= found.high
    assert given > (100 if mean < 0.5 else 1000)
    assert inside / given > 0.95 - 4 * np.sqrt(0.95 * 0.05 / given)


def test_a_gain_that_may_be_nothing_leaves_a_point_and_no_gain_leaves_none():
    rng = np.random.default_rng(2)
    y = rng.normal(size=40)
    y += 0.1 - y.mean()  # the mean is .1 and its standard error .16
    x = rng.normal(size=40)
    found = ratio_of_differences(*values(x, y), "")
    assert found is not None and found.low is found.high is None
    assert ratio_of_differences(*values(x, -y), "") is None
    assert ratio_of_differences(*values(x[:8], y[:8] + 5), "").low is None  # too few clusters


def test_no_difference_is_a_share_of_nothing_whatever_the_gain():
    y = np.random.default_rng(3).normal(size=40) + 0.2
    found = ratio_of_differences(*values(0 * y, y), "")
    assert (found.estimate, found.low, found.high) == (0, 0, 0)
