"""Tokens of one prompt: all its rollouts side by side, coloured by one column; what was not measured has no colour.

Token text is model output. It is passed on as text, with a visible sign for every character that would not show or
would rearrange its neighbours; it is never markup.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.numbers import number
from otb_analysis.figures.theme import TEMPLATE
from otb_analysis.figures.token_colors import ColorScale, color_scale, token_colors
from otb_analysis.schema import TOKENS
from otb_analysis.types import Float32

UNKNOWN = "rgba(125, 130, 140, 0.35)"
GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
NUMERIC = tuple(
    c.name
    for c in TOKENS
    if c.dtype in ("FLOAT", "DOUBLE") or c.name == "token_id"
)  # fmt: skip

SIGNED = ("attribution", "signal", "noise")
"""Columns in which a token can push for or against; 0 always has the middle colour."""


@dataclass(frozen=True)
class Token:
    """One token of the view."""

    t: int
    text: str  # Decoded text with visible glyphs; text, never markup
    breaks: bool
    tool: bool  # Tool output, not sampled by the policy
    color: str | None  # Background colour, or None where the column was not measured
    ink: str | None


@dataclass(frozen=True)
class RolloutRow:
    """One rollout of the view; `reward` is None when not recorded, `length` counts policy tokens."""

    rollout: int
    reward: float | None
    length: int
    tokens: tuple[Token, ...]


ORDERS: dict[str, Callable[[RolloutRow], float]] = {
    "rollout": lambda row: row.rollout,
    "reward": lambda row: np.inf if row.reward is None else -row.reward,
    "length": lambda row: -row.length,
}


@dataclass(frozen=True)
class TokensInfo:
    """The numbers behind the token view."""

    column: str
    rollouts: tuple[RolloutRow, ...]
    values: Float32  # The column as a grid [rollouts, T] float32, NaN where not measured or beyond the end
    unknown: Float32  # 1 where there is a token without a value, NaN elsewhere [rollouts, T] float32
    scale: ColorScale
    n_missing: int
    n_below: int
    n_above: int


def visible(text: str) -> str:
    """Return a token's text with a glyph or a code point for each character that has no shape of its own."""
    if text == "":
        return "∅"
    return "".join(GLYPHS.get(c) or (f"⟨{ord(c):04X}⟩" if _shapeless(c) else c) for c in text)


def _shapeless(character: str) -> bool:
    """True for controls, bidirectional overrides and invisible formatting; joiners inside emoji stay."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200d\ufe0f"


def tokens_info(
    tokens: pd.DataFrame, rewards: pd.Series, column: str, order: str = "rollout", scale: str = "auto"
) -> TokensInfo:
    """Lay out all rollouts of one prompt and colour them by one column.

    `order` is `rollout`, `reward` (best first) or `length` (longest first).

    Raises:
        InputError: The column is not a numeric column of the table, there are no tokens, or order or scale is unknown.
    """
    known = [c for c in NUMERIC if c in tokens]
    if column not in known:
        raise InputError(f"column {column!r} cannot colour tokens; {nearest(column, known)}")
    if tokens.empty:
        raise InputError("tokens has 0 rows; pass the token rows of one step and one prompt.")
    table: Any = tokens.sort_values(["rollout", "t"])
    policy = table["mask"].fillna(True).to_numpy(bool) if "mask" in table else np.ones(len(table), bool)
    value = np.where(policy, table[column].to_numpy(np.float64, na_value=np.nan), np.nan)
    colors = color_scale(value, scale, column in SIGNED)
    table = table.assign(_value=value, _policy=policy)
    rows = [_row(int(r), part, rewards.get(r), colors) for r, part in table.groupby("rollout")]
    if order not in ORDERS:
        raise InputError(f"order is {order!r}; {nearest(order, ORDERS)}")
    rows.sort(key=ORDERS[order])  # they come by rollout, which decides among equals
    grid = np.full((len(rows), max(len(r.tokens) for r in rows)), np.nan, dtype=np.float32)
    for i, row in enumerate(rows):
        grid[i, : len(row.tokens)] = table.loc[table["rollout"] == row.rollout, "_value"]
    ends = np.array([len(r.tokens) for r in rows])
    exists = np.arange(grid.shape[1]) < ends[:, None]
    unknown = np.where(exists & np.isnan(grid), 1, np.nan).astype(np.float32)
    below, above = int((value < colors.low).sum()), int((value > colors.high).sum())
    missing = int(np.isnan(value[policy]).sum())
    return TokensInfo(column, tuple(rows), grid, unknown, colors, missing, below, above)


def _row(rollout: int, part: Any, reward: float | None, scale: ColorScale) -> RolloutRow:
    colors = token_colors(part["_value"].to_numpy(np.float64), scale)
    texts = part["token"].fillna("").astype(str) if "token" in part else part["token_id"].astype(str)
    tokens = tuple(
        Token(int(t), visible(text), text.endswith("\n"), not policy, color, ink)
        for t, text, policy, (color, ink) in zip(part["t"], texts, part["_policy"], colors, strict=True)
    )
    known_reward = None if reward is None or reward != reward else float(reward)
    return RolloutRow(rollout, known_reward, int(part["_policy"].sum()), tokens)


def plot_tokens(info: TokensInfo) -> go.Figure:
    """Draw the grid rollouts × position as a heatmap; gaps are tokens that were not measured or do not exist."""
    figure = go.Figure(layout={"template": TEMPLATE})
    where = {
        "x": np.arange(info.values.shape[1], dtype=np.float32), "y": [f"rollout {r.rollout}" for r in info.rollouts],
        "xgap": 1, "ygap": 2, "hoverongaps": False,
    }  # fmt: skip
    figure.add_heatmap(
        z=info.unknown, colorscale=[UNKNOWN, UNKNOWN], showscale=False,
        hovertemplate="%{y}, t = %{x}<br>not measured<extra></extra>", **where,
    )  # fmt: skip
    ticks = np.linspace(0, 1, 5)
    figure.add_heatmap(
        z=info.scale.position(info.values).astype(np.float32), **where,
        zmin=0, zmax=1, colorscale=info.scale.stops,
        colorbar={
            "thickness": 10, "title": {"text": info.column, "side": "right", "font": {"size": 12}},
            "tickvals": ticks, "ticktext": [number(value) for value in info.scale.values(ticks)],
        },
        text=[[number(float(v)) for v in row] for row in info.values],
        hovertemplate="%{y}, t = %{x}<br>" + info.column + " <b>%{text}</b><extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="position t in the completion (tokens)", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(height=130 + 24 * len(info.rollouts), margin={"l": 90, "t": 16})
    return figure
