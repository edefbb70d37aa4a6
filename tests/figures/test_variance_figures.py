import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import InputError
from otb_analysis.figures.comparison import comparison_info, comparison_table, display_table, plot_comparison
from otb_analysis.figures.variance import (
    MEASURES,
    default_window,
    evenly,
    labels,
    plot_variance,
    statistics_table,
    variance_info,
)
from otb_analysis.statistics import NOTHING, gradient_noise_scale, pooled_statistics
from otb_analysis.types import Gram, Proved

RLOO = ("rloo", "none")


def test_variance_never_stands_alone(grams):
    figure = plot_variance(variance_info(statistics_table(grams)))
    titles = [note.text.split("<br>")[0] for note in figure.layout.annotations[:4]]
    assert titles == [m.title for m in MEASURES]
    assert {m.column for m in MEASURES} == {"efficiency", "sf", "variance", "projection"}


def test_the_four_measures_of_four_prompts_are_hand_worked():
    # Gradients of prompts (2, 0), (0, 0), (2, 0), (0, 0): their mean is (1, 0), their squared distances from it sum to
    # 4, so the batch variance is 4/(4·3). Of the 12 pairs of different prompts 2 have the product 4: ‖∇J‖² = 2/3.
    # rloo is unbiased, so c = 1 and SF = variance; efficiency = (2/3)/(2/3 + 1/3). Half as long: c = ½, the rest alike.
    rloo = np.array([[2.0, 0], [0, 0], [2, 0], [0, 0]])
    both = np.stack([rloo, rloo / 2])
    gram = Gram(np.einsum("mpd,nqd->mnpq", both, both), (("rloo", "none"), ("group_mean", "none")), 32)
    info = variance_info(statistics_table({5: gram}))
    found = {m.column: [float(t.value[0]) for t in of] for m, of in zip(MEASURES, info.traces, strict=True)}
    assert found["variance"] == pytest.approx([1 / 3, 1 / 12]) and found["projection"] == pytest.approx([1, 1 / 2])
    assert found["sf"] == pytest.approx([1 / 3, 1 / 3]) and found["efficiency"] == pytest.approx([2 / 3, 2 / 3])
    assert info.n_prompts == (4, 4) and [t.step.tolist() for t in info.traces[0]] == [[5], [5]]


def test_points_and_intervals_are_those_of_the_statistics(grams):
    info = variance_info(statistics_table(grams))
    expected = next(s for s in pooled_statistics([grams[10]]) if s.estimator == "group_mean")
    index = [m.column for m in MEASURES].index("variance")
    trace = next(t for t in info.traces[index] if t.label == "group_mean")
    assert trace.value[1] == pytest.approx(expected.variance, rel=1e-6)
    assert trace.low[1] == pytest.approx(expected.variance_low, rel=1e-6)
    assert trace.step.tolist() == [0, 10, 20]


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


def test_below_sixteen_prompts_there_are_points_and_no_intervals(vectors, grams):
    inner = grams[0].inner[:, :, :15, :15]
    few = {0: Gram(inner, grams[0].labels, 120)}
    info = variance_info(statistics_table(few))
    assert not info.has_intervals
    assert info.n_prompts == (15, 15)
    assert "without intervals" in comparison_info(list(few.values())).words


def test_pooling_steps_gives_intervals_where_single_steps_have_none(grams):
    few = {s: Gram(g.inner[:, :, :8, :8], g.labels, 64) for s, g in grams.items()}
    assert not variance_info(statistics_table(few)).has_intervals
    pooled = statistics_table(few, window=2)
    assert pooled.loc[pooled["step"] == 0, "variance_low"].isna().all()
    assert pooled.loc[pooled["step"] == 20, "variance_low"].notna().all()


def test_gradients_table_without_grams_gives_points():
    table = pd.DataFrame({"step": [0, 10], "estimator": "otb", "energy_source": "exact", "n_prompts": 4})
    table = table.assign(n_rollouts=32, variance=[1.0, 2.0], sf=[-1.0, 2.0], projection=0.5, efficiency=0.4)
    info = variance_info(table)
    assert not info.has_intervals
    assert info.hidden == 1  # SF −1 has no place on a logarithmic axis


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
    assert (info.n_prompts, info.looked_at, info.together) == (48, 2, "all 2 together")
    for row in info.rows[2:]:
        ratio = row.ratios[0 if row.decides == "sf" else 1]
        assert row.together.low < ratio.low < ratio.high < row.together.high


def test_nothing_is_ranked_where_nothing_is_told_apart(vectors):
    # Noises of one size, independent of each other.
    random = np.random.default_rng(0)
    g = np.eye(12)[0] + 0.3 * random.normal(size=(4, 32, 12))
    labels = (RLOO, ("a", "none"), ("b", "none"), ("c", "none"))
    info = comparison_info([Gram(np.einsum("mpd,nqd->mnpq", g, g), labels, 256)])
    assert [row.key for row in info.rows] == list(labels) and "order says nothing" in info.words
    assert "all 3 together" in display_table(info)


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
    thin = [trace for trace in data if trace.error_x.thickness == 1]
    assert len(points) == 3 * 4 and len(thin) == 2  # both of otb, by efficiency
    assert {trace.xaxis for trace in thin} == {"x2"}
    assert [trace.name for trace in data if trace.showlegend] == ["one look", "all 2 together"]


def test_estimators_are_set_apart_but_hover_says_the_true_step(grams):
    figure = plot_variance(variance_info(statistics_table(grams)))
    first = figure.data[0]
    assert first.x[1] != 10
    assert first.text[1].startswith("step 10:")
    assert np.abs(first.x[1] - 10) < 10 / 3


def test_measures_are_undefined_and_said_to_be_where_the_gradient_is_lost_in_the_noise(grams):
    gram = grams[0]
    # Opposite gradients: every pair of different prompts has a negative inner product on average.
    inner = np.einsum("pq,mn->mnpq", np.where(np.eye(4, dtype=bool), 1.0, -0.5), np.ones((4, 4)))
    info = variance_info(statistics_table({0: Gram(inner, gram.labels, 32)}))
    assert info.undefined == info.n_points == 4
    notes = [note.text for note in plot_variance(info).layout.annotations]
    assert sum("too few prompts" in note for note in notes) == 3
    compared = comparison_info([Gram(inner, gram.labels, 32)])
    assert [row.ratios[1].estimate for row in compared.rows] == [1.0] * 4  # four times the same update


def test_comparison_shows_the_chosen_estimators_and_the_one_they_are_compared_with(grams):
    info = comparison_info(list(grams.values()), estimators=["otb"])
    assert {row.label for row in info.rows} == {"rloo", "otb · exact", "otb · proxy"}


def test_of_many_measured_steps_evenly_spread_ones_are_compared():
    assert evenly(list(range(0, 90, 10))) == list(range(0, 90, 10)) and evenly([]) == []
    assert evenly(list(range(9)), 3) == [0, 4, 8]


def test_table_of_some_estimators_is_their_rows_of_the_whole_one(grams):
    whole, some = statistics_table(grams, 2), statistics_table(grams, 2, only={("otb", "exact"), ("rloo", "none")})
    kept = whole[whole["energy_source"].eq("none") & whole["estimator"].eq("rloo") | whole["energy_source"].eq("exact")]
    pd.testing.assert_frame_equal(some, kept.reset_index(drop=True), check_dtype=False)
    assert 0 < len(some) < len(whole)


def test_the_default_window_is_one_where_no_window_shows_an_efficiency(grams):
    # Without inner products between prompts that are positive there is no gradient to be efficient about.
    assert default_window(grams, NOTHING) < 10
    orthogonal = np.zeros((1, 1, 4, 4))
    orthogonal[0, 0] = 4 * np.eye(4) - 1
    dull = {step: Gram(orthogonal, (RLOO,), 32) for step in range(12)}
    assert statistics_table(dull, 10)["efficiency"].isna().all()
    assert default_window(dull, NOTHING) == 1
