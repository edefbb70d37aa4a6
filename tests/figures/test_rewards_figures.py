"""The histogram of rewards by step: shares of a hand-worked table, and what a click asks for."""

import numpy as np
import pandas as pd

from otb_analysis.figures.rewards import plot_rewards, rewards_info

COUNTS = pd.DataFrame({"step": [0, 0, 2, 2, 4], "reward": [0.0, 1.0, 0.0, 0.5, 1.0], "n": [3, 1, 2, 2, 4]})
"""Bins of two steps: 4 rollouts in the first, of which 3 earned nothing; 4 in each of the others."""


def test_shares_are_of_the_rollouts_of_a_bin_of_steps():
    info = rewards_info(COUNTS.assign(width=2, height=0.0))
    assert info.step.tolist() == [0, 2, 4] and info.reward.tolist() == [0, 0.5, 1]
    assert info.count.tolist() == [[3, 2, 0], [0, 2, 0], [1, 0, 4]]
    assert info.share.tolist() == [[0.75, 0.5, 0], [0, 0.5, 0], [0.25, 0, 1]]


def test_a_cell_holds_both_ends_of_its_steps_and_rewards():
    one_each = rewards_info(COUNTS.assign(width=2, height=0.0))
    assert one_each.ranges(2, 0.5) == ((2, 3), (0.5, 0.5))
    assert rewards_info(COUNTS.assign(width=1, height=0.25)).ranges(2, 0.5) == ((2, 2), (0.5, 0.75))


def test_every_cell_has_a_point_to_click_that_says_its_step_reward_count_and_share():
    figure = plot_rewards(rewards_info(COUNTS.assign(width=2, height=0.0)))
    heat, points = figure.data
    np.testing.assert_array_equal(heat.z[0], [0.75, 0.5, 0])
    assert list(heat.y) == ["0", "0.500", "1.00"]
    asked = {(x, y): tuple(data) for x, y, data in zip(points.x, points.y, points.customdata, strict=True)}
    assert len(asked) == 9 and asked[2, "0.500"] == (2, 0.5, 2, 0.5) and asked[4, "0"] == (4, 0, 0, 0)
    assert heat.hoverinfo == "skip" and points.hoverinfo != "skip"  # a click goes to what is hovered
