import math

from otb_analysis.statistics import Interval
from otb_analysis.study import column_words, grid, interval_columns, interval_curve, known

FOUND = Interval(0.412, 0.361, 0.468, 20, "a share", "a method")


def test_an_interval_is_three_columns_and_reads_back_in_words():
    row = interval_columns("efficiency", FOUND)
    assert row == {"efficiency": 0.412, "efficiency_low": 0.361, "efficiency_high": 0.468}
    assert column_words(row, "efficiency") == "0.41 (0.36–0.47)"


def test_what_is_undefined_is_a_dash_and_a_point_stands_alone():
    assert column_words(interval_columns("sf", None), "sf") == "–"
    point = Interval(1.5, None, None, 3, "", "")
    assert column_words(interval_columns("sf", point), "sf", form=".1f") == "1.5"


def test_a_grid_keeps_the_order_of_its_rows_and_leaves_missing_pairs_empty():
    rows = [{"name": "b", "n": 4, "x": 1}, {"name": "b", "n": 2, "x": 2}, {"name": "a", "n": 2, "x": 3}]
    found = grid(rows, "name", "n", lambda row: str(row["x"]), "N = {}")
    assert found == "| name | N = 4 | N = 2 |\n| --- | ---: | ---: |\n| b | 1 | 2 |\n| a |  | 3 |"


def test_a_curve_has_gaps_where_nothing_is_known():
    rows = [{"n": 2} | interval_columns("x", FOUND), {"n": 4} | interval_columns("x", None)]
    curve = interval_curve(rows, lambda row: row["n"], "x", "words", "#000000")
    assert (list(curve.x), curve.y[0], curve.name) == ([2, 4], 0.412, "words")
    assert math.isnan(curve.y[1]) and math.isnan(known(None)) and known(1) == 1.0
