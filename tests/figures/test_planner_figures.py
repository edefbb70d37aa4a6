"""The picture of the budget planner: its points are the planner's cells, and its table their numbers."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.answers.measured import planner_words
from otb_analysis.diagnostics.planner import Cell, Planner
from otb_analysis.figures.comparison import planner_display, planner_table, plot_planner
from otb_analysis.statistics import Interval

COST = Interval(0.8, 0.7, 0.9, 16, "")
CELLS = (
    Cell("rloo", "none", 4, 0.25, False, COST),
    Cell("rloo", "none", 8, 0.5, True, None),
    Cell("rloo", "none", 16, 0.375, False, None),
    Cell("otb", "proxy", 8, None, False, None),
)
PLANNER = Planner(128, 8, CELLS, (), "")


def test_a_point_is_an_efficiency_and_a_star_where_it_is_best():
    rloo, otb = plot_planner(PLANNER).data
    assert (rloo.name, list(rloo.x), list(rloo.y)) == ("rloo", [4, 8, 16], [0.25, 0.5, 0.375])
    plain, best, other = rloo.marker.symbol
    assert best == "star" and plain == other != best and list(rloo.marker.size) == [8, 14, 8]
    assert (list(otb.x), list(otb.y)) == ([8], [None])


def test_the_axis_has_the_sizes_of_all_curves():
    axis = plot_planner(PLANNER).layout.xaxis
    assert (axis.type, axis.tickvals, axis.ticktext) == ("log", (4, 8, 16), ("4", "8", "16"))


def test_the_table_has_a_row_for_each_point_with_its_cost_against_the_recorded_size():
    table = planner_table(PLANNER)
    assert table["group_size"].tolist() == [4, 8, 16, 8]
    assert table["shown_best"].tolist() == [False, True, False, False]
    assert table.loc[0, ["cost", "cost_low", "cost_high"]].tolist() == [0.8, 0.7, 0.9]
    assert table.loc[1:, "cost"].isna().all() and table["efficiency"].fillna(-1).tolist() == [0.25, 0.5, 0.375, -1]


def test_the_words_say_for_how_many_rollouts():
    assert planner_words(PLANNER).startswith("How efficient the same 128 rollouts would be")


def test_what_is_read_has_a_star_at_the_best_and_leaves_out_rows_without_a_number():
    shown = planner_display(PLANNER)
    assert shown["group size"].tolist() == ["4", "8*", "16"] and shown["estimator"].tolist() == ["rloo"] * 3
    assert shown["cost"].tolist() == ["0.80 [0.70, 0.90]", "1", "–"]


def test_costs_are_drawn_and_read_where_no_efficiency_is_told():
    cells = [replace(cell, efficiency=None) for cell in CELLS]
    hidden = replace(PLANNER, cells=tuple(cells))
    (rloo,) = plot_planner(hidden).data  # otb has no cost either
    assert (list(rloo.x), list(rloo.y)[:2], np.isnan(rloo.y[2])) == ([4, 8, 16], [0.8, 1], True)
    assert list(rloo.error_y.array)[:2] == pytest.approx([0.1, 0]) == list(rloo.error_y.arrayminus)[:2]
    assert planner_words(hidden).startswith("What the same 128 rollouts would cost")
    assert plot_planner(hidden).layout.yaxis.title.text == "cost, groups of 8 = 1"
    assert planner_display(hidden).to_dict("list") == {
        "estimator": ["rloo"], "group size": ["4"], "cost": ["0.80 [0.70, 0.90]"],
    }  # fmt: skip
