"""Tokens of one prompt: all its rollouts side by side, coloured by one column; what was not measured has no colour."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.rollouts import ends_elsewhere
from otb_analysis.figures.styles import RULE, TEMPLATE, number
from otb_analysis.figures.texts import SPECIAL, visible
from otb_analysis.figures.token_columns import LOW, RATIOS, SIGNED, TITLES, ColorScale, color_levels, color_scale
from otb_analysis.types import Float, Float32, Int


@dataclass(frozen=True)
class RolloutRow:
    """One rollout of the view."""

    rollout: int
    reward: float | None  # None when not recorded
    parts: tuple[tuple[str, float], ...]  # What the reward is made of, where that is more than one part
    length: int  # Policy tokens
    finish: str
    warning: str  # Why the reward looks wrong, else empty
    rows: pd.DataFrame = field(repr=False, compare=False)  # Its tokens as stored, with _policy, _value and _level

    @cached_property
    def tokens(self) -> dict[str, list[Any]]:
        """Its tokens by column, made when they are first asked for: those of 64 rollouts of 8,192 take seconds.

        `ts`; `texts` with visible glyphs, never markup; `kinds`: "tool" where the policy did not sample it, "special"
        for a tokenizer's own, else empty; `turns`; `breaks` where a line ends; `levels` as `color_levels` counts them,
        −1 where the column was not measured.
        """
        rows: Any = self.rows
        texts = (rows["token"].fillna("") if "token" in rows else rows["token_id"]).astype(str).tolist()
        shown = {text: visible(text, flowing=True) for text in set(texts)}
        special = {text: "special" for text in shown if text == "" or SPECIAL.fullmatch(text)}
        written = zip(texts, rows["_policy"].tolist(), strict=True)
        return {
            "ts": rows["t"].tolist(), "texts": [shown[text] for text in texts],
            "kinds": [special.get(text, "") if policy else "tool" for text, policy in written],
            "turns": rows["turn"].tolist() if "turn" in rows else [0] * len(rows),
            "breaks": [text.endswith("\n") for text in texts], "levels": rows["_level"].tolist(),
        }  # fmt: skip


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
    # The column as a grid [rollouts, T], NaN where not measured or beyond the end; column k is the k-th token
    values: Float32
    scale: ColorScale
    n_missing: int
    n_below: int
    n_above: int


def column_values(tokens: pd.DataFrame, column: str) -> Float:
    """Return a column of policy tokens, NaN where it was not measured and at tool tokens.

    Raises:
        InputError: It is no column of numbers.
    """
    known = [str(c) for c in tokens if pd.api.types.is_numeric_dtype(tokens[c])]
    if column not in known:
        raise InputError(f"column {column!r} cannot colour tokens; {nearest(column, known)}")
    value: Any = tokens[column]
    return np.where(_policy(tokens), value.to_numpy(np.float64, na_value=np.nan), np.nan)


def scale_of(values: Float, column: str, kind: str = "auto", dark: bool = False) -> ColorScale:
    """Return the scale of a column's values: diverging around 0 or 1 where the column has a sign or is a ratio."""
    scale = color_scale(values, kind, signed=column in SIGNED, ratio=column in RATIOS)
    return replace(scale, dark=dark, backward=column in LOW)


def tokens_info(
    tokens: pd.DataFrame, rollouts: pd.DataFrame, column: str, order: str = "rollout", scale: str | ColorScale = "auto"
) -> TokensInfo:
    """Lay out all rollouts of one prompt and colour them by one column.

    Args:
        rollouts: The prompt's rows of the table `rollouts`.
        order: `rollout`, `reward` (best first) or `length` (longest first).
        scale: A kind of scale, or the scale itself, for several prompts with the same colours.

    Raises:
        InputError: The column is not a numeric column of the table, there are no tokens, or order or scale is unknown.
    """
    if order not in ORDERS:
        raise InputError(f"order is {order!r}; {nearest(order, ORDERS)}")
    if tokens.empty:
        raise InputError("tokens has 0 rows; pass the token rows of one step and one prompt.")
    table: Any = tokens.sort_values(["rollout", "t"])
    value, policy = column_values(table, column), _policy(table)
    colors = scale if isinstance(scale, ColorScale) else scale_of(value, column, scale)
    table = table.assign(_value=value, _level=color_levels(value, colors), _policy=policy)
    facts = {int(row["rollout"]): row for row in rollouts.to_dict("records")}
    parts = {int(str(rollout)): part for rollout, part in table.groupby("rollout")}
    rows = sorted((_row(r, part, facts.get(r, {})) for r, part in parts.items()), key=ORDERS[order])
    grid = np.full((len(rows), max(len(row.rows) for row in rows)), np.nan, dtype=np.float32)
    for i, row in enumerate(rows):
        grid[i, : len(row.rows)] = row.rows["_value"]
    missing = int(np.isnan(value[policy]).sum())
    below, above = int((value < colors.low).sum()), int((value > colors.high).sum())
    return TokensInfo(column, tuple(rows), grid, colors, missing, below, above)


def _policy(tokens: pd.DataFrame) -> Any:
    return tokens["mask"].fillna(True).to_numpy(bool) if "mask" in tokens else np.ones(len(tokens), bool)


def _row(rollout: int, part: Any, facts: dict[Any, Any]) -> RolloutRow:
    reward, finish = _number_or_none(facts.get("reward")), facts.get("finish_reason")
    paid = {str(n).removeprefix("reward_"): _number_or_none(facts[n]) for n in facts if str(n).startswith("reward_")}
    parts = tuple((name, value) for name, value in paid.items() if value is not None)
    listed = parts if len(parts) > 1 or any(value != reward for _, value in parts) else ()
    # A rewarded answer looks wrong where its last number is not the reference's.
    answer, completion = (x if isinstance(x, str) else None for x in (facts.get("answer"), facts.get("completion")))
    wrong = ends_elsewhere(answer, completion) if (dict(parts).get("correct", reward) or 0) > 0 else None
    return RolloutRow(
        rollout, reward, listed, int(part["_policy"].sum()), finish if isinstance(finish, str) else "",
        "" if wrong is None else f"rewarded, but ends with {wrong}", part,
    )  # fmt: skip


def _number_or_none(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


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
    values = np.pad(info.values, pad, constant_values=np.nan).reshape(n, cells, width)
    loud = -values if info.scale.backward else values
    if info.scale.diverging:
        loud = np.abs(np.log(np.maximum(values, 1e-300)) if info.scale.log else values)
    apart = np.where(np.isnan(values), -np.inf, loud)
    best = apart.argmax(axis=2)
    shown = np.take_along_axis(values, best[:, :, None], axis=2)[:, :, 0]
    there = np.arange(cells) * width < np.array([len(row.rows) for row in info.rollouts])[:, None]
    unknown = np.where(there & np.isnan(shown), 1, np.nan).astype(np.float32)
    return GridInfo(shown, unknown, np.arange(cells) * width + best, width)


def plot_tokens(info: TokensInfo, title: str = "", chosen: tuple[int, int] | None = None) -> go.Figure:
    """Draw the grid; gaps are tokens that do not exist, grey ones were not measured.

    The points over the cells cannot be seen: a click selects points, and a heatmap has none. Their data are rollout, t.
    """
    grid, title = grid_info(info), title or TITLES.get(info.column, info.column)
    figure = go.Figure(layout={"template": TEMPLATE})
    x = np.arange(grid.values.shape[1]) * grid.width + (grid.width - 1) / 2
    names = [f"rollout {row.rollout}" for row in info.rollouts]
    gap = 1 if len(x) <= ACROSS // 2 else 0
    where = {"x": x, "y": names, "xgap": gap, "ygap": 2, "hoverongaps": False, "hoverinfo": "skip"}
    figure.add_heatmap(z=grid.unknown, colorscale=[UNKNOWN, UNKNOWN], showscale=False, **where)
    ticks = np.linspace(0, 1, 5)
    figure.add_heatmap(
        z=info.scale.position(grid.values).astype(np.float32), zmin=0, zmax=1, colorscale=info.scale.stops, **where,
        colorbar={
            "thickness": 10, "title": {"text": title, "side": "right", "font": {"size": 12}},
            "tickvals": ticks, "ticktext": [number(value) for value in info.scale.values(ticks)],
        },
    )  # fmt: skip
    ts = [row.rows["t"].to_numpy(np.int64) for row in info.rollouts]
    cells = [(i, k) for i, t in enumerate(ts) for k in range(-(-len(t) // grid.width))]
    figure.add_scatter(
        x=[x[k] for _, k in cells], y=[names[i] for i, _ in cells], mode="markers", showlegend=False,
        customdata=[(info.rollouts[i].rollout, int(ts[i][grid.token[i, k]])) for i, k in cells],
        text=[number(float(grid.values[i, k])) for i, k in cells],
        marker={"opacity": 0, "size": 14, "symbol": "square"},
        hovertemplate="%{y}, t = %{customdata[1]}<br>" + title + " <b>%{text}</b><extra></extra>",
    )  # fmt: skip
    for i, row in enumerate(info.rollouts):
        for position in np.flatnonzero(ts[i] == chosen[1]) if chosen and chosen[0] == row.rollout else ():
            figure.add_scatter(
                x=[x[position // grid.width]], y=[names[i]], mode="markers", showlegend=False, hoverinfo="skip",
                marker={"symbol": "square-open", "size": 16, "color": RULE, "line": {"width": 3}},
            )  # fmt: skip
    figure.update_xaxes(title_text="position t in the completion (tokens)", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    height = 130 + 24 * len(info.rollouts)
    return figure.update_layout(height=height, margin={"l": 90, "t": 16}, clickmode="event+select", hoverdistance=-1)
