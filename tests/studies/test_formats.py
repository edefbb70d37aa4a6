import math

import numpy as np
import pytest

from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import Interval
from studies.lib import interval_columns, or_nan, rounded
from studies.lib.formats import (
    above,
    below,
    find,
    grid,
    heads,
    interval,
    interval_curve,
    mean_curve,
    median,
    number,
    percent,
    side_by_side,
    span,
    spanning,
    with_deleted,
)
from studies.lib.record import forget_peak_memory, minutes_words, peak_memory_mib
from studies.lib.seeds import later_success, paired_difference

FOUND = Interval(0.4142, 0.3614, 0.4649, 20, "a share")
POINT = Interval(1.5, None, None, 3, "")


def test_a_share_is_written_in_percent_with_its_interval():
    assert (percent(0.414), percent(FOUND, digits=1)) == ("41 %", "41.4 % (36.1–46.5)")
    assert percent(interval_columns("x", FOUND), "x") == "41 % (36–46)"
    assert (percent(POINT), percent(None)) == ("150 %", "–")


def test_ends_that_differ_by_a_hundred_are_a_dash_unless_the_quantity_has_a_sign():
    assert interval(Interval(1, 0.1, 9.9, 20, "")) == "1.00 (0.10–9.90)"
    wide = Interval(1, 0.1, 10, 20, "")
    assert (interval(wide), percent(wide), interval(interval_columns("x", wide), "x")) == ("–", "–", "–")
    assert interval(wide, form="+.1f") == "+1.0 (+0.1 to +10.0)"  # a difference
    assert interval(Interval(0.5, 0.001, 0.7, 20, ""), linear=True) == "0.50 (0.00–0.70)"  # a correlation
    assert interval(Interval(0.1, 0, 0.2, 20, "")) == "0.10 (0.00–0.20)"


def test_an_interval_is_three_columns_and_reads_back():
    columns = interval_columns("gain", Interval(1.2345678, 1.1, 1.42, 32, "gain"))
    assert columns == {"gain": 1.2346, "gain_low": 1.1, "gain_high": 1.42}
    assert interval(columns, "gain") == "1.23 (1.10–1.42)"
    assert interval(POINT, form=".1f") == "1.5"
    assert interval(interval_columns("gain", None), "gain") == interval({}, "gain") == interval(None) == "–"


def test_a_signed_difference_says_to_between_its_ends():
    assert interval(Interval(0.031, -0.004, 0.066, 8, ""), form="+.1f", scale=100) == "+3.1 (-0.4 to +6.6)"
    assert interval(Interval(0.1, -0.2, 0.3, 8, "")) == "0.10 (-0.20 to 0.30)"


def test_numbers_say_no_more_than_is_known():
    assert [number(x) for x in (None, 0.5, 2e7, -2e7)] == ["–", "0.50", ">999", "<−999"]
    assert [rounded(x) for x in (None, float("nan"), float("inf"), 123456.7)] == [None, None, None, 123460.0]
    assert [span([]), span([0.59, 0.35]), span([-0.2, 0.1])] == ["–", "0.35–0.59", "-0.20 to 0.10"]
    assert [median([]), median([3, 1, 10], ".0f")] == ["–", "3 (1–10)"]


@pytest.mark.parametrize(("value", "shown"), [(0.3, above), (0.4, spanning), (0.5, below)])
def test_an_interval_shows_a_difference_or_contains_the_value(value, shown):
    assert [test for test in (above, spanning, below) if test(FOUND, value)] == [shown]
    assert [test for test in (above, spanning, below) if test(interval_columns("x", FOUND), value, "x")] == [shown]


def test_without_ends_nothing_is_shown():
    assert not any(test(of, 1) for test in (above, spanning, below) for of in (POINT, None, {}))


def test_a_table_has_its_words_left_and_its_numbers_right():
    assert heads("name", "n") == "| name | n |\n| --- | ---: |"


def test_a_grid_keeps_the_order_of_its_rows_and_leaves_missing_pairs_empty():
    rows = [{"name": "b", "n": 4, "x": 1}, {"name": "b", "n": 2, "x": 2}, {"name": "a", "n": 2, "x": 3}]
    found = grid(rows, "name", "n", lambda row: str(row["x"]), "N = {}")
    assert found == "| name | N = 4 | N = 2 |\n| --- | ---: | ---: |\n| b | 1 | 2 |\n| a |  | 3 |"


def test_a_curve_has_gaps_where_nothing_is_known():
    curve = interval_curve({2: interval_columns("x", FOUND), 4: interval_columns("x", None)}, "x", "words", "#000000")
    assert (list(curve.x), curve.y[0], curve.name) == ([2, 4], 0.4142, "words")
    assert math.isnan(curve.y[1]) and math.isnan(or_nan(None)) and or_nan(1) == 1.0


def test_points_stand_where_something_is_known_and_a_panel_without_one_is_drawn_empty():
    points = side_by_side([None, FOUND, interval_columns("", None)], 2, "", "words", "#000000")
    assert (list(points.x), points.y) == ([2.12], [0.4142])
    none = side_by_side([None, None], 1, "", "words", "#000000")
    assert list(none.x) == [] and svg([Panel("title", "note", "x", [none], [(1.0, "rule")])]).startswith("<svg")


def test_a_mean_curve_has_one_point_a_step():
    rows = [{"step": 5, "n": 20, "y": 1.0}, {"step": 0, "n": 0, "y": 0.0}, {"step": 5, "n": 40, "y": 0.5}]
    curve = mean_curve(rows, "n", "y", "words", "#000000", dashed=True)
    assert (curve.x, curve.y, curve.dashed) == ([0, 30], [0.0, 0.75], True)


def test_minutes_are_those_of_all_cells():
    cost = [{"minutes": 16.5, "processor_minutes": 8.26}, {"minutes": 8.0, "processor_minutes": 4.0}]
    assert minutes_words(cost) == "12 min of processor time (24 min by the clock)"  # 8.26 + 4 = 12.26; 16.5 + 8 = 24.5
    assert (
        minutes_words([{"minutes": 2.0, "processor_minutes": 1.0}])
        == "1.0 min of processor time (2.0 min by the clock)"
    )


def test_peak_memory_is_that_since_it_was_forgotten():
    block = bytearray(200 * 2**20)
    high = peak_memory_mib()
    del block
    forget_peak_memory()
    low = peak_memory_mib()
    if high is None or low is None:
        pytest.skip("the system does not tell")
    assert high - low > 150


def test_a_row_is_found_by_its_columns_and_none_is_an_empty_one():
    rows = [{"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert find(rows, a=1) == rows[0] and find(rows, b=3) == rows[1] and find(rows, a=2) == {}


def test_means_without_each_cluster_stand_behind_the_mean_of_all():
    # 9/3, then 8/2, 7/2 and 3/2
    assert with_deleted(np.array([1.0, 2.0, 6.0])).tolist() == [3.0, 4.0, 3.5, 1.5]


def test_arms_are_compared_over_the_seeds_that_both_have():
    rows = [{"seed": seed, "step": step, "success": x} for seed, step, x in ((0, 0, 0.1), (0, 5, 0.4), (0, 9, 0.6))]
    assert later_success([*rows, {"seed": 1, "step": 5, "success": 0.9}]) == {0: 0.5, 1: 0.9}
    # seed 2 has no partner: the mean of .5 − .2 and .9 − .4
    found = paired_difference({0: 0.5, 1: 0.9, 2: 0.0}, {0: 0.2, 1: 0.4}, "x")
    assert found is not None and found.estimate == pytest.approx(0.4)
    assert paired_difference({2: 0.0}, {0: 0.2}, "x") is None
