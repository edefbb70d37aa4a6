import numpy as np
import plotly.graph_objects as go
import pytest

from otb_analysis.estimators import ESTIMATORS
from otb_analysis.figures.numbers import number
from otb_analysis.figures.styles import (
    CONFIG,
    ESTIMATOR_STYLES,
    RAMP,
    estimator_style,
    for_background,
    linear_range,
    log_axis,
    panels,
    run_styles,
    step_axis,
)


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


def test_every_styled_name_is_an_estimator():
    assert set(ESTIMATOR_STYLES) <= set(ESTIMATORS)


def test_no_two_estimators_look_alike():
    assert len(set(ESTIMATOR_STYLES.values())) == len(ESTIMATOR_STYLES)


def test_estimator_without_a_style_always_gets_the_same_one_that_no_other_estimator_has():
    assert estimator_style("mine") == estimator_style("mine")
    assert estimator_style("mine") not in ESTIMATOR_STYLES.values()


def test_leave_one_out_form_without_a_style_is_the_dashed_twin_too():
    plain, loo = estimator_style("mine"), estimator_style("mine_loo")
    assert (loo.color, loo.dash, loo.symbol) == (plain.color, "dash", f"{plain.symbol}-open")


def luminance(color):
    """Of an sRGB colour, as WCAG defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_run_has_a_colour_of_its_own_and_the_dash_of_its_estimator():
    styles = run_styles({"a": "otb", "b": "otb", "c": "otb_loo", "d": "none", "e": ""})
    assert len({style.color for style in styles.values()}) == 5
    assert [style.dash for style in styles.values()] == ["solid", "solid", "dash", "dot", "solid"]


def test_twenty_four_runs_all_differ_and_are_seen_on_white_and_on_dark():
    styles = run_styles({str(n): "otb" for n in range(24)})
    assert len({(style.color, style.dash) for style in styles.values()}) == 24
    for style in styles.values():
        ink = luminance(style.color) + 0.05
        assert min((luminance("#FFFFFF") + 0.05) / ink, ink / (luminance("#0E1117") + 0.05)) > 2.2


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
    figure, places = panels([("a", "x"), ("b", "y"), ("c", "z")], 2)
    assert places == [{"row": 1, "col": 1}, {"row": 1, "col": 2}, {"row": 2, "col": 1}]
    assert [note.text[0] for note in figure.layout.annotations] == ["a", "b", "c"]
    assert figure.layout.annotations[1].x == figure.layout.xaxis2.domain[0]


def test_nothing_leaves_the_page():
    assert CONFIG["showSendToCloud"] is False
    assert CONFIG["displaylogo"] is False


def test_dark_background_gets_light_ink():
    dark = for_background(panels([("a", "")], 1)[0], dark=True).layout.font.color
    assert int(dark[1:3], 16) > 200


def test_ratio_axis_keeps_its_tick_at_one():
    for low, high in ((0.1, 3.0), (0.2, 30.0), (0.8, 1.3)):
        assert "1" in log_axis([low, 1.0, high], most=4)["ticktext"]


def test_linear_range_keeps_its_mark_in_view_and_bounds_endless_intervals():
    # Values 1 to 2 and a mark at 1: one more unit on each side for the intervals, and 6 % of margin.
    assert linear_range([1.0, 2.0], [-50.0, 50.0], around=1.0) == pytest.approx([-0.18, 3.18])
    low, high = linear_range([2.0], [], around=1.0)
    assert low < 1 < 2 < high


def test_a_ramp_begins_near_the_colour_of_the_page():
    figure = go.Figure([go.Heatmap(z=[[1, 2]], meta=RAMP), go.Heatmap(z=[[1, 2]])])
    assert [trace.reversescale for trace in for_background(figure, dark=True).data] == [True, None]
    assert [trace.reversescale for trace in for_background(figure, dark=False).data] == [False, None]
