import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers.prompt import described, prompt_head
from otb_analysis.answers.token_formula import token_details
from otb_analysis.errors import InputError
from otb_analysis.figures.token_columns import (
    ADVANTAGES,
    COLOURS,
    DIVERGING,
    DIVERGING_DARK,
    LEVELS,
    RATIO,
    SAMPLER,
    SEQUENTIAL,
    ColorScale,
    color_levels,
    color_scale,
    measured,
    palette,
    with_differences,
)
from otb_analysis.figures.tokens import (
    column_values,
    grid_info,
    plot_tokens,
    scale_of,
    tokens_info,
)

ROLLOUTS = pd.DataFrame(
    {
        "rollout": [0, 1, 2], "reward": [1.0, 0.0, 1.0], "reward_correct": [1.0, 0.0, 0.5],
        "reward_form": [0.0, 0.0, 0.5], "finish_reason": ["stop", None, "length"], "prompt": ["1+2="] * 3,
        "answer": ["3"] * 3, "completion": ["it is 3", "4", "4"],
    }
)  # fmt: skip


def test_token_that_was_not_measured_has_no_colour(tokens):
    info = tokens_info(tokens, ROLLOUTS, "grad_norm_sq")
    unmeasured = info.rollouts[2].tokens
    assert (unmeasured["levels"][0], unmeasured["kinds"][0]) == (-1, "special")
    assert info.n_missing == 1
    assert np.isnan(info.values[2, 0])
    assert grid_info(info).unknown[2].tolist()[0] == 1 and np.isnan(grid_info(info).unknown[2, 1])


def test_tool_token_has_no_colour_even_where_the_column_has_a_value(tokens):
    tokens.loc[tokens["token"] == "tool", "energy_proxy"] = 1.0
    tool = tokens_info(tokens, ROLLOUTS, "energy_proxy").rollouts[1].tokens
    assert (tool["kinds"][1], tool["levels"][1]) == ("tool", -1)


def test_signed_column_gets_a_scale_symmetric_around_zero(tokens):
    info = tokens_info(tokens, ROLLOUTS, "advantage")
    assert info.scale.low == -info.scale.high
    assert info.scale.colors == DIVERGING


def test_unsigned_column_gets_a_sequential_scale(tokens):
    assert tokens_info(tokens, ROLLOUTS, "energy_proxy").scale.colors == SEQUENTIAL


def test_on_a_linear_scale_one_outlier_does_not_take_the_colours_from_the_rest():
    assert color_scale(np.append(np.linspace(0, 1, 1000), 1e6), "linear").high < 1.1


def test_where_clipping_would_hide_the_tail_the_scale_is_logarithmic():
    heavy = color_scale(np.append(np.linspace(0, 0.1, 1000), 2.0))
    assert heavy.log
    assert (heavy.low, heavy.high) == (pytest.approx(2e-4), 2.0)
    assert not color_scale(np.linspace(0, 1, 1000)).log


def test_position_on_a_logarithmic_scale_is_hand_worked():
    scale = ColorScale(0.01, 100.0, log=True)
    np.testing.assert_allclose(scale.position(np.array([0.0, 0.01, 1.0, 100.0, 1e9])), [0, 0, 0.5, 1, 1])
    assert scale.values(np.array([0.0, 0.5, 1.0])) == pytest.approx([0.01, 1.0, 100.0])


def test_scale_ends_at_its_two_colours():
    scale = ColorScale(0.0, 1.0)
    levels = color_levels(np.array([0.0, 1.0, 99.0, np.nan]), scale)
    assert levels.tolist() == [0, LEVELS - 1, LEVELS - 1, -1]
    colors = palette(scale)
    assert (colors[0][0], colors[-1][0]) == (SEQUENTIAL[0], SEQUENTIAL[-1])
    assert (colors[0][1], colors[-1][1]) == ("#000000", "#FFFFFF")  # ink that can be read on it


def test_on_a_dark_page_the_middle_is_dark_and_the_ends_are_light():
    scale = scale_of(np.array([-1.0, 1.0]), "advantage", dark=True)
    assert scale.colors == DIVERGING_DARK
    inks = [ink for _, ink in palette(scale)]
    assert (inks[LEVELS // 2], inks[0], inks[-1]) == ("#FFFFFF", "#000000", "#000000")


def test_constant_column_has_a_scale():
    assert color_scale(np.full(3, 2.0)) == ColorScale(1.5, 2.5)
    assert color_scale(np.zeros(3), "log") == ColorScale(-0.5, 0.5)


def test_unknown_scale_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'linear'"):
        color_scale(np.zeros(3), "liner")


@pytest.mark.parametrize(("order", "rollouts"), [("rollout", [0, 1, 2]), ("reward", [0, 2, 1]), ("length", [0, 1, 2])])
def test_rollouts_come_in_the_order_asked_for(tokens, order, rollouts):
    assert [r.rollout for r in tokens_info(tokens, ROLLOUTS, "energy_proxy", order).rollouts] == rollouts


def test_length_counts_policy_tokens(tokens):
    assert [r.length for r in tokens_info(tokens, ROLLOUTS, "energy_proxy").rollouts] == [2, 2, 1]


def test_unknown_column_names_the_nearest(tokens):
    with pytest.raises(InputError, match="did you mean 'energy_proxy'"):
        tokens_info(tokens, ROLLOUTS, "energy_prox")


def test_text_cannot_colour(tokens):
    with pytest.raises(InputError, match="cannot colour"):
        tokens_info(tokens, ROLLOUTS, "token")


def test_the_grid_has_a_point_to_click_for_every_token_and_draws_unmeasured_ones_grey(tokens):
    info = tokens_info(tokens, ROLLOUTS, "grad_norm_sq")
    grid = grid_info(info)
    assert grid.width == 1
    np.testing.assert_array_equal(grid.values[0], [2, 6, np.nan])
    assert grid.unknown[2].tolist()[0] == 1 and np.isnan(grid.unknown[2, 1])
    unmeasured, values, points = plot_tokens(info).data
    assert values.z.dtype == np.float32 and unmeasured.z[2, 0] == 1
    assert list(map(tuple, points.customdata)) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert points.text[1] == "6.00"
    marked = plot_tokens(info, chosen=(1, 2)).data[3]
    assert (list(marked.x), list(marked.y)) == ([2], ["rollout 1"])


def test_cells_of_long_rollouts_show_and_open_the_token_that_stands_out():
    n, length = 8, 2000
    rows = pd.MultiIndex.from_product([range(n), range(length)], names=["rollout", "t"]).to_frame(index=False)
    table = rows.assign(entropy=0.1, advantage=0.1, mask=True, token=" a")
    table.loc[(table["rollout"] == 3) & (table["t"] == 1234), ["entropy", "advantage"]] = [5.0, -7.0]
    facts = pd.DataFrame({"rollout": range(n), "reward": 0.0})
    for name, value in (("entropy", 5), ("advantage", -7)):
        grid = grid_info(tokens_info(table, facts, name))
        assert grid.width == 5 and grid.values.shape == (8, 400)
        assert (grid.values[3, 1234 // 5], grid.token[3, 1234 // 5]) == (value, 1234)
        assert np.unique(grid.values).size == 2
    points = plot_tokens(tokens_info(table, facts, "entropy")).data[2]
    assert len(points.x) == 8 * 400 and (3, 1234) in list(map(tuple, points.customdata))


def test_of_the_contrast_the_low_values_stand_out():
    table = pd.MultiIndex.from_product([range(8), range(2000)], names=["rollout", "t"]).to_frame(index=False)
    table = table.assign(group=0, turn=0, token="x", mask=True, contrast=0.9)
    table.loc[3 * 2000 + 1234, "contrast"] = 0.1
    grid = grid_info(tokens_info(table, pd.DataFrame({"rollout": range(8), "reward": 0.0}), "contrast"))
    assert (grid.values[3, 1234 // 5], grid.token[3, 1234 // 5]) == (0.1, 1234)
    up, down = (scale_of(np.array([0.1, 0.9]), name).colors for name in ("entropy", "contrast"))
    assert down == up[::-1]


def test_details_write_out_return_baseline_and_advantage(tokens):
    formulas = dict(token_details(tokens, 0, 0, "otb").formulas)
    assert formulas["return"] == "G = Σ of rewards from here on = 1.00"
    assert formulas["advantage"] == "G − B = 1.00 − 0.250 = 0.750"
    assert formulas["baseline of otb"] == "B = 0.250"


def test_details_say_when_an_estimator_rescales(tokens):
    tokens.loc[0, "advantage"] = 1.5
    assert "rescaled by the estimator to A = 1.50" in dict(token_details(tokens, 0, 0, "grpo").formulas)["advantage"]


def test_details_of_energies_are_hand_worked(tokens):
    formulas = dict(token_details(tokens, 0, 1, "otb").formulas)
    # W = 2 + 6 = 8, the whole rollout
    assert formulas["realized energy"] == "W = Σ w over 2 tokens = 8.00, 100% of this rollout's 8.00"
    # π = e^-0.7 = 0.497, (1 − π)² = 0.253, proxy 0.5
    assert formulas["proxy energy"] == "(1 − π)² + Σ_v≠y π_v² = 0.253 + 0.247 = 0.500"


def test_details_of_a_soft_token_give_its_density_and_no_probability(tokens):
    soft = tokens.assign(token="~7", entropy=np.nan, energy_proxy=np.nan, logprob=120.0)
    formulas = dict(token_details(soft, 0, 0, "otb").formulas)
    assert formulas["log-density"] == "log q = 120"
    assert not {"probability", "proxy energy", "entropy"} & formulas.keys()


def test_details_of_a_tool_token_say_it_has_no_score(tokens):
    formulas = token_details(tokens, 1, 1, "otb").formulas
    assert [name for name, _ in formulas] == ["not the policy's"]


def test_details_of_a_token_that_is_not_there_are_none(tokens):
    assert token_details(tokens, 0, 99, "otb") is None


def test_scale_of_energies_starts_at_zero():
    assert color_scale(np.array([1e-9, 0.5, 1.0])).low == 0.0


def test_signed_columns_keep_zero_in_the_middle_whatever_the_signs():
    assert color_scale(np.array([1.0, 2.0]), signed=True).diverging
    scale = color_scale(np.array([0.0, 0.0]), signed=True)
    assert (scale.low, scale.high) == (-1, 1)
    assert not color_scale(np.array([1.0, 2.0])).diverging


def test_details_of_a_sketched_token_say_estimate_and_standard_error(tokens):
    table = tokens.assign(measured_by="sketch", grad_norm_sq_stderr=0.5)
    formulas = dict(token_details(table, 0, 1, "otb").formulas)
    assert formulas["energy by sketch"] == "w = ‖∇ log π‖² ≈ 6.00 ± 0.500 (standard error), sketch"
    assert formulas["realized energy"] == "W = Σ w over 2 tokens ≈ 8.00, 100% of this rollout's 8.00"
    assert "exact energy" not in formulas
    exact = dict(token_details(tokens.assign(measured_by="exact"), 0, 1, "otb").formulas)
    assert exact["exact energy"] == "w = ‖∇ log π‖² = 6.00, exact"


def test_details_split_a_share_into_signal_and_noise(tokens):
    # 0.5 − 0.2 = 0.3; by size 0.3 stands behind −0.4 among the two tokens that were attributed
    table = tokens.assign(
        attribution=[0.3, -0.4] + [None] * 4, signal=[0.5, None] + [None] * 4, noise=[-0.2] + [None] * 5
    )
    formulas = dict(token_details(table, 0, 0, "otb").formulas)
    assert formulas["its part of ‖ḡ‖²"] == "A/N · s·ḡ = 0.300: number 2 of 2 by size here"
    assert formulas["signal and noise"] == (
        "along other prompts' gradients 0.500 + along its own prompt's −0.200 = 0.300"
    )
    assert "signal and noise" not in dict(token_details(table, 0, 1, "otb").formulas)


def test_rollouts_say_what_was_paid_for_what_and_whether_the_answer_looks_wrong(tokens):
    first, second, third = tokens_info(tokens, ROLLOUTS, "logprob").rollouts
    assert first.parts == (("correct", 1.0), ("form", 0.0)) and first.warning == ""
    assert (first.finish, second.finish) == ("stop", "")
    assert second.warning == ""  # ends with 4, and was not paid
    assert third.warning == "rewarded, but ends with 4, not 3"
    without = ROLLOUTS.drop(columns=["reward_correct", "reward_form", "answer"])
    assert tokens_info(tokens, without, "logprob").rollouts[2].warning == ""
    one = ROLLOUTS.drop(columns="reward_form").assign(reward_correct=ROLLOUTS["reward"])
    assert tokens_info(tokens, one, "logprob").rollouts[0].parts == ()  # the only part is the reward


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<|im_end|>", "special"), ("</s>", "special"), ("<end_of_turn>", "special"), ("[PAD]", "special"),
        ("<tool_call>", "special"), ("</tool_response>", "special"), ("[/INST]", "special"),
        ("[TOOL_CALLS]", "special"), ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "special"), ("<toolbox>", ""),
        ("", "special"), ("<b>", ""), ("[a](b)", ""), (" the", ""), ("<|a|><|b|>", ""),
    ],
)  # fmt: skip
def test_special_tokens_are_told_apart(tokens, text, kind):
    table = tokens.assign(token=text)
    assert tokens_info(table, ROLLOUTS, "logprob").rollouts[0].tokens["kinds"][0] == kind


def test_differences_are_hand_worked(tokens):
    table = tokens.assign(behavior_logprob=tokens["logprob"] - 0.5)
    other = pd.Series([0.5, 1.0, -0.5, None, -0.5, 0.0])
    found = with_differences(table, other)
    np.testing.assert_allclose(found[SAMPLER], [0.5, 0.5, 0.5, np.nan, 0.5, 0.5])
    np.testing.assert_allclose(found[ADVANTAGES], [0.25, -0.25, 0, np.nan, 0, 1])
    scale = scale_of(column_values(found, ADVANTAGES), ADVANTAGES)
    assert scale.diverging and scale.low == -scale.high
    assert {SAMPLER, ADVANTAGES} <= set(measured(found)) and "token_id" not in measured(found)
    assert ADVANTAGES not in measured(with_differences(table)) and SAMPLER not in measured(with_differences(tokens))


def test_exact_over_the_calibrated_proxy_has_1_in_the_middle(tokens):
    stored = with_differences(tokens.assign(energy_calibrated=[1.0, 12.0, 10.0, None, 0.0, 3.0]))
    # 2/1, 6/12, 10/10; no ratio to 0, to a tool token, or without an exact norm
    np.testing.assert_allclose(stored[RATIO], [2, 0.5, 1, np.nan, np.nan, np.nan])
    scale = scale_of(column_values(stored, RATIO), RATIO)
    assert scale.diverging and scale.log and scale.low == pytest.approx(1 / scale.high)
    np.testing.assert_allclose(scale.position(np.array([scale.low, 1, scale.high])), [0, 0.5, 1], atol=1e-12)
    assert "as stored" in described(stored, RATIO).meaning


def test_without_a_calibrated_proxy_it_is_fitted_here(tokens):
    # exact = 100·proxy² on every token: the fit is exact, and so every ratio is 1
    table = tokens.assign(grad_norm_sq=100 * tokens["energy_proxy"] ** 2, measured_by="exact")
    found = with_differences(table)
    np.testing.assert_allclose(found[RATIO], [1, 1, 1, np.nan, 1, 1])
    assert "fitted to this prompt" in described(found, RATIO).meaning
    sketched = with_differences(table.assign(measured_by="sketch"))
    assert sketched[RATIO].isna().all()  # an estimate is no exact norm


def test_prompt_says_its_answer_its_rewards_and_their_parts(tokens):
    head = prompt_head(ROLLOUTS, tokens)
    assert (head.text, head.answer, head.equal) == ("1+2=", "3", "")
    assert head.rewards == "2 × 1.00, 0 (means of parts: correct 0.500, form 0.167)"
    many = pd.DataFrame({"reward": np.arange(6.0)})
    assert prompt_head(many, tokens).rewards == "6 rewards from 0 to 5.00, mean 2.50"


def test_equal_rewards_say_no_gradient_where_there_is_none(tokens):
    equal = ROLLOUTS.assign(reward=0.0)
    assert prompt_head(equal, tokens.assign(advantage=0.0)).equal == "All 3 rewards are 0: no gradient here."
    assert prompt_head(equal, tokens.assign(advantage=1e-9), "otb").equal.endswith("no gradient here.")
    moved = prompt_head(equal, tokens.assign(advantage=[0, 0.5, 0, None, 0, -2.0]), "value").equal
    assert moved == "All 3 rewards are 0, yet 2 of 5 tokens have an advantage under value, up to 2.00."
    unknown = prompt_head(equal, tokens.drop(columns="advantage")).equal
    assert unknown == "All 3 rewards are 0: no gradient here with a baseline from this group."
    assert prompt_head(equal[:1], tokens).equal == ""


def test_details_leave_out_what_was_stored_where_nobody_asks(tokens):
    names = [name for name, _ in token_details(tokens, 0, 0, None).formulas]
    assert "return" in names and not {"advantage", "baseline of otb"} & set(names)


def test_hovers_and_legends_have_words_and_no_names_of_columns(tokens):
    titles = [described(tokens, name).title for name in COLOURS]
    assert not [title for title in titles if "_" in title] and len(set(titles)) == len(COLOURS)
    figure = plot_tokens(tokens_info(tokens, ROLLOUTS, "energy_proxy"))
    assert "proxy energy" in figure.data[2].hovertemplate and figure.data[1].colorbar.title.text == "proxy energy"


def test_columns_that_somebody_else_recorded_colour_too(tokens):
    table = tokens.assign(recorded_logprob=tokens["logprob"], note="x")
    assert measured(table)[-1] == "recorded_logprob" and "note" not in measured(table)
    assert described(table, "recorded_logprob").title == "recorded_logprob"
