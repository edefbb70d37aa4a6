import re
from base64 import b64decode

import numpy as np
import pandas as pd
import pytest

from otb_analysis.figures.curves import (
    QUANTITIES,
    Quantity,
    curves_info,
    degenerate_table,
    derived,
    grouped_info,
    learning_info,
    plot_learning,
    sparkline,
)
from otb_analysis.figures.runs import config_differences, grouped
from otb_analysis.figures.styles import Style


@pytest.fixture
def steps():
    return pd.DataFrame(
        {
            "step": [2, 0, 1, 3], "reward_mean": [0.3, 0.1, 0.2, 0.4], "heldout_reward": [0.5, 0.4, None, None],
            "n_zero_variance_groups": [1, 0, 2, 4], "n_prompts": [4, 4, 4, 4], "clipped": [True, False, True, None],
            "grad_norm": [1.0, 2.0, 3.0, 4.0], "energy_tail_k": [0.1, 0.2, 0.3, 0.6],
        }
    )  # fmt: skip


def test_running_mean_of_a_hand_worked_row():
    table = pd.DataFrame({"step": range(4), "reward_mean": np.array([1, 3, 5, 7], np.float32)})

    def smooth(window):
        return curves_info({"a": table}, [Quantity("r", "", "reward_mean")], {}, window).curves[0][0].smooth.tolist()

    assert smooth(2) == [1, 2, 4, 6]  # 1; (1+3)/2; (3+5)/2; (5+7)/2
    assert smooth(1) == [1, 3, 5, 7]


def test_curves_come_in_order_of_steps_and_as_float32(steps):
    curve = curves_info({"a": steps}, [Quantity("r", "", "reward_mean")], {}).curves[0][0]
    assert curve.step.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(curve.value, [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    assert {curve.step.dtype, curve.value.dtype, curve.smooth.dtype} == {np.dtype(np.float32)}


def test_step_without_a_value_is_left_out_not_drawn_as_zero(steps):
    held = learning_info({"a": steps}, {}).curves[1][0]
    assert held.step.tolist() == [0, 2]


@pytest.mark.parametrize("without", [[], ["heldout_reward"]])
def test_held_out_reward_has_no_panel_where_no_run_recorded_it(steps, without):
    bare = steps.drop(columns=without) if without else steps.assign(heldout_reward=np.nan)
    assert [q.column for q in learning_info({"a": bare}, {}).quantities] == ["reward_mean"]
    assert [q.column for q in learning_info({"a": bare, "b": steps}, {}).quantities] == [
        "reward_mean",
        "heldout_reward",
    ]


def test_rare_quantity_is_never_smoothed(steps):
    info = learning_info({"a": steps}, {}, window=4)
    assert info.curves[1][0].smooth.tolist() == info.curves[1][0].value.tolist()
    assert info.curves[0][0].smooth.tolist() != info.curves[0][0].value.tolist()


def test_run_that_never_recorded_a_quantity_has_no_curve(steps):
    info = curves_info({"a": steps, "b": steps[["step"]]}, [Quantity("r", "", "reward_mean")], {})
    assert [c.run for c in info.curves[0]] == ["a"]


def test_derived_shares_of_a_hand_worked_table(steps):
    table = derived(steps)
    assert table["zero_variance_share"].tolist() == [0, 0.5, 0.25, 1]  # steps 0, 1, 2, 3
    assert table["clipped_share"].isna().all()  # fewer than five recorded steps


def test_degenerate_input_is_summed_over_steps_and_missing_where_never_counted(steps):
    table = degenerate_table({"a": steps, "b": steps.assign(n_truncated=[0, 3, None, 1])})
    assert table["groups of equal reward"].tolist() == [7, 7]
    assert table["cut completions"].tolist() == [pd.NA, 4]
    assert table["measurement gaps"].isna().all()


def test_clipped_share_is_the_mean_of_the_last_twenty():
    table = pd.DataFrame({"step": range(25), "clipped": [True] * 5 + [False] * 20})
    assert derived(table)["clipped_share"].iloc[[4, 9, 24]].tolist() == [1.0, 0.5, 0.0]


def test_curves_have_titled_panels_and_their_names_at_their_ends_in_their_colours(steps):
    names = ("demo-a", "demo-b")
    figure = plot_learning(curves_info(dict.fromkeys(names, steps), QUANTITIES, {"demo-b": Style("#123456")}, window=2))
    titles = [note.text.split("<br>")[0] for note in figure.layout.annotations[: len(QUANTITIES)]]
    assert titles == [q.title for q in QUANTITIES]
    first, second = [n for n in figure.layout.annotations if n.xref == "x" and "━" in n.text]
    assert first.text.endswith(" a") and second.text.endswith(" b") and "#123456" in second.text  # without "demo-"
    assert first.x == second.x == 3 and first.y < second.y  # moved apart, though both end at one value
    assert not [t.name for t in figure.data if t.showlegend]


def test_more_lines_than_have_room_for_names_get_a_legend_below_the_panels(steps):
    figure = plot_learning(curves_info({f"r{n}": steps for n in range(7)}, QUANTITIES, {}))
    assert [t.name for t in figure.data if t.showlegend] == [f"r{n}" for n in range(7)]
    assert figure.layout.legend.y < 0 and not [n for n in figure.layout.annotations if "━" in n.text]


def test_panel_without_data_says_not_recorded(steps):
    figure = plot_learning(curves_info({"a": steps}, QUANTITIES, {}))
    notes = [note for note in figure.layout.annotations if note.text == "no finite number was recorded"]
    assert notes
    # A note lies in its own panel only if the panel has a trace: without one a browser draws no axes there.
    assert {note.xref.split()[0] for note in notes} <= {trace.xaxis for trace in figure.data}


def test_run_name_is_text_in_hover_and_template():
    table = pd.DataFrame({"step": [0], "reward_mean": [1.0]})
    figure = plot_learning(learning_info({"<b>%{x}": table}, {}))
    assert figure.data[0].hovertemplate.endswith("<extra>&lt;b>% {x}</extra>")


def evaluated(k):
    """Three steps of which two were evaluated, and one of these without an interval."""
    table = pd.DataFrame({"step": [0, 1, 2], "reward_mean": [0.1, 0.2, 0.3], "heldout_pass_k": [k, None, k]})
    for column in ("heldout_reward", "heldout_success", "heldout_pass_at_k"):
        table[column], table[f"{column}_low"], table[f"{column}_high"] = (
            [0.4, None, 0.5], [0.3, None, None], [0.6, None, None],
        )  # fmt: skip
    return table


def test_interval_is_a_band_over_the_steps_that_have_one():
    info = learning_info({"a": evaluated(1)}, {})
    curve = info.curves[1][0]
    np.testing.assert_array_equal(curve.low, np.array([0.3, np.nan], np.float32))
    (band,) = [t for t in plot_learning(info).data if t.fill == "toself"]
    np.testing.assert_allclose(band.x, [0, 0])
    np.testing.assert_allclose(band.y, [0.6, 0.3], rtol=1e-6)


def test_hover_reads_the_interval_beside_the_value():
    figure = plot_learning(learning_info({"a": evaluated(1)}, {}))
    assert list(figure.data[-1].text) == ["0.400 [0.300, 0.600]", "0.500"]


def test_run_from_before_intervals_has_a_curve_and_no_band(steps):
    figure = plot_learning(learning_info({"a": steps}, {}))
    assert [t.fill for t in figure.data] == [None, None]


def test_success_has_panels_of_its_own_only_with_several_answers(steps):
    titles = [
        [q.title for q in learning_info({"a": t, "b": steps}, {}).quantities] for t in (evaluated(1), evaluated(4))
    ]
    assert titles[0] == ["Training reward", "Held-out reward"]
    assert titles[1] == [*titles[0], "Held-out success", "Held-out pass@4"]


def test_runs_with_different_numbers_of_answers_share_a_panel_without_a_number():
    info = learning_info({"a": evaluated(2), "b": evaluated(4)}, {})
    assert info.quantities[-1].title == "Held-out pass@k"
    assert info.quantities[-1].line == "one of k answers is right, 95 % interval"


def test_runs_of_a_group_are_one_curve_from_the_lowest_to_the_highest():
    def run(*rewards):
        return pd.DataFrame({"step": range(len(rewards)), "reward_mean": np.array(rewards, np.float32)})

    steps = {"a": run(0.0, 1.0, 0.5), "b": run(1.0, 2.0), "c": run(5.0, 5.0)}
    info = grouped_info(steps, {"x (2 runs)": ["a", "b"], "y (1 run)": ["c"]})
    both, alone = info.curves[0]
    assert both.step.tolist() == [0, 1] and both.value.tolist() == [0.5, 1.5]  # steps that both runs have
    assert both.low.tolist() == [0.0, 1.0] and both.high.tolist() == [1.0, 2.0]
    assert alone.value.tolist() == [5.0, 5.0] and np.isnan(alone.low).all()
    assert grouped_info(steps, {"x (2 runs)": ["a", "b"]}, window=2).curves[0][0].value.tolist() == [0.5, 1.0]
    plot_learning(info)


def test_runs_are_grouped_by_the_values_of_a_setting():
    runs = {"a": (0, "otb"), "b": (1, "otb"), "c": (0, "rloo")}
    configs = {run: {"seed": seed, "estimator": {"name": name}} for run, (seed, name) in runs.items()}
    assert grouped(config_differences(configs), "estimator.name") == {
        "estimator.name = otb (2 runs)": ["a", "b"], "estimator.name = rloo (1 run)": ["c"],
    }  # fmt: skip


def test_an_infinite_number_is_left_out_and_does_not_spoil_the_steps_after_it():
    table = pd.DataFrame({"step": range(8), "grad_norm": [1.0, 1.0, np.inf, 1.0, 1.0, np.nan, 1.0, 1.0]})
    (curve,) = curves_info({"a": table}, [Quantity("‖ḡ‖", "", "grad_norm")], {}, window=3).curves[0]
    assert curve.step.tolist() == [0, 1, 3, 4, 6, 7] and curve.smooth.tolist() == [1.0] * 6
    never = {"a": table.assign(grad_norm=np.inf)}
    assert curves_info(never, [Quantity("‖ḡ‖", "", "grad_norm")], {}).curves == ((),)
    (note,) = [
        n.text for n in plot_learning(curves_info(never, [Quantity("r", "", "grad_norm")], {})).layout.annotations
    ][1:]
    assert note == "no finite number was recorded"


def drawn(values):
    """Return the lines of a sparkline, each a list of points, out of its picture."""
    svg = b64decode(re.findall(r"base64,([^\"]+)", sparkline(np.array(values), "#123456"))[0]).decode()
    assert 'stroke="#123456"' in svg
    (path,) = re.findall(r' d="([^"]*)"', svg.replace("h0", ""))
    return [[tuple(map(float, point.split())) for point in line.split("L")] for line in path.split("M")[1:]]


def test_a_sparkline_goes_from_left_to_right_between_its_extremes_and_has_gaps():
    assert drawn([1.0, 3.0, 2.0]) == [[(0, 28), (50, 2), (100, 15)]]
    assert drawn([1.0, np.nan, 3.0, 3.0, np.inf]) == [[(0, 28)], [(50, 2), (75, 2)]]
    assert drawn([5.0, 5.0]) == [[(0, 28), (100, 28)]]
    assert drawn([np.nan]) == drawn([]) == []
    marked = b64decode(sparkline(np.arange(3.0), "#123456", [(0.25, "#CC1F2B")]).split(",")[1].split('"')[0]).decode()
    assert '<path d="M25.0 0V30" stroke="#CC1F2B"' in marked
