from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.answers.measured import forest_words
from otb_analysis.errors import InputError
from otb_analysis.figures.comparison import MEASURES, comparison_info, comparison_table, display_table, plot_comparison
from otb_analysis.figures.curves import plot_learning
from otb_analysis.figures.pairs import over_training
from otb_analysis.figures.styles import labels
from otb_analysis.statistics import NOTHING, decide, gradient_noise_scale, pooled_statistics
from otb_analysis.types import Gram, Proved

RLOO = ("rloo", "none")


def test_group_mean_has_the_variance_of_rloo_times_its_shrinkage_squared(grams):
    # group_mean = 7/8 · rloo, so its variance is 49/64 of rloo's while SF and efficiency are the same.
    rows = {row.label: row for row in comparison_info(list(grams.values())).rows}
    efficiency, sf, variance = (ratio.estimate for ratio in rows["group_mean"].ratios)
    assert variance == pytest.approx(49 / 64)
    assert sf == pytest.approx(1)
    assert efficiency == pytest.approx(1)


def test_half_of_the_noise_is_a_quarter_of_the_variance(grams):
    # otb = ∇J + noise/2 and otb of the proxy ∇J + 0.6·noise, rloo = ∇J + noise: exact but for the order of the sums.
    rows = {row.label: row.ratios[2].estimate for row in comparison_info(list(grams.values())).rows}
    assert rows == pytest.approx({"otb · exact": 0.25, "otb · proxy": 0.36, "group_mean": 49 / 64, "rloo": 1})


def test_energy_source_is_named_only_where_several_meet():
    assert labels([("rloo", "none"), ("otb", "exact")]) == {("rloo", "none"): "rloo", ("otb", "exact"): "otb"}
    both = labels([("otb", "exact"), ("otb", "proxy"), ("rloo", "none")])
    assert both["otb", "proxy"] == "otb · proxy"
    assert both["rloo", "none"] == "rloo"


def test_comparison_has_the_reference_at_one_first_then_proved_ones_and_each_row_says_what_it_is_judged_by(grams):
    exact = ("otb", "exact")
    info = comparison_info(list(grams.values()), known=Proved({RLOO: 1.0, exact: 1.0}, frozenset((RLOO, exact))))
    assert [row.label for row in info.rows] == ["rloo", "group_mean", "otb · exact", "otb · proxy"]
    assert [row.decides for row in info.rows] == ["", "", "sf", "efficiency"]  # group_mean is a multiple of rloo
    assert [ratio.estimate for ratio in info.rows[0].ratios] == [1, 1, 1]
    assert [row.told for row in info.rows] == ["", "", "better", "better"]
    assert (info.n_prompts, info.judged, info.together) == (48, True, "all 2 together")
    for row in info.rows[2:]:
        ratio = row.ratios[0 if row.decides == "sf" else 1]
        assert row.together.low < ratio.low < ratio.high < row.together.high


def test_nothing_is_ranked_where_nothing_is_told_apart(vectors):
    # Noises of one size, independent of each other.
    random = np.random.default_rng(0)
    g = np.eye(12)[0] + 0.3 * random.normal(size=(4, 32, 12))
    labels = (RLOO, ("a", "none"), ("b", "none"), ("c", "none"))
    info = comparison_info([Gram(np.einsum("mpd,nqd->mnpq", g, g), labels, 256)])
    assert [row.key for row in info.rows] == list(labels) and "order says nothing" in forest_words(info)
    assert "all 3 together" in display_table(info)


def test_intervals_against_what_trained_stand_under_the_ratio_that_decides(grams):
    exact = ("otb", "exact")
    steps, known = list(grams.values()), Proved({RLOO: 1.0, exact: 1.0}, frozenset((RLOO, exact)))
    beside = decide(steps, exact, known)
    table = display_table(comparison_info(steps, known=known), beside).set_index(["estimator", "energy"])
    judged = {"variance": f"SF ÷ otb with exact norms, all {beside.looked_at}"}
    judged["efficiency"] = judged["variance"].replace("SF", "efficiency")
    told = {one.label: one for one in beside.comparisons if one.together}
    assert {told[RLOO].by, told["otb", "proxy"].by} == {*judged}
    for label, one in told.items():
        for by, column in judged.items():
            expected = f"{one.together.estimate:.2f} [" if by == one.by else "–"
            assert table.loc[label, column].startswith(expected)


def test_the_caption_says_proved_first_only_where_something_is_proved(grams):
    exact, steps = ("otb", "exact"), list(grams.values())
    known = Proved({RLOO: 1.0, exact: 1.0}, frozenset((RLOO, exact)))
    words = [forest_words(comparison_info(steps, known=proved)) for proved in (known, Proved({}, frozenset()))]
    assert ["Proved step lengths first" in one for one in words] == [True, False]


def test_an_estimator_whose_ratios_noise_hides_has_no_row_in_the_figure_and_is_named(grams):
    info = comparison_info(list(grams.values()))
    bare = replace(info.rows[1], ratios=(None, None, None), together=None, decides="", told="")
    info = replace(info, rows=(info.rows[0], bare, *info.rows[2:]))
    axis = plot_comparison(info).layout.yaxis
    assert list(axis.ticktext) == [row.label for row in info.rows if row is not bare]
    assert f"every ratio of {bare.label}, so the figure leaves them out" in forest_words(info)


def test_comparison_of_one_energy_source(grams):
    info = comparison_info(list(grams.values()), energy_source="proxy")
    assert {row.label for row in info.rows} == {"rloo", "group_mean", "otb"}


def test_comparison_with_an_estimator_that_was_not_measured_names_the_nearest(grams):
    with pytest.raises(InputError, match=r"did you mean 'rloo'\?"):
        comparison_info(list(grams.values()), against="rlo")


def test_tables_hold_one_row_per_estimator(grams):
    info = comparison_info(list(grams.values()))
    table = comparison_table(info)
    assert table["estimator"].tolist() == [row.key[0] for row in info.rows]
    assert table.loc[2, "sf_ratio_low"] < table.loc[2, "sf_ratio"] < table.loc[2, "sf_ratio_high"]
    assert table.loc[2, "together_low"] < table.loc[2, "efficiency_ratio_low"] and table.loc[2, "told"] == "better"
    shown = display_table(info)
    assert shown["SF ÷ rloo"].tolist()[:2] == ["1.00", "1.00"] and " [" in shown["SF ÷ rloo"].iloc[2]
    assert shown["all 2 together"].iloc[2].startswith("eff. ") and shown["all 2 together"].iloc[2].endswith("]*")


def test_noise_scale_stands_beside_each_estimator_with_its_interval(grams):
    info = comparison_info(list(grams.values()))
    scale = gradient_noise_scale(list(grams.values()), ("otb", "exact"))
    (row,) = (row for row in info.rows if row.label == "otb · exact")
    assert row.intervals["noise_scale"] == scale and scale.low < scale.estimate < scale.high
    shown = display_table(info).set_index(["estimator", "energy"])["noise scale"]
    assert shown["otb", "exact"] == f"{scale.estimate:.3f} [{scale.low:.3f}, {scale.high:.3f}]"
    table = comparison_table(info).set_index(["estimator", "energy_source"])
    assert table.loc[("otb", "exact"), "noise_scale_high"] == scale.high
    # Half the noise of rloo is a quarter of its noise scale.
    assert scale.estimate < 0.5 * table.loc[("rloo", "none"), "noise_scale"]


def test_forest_draws_a_point_per_estimator_and_ratio_a_thin_bar_where_it_is_judged_and_a_legend(grams):
    data = plot_comparison(comparison_info(list(grams.values()))).data
    points = [trace for trace in data if trace.hovertemplate]
    assert [len(trace.x) for trace in points] == [len(trace.marker.color) for trace in points] == [4, 4, 4]
    (thin,) = [trace for trace in data if trace.error_x.thickness == 1]
    assert (len(thin.x), thin.xaxis) == (2, "x2")  # both of otb, by efficiency
    thick = [trace for trace in data if trace.error_x.thickness == 4]
    assert all(len(trace.x) == len(trace.error_x.array) == 4 for trace in thick) and len(thick) == 3
    assert [trace.name for trace in data if trace.showlegend] == ["one look", "all 2 together"]


def test_a_ratio_that_noise_hides_has_no_panel_and_the_words_say_why():
    noise = np.random.default_rng(1).normal(size=(2, 24, 30))
    noise[1] = noise[0] + 0.05 * noise[1]
    noise -= noise.mean(axis=1, keepdims=True)  # so that no gradient is left
    two = (RLOO, ("sequence_optimal_loo", "proxy"))
    info = comparison_info([Gram(np.einsum("mpd,nqd->mnpq", noise, noise), two, 96)])
    (title,) = plot_comparison(info).layout.annotations
    assert title.text.startswith("Batch variance") and info.shown == [2]
    assert "Not shown: variance at equal progress and efficiency" in forest_words(info)


def test_a_hover_has_the_usual_words(grams):
    hovers = [
        trace.text for trace in plot_comparison(comparison_info(list(grams.values()))).data if trace.hovertemplate
    ]
    said = " ".join(text for texts in hovers for text in texts)
    assert "Variance at equal progress ÷ rloo" in said and "Efficiency ÷ rloo" in said and "sf ratio" not in said


def test_comparison_shows_the_chosen_estimators_and_the_one_they_are_compared_with(grams):
    info = comparison_info(list(grams.values()), estimators=["otb"])
    assert {row.label for row in info.rows} == {"rloo", "otb · exact", "otb · proxy"}


def test_the_four_measures_of_four_prompts_are_hand_worked():
    # Gradients of prompts (2, 0), (0, 0), (2, 0), (0, 0): their mean is (1, 0), their squared distances from it sum to
    # 4, so the batch variance is 4/(4·3). Of the 12 pairs of different prompts 2 have the product 4: ‖∇J‖² = 2/3.
    # rloo is unbiased, so c = 1 and SF = variance; efficiency = (2/3)/(2/3 + 1/3). Half as long: c = ½, the rest alike.
    rloo = np.array([[2.0, 0], [0, 0], [2, 0], [0, 0]])
    both = np.stack([rloo, rloo / 2])
    gram = Gram(np.einsum("mpd,nqd->mnpq", both, both), (RLOO, ("group_mean", "none")), 32)
    one, half = pooled_statistics([gram])
    assert [getattr(one, m.column) for m in MEASURES] == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1])
    assert [getattr(half, m.column) for m in MEASURES] == pytest.approx([2 / 3, 1 / 3, 1 / 12, 1 / 2])


def test_below_sixteen_prompts_there_are_points_and_no_intervals(grams):
    few = Gram(grams[0].inner[:, :, :15, :15], grams[0].labels, 120)
    assert "without intervals" in forest_words(comparison_info([few]))
    of_few = over_training({0: few}, RLOO, [("otb", "exact")], NOTHING)
    assert all(np.isnan(curve.low).all() and curve.value.size for curves in of_few.curves for curve in curves)


def test_over_training_the_ratios_are_the_planted_ones_at_every_block(grams):
    # Half the noise is a quarter of the variance; with the proxy 0.6 of the noise, so 0.36; group_mean (7/8)².
    chosen = [("otb", "exact"), ("otb", "proxy"), ("group_mean", "none")]
    info = over_training(grams, RLOO, chosen, NOTHING)
    assert [quantity.column for quantity in info.quantities] == ["sf", "efficiency", "variance"]
    assert info.quantities[2].line.startswith("÷ rloo: ")
    variance = {curve.run: curve for curve in info.curves[2]}
    assert {name: curve.value.tolist() for name, curve in variance.items()} == {
        "otb · exact": pytest.approx([0.25] * 3), "otb · proxy": pytest.approx([0.36] * 3),
        "group_mean": pytest.approx([49 / 64] * 3),
    }  # fmt: skip
    otb = variance["otb · exact"]
    assert otb.step.tolist() == [0, 10, 20] and (otb.low <= otb.value).all() and (otb.value <= otb.high).all()


def test_over_training_has_a_rule_at_one_in_view_of_every_panel(grams):
    figure = plot_learning(over_training(grams, RLOO, [("otb", "exact")], NOTHING))
    assert [shape.y0 for shape in figure.layout.shapes] == [1] * 3
    assert all(axis.type == "log" and axis.range[0] < 0 < axis.range[1] for axis in figure.select_yaxes())


def test_over_training_what_no_block_tells_from_noise_has_no_panel(grams):
    # Opposite gradients: every pair of different prompts has a negative inner product on average.
    inner = np.einsum("pq,mn->mnpq", np.where(np.eye(4, dtype=bool), 1.0, -0.5), np.ones((4, 4)))
    lost = Gram(inner, grams[0].labels, 32)
    assert "efficiency" not in [
        q.column for q in over_training({0: lost}, RLOO, [("otb", "exact")], NOTHING).quantities
    ]
    assert [row.ratios[1].estimate for row in comparison_info([lost]).rows] == [1.0] * 4  # four times the same update
