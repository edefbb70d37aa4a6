"""Rollouts in short: where a prompt differs, the number that an answer ends with, and rewards over steps."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.styles import ORANGE, TEMPLATE, number
from otb_analysis.figures.texts import legible
from otb_analysis.types import Float

MOST = 60
"""Characters of a label."""
LEAD = 12
"""Characters of what they share that stay in front of the part that differs."""
DIGITS = 40
"""A longer number is noise, not an answer."""

NUMBER = re.compile(r"(?:(?<![\w)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+(?![\d.]))?|(?<!\d)\.\d+")
FRACTION = re.compile(r"\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}")


def distinct(prompts: Mapping[int, str], most: int = MOST) -> dict[int, str]:
    """Return for each prompt at most `most` characters that tell it from the others.

    White space counts as one blank. A label starts where all prompts begin to differ, or later: where the prompt
    differs from the one most like it, if its first characters would not show that.
    """
    texts = {group: legible(" ".join(text.split())) for group, text in prompts.items()}
    ordered = sorted(set(texts.values()))
    shared = len(os.path.commonprefix(ordered)) if len(ordered) > 1 else 0  # noqa: RUF071 (characters)
    alike = dict.fromkeys(ordered, shared)
    for two in pairwise(ordered):  # the prompt most like another stands beside it in order
        for text in two:
            alike[text] = max(alike[text], len(os.path.commonprefix(two)))  # noqa: RUF071
    labels = {}
    for group, text in texts.items():
        start = shared - LEAD if shared > most // 2 else 0
        if alike[text] - start >= most - 2:
            start = alike[text] - LEAD
        part = ("…" if start else "") + text[start:]
        labels[group] = part if len(part) <= most else part[: most - 1] + "…"
    return labels


def shared_head(prompts: Iterable[str]) -> int:
    """Return how many first characters all different prompts share, up to the end of a sentence; 0 for few or none.

    Prompts with the same examples share a long one; what differs stands behind it.
    """
    different = sorted(set(prompts))
    shared = os.path.commonprefix(different) if len(different) > 1 else ""  # noqa: RUF071 (characters)
    end = max((found.end() for found in re.finditer(r"[.!?:]\s+|\n+", shared)), default=0)
    return end if end > MOST else 0


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text; None where it has none. 1,234.5, −3, 3/4 and LaTeX's fractions are numbers."""
    plain = FRACTION.sub(r"\1/\2", text.replace("−", "-").replace("{,}", ","))
    numbers = NUMBER.findall(plain)
    if not numbers or len(numbers[-1]) > DIGITS:
        return None
    whole, _, divisor = numbers[-1].replace(",", "").partition("/")
    try:
        return Fraction(whole) / Fraction(divisor or 1)
    except ZeroDivisionError:
        return None


def ends_elsewhere(answer: str | None, completion: str | None) -> str | None:
    """Return how a completion ends instead of with the reference answer: `48, not 49`; None where it does not.

    Both are read by their last number; a reference without a number says nothing.
    """
    wanted = last_number(answer or "")
    if wanted is None or completion is None or (found := last_number(completion)) == wanted:
        return None
    ends = (found, wanted)
    words = ("no number" if x is None else f"{float(x):g}" if x.denominator > 1 else str(x) for x in ends)
    return ", not ".join(words)


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
    (first, last), (low, high) = steps or (-np.inf, np.inf), rewards or (-np.inf, np.inf)
    across = info.step[(info.step + info.width - 1 >= first) & (info.step <= last)]
    up = np.flatnonzero((info.reward + info.height >= low) & (info.reward <= high))
    if (steps or rewards) and len(across) and len(up):
        figure.add_shape(
            type="rect", x0=across[0] - info.width / 2, x1=across[-1] + info.width / 2, y0=up[0] - 0.5, y1=up[-1] + 0.5,
            line={"color": ORANGE, "width": 2},
        )  # fmt: skip
    figure.update_xaxes(tick0=info.step[0], dtick=info.width * math.ceil(len(info.step) / 9))
    return figure.update_layout(
        template=TEMPLATE, height=70 + 26 * max(3, len(rows)), margin={"t": 8, "b": 40},
        xaxis={"title": {"text": "step", "standoff": 4}}, yaxis={"title": {"text": "reward"}, "type": "category"},
        clickmode="event+select", hoverdistance=-1,  # the point of the cell, wherever in it the mouse is
    )  # fmt: skip
