import os
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.figures.svg import HEIGHT, LEGEND, WIDTH, Curve, Panel, figure, svg

NAN = float("nan")


def axes(*curves, **panel):
    """The axes of one panel, from 0 to 1."""
    return figure([Panel("Title", "note", "x", curves, y_range=(0.0, 1.0), **panel)]).axes[0]


def test_a_curve_lies_where_its_numbers_are():
    (line,) = axes(Curve([0, 10], [0.0, 1.0])).lines
    assert line.get_xydata().tolist() == [[0, 0], [10, 1]]


def test_a_band_spans_the_ends_that_are_known():
    (band,) = axes(Curve([0, 5, 10], [0.5] * 3, low=[NAN, 0.0, 0.1], high=[NAN, 1.0, 0.9])).collections
    corners = {tuple(xy) for xy in band.get_paths()[0].vertices.tolist()}
    assert corners == {(5, 0), (10, 0.1), (10, 0.9), (5, 1)}


def test_points_have_bars_and_no_line():
    drawn = axes(Curve([0, 10], [0.5, 0.5], low=[0.0, NAN], high=[1.0, NAN], width=0))
    (points, *_), (bars,) = drawn.lines, drawn.collections
    assert points.get_linestyle() == "None" and points.get_marker() == "o"
    assert [np.ptp(bar, axis=0).tolist() for bar in bars.get_segments()] == [[0, 1], [0, 0]]


def test_shares_are_labelled_in_percent():
    picture = svg([Panel("T", "n", "x", [Curve([0, 10], [0.0, 1.0])], percent=True, y_range=(0.0, 1.0))])
    words = [x.text for x in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert [w for w in words if w.endswith("%")] == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert {"0", "2", "4", "6", "8", "10"} <= set(words)


def test_each_name_is_once_in_the_legend_and_text_is_escaped():
    curve = Curve([0, 1], [0.0, 1.0], "a < b")
    picture = svg([Panel("T", "n", "x", [curve, curve]), Panel("T", "n", "x", [curve])])
    assert picture.count(">a &lt; b<") == 1


@pytest.mark.parametrize(("panels", "columns", "size"), [(1, 2, (1, 1)), (2, 2, (2, 1)), (3, 2, (2, 2))])
def test_panels_fill_rows(panels, columns, size):
    tree = ElementTree.fromstring(svg([Panel("T", "n", "x", [Curve([0, 1], [0, 1])])] * panels, columns))
    width, height = (float(tree.get(name).removesuffix("pt")) * 96 / 72 for name in ("width", "height"))
    assert (width, height) == pytest.approx((size[0] * WIDTH, size[1] * HEIGHT + LEGEND))


# matplotlib beside NumPy before 2.4, which warns where later ones refuse.
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_constant_data_still_have_an_axis():
    low, high = figure([Panel("T", "n", "x", [Curve([3], [2.0], width=0)])]).axes[0].get_ylim()
    assert low < 2 < high


def test_rules_are_drawn_at_their_height_with_their_words():
    drawn = axes(Curve([0, 10], [0.0, 1.0]), rules=((0.5, "target"),))
    assert drawn.lines[1].get_ydata() == [0.5, 0.5] and "target" in [text.get_text() for text in drawn.texts]


def test_the_same_picture_has_the_same_bytes_in_every_process(tmp_path):
    script = (
        "import sys; from otb_analysis.figures.svg import Curve, Panel, svg; "
        "sys.stdout.write(svg([Panel('T', 'n', 'x', [Curve([0, 1], [0, 1], 'a', [0, 0], [1, 1])])]))"
    )
    pictures = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "01"
    }
    assert len(pictures) == 1 and pictures.pop().startswith(b"<svg")


def test_without_matplotlib_a_sentence_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="matplotlib is needed"):
        svg([Panel("T", "n", "x", [Curve([0, 1], [0, 1])])])
