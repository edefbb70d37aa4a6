import re
import tomllib
from itertools import combinations
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from otb_analysis.estimators import ESTIMATORS
from otb_analysis.figures.alarms import MARKS
from otb_analysis.figures.styles import (
    BLUE,
    CONFIG,
    ESTIMATOR_STYLES,
    FALLBACK_STYLES,
    ORANGE,
    RAMP,
    RUN_COLORS,
    estimator_style,
    for_background,
    linear_range,
    log_axis,
    number,
    panels,
    run_styles,
    stacked,
)
from otb_analysis.figures.token_columns import ColorScale, palette


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


def contrast(one, other):
    """Of two colours, as WCAG defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes 2009, whole deficiency, on linear RGB; then CIE XYZ of sRGB over the white of D65.
DEUTAN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTAN = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def as_seen(color, eyes):
    """CIE L*a*b* of a colour."""
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    ratio = XYZ @ np.clip(eyes @ linear, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(one, other):
    """The distance ΔE of two colours for those eyes to which they are nearest."""
    return min(float(np.linalg.norm(as_seen(one, e) - as_seen(other, e))) for e in (np.eye(3), DEUTAN, PROTAN))


GROUNDS = ("#FFFFFF", "#12171C")
NEAR = 15


def test_contrast_and_distance_of_known_colours():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert apart("#000000", "#FFFFFF") == pytest.approx(100, abs=0.1)
    assert (
        apart("#D7301F", "#4C7F1B")
        < NEAR
        < np.linalg.norm(as_seen("#D7301F", np.eye(3)) - as_seen("#4C7F1B", np.eye(3)))
    )


def test_the_grounds_are_those_of_the_pages():
    theme = tomllib.loads((Path(__file__).parents[2] / "app/.streamlit/config.toml").read_text())["theme"]
    assert (theme["light"]["backgroundColor"], theme["dark"]["backgroundColor"]) == GROUNDS


@pytest.mark.parametrize("ground", GROUNDS)
def test_every_mark_is_seen_on_the_light_and_on_the_dark_page(ground):
    marks = {style.color for style in (*ESTIMATOR_STYLES.values(), *FALLBACK_STYLES)} | set(RUN_COLORS)
    marks |= {color for _, _, color in MARKS.values()}
    assert {mark: round(contrast(mark, ground), 2) for mark in marks if contrast(mark, ground) < 3} == {}


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_of_a_figure_is_read_on_its_page(dark):
    figure = for_background(panels([("title", "what it measures")], 1)[0], dark)
    (note,) = figure.layout.annotations
    inks = [figure.layout.font.color, *re.findall(r"color:(#\w{6})", note.text)]
    assert len(inks) == 2 and min(contrast(ink, GROUNDS[dark]) for ink in inks) >= 4.5


def test_estimators_that_are_near_for_colour_blind_eyes_have_another_dash_or_marker():
    for (a, one), (b, other) in combinations(ESTIMATOR_STYLES.items(), 2):
        if apart(one.color, other.color) < NEAR:
            assert (one.dash, one.symbol) != (other.dash, other.symbol), (a, b)


def test_a_run_has_one_look_whatever_else_is_chosen_and_the_same_as_runs_are_added():
    styles = run_styles("abc")
    assert run_styles("abcd") | styles == run_styles("abcd")
    assert len({style.color for style in run_styles("abcdefgh").values()}) == 8


def test_a_run_has_the_colour_of_its_estimator_where_no_other_of_four_has_it():
    estimators = {"a": "otb", "b": "otb", "c": "group_mean", "e": "rloo"}
    colors = [style.color for style in run_styles("abcde", estimators).values()]
    assert colors[:1] + colors[2:3] == [ORANGE, BLUE]
    assert len(set(colors)) == 5 and [s.dash for s in run_styles("abcde", estimators).values()] == ["solid"] * 4 + [
        "dash"
    ]
    assert run_styles("abc", estimators) == {n: s for n, s in run_styles("abcde", estimators).items() if n in "abc"}


def test_twenty_four_runs_all_differ_and_those_of_one_dash_are_apart_for_colour_blind_eyes():
    styles = run_styles(map(str, range(24))).values()
    assert len({(style.color, style.dash) for style in styles}) == 24
    for one, other in combinations(styles, 2):
        assert one.dash != other.dash or apart(one.color, other.color) > NEAR


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


def test_stacked_panels_stand_below_one_another_as_high_as_before_under_their_titles():
    figure, places = panels([("a", ""), ("b", ""), ("c", "")], 3, height=200)
    for where in places:
        figure.add_scatter(x=[0], y=[0], **where)
    before = figure.layout.height
    inside = before - 120
    stacked(figure)
    tops = [axis.domain[1] for axis in figure.select_yaxes()]
    assert tops[0] == 1 and tops == sorted(tops, reverse=True)
    assert [note.y for note in figure.layout.annotations] == tops
    assert {axis.domain for axis in figure.select_xaxes()} == {(0, 1)}
    heights = [(axis.domain[1] - axis.domain[0]) * (figure.layout.height - 120) for axis in figure.select_yaxes()]
    assert heights == pytest.approx([inside] * 3)


def test_a_single_panel_is_not_stacked():
    figure, _ = panels([("a", "")], 1)
    assert stacked(figure).layout.height == panels([("a", "")], 1)[0].layout.height


def test_linear_range_keeps_its_mark_in_view_and_bounds_endless_intervals():
    # Values 1 to 2 and a mark at 1: one more unit on each side for the intervals, and 6 % of margin.
    assert linear_range([1.0, 2.0], [-50.0, 50.0], around=1.0) == pytest.approx([-0.18, 3.18])
    low, high = linear_range([2.0], [], around=1.0)
    assert low < 1 < 2 < high


def test_a_ramp_begins_near_the_colour_of_the_page():
    figure = go.Figure([go.Heatmap(z=[[1, 2]], meta=RAMP), go.Heatmap(z=[[1, 2]])])
    assert [trace.reversescale for trace in for_background(figure, dark=True).data] == [True, None]
    assert [trace.reversescale for trace in for_background(figure, dark=False).data] == [False, None]


@pytest.mark.parametrize("diverging", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_every_coloured_token_is_read_on_its_colour(diverging, dark):
    levels = palette(ColorScale(0.0, 1.0, diverging=diverging, dark=dark))
    assert min(contrast(ground, ink) for ground, ink in levels) >= 4.5
