import numpy as np
import pandas as pd
import pytest

from otb_analysis.diagnostics import AttributedTokens, attribute_step
from otb_analysis.figures.attribution import (
    MOST_POINTS,
    MOST_PROMPTS,
    attribution_info,
    attribution_table,
    plot_attribution,
)

SIGNAL, NOISE = np.array([1.0, -2.0, 0.5, 0.0, 1.0]), np.array([3.0, 1.0, 0.5, -1.5, 0.5])
KEYS = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 2, 2]), np.array([0, 1, 0, 0, 1])
FOUND = attribute_step(7, AttributedTokens(*KEYS, SIGNAL + NOISE, SIGNAL, NOISE))
TOKENS = pd.DataFrame({"rollout": KEYS[1], "t": KEYS[2], "token": ["<b>", " x", "\n", "%{y}", ""]})
PROMPTS = ["1 +\n2", "1 +\n2", None]
ROLLOUTS = pd.DataFrame({"group": [0, 0, 1], "rollout": [0, 1, 2], "prompt": PROMPTS, "reward": [1.0, 0.0, 0.5]})


def test_bars_and_curve_are_shares_of_the_norm():
    info = attribution_info(FOUND)  # ‖ḡ‖² = 4; prompt 0: signal −.5, noise 4.5; prompt 1: signal 1, noise −1
    assert info.prompt == ("0", "1")
    assert info.signal.tolist() == [-0.125, 0.25] and info.noise.tolist() == [1.125, -0.25]
    # Shares 4, 1.5, 1, −1, −1.5 from the largest down.
    assert info.held.tolist() == [1.0, 1.375, 1.625, 1.375, 1.0]


def test_many_prompts_end_in_one_bar_that_keeps_the_sum():
    n = MOST_PROMPTS + 6
    one = attribute_step(0, AttributedTokens(np.arange(n), np.arange(n), np.zeros(n, int), np.arange(1.0, n + 1)))
    info = attribution_info(one)
    assert len(info.prompt) == MOST_PROMPTS + 1 and info.prompt[-1] == "6 others"
    assert info.signal.sum() == pytest.approx(1) and info.noise is None


def test_the_curve_of_many_tokens_has_as_many_points_as_can_be_seen():
    share = np.arange(50_000, 0, -1.0)
    key, t = np.zeros(len(share), int), np.arange(len(share))
    info = attribution_info(attribute_step(0, AttributedTokens(key, key, t, share)))
    assert len(info.count) == len(info.held) == MOST_POINTS
    assert (info.count[0], info.count[-1], info.held[-1]) == (1, len(share), pytest.approx(1))
    half = info.count.searchsorted(25_000)
    assert info.held[half] == pytest.approx(share[: int(info.count[half])].sum() / share.sum())


def test_the_plot_has_two_bars_and_a_curve_and_names_the_whole():
    figure = plot_attribution(attribution_info(FOUND))
    assert [trace.type for trace in figure.data] == ["bar", "bar", "scatter"]
    assert figure.layout.barmode == "relative"
    assert len(figure.layout.shapes) == 1


def test_tables_name_what_holds_the_gradient_with_its_text():
    prompts = attribution_table(FOUND, FOUND.prompts, TOKENS, ROLLOUTS)
    assert prompts.columns.tolist() == ["prompt", "share", "signal", "noise", "tokens", "reward", "text"]
    assert prompts["share"].tolist() == [1.0, 0.0] and prompts["reward"].tolist() == [0.5, 0.5]
    assert prompts["text"].tolist() == ["1 + 2", ""]
    tokens = attribution_table(FOUND, FOUND.tokens.head(3), TOKENS, ROLLOUTS)
    assert tokens["token"].tolist() == ["<b>", "%{y}", "∅"] and tokens["reward"].tolist() == [1.0, 0.5, 0.5]
    assert attribution_table(FOUND, FOUND.rollouts, TOKENS, ROLLOUTS)["tokens"].tolist() == [2, 1, 2]
