import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import InputError
from otb_analysis.figures.token_colors import DIVERGING, SEQUENTIAL, ColorScale, color_scale, token_colors
from otb_analysis.figures.token_details import token_details
from otb_analysis.figures.tokens import plot_tokens, tokens_info, visible

REWARDS = pd.Series({0: 1.0, 1: 0.0, 2: 1.0})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"), ("a\n", "a↵"), ("\t", "⇥"), ("", "∅"), ("\u202eabc", "⟨202E⟩abc"), ("\x00", "⟨0000⟩"),
        ("<script>", "<script>"), ("🙂", "🙂"), ("👩‍👩‍👧", "👩‍👩‍👧"), ("אב", "אב"), ("\u200b", "⟨200B⟩"),
    ],
)  # fmt: skip
def test_invisible_characters_get_a_sign_and_the_rest_stays_text(text, shown):
    assert visible(text) == shown


def test_token_that_was_not_measured_has_no_colour(tokens):
    info = tokens_info(tokens, REWARDS, "grad_norm_sq")
    unmeasured = info.rollouts[2].tokens[0]
    assert (unmeasured.color, unmeasured.ink, unmeasured.tool) == (None, None, False)
    assert info.n_missing == 1
    assert np.isnan(info.values[2, 0])
    assert info.unknown[2, 0] == 1


def test_tool_token_has_no_colour_even_where_the_column_has_a_value(tokens):
    tokens.loc[tokens["token"] == "tool", "energy_proxy"] = 1.0
    tool = tokens_info(tokens, REWARDS, "energy_proxy").rollouts[1].tokens[1]
    assert tool.tool
    assert tool.color is None


def test_signed_column_gets_a_scale_symmetric_around_zero(tokens):
    info = tokens_info(tokens, REWARDS, "advantage")
    assert info.scale.low == -info.scale.high
    assert info.scale.colors == DIVERGING


def test_unsigned_column_gets_a_sequential_scale(tokens):
    assert tokens_info(tokens, REWARDS, "energy_proxy").scale.colors == SEQUENTIAL


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
    colors = [c for c, _ in token_colors(np.array([0.0, 1.0, 99.0, np.nan]), ColorScale(0.0, 1.0))]
    assert colors == [SEQUENTIAL[0], SEQUENTIAL[-1], SEQUENTIAL[-1], None]


def test_constant_column_has_a_scale():
    assert color_scale(np.full(3, 2.0)) == ColorScale(1.5, 2.5)
    assert color_scale(np.zeros(3), "log") == ColorScale(-0.5, 0.5)


def test_unknown_scale_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'linear'"):
        color_scale(np.zeros(3), "liner")


@pytest.mark.parametrize(("order", "rollouts"), [("rollout", [0, 1, 2]), ("reward", [0, 2, 1]), ("length", [0, 1, 2])])
def test_rollouts_come_in_the_order_asked_for(tokens, order, rollouts):
    assert [r.rollout for r in tokens_info(tokens, REWARDS, "energy_proxy", order).rollouts] == rollouts


def test_length_counts_policy_tokens(tokens):
    assert [r.length for r in tokens_info(tokens, REWARDS, "energy_proxy").rollouts] == [2, 2, 1]


def test_unknown_column_names_the_nearest(tokens):
    with pytest.raises(InputError, match="did you mean 'energy_proxy'"):
        tokens_info(tokens, REWARDS, "energy_prox")


def test_text_cannot_colour(tokens):
    with pytest.raises(InputError, match="cannot colour"):
        tokens_info(tokens, REWARDS, "token")


def test_heatmap_draws_unmeasured_tokens_grey_under_the_values(tokens):
    figure = plot_tokens(tokens_info(tokens, REWARDS, "grad_norm_sq"))
    assert len(figure.data) == 2
    assert figure.data[1].z.dtype == np.float32


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


def test_details_of_a_tool_token_say_it_has_no_score(tokens):
    formulas = token_details(tokens, 1, 1, "otb").formulas
    assert [name for name, _ in formulas] == ["tool output"]


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
    assert formulas["share of ‖ḡ‖²"] == "A/N · s·ḡ = 0.300: number 2 of 2 by size here"
    assert formulas["signal and noise"] == (
        "along other prompts' gradients 0.500 + along its own prompt's −0.200 = 0.300"
    )
    assert "signal and noise" not in dict(token_details(table, 0, 1, "otb").formulas)
