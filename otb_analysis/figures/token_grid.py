"""Rollouts × position as a heatmap that can be clicked, also where a rollout has thousands of tokens."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from otb_analysis.figures.numbers import number
from otb_analysis.figures.theme import RULE, TEMPLATE
from otb_analysis.figures.tokens import TokensInfo
from otb_analysis.types import Float32, Int

UNKNOWN = "rgba(125, 130, 140, 0.35)"
CELLS, ACROSS = 6000, 400
"""Most cells of the heatmap, and most of them in a row: more than that cannot be told apart or clicked."""


@dataclass(frozen=True)
class GridInfo:
    """The cells of the heatmap; each holds `width` tokens and shows the one that stands out most."""

    values: Float32  # [rollouts, cells], NaN where nothing was measured
    unknown: Float32  # 1 where there is a token but no value, NaN elsewhere [rollouts, cells]
    token: Int  # Index of the token shown [rollouts, cells]; the first of the cell where none was measured
    width: int


def grid_info(info: TokensInfo) -> GridInfo:
    """Put the tokens of each rollout into cells; a cell shows its value furthest from the scale's quiet end."""
    n, length = info.values.shape
    width = -(-length // min(ACROSS, max(1, CELLS // n)))
    cells = -(-length // width)
    pad = ((0, 0), (0, cells * width - length))
    values, exists = (
        np.pad(x, pad, constant_values=np.nan).reshape(n, cells, width) for x in (info.values, info.exists)
    )
    loud = -values if info.scale.backward else values
    if info.scale.diverging:
        loud = np.abs(np.log(np.maximum(values, 1e-300)) if info.scale.log else values)
    apart = np.where(np.isnan(values), -np.inf, loud)
    best = apart.argmax(axis=2)
    shown = np.take_along_axis(values, best[:, :, None], axis=2)[:, :, 0]
    there = ~np.isnan(exists).all(axis=2)
    unknown = np.where(there & np.isnan(shown), 1, np.nan).astype(np.float32)
    return GridInfo(shown, unknown, np.arange(cells) * width + best, width)


def plot_tokens(info: TokensInfo, title: str = "", chosen: tuple[int, int] | None = None) -> go.Figure:
    """Draw the grid; gaps are tokens that do not exist, grey ones were not measured.

    The points over the cells cannot be seen: a click selects points, and a heatmap has none. Their data are rollout, t.
    """
    grid = grid_info(info)
    figure = go.Figure(layout={"template": TEMPLATE})
    x = np.arange(grid.values.shape[1]) * grid.width + (grid.width - 1) / 2
    names = [f"rollout {r.rollout}" for r in info.rollouts]
    gap = 1 if len(x) <= ACROSS // 2 else 0
    where = {"x": x, "y": names, "xgap": gap, "ygap": 2, "hoverongaps": False}
    figure.add_heatmap(z=grid.unknown, colorscale=[UNKNOWN, UNKNOWN], showscale=False, hoverinfo="skip", **where)
    ticks = np.linspace(0, 1, 5)
    figure.add_heatmap(
        z=info.scale.position(grid.values).astype(np.float32), **where, hoverinfo="skip",
        zmin=0, zmax=1, colorscale=info.scale.stops,
        colorbar={
            "thickness": 10, "title": {"text": title or info.column, "side": "right", "font": {"size": 12}},
            "tickvals": ticks, "ticktext": [number(value) for value in info.scale.values(ticks)],
        },
    )  # fmt: skip
    tokens = [(i, k, row.tokens[grid.token[i, k]]) for i, row in enumerate(info.rollouts)
              for k in range(len(x)) if grid.token[i, k] < len(row.tokens)]  # fmt: skip
    figure.add_scatter(
        x=[x[k] for _, k, _ in tokens], y=[names[i] for i, _, _ in tokens], mode="markers", showlegend=False,
        customdata=[(info.rollouts[i].rollout, token.t) for i, _, token in tokens],
        text=[number(float(grid.values[i, k])) for i, k, _ in tokens],
        marker={"opacity": 0, "size": 14, "symbol": "square"},
        hovertemplate="%{y}, t = %{customdata[1]}<br>" + (title or info.column) + " <b>%{text}</b><extra></extra>",
    )  # fmt: skip
    for i, k, _ in (one for one in tokens if chosen is not None and info.rollouts[one[0]].rollout == chosen[0]):
        places = [token.t for token in info.rollouts[i].tokens[k * grid.width : (k + 1) * grid.width]]
        if chosen is not None and chosen[1] in places:
            figure.add_scatter(
                x=[x[k]], y=[names[i]], mode="markers", showlegend=False, hoverinfo="skip",
                marker={"symbol": "square-open", "size": 16, "color": RULE, "line": {"width": 3}},
            )  # fmt: skip
    figure.update_xaxes(title_text="position t in the completion (tokens)", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    height = 130 + 24 * len(info.rollouts)
    figure.update_layout(height=height, margin={"l": 90, "t": 16}, clickmode="event+select", hoverdistance=-1)
    return figure
