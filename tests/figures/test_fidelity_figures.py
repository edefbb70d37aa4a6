import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers.proxy import gain_lost_words
from otb_analysis.errors import InputError
from otb_analysis.figures.fidelity import (
    energies,
    fidelity_info,
    fidelity_table,
    plot_fidelity,
    plot_fidelity_steps,
)
from otb_analysis.statistics import Interval


def many(scale_of_position, steps=(0, 10)) -> pd.DataFrame:
    """Two prompts of eight rollouts of six tokens at each step; exact = proxy · scale(position)."""
    random = np.random.default_rng(0)
    index = pd.MultiIndex.from_product([steps, range(16), range(6)], names=["step", "rollout", "t"])
    table = index.to_frame(index=False).assign(mask=True, energy_proxy=random.uniform(0.1, 1, len(index)))
    return table.assign(group=table["rollout"] // 8, grad_norm_sq=table["energy_proxy"] * scale_of_position(table["t"]))


def test_scale_that_depends_on_position_spoils_the_pooled_figure_and_not_the_one_within():
    info = fidelity_info(many(lambda t: 10.0**t))
    assert info.overall.within.log_pearson == pytest.approx(1)
    assert info.overall.within.spearman == pytest.approx(1)
    assert info.overall.pooled.pearson < 0.6


def test_correlations_line_and_distances_of_six_tokens_are_hand_worked():
    # One prompt, three rollouts of two tokens; log₁₀ proxy 0, 1, 2 at each position.
    table = pd.DataFrame({"rollout": [0, 1, 2] * 2, "t": [0] * 3 + [1] * 3, "step": 4, "group": 7, "mask": True})
    table = table.assign(energy_proxy=[1.0, 10, 100] * 2, grad_norm_sq=[1.0, 10, 1000, 10, 1, 100])
    info = fidelity_info(table)
    # log₁₀ exact: 0, 1, 3 and 1, 0, 2. Σ(x − 1)² = 4, Σ(x − 1)·y = 3 + 1 = 4: slope 1; means 7/6 and 1: level 1/6.
    assert info.line == (pytest.approx(1 / 6), pytest.approx(1))
    # Away from the line: −1/6, −1/6, 5/6 and 5/6, −7/6, −1/6.
    assert info.far["rollout"].tolist()[:1] == [1] and info.far["t"].tolist()[0] == 1
    assert set(map(tuple, info.far[["rollout", "t"]].iloc[1:3].to_numpy())) == {(2, 0), (0, 1)}
    assert info.far[["step", "group", "proxy", "exact"]].iloc[0].tolist() == [4, 7, 10, 1]
    # Pooled: Σ(y − 7/6)² = 15 − 6·49/36 = 41/6, so r = 4/√(4·41/6).
    assert info.overall.pooled.log_pearson == pytest.approx(4 / np.sqrt(4 * 41 / 6))
    # Within positions means are 4/3 and 1: Σ = 14/3 + 2 = 20/3.
    assert info.overall.within.log_pearson == pytest.approx(4 / np.sqrt(4 * 20 / 3))
    assert (info.n_tokens, info.overall.n_cells, info.n_zero) == (6, 2, 0)


def test_every_measured_step_has_its_own_agreement():
    info = fidelity_info(many(lambda t: 2.0))
    assert list(info.steps) == [0, 10]
    assert fidelity_table(info)["step"].tolist() == ["all", "0", "10"]


def test_density_counts_every_token_once():
    info = fidelity_info(many(lambda t: 2.0))
    assert np.nansum(info.count) == info.n_tokens == 192


def test_zero_energy_is_counted_not_drawn():
    table = many(lambda t: 2.0)
    table.loc[0, "energy_proxy"] = 0.0
    info = fidelity_info(table)
    assert (info.n_zero, np.nansum(info.count)) == (1, 191)


def test_tool_tokens_take_no_position_and_no_part(tokens):
    found = energies(tokens, "token")
    assert len(found) == 4
    assert found["exact"].tolist() == [2, 6, 10, 4]


def test_realized_energy_is_the_running_sum_up_to_the_first_unmeasured_token(tokens):
    found = energies(tokens, "realized")
    # rollout 0: 2, 2+6; rollout 1: 10, 10+4 (the tool token adds nothing); rollout 2 was not measured
    assert found["exact"].tolist() == [2, 8, 10, 14]
    np.testing.assert_allclose(found["proxy"], [0.02, 0.52, 0.9, 1.0])


def test_value_in_padding_or_tool_tokens_changes_nothing(tokens):
    tokens.loc[tokens["token"] == "tool", ["energy_proxy", "grad_norm_sq"]] = 1e9
    assert energies(tokens, "realized")["exact"].tolist() == [2, 8, 10, 14]


def test_nothing_measured_is_a_sentence_with_a_remedy(tokens):
    with pytest.raises(InputError, match="schedule exact measurements"):
        fidelity_info(tokens.assign(grad_norm_sq=np.nan))


def test_unknown_kind_names_the_nearest(tokens):
    with pytest.raises(InputError, match="did you mean 'realized'"):
        fidelity_info(tokens, "realised")


def test_both_axes_are_logarithmic_and_carry_their_unit():
    figure = plot_fidelity(fidelity_info(many(lambda t: 2.0)))
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert "norm²" in figure.layout.xaxis.title.text


def test_correlations_within_stand_above_the_pooled_ones():
    figure = plot_fidelity_steps(fidelity_info(many(lambda t: 2.0)))
    assert figure.layout.annotations[0].text.startswith("Within (prompt, t)")
    assert len(figure.data) == 6


def drawn(table):
    """The same tokens, of which every third was drawn in the second prompt, with unequal chances."""
    by_chance = table["group"] == 1
    table = table.assign(inclusion_prob=np.where(by_chance, 0.1 + table["t"] / 10, 1.0))
    return table.assign(grad_norm_sq=table["grad_norm_sq"].mask(by_chance & (table["t"] % 3 > 0)))


def test_groups_drawn_with_unequal_chances_are_left_out_where_whole_ones_were_measured():
    table = many(lambda t: 2.0)
    info = fidelity_info(drawn(table))
    assert (info.n_tokens, info.drawn) == (96, False)
    whole = fidelity_info(table[table["group"] == 0])
    assert info.overall == whole.overall


def test_groups_drawn_with_unequal_chances_are_compared_and_named_where_there_are_no_others():
    table = drawn(many(lambda t: 2.0))
    info = fidelity_info(table[table["group"] == 1])
    # Positions 0 and 3 of eight rollouts at two steps.
    assert (info.n_tokens, info.drawn) == (32, True)


def test_groups_drawn_with_equal_chances_are_a_fair_sample():
    table = drawn(many(lambda t: 2.0)).assign(inclusion_prob=0.5)
    info = fidelity_info(table)
    assert (info.n_tokens, info.drawn) == (96 + 32, False)


def test_calibrated_energies_take_the_place_of_the_proxy():
    table = many(lambda t: 2.0)
    table = table.assign(energy_calibrated=table["grad_norm_sq"], energy_proxy=1.0)
    info = fidelity_info(table, source="calibrated")
    assert (info.source, info.overall.pooled.pearson) == ("calibrated", pytest.approx(1))
    assert "calibrated proxy" in plot_fidelity(info).layout.xaxis.title.text
    with pytest.raises(InputError, match="source is 'calib'"):
        fidelity_info(table, source="calib")


def test_sketched_norms_are_no_standard_to_compare_with():
    table = many(lambda t: 2.0)
    by = np.where(table["group"] == 1, "sketch", "exact")
    wild = table["grad_norm_sq"].where(table["group"] == 0, -100.0)
    for kind in ("token", "realized"):
        info = fidelity_info(table.assign(grad_norm_sq=wild, measured_by=by), kind)
        assert info.overall == fidelity_info(table[table["group"] == 0], kind).overall
    # Sketched groups, all tokens alike, do not push aside groups of which tokens were drawn.
    prob = np.where(by == "sketch", 0.5, 0.1 + table["t"] / 10)
    assert fidelity_info(table.assign(measured_by=by, inclusion_prob=prob)).drawn
    with pytest.raises(InputError, match="No token has both"):
        fidelity_info(table.assign(measured_by="sketch"))


def test_share_of_the_gain_that_a_proxy_loses_is_shown_only_with_an_interval():
    # A ratio of two differences within noise was −0.506 on 10 prompts of a run: alone, it is no finding.
    assert gain_lost_words(None) == ("–", "no gain shown")
    assert gain_lost_words(Interval(-0.506, None, None, 10, "")) == ("–", "needs 16 prompts, has 10")
    assert gain_lost_words(Interval(-0.506, None, None, 40, "")) == ("–", "no interval on these 40 prompts")
    shown = gain_lost_words(Interval(0.125, -0.25, 0.5, 40, ""))
    assert shown == ("0.125", "95 %: −0.250 to 0.500, 40 prompts")
