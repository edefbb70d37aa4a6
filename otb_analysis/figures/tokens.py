"""Tokens of one prompt: all its rollouts side by side, coloured by one column; what was not measured has no colour.

Token text is model output. It is passed on as text, with a visible sign for every character that would not show or
would rearrange its neighbours; it is never markup, and never longer than a line or two.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.numbers import number
from otb_analysis.figures.prompts import ends_elsewhere
from otb_analysis.figures.token_colors import ColorScale, color_levels, color_scale
from otb_analysis.figures.token_columns import LOW, RATIOS, SIGNED
from otb_analysis.types import Float, Float32, Int

GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
SPECIAL = re.compile(r"<\|[^<>]{1,60}\|>|</?(s|pad|eos|bos|unk|mask|end|think|\w{1,20}_of_\w{1,20})>|\[[A-Z]{2,8}\]")
"""Tokens that a tokenizer adds to text: ends, roles, padding."""
LONGEST = 240
"""Characters of one token that are shown."""


@dataclass(frozen=True)
class Token:
    """One token of the view."""

    t: int
    text: str  # Decoded text with visible glyphs; text, never markup
    breaks: bool
    kind: str  # "tool" where the policy did not sample it, "special" for a tokenizer's own, else empty
    turn: int
    level: int  # Colour, as `color_levels` counts them; −1 where the column was not measured


@dataclass(frozen=True)
class RolloutRow:
    """One rollout of the view."""

    rollout: int
    reward: float | None  # None when not recorded
    parts: tuple[tuple[str, float], ...]  # What the reward is made of, where that is more than one part
    length: int  # Policy tokens
    finish: str
    warning: str  # Why the reward looks wrong, else empty
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
    # The column as a grid [rollouts, T], NaN where not measured or beyond the end; column k is the k-th token
    values: Float32
    exists: Float32  # 1 where there is a token, NaN elsewhere [rollouts, T]
    scale: ColorScale
    n_missing: int
    n_below: int
    n_above: int


def visible(text: str, flowing: bool = False) -> str:
    """Return a token's text with a glyph or a code point for each character that has no shape of its own.

    A `flowing` text keeps the blank before a word, so that a line of tokens reads as prose. Longer texts are cut.
    """
    if text == "":
        return "∅"
    cut = f"… ({len(text):,} characters)" if len(text) > LONGEST else ""
    lead = " " if flowing and text[0] == " " and not text[1:2].isspace() and text[1:] else ""
    shown = text[len(lead) : LONGEST]
    return lead + "".join(GLYPHS.get(c) or (f"⟨{ord(c):04X}⟩" if _shapeless(c) else c) for c in shown) + cut


def _shapeless(character: str) -> bool:
    """True for controls, bidirectional overrides and invisible formatting; joiners inside emoji stay."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200d\ufe0f"


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
    value = column_values(table, column)
    colors = scale if isinstance(scale, ColorScale) else scale_of(value, column, scale)
    table = table.assign(_level=color_levels(value, colors), _policy=_policy(table))
    facts = {int(row["rollout"]): row for row in rollouts.to_dict("records")}
    rows = [_row(int(str(r)), part, facts.get(int(str(r)), {})) for r, part in table.groupby("rollout")]
    order_of = sorted(range(len(rows)), key=lambda i: ORDERS[order](rows[i]))  # equals stay as sampled
    rows = [rows[i] for i in order_of]
    starts = np.cumsum([0, *table.groupby("rollout").size()])
    grid = np.full((len(rows), max(len(r.tokens) for r in rows)), np.nan, dtype=np.float32)
    exists = grid.copy()
    for i, which in enumerate(order_of):
        n = len(rows[i].tokens)
        grid[i, :n], exists[i, :n] = value[starts[which] : starts[which + 1]], 1
    missing = int(np.isnan(value[table["_policy"].to_numpy(bool)]).sum())
    below, above = int((value < colors.low).sum()), int((value > colors.high).sum())
    return TokensInfo(column, tuple(rows), grid, exists, colors, missing, below, above)


def _policy(tokens: pd.DataFrame) -> Any:
    return tokens["mask"].fillna(True).to_numpy(bool) if "mask" in tokens else np.ones(len(tokens), bool)


def _row(rollout: int, part: Any, facts: dict[Any, Any]) -> RolloutRow:
    texts = part["token"].fillna("").astype(str) if "token" in part else part["token_id"].astype(str)
    shown = {text: visible(text, flowing=True) for text in set(texts)}
    turns: Int = part["turn"].to_numpy(np.int64) if "turn" in part else np.zeros(len(part), np.int64)
    columns = zip(part["t"], texts, part["_policy"], turns.tolist(), part["_level"], strict=True)
    tokens = tuple(
        Token(int(t), shown[text], text.endswith("\n"), _kind(text, policy), turn, int(level))
        for t, text, policy, turn, level in columns
    )
    reward = _known(facts.get("reward"))
    parts = tuple(
        (name.removeprefix("reward_"), value)
        for name in facts
        if str(name).startswith("reward_") and (value := _known(facts[name])) is not None
    )
    own = parts if len(parts) > 1 or any(value != reward for _, value in parts) else ()
    finish = facts.get("finish_reason")
    return RolloutRow(
        rollout, reward, own, int(part["_policy"].sum()), finish if isinstance(finish, str) else "",
        _warning(facts, reward, dict(parts)), tokens,
    )  # fmt: skip


def _kind(text: str, policy: bool) -> str:
    if not policy:
        return "tool"
    return "special" if text == "" or SPECIAL.fullmatch(text) else ""


def _warning(facts: dict[Any, Any], reward: float | None, parts: dict[str, float]) -> str:
    """Return why a rewarded answer looks wrong: its last number is not the reference's."""
    paid = parts.get("correct", reward)
    answer, completion = (x if isinstance(x, str) else None for x in (facts.get("answer"), facts.get("completion")))
    if paid is None or paid <= 0 or (found := ends_elsewhere(answer, completion)) is None:
        return ""
    return f"rewarded, but ends with {found}"


def _known(value: object) -> float | None:
    known = None if value is None or value is pd.NA else float(str(value))
    return None if known is None or known != known else known


@dataclass(frozen=True)
class PromptHead:
    """What stands above the rollouts of a prompt."""

    text: str
    answer: str  # Reference answer, empty where none was recorded
    rewards: str  # What was paid
    equal: str  # What equal rewards mean for the gradient; empty where rewards differ


def prompt_head(rollouts: pd.DataFrame, tokens: pd.DataFrame, estimator: str = "") -> PromptHead:
    """Return the prompt, its reference answer and what its rollouts were paid.

    Args:
        rollouts: The prompt's rows of the table `rollouts`.
        tokens: Its rows of `tokens`, with the advantages of the estimator that trained.
        estimator: The estimator that trained.
    """

    def text(name: str) -> str:
        values = [value for value in rollouts[name] if isinstance(value, str)] if name in rollouts else []
        return values[0] if values else ""

    reward = rollouts["reward"].to_numpy(np.float64, na_value=np.nan) if "reward" in rollouts else np.array([])
    reward = reward[~np.isnan(reward)]
    values, counts = np.unique(reward, return_counts=True)
    if len(values) > 4:
        paid = f"{len(reward)} rewards from {number(values[0])} to {number(values[-1])}, mean {number(reward.mean())}"
    else:
        paid = ", ".join(
            f"{n} × {number(v)}" if n > 1 else number(v) for v, n in zip(values[::-1], counts[::-1], strict=True)
        )
    names = [str(c) for c in rollouts if str(c).startswith("reward_") and bool(rollouts[c].notna().any())]
    if len(names) > 1:
        means = {name: np.nanmean(rollouts[name].to_numpy(np.float64, na_value=np.nan)) for name in names}
        parts = (f"{name.removeprefix('reward_')} {number(float(mean))}" for name, mean in means.items())
        paid += f" (means of parts: {', '.join(parts)})"
    return PromptHead(text("prompt"), text("answer"), paid, _equal(reward, tokens, estimator))


def _equal(reward: Float, tokens: pd.DataFrame, estimator: str) -> str:
    if len(reward) < 2 or np.ptp(reward) > 0:
        return ""
    same = f"All {len(reward)} rewards are {number(float(reward[0]))}"
    stored: Any = tokens["advantage"] if "advantage" in tokens else pd.Series(dtype=float)
    advantage = np.abs(stored.dropna().to_numpy(np.float64))
    if not len(advantage):
        return f"{same}: no gradient here with a baseline from this group."
    moved = advantage > 1e-6 * max(1.0, float(np.abs(reward[0])))
    if not moved.any():
        return f"{same}: no gradient here."
    return (
        f"{same}, yet {int(moved.sum()):,} of {len(advantage):,} tokens have an advantage under "
        f"{estimator or 'the estimator that trained'}, up to {number(float(advantage.max()))}."
    )
