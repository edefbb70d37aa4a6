from xml.etree import ElementTree

import pytest

from otb_analysis.figures.svg import HEIGHT, LEGEND, WIDTH, Curve, Panel, svg

SPACE = "{http://www.w3.org/2000/svg}"


def drawn(*curves, **panel):
    """The picture of one panel as an XML tree; its axes go from pixel 46 to 368 and, for 0 to 1, from 210 up to 46."""
    return ElementTree.fromstring(svg([Panel("Title", "note", "x", curves, y_range=(0.0, 1.0), **panel)]))


def test_a_curve_lies_where_its_numbers_are():
    (line,) = drawn(Curve([0, 10], [0.0, 1.0])).iter(f"{SPACE}polyline")
    # 46 px are the left edge and 380 − 12 the right one; 250 − 40 is the bottom and 46 the top.
    assert line.get("points") == "46.0,210.0 368.0,46.0"


def test_a_band_goes_along_its_lower_ends_and_back_along_its_upper_ones():
    (band,) = drawn(Curve([0, 10], [0.5, 0.5], low=[0.0, 0.0], high=[1.0, 1.0])).iter(f"{SPACE}polygon")
    assert band.get("points") == "46.0,210.0 368.0,210.0 368.0,46.0 46.0,46.0"


def test_an_end_that_is_not_known_is_left_out_of_the_band():
    nan = float("nan")
    (band,) = drawn(Curve([0, 5, 10], [0.5] * 3, low=[nan, 0.0, 0.0], high=[nan, 1.0, 1.0])).iter(f"{SPACE}polygon")
    assert band.get("points") == "207.0,210.0 368.0,210.0 368.0,46.0 207.0,46.0"


def test_points_have_bars_and_no_line():
    tree = drawn(Curve([0, 10], [0.5, 0.5], low=[0.0, 0.0], high=[1.0, 1.0], color="#123456", width=0))
    assert [c.get("cx") for c in tree.iter(f"{SPACE}circle")] == ["46.0", "368.0"]
    assert len([x for x in tree.iter(f"{SPACE}line") if x.get("stroke") == "#123456"]) == 2
    assert not list(tree.iter(f"{SPACE}polyline"))


def test_shares_are_labelled_in_percent_and_ticks_are_round():
    words = [x.text for x in drawn(Curve([0, 10], [0.0, 1.0]), percent=True).iter(f"{SPACE}text")]
    assert [w for w in words if w.endswith("%")] == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert {"0", "2", "4", "6", "8", "10"} <= set(words)


def test_each_name_is_once_in_the_legend_and_text_is_escaped():
    curve = Curve([0, 1], [0.0, 1.0], "a < b")
    picture = svg([Panel("T", "n", "x", [curve, curve]), Panel("T", "n", "x", [curve])])
    assert picture.count("a &lt; b") == 1


@pytest.mark.parametrize(("panels", "columns", "size"), [(1, 2, (1, 1)), (2, 2, (2, 1)), (3, 2, (2, 2))])
def test_panels_fill_rows(panels, columns, size):
    tree = ElementTree.fromstring(svg([Panel("T", "n", "x", [Curve([0, 1], [0, 1])])] * panels, columns))
    assert (tree.get("width"), tree.get("height")) == (str(size[0] * WIDTH), str(size[1] * HEIGHT + LEGEND))


def test_constant_data_still_have_an_axis():
    tree = ElementTree.fromstring(svg([Panel("T", "n", "x", [Curve([3], [2.0], width=0)])]))
    assert len(list(tree.iter(f"{SPACE}circle"))) == 1


def test_rules_are_drawn_at_their_height_with_their_words():
    tree = drawn(Curve([0, 10], [0.0, 1.0]), rules=((0.5, "target"),))
    (rule,) = [x for x in tree.iter(f"{SPACE}line") if x.get("stroke-dasharray")]
    assert (rule.get("y1"), rule.get("y2")) == ("128.0", "128.0")
    assert "target" in [x.text for x in tree.iter(f"{SPACE}text")]
