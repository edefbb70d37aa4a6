"""The histogram of rewards by step: shares of a hand-worked table, and what a click asks for."""

import numpy as np
import pandas as pd

from otb_analysis.figures.rollouts import plot_rewards, rewards_info
from otb_analysis.figures.styles import for_background

BINS = pd.DataFrame(
    {"step": [0, 0, 5, 10], "reward": [0.0, 1.0, 1.0, 0.0], "n": [3, 1, 4, 2], "width": 5, "height": 0.0}
)


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


def test_a_cell_is_a_share_of_its_steps():
    info = rewards_info(BINS)
    np.testing.assert_allclose(info.share, [[0.75, 0, 1], [0.25, 1, 0]])
    assert info.ranges(5, 1.0) == ((5, 9), (1.0, 1.0))


def test_every_cell_can_be_clicked_and_carries_its_steps_reward_count_and_share():
    (_, points) = plot_rewards(rewards_info(BINS)).data
    assert [cell.tolist() for cell in np.asarray(points.customdata)[[0, 4]]] == [[0, 0, 3, 0.75], [5, 1, 4, 1]]
    assert points.hoverinfo != "skip" and plot_rewards(rewards_info(BINS)).layout.hoverdistance == -1


def test_a_frame_stands_around_what_is_chosen():
    def frame(*chosen):
        return [(s.x0, s.x1, s.y0, s.y1) for s in plot_rewards(rewards_info(BINS), *chosen).layout.shapes]

    assert frame() == []
    assert frame((5, 9), (1.0, 1.0)) == [(2.5, 7.5, 0.5, 1.5)]
    assert frame((3, 7), None) == [(-2.5, 7.5, -0.5, 1.5)]
    assert frame((50, 60), None) == []


def test_a_large_share_is_strong_on_a_dark_page_too():
    ramps = [for_background(plot_rewards(rewards_info(BINS)), dark).data[0] for dark in (False, True)]
    assert [ramp.colorscale[-1][1] for ramp in ramps] == ["#0072B2"] * 2 and not ramps[1].reversescale
