"""The clickable, coloured tokens: a component that only ever creates text nodes.

Token text is model output. It reaches the browser as JSON and the page through `textContent`; nothing of it is parsed
as HTML, Markdown or a template.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
from streamlit.components.v2 import component

from otb_analysis.figures.numbers import number
from otb_analysis.figures.token_colors import palette
from otb_analysis.figures.tokens import RolloutRow, TokensInfo

_HERE = Path(__file__)
_STYLE, _SCRIPT = (_HERE.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
_component = component("otb_analysis.tokens", css=_STYLE, js=_SCRIPT)
KEY = "token_view"

MOST = 40_000
"""Most tokens that a browser is given at once."""
LONG = 300
"""Tokens from which a rollout gets a wide box."""

Chosen = tuple[int, int, int]
"""A token: which pane, its rollout, its t."""


@dataclass(frozen=True)
class Pane:
    """One prompt at one step of one run."""

    title: str
    info: TokensInfo
    tokens: pd.DataFrame


def token_view(
    panes: Sequence[Pane],
    columns: Mapping[str, str],
    chosen: Chosen | None,
    on_token: Callable[[], None],
    on_step: Callable[[], None],
) -> int:
    """Show all rollouts of a prompt, or of two side by side; return how many did not fit.

    Args:
        columns: Columns to show where the mouse is, and how they are called.
        chosen: Its rollout is there even if not all fit.
        on_token: Called when a token was chosen; `clicked` then says which.
        on_step: Called when another step was asked for; `stepped` then says in which direction.
    """
    scale = panes[0].info.scale
    shown = [
        _shown(pane.info, chosen[1] if chosen and chosen[0] == p else None, len(panes)) for p, pane in enumerate(panes)
    ]
    payload: dict[str, Any] = {
        "panes": [
            {"title": pane.title, "rows": [_row(row, values) for row, values in _with_values(pane, rows, columns)]}
            for pane, rows in zip(panes, shown, strict=True)
        ],
        "column": panes[0].info.column,
        "title": columns[panes[0].info.column],
        "columns": list(columns.items()),
        "colors": list(scale.colors),
        "palette": palette(scale),
        "low": ("≤ " if any(p.info.n_below for p in panes) else "") + number(scale.low),
        "high": ("≥ " if any(p.info.n_above for p in panes) else "")
        + number(scale.high)
        + (" (log)" if scale.log and not scale.diverging else ""),
        "marks": _marks(panes),
        "wide": max(row.length for pane in panes for row in pane.info.rollouts) > LONG,
    }
    # The browser builds its page anew only where this changes.
    version = hashlib.sha256(json.dumps(payload, ensure_ascii=False).encode()).hexdigest()
    data = payload | {"version": version, "chosen": chosen}
    _component(data=data, key=KEY, on_token_change=on_token, on_step_change=on_step)
    return sum(len(pane.info.rollouts) - len(rows) for pane, rows in zip(panes, shown, strict=True))


def clicked() -> Chosen | None:
    """Return the token that was just chosen."""
    token = st.session_state[KEY].get("token")
    return None if token is None else (int(token[0]), int(token[1]), int(token[2]))


def stepped() -> int:
    """Return by how many steps to move."""
    step = st.session_state[KEY].get("step")
    return 0 if step is None else int(step[0])


def _shown(info: TokensInfo, chosen: int | None, panes: int) -> list[RolloutRow]:
    """Return as many rollouts as fit, the chosen one always among them."""
    ends = np.cumsum([len(row.tokens) for row in info.rollouts])
    fits = max(1, int((ends <= MOST // panes).sum()))
    return [row for i, row in enumerate(info.rollouts) if i < fits or row.rollout == chosen]


def _with_values(pane: Pane, rows: Sequence[RolloutRow], columns: Mapping[str, str]) -> Any:
    """Yield rollouts with their columns, four digits of each value."""
    table: Any = pane.tokens.sort_values(["rollout", "t"])
    by_rollout = dict(iter(table.groupby("rollout")))
    for row in rows:
        part = by_rollout[row.rollout]
        values = {name: _digits(part[name].to_numpy(np.float64, na_value=np.nan)) for name in columns}
        yield row, values


def _digits(x: Any) -> list[float | None]:
    size = np.where(np.isfinite(x) & (x != 0), np.abs(x), 1.0)
    unit = 10.0 ** (np.floor(np.log10(size)) - 3)
    return [None if v != v else v for v in (np.round(x / unit) * unit).tolist()]


def _row(row: RolloutRow, values: Mapping[str, list[float | None]]) -> dict[str, Any]:
    return {
        "rollout": row.rollout,
        "reward": number(row.reward),
        "parts": ", ".join(f"{name} {number(value)}" for name, value in row.parts),
        "facts": [f"{row.length:,} token{'s' * (row.length != 1)}", *([row.finish] if row.finish else [])],
        "warning": row.warning,
        "ts": [t.t for t in row.tokens],
        "texts": [t.text.encode("utf-8", "replace").decode() for t in row.tokens],
        "kinds": [t.kind for t in row.tokens],
        "turns": [t.turn for t in row.tokens],
        "breaks": [int(t.breaks) for t in row.tokens],
        "levels": [t.level for t in row.tokens],
        "values": values,
    }


def _marks(panes: Sequence[Pane]) -> list[tuple[str, str]]:
    missing = sum(pane.info.n_missing for pane in panes)
    kinds = {t.kind for pane in panes for row in pane.info.rollouts for t in row.tokens}
    marks = [("missing", f"not measured ({missing:,})")] if missing else []
    if "tool" in kinds:
        marks.append(("tool", "tool output, not sampled by the policy"))
    return marks + ([("special", "special token")] if "special" in kinds else [])
