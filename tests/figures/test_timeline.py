from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from otb_analysis.diagnostics import change_points, diagnose, single_step_outliers
from otb_analysis.figures.styles import stacked
from otb_analysis.figures.timeline import LETTER, Event, event_names, plot_timeline, timeline_info
from otb_analysis.store import step_series

N = 30
STEPS = pd.DataFrame(
    {
        "step": np.arange(N),
        "reward_mean": [0.75] * 20 + [0.0] * 10,
        "grad_norm": [1.0] * 22 + [0.0] * 8,
        "entropy_mean": np.full(N, 0.5),
        "length_mean": [np.nan] * N,
    }
)


def info(steps, more=False):
    series = step_series(steps)
    return timeline_info(steps, diagnose(series), change_points(series), more, single_step_outliers(series))


def notes(figure):
    return [note.text for note in figure.layout.annotations]


def test_a_centred_mean_is_of_fewer_values_at_the_ends():
    reward = info(pd.DataFrame({"step": range(10), "reward_mean": np.arange(10.0) ** 2})).series[0].mean
    assert reward[[0, 4, 9]].tolist() == [(0 + 1 + 4 + 9 + 16) / 5, 204 / 9, (25 + 36 + 49 + 64 + 81) / 5]


def test_only_panels_with_values_are_drawn_in_their_order():
    found = info(STEPS)
    assert [series.quantity.column for series in found.series] == ["reward_mean", "grad_norm", "entropy_mean"]
    assert len(plot_timeline(found).data) == 4 + 2 * 3  # the lane's four kinds, then mean and values of each panel


def test_events_stand_in_the_order_of_steps():
    found = info(STEPS).events
    assert [event.step for event in found] == sorted(event.step for event in found)
    assert ("alarm", 21, "Falling reward") in {(event.kind, event.step, event.text) for event in found}


def test_a_lane_without_events_says_that_nothing_fired():
    calm = info(STEPS.assign(reward_mean=0.5, grad_norm=1.0))
    assert calm.events == () and any("nothing fired" in text for text in notes(plot_timeline(calm)))
    assert not any("nothing fired" in text for text in notes(plot_timeline(info(STEPS))))


def test_a_gradient_of_exactly_zero_is_counted_and_not_missing():
    norm = info(STEPS).series[1]
    assert len(norm.value) == N
    assert any("exactly 0 at 8 of 30 steps" in text for text in notes(plot_timeline(info(STEPS))))
    assert not any("exactly 0" in text for text in notes(plot_timeline(info(STEPS.assign(grad_norm=1.0)))))


def test_only_positive_unbounded_values_get_a_logarithmic_axis():
    figure = plot_timeline(info(STEPS), log_y=True)
    kinds = [figure.layout[f"yaxis{n}"].type for n in (2, 3, 4)]
    assert kinds == [None, None, "log"]  # reward may be 0 or less, ‖ḡ‖ is 0 here, entropy is positive
    assert sum("logarithmic" in text for text in notes(figure)) == 1


def test_the_chosen_step_is_marked():
    assert [shape.x0 for shape in plot_timeline(info(STEPS), 9).layout.shapes] == [9]
    assert len(plot_timeline(info(STEPS)).layout.shapes) == 0


def test_a_number_that_is_never_finite_has_no_panel_and_one_that_is_once_infinite_keeps_its_others():
    infinite = [np.inf] * N
    found = info(STEPS.assign(grad_norm=infinite))
    assert [series.quantity.column for series in found.series] == ["reward_mean", "entropy_mean"]
    assert len(plot_timeline(found, log_y=True).data) == 4 + 2 * 2
    nothing = info(STEPS.assign(grad_norm=infinite, reward_mean=np.nan, entropy_mean=infinite))
    assert nothing.series == () and len(plot_timeline(nothing).data) == 4
    once = info(STEPS.assign(grad_norm=[np.inf] + [1.0] * (N - 1))).series[1]
    assert once.step.tolist() == list(range(1, N)) and once.mean.tolist() == [1.0] * (N - 1)


def test_a_single_step_outlier_is_marked_in_the_lane_and_on_its_curve():
    found = info(STEPS.assign(grad_norm=[1.0] * 20 + [30.0] + [1.0] * 9, reward_mean=0.5))
    assert [(e.kind, e.step, e.column) for e in found.events] == [("outlier", 20, "grad_norm")]
    assert found.events[0].text.startswith("gradient norm 30.0")
    marks = [t for t in plot_timeline(found).data if t.marker.symbol == "diamond" and len(t.x)]
    assert [(list(t.x), list(t.y)) for t in marks] == [([20], [14.0]), ([20], [30.0])]


def test_marks_have_their_names_above_one_another_where_there_is_room():
    of_run = info(STEPS)
    names = {(one.x, one.text, one.ay) for one in plot_timeline(of_run).layout.annotations if one.yref == "y"}
    assert {(x, text) for x, text, _ in names} == {(event.step, event.text) for event in of_run.events}
    assert len({ay for *_, ay in names}) > 1


@pytest.mark.parametrize("width", [100, 260, 560])
def test_names_of_events_hide_no_other_and_alarms_come_first(width):
    random, kinds = np.random.default_rng(0), ["watch", "alarm", "change", "outlier"]
    for _ in range(50):
        steps = sorted(random.integers(0, N, 8).tolist())
        events = [Event(step, kinds[step % 4], "", "x" * int(random.integers(4, 30))) for step in steps]
        named = event_names(replace(info(STEPS), events=tuple(events)), width)
        assert {event.kind for event, *_ in named} & {"watch", "alarm"} or not {"watch", "alarm"} & {
            event.kind for event in events
        }
        boxes = []
        for event, row, ends in named:
            x, long = event.step / (N - 1) * width, LETTER * len(event.text)
            boxes.append((x, x - long if ends else x, x if ends else x + long, row))
        for i, (_, low, high, row) in enumerate(boxes):
            for j, (x, *span, other) in enumerate(boxes):
                assert i == j or row != other or high <= span[0] or span[1] <= low
                assert i == j or other <= row or not low < x < high  # the line from another's name to its mark


def test_on_a_narrow_page_titles_begin_at_the_edge_whatever_the_margin():
    figure = stacked(plot_timeline(info(STEPS)))
    titles = [note for note in figure.layout.annotations if note.xref == "paper"]
    assert titles and {note.xshift for note in titles} == {8 - figure.layout.margin.l}
    bare = go.Figure().add_scatter(y=[1, 2]).add_annotation(text="title", xref="paper", x=0)
    assert stacked(bare).layout.annotations[0].xshift == -56  # the house style's margin
