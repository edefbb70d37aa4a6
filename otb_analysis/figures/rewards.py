"""How rewards spread over the steps of a run: a heatmap whose cells can be clicked."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.numbers import number
from otb_analysis.figures.scales import step_axis
from otb_analysis.figures.styles import ORANGE
from otb_analysis.figures.theme import TEMPLATE
from otb_analysis.types import Float

LIGHT = ["rgba(0, 114, 178, 0.06)", "#0072B2"]
"""From the page's own colour, light or dark, so that no page takes it in reverse."""


@dataclass(frozen=True)
class RewardsInfo:
    """Counts of rollouts by steps and rewards."""

    step: Float  # Lower ends of the bins of steps [S]
    reward: Float  # Rewards, or lower ends of their bins [R], ascending
    share: Float  # Share of a bin's rollouts with that reward [R, S]; NaN where the bin of steps has none
    count: Float  # [R, S]
    width: int  # Steps in a bin
    height: float  # Width of a bin of rewards, 0 where each row is one reward

    def ranges(self, step: float, reward: float) -> tuple[tuple[int, int], tuple[float, float]]:
        """Return the steps and rewards of a cell, both ends belonging to it."""
        return (int(step), int(step) + self.width - 1), (reward, reward + self.height)


def rewards_info(histogram: pd.DataFrame) -> RewardsInfo:
    """Arrange the counts of `reward_histogram`."""
    wide = histogram.pivot_table(index="reward", columns="step", values="n", aggfunc="sum")
    count = wide.to_numpy(float)
    total = np.nansum(count, axis=0, keepdims=True)
    return RewardsInfo(
        wide.columns.to_numpy(float), wide.index.to_numpy(float), np.nan_to_num(count) / total, np.nan_to_num(count),
        int(histogram["width"].iloc[0]), float(histogram["height"].iloc[0]),
    )  # fmt: skip


Range = tuple[float, float] | None


def plot_rewards(info: RewardsInfo, steps: Range = None, rewards: Range = None) -> go.Figure:
    """Draw the share of each reward among the rollouts of each bin of steps, and a frame around chosen ones."""
    rows = [number(float(r)) if not info.height else f"{number(float(r))} …" for r in info.reward]
    figure = go.Figure(
        go.Heatmap(
            x=info.step, y=rows, z=info.share, colorscale=LIGHT, zmin=0, zmax=1, xgap=1, ygap=1,
            hoverinfo="skip", colorbar={"title": {"text": "share"}, "thickness": 10, "tickformat": ".0%"},
        )
    )  # fmt: skip
    # Markers that cannot be seen: a click selects points, and a heatmap has none.
    x, y = np.meshgrid(info.step, np.arange(len(rows)))
    cells = np.stack([x.ravel(), info.reward[y.ravel()], info.count.ravel(), info.share.ravel()], -1)
    figure.add_scatter(
        x=x.ravel(), y=np.repeat(rows, len(info.step)), mode="markers", customdata=cells, showlegend=False,
        marker={"opacity": 0, "size": 14, "symbol": "square"},
        hovertemplate="step %{x}, reward %{y}: %{customdata[2]:,} rollouts (%{customdata[3]:.0%})<extra></extra>",
    )  # fmt: skip
    across = _within(info.step, info.width - 1, steps)
    up = np.flatnonzero(np.isin(info.reward, _within(info.reward, info.height, rewards)))
    if (steps or rewards) and len(across) and len(up):
        figure.add_shape(
            type="rect", x0=across[0] - info.width / 2, x1=across[-1] + info.width / 2, y0=up[0] - 0.5, y1=up[-1] + 0.5,
            line={"color": ORANGE, "width": 2},
        )  # fmt: skip
    figure.update_xaxes(**step_axis(info.step))
    return figure.update_layout(
        template=TEMPLATE, height=70 + 26 * max(3, len(rows)), margin={"t": 8, "b": 40},
        xaxis={"title": {"text": "step", "standoff": 4}}, yaxis={"title": {"text": "reward"}, "type": "category"},
        clickmode="event+select", hoverdistance=-1,  # the point of the cell, wherever in it the mouse is
    )  # fmt: skip


def _within(lower: Float, width: float, asked: Range) -> Float:
    """Return the bins that hold some of what is asked for; without a question all."""
    return lower if asked is None else lower[(lower + width >= asked[0]) & (lower <= asked[1])]
