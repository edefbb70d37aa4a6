"""Medians of long windows of a series that grows are those of the whole series, and only new ones are computed."""

import numpy as np
import pytest

from otb_analysis.diagnostics import windows
from otb_analysis.diagnostics.windows import going_on, median_of_last, usual


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(windows, "_kept", {})


def series(n, bad=()):
    x = np.random.default_rng(3).normal(size=n)
    x[list(bad)] = np.nan
    return x


@pytest.mark.parametrize("bad", [(), (40, 90)])
@pytest.mark.parametrize("most", [12, 60])
@pytest.mark.parametrize("grows_by", [1, 7, 50])
def test_a_series_that_grew_says_the_same_as_one_that_was_always_so_long(most, grows_by, bad):
    x = series(150, bad)
    for end in range(5, 151, grows_by):
        found = [*usual(x[:end], 5, 10, most), median_of_last(x[:end], 10, most)]
    windows._kept.clear()
    whole = [*usual(x[:end], 5, 10, most), median_of_last(x[:end], 10, most)]
    np.testing.assert_array_equal(found, whole)
    assert np.isfinite(whole).any(axis=1).all()


def test_only_what_is_new_is_computed_and_a_changed_series_anew():
    sizes = []

    def last(x, reach):
        sizes.append(x.size)
        return x * 2

    x = series(200)
    for end, size in ((100, [100]), (101, [11]), (101, []), (150, [59]), (90, [90])):
        np.testing.assert_array_equal(going_on(last, x[:end], 10, reach=10), x[:end] * 2)
        assert sizes == size
        sizes.clear()
    changed = x.copy()
    changed[50] = 7
    np.testing.assert_array_equal(going_on(last, changed, 10, reach=10), changed * 2)
    assert sizes == [200]


def test_a_result_that_is_changed_does_not_change_what_is_kept():
    x = series(100)
    first = median_of_last(x, 10, 20)
    first[:] = 0
    assert median_of_last(x, 10, 20)[50] != 0
