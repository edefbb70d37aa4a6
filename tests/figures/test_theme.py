import numpy as np
import pytest

from otb_analysis.estimators import ESTIMATORS
from otb_analysis.figures.scales import linear_range, log_axis, number, step_axis
from otb_analysis.figures.styles import ESTIMATOR_STYLES, estimator_style, run_styles
from otb_analysis.figures.theme import CONFIG, for_background, panels


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012345, "0.0123"), (12345.6, "12,300"), (1.2e-7, "1.20×10⁻⁷"), (3.2e8, "3.20×10⁸"), (0.0, "0"),
        (None, "–"), (float("nan"), "–"), (float("inf"), "∞"), (1234567, "1,234,567"), (-0.5, "−0.500"), (99.96, "100"),
        (0.9999, "1.00"), (9.9996e-5, "0.000100"),
    ],
)  # fmt: skip
def test_number_has_three_significant_digits(value, text):
    assert number(value) == text


def test_leave_one_out_form_is_the_dashed_twin_of_its_self_inclusive_form():
    for name in (n for n in ESTIMATORS if f"{n}_loo" in ESTIMATORS):
        plain, loo = estimator_style(name), estimator_style(f"{name}_loo")
        assert (plain.color, plain.dash, loo.dash) == (loo.color, "solid", "dash")


def test_every_estimator_has_a_style_of_its_own():
    assert set(ESTIMATORS) <= set(ESTIMATOR_STYLES)


def test_no_two_estimators_look_alike():
    assert len(set(ESTIMATOR_STYLES.values())) == len(ESTIMATOR_STYLES)


def test_unknown_estimator_always_gets_the_same_muted_style():
    assert estimator_style("mine") == estimator_style("mine")


def test_runs_of_one_estimator_differ_in_lightness_and_loo_keeps_its_twins_colour():
    styles = run_styles({"a": "otb", "b": "otb", "c": "otb_loo", "d": "group_mean"})
    assert styles["a"].color == styles["c"].color == estimator_style("otb").color
    assert styles["a"].color != styles["b"].color
    assert styles["d"] == estimator_style("group_mean")


def test_log_axis_over_one_decade_has_ticks_at_one_two_five():
    axis = log_axis([0.1, 1.0])
    assert axis["ticktext"] == ["0.1", "0.2", "0.5", "1"]


def test_log_axis_leaves_out_what_is_not_positive():
    assert log_axis([-1.0, 0.0, np.nan, 1.0, 10.0]) == log_axis([1.0, 10.0])
    assert log_axis([0.0]) == {"type": "log"}


def test_one_endless_interval_does_not_flatten_the_others():
    low, high = log_axis([1.0, 2.0], [1e-9, 1e9])["range"]
    assert 10**low > 0.1
    assert 10**high < 20


def test_step_axis_has_its_ticks_where_something_was_measured():
    axis = step_axis([20, 0, 10, 10])
    assert list(axis["tickvals"]) == [0, 10, 20]
    assert axis["range"] == [-7.0, 27.0]


def test_panel_titles_stand_flush_left_above_their_panel():
    figure = panels([("a", "x"), ("b", "y"), ("c", "z")], 2)
    assert [note.text[0] for note in figure.layout.annotations] == ["a", "b", "c"]
    assert figure.layout.annotations[1].x == figure.layout.xaxis2.domain[0]


def test_nothing_leaves_the_page():
    assert CONFIG["showSendToCloud"] is False
    assert CONFIG["displaylogo"] is False


def test_dark_background_gets_light_ink():
    dark = for_background(panels([("a", "")], 1), dark=True).layout.font.color
    assert int(dark[1:3], 16) > 200


def test_ratio_axis_keeps_its_tick_at_one():
    for low, high in ((0.1, 3.0), (0.2, 30.0), (0.8, 1.3)):
        assert "1" in log_axis([low, 1.0, high], most=4)["ticktext"]


def test_linear_range_keeps_its_mark_in_view_and_bounds_endless_intervals():
    # Values 1 to 2 and a mark at 1: one more unit on each side for the intervals, and 6 % of margin.
    assert linear_range([1.0, 2.0], [-50.0, 50.0], around=1.0) == pytest.approx([-0.18, 3.18])
    low, high = linear_range([2.0], [], around=1.0)
    assert low < 1 < 2 < high
