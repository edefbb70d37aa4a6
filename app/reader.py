"""The reader: rollouts as a list beside the text of the chosen one, its tokens coloured by their size.

Texts are model output. They reach the browser as JSON and the page through `textContent`, with a visible sign for every
character that would rearrange others.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
from streamlit.components.v2 import component
from widgets import go_to, one_line

from otb_analysis.figures.fidelity import exact_norms
from otb_analysis.figures.rollouts import distinct, shared_head
from otb_analysis.figures.styles import cell, number
from otb_analysis.figures.texts import LONGEST, ONE_LINE, legible, passages, pieces, surroundings, token_pieces
from otb_analysis.figures.token_columns import TITLES, color_levels, palette
from otb_analysis.figures.tokens import column_values, scale_of

_HERE = Path(__file__)
_STYLE, _SCRIPT = (_HERE.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
_component = component("otb_analysis.reader", css=_STYLE, js=_SCRIPT)

ASKED = 44
"""Characters of a prompt before its answer in the list: half of a line in a window of 1,440 points."""
SIZES = ("grad_norm_sq", "energy_proxy")
"""What tokens are coloured by: the first that is known of all that the policy wrote."""


def name_of(row: Any) -> str:
    """Return how an address names a rollout: its step and its number in the step."""
    return f"{row['step']}.{row['rollout']}"


def _on_rollout() -> None:
    if (name := st.session_state["reader"].get("rollout")) is not None:
        st.session_state["rollout"] = name


def _on_token() -> None:
    if (token := st.session_state["reader"].get("token")) is not None:
        step, prompt, rollout, by, t = token
        colored = {"color": by} if by else {}
        go_to("tokens", step=step, prompt=prompt, token=f"{rollout}.{t}", **colored)


def _sizes(tokens: pd.DataFrame) -> dict[str, Any]:
    """Return the colour of each token and the scale; nothing where no size is known of all that the policy wrote."""
    written = tokens["mask"].fillna(True).to_numpy(bool)
    if "grad_norm_sq" in tokens:
        tokens = tokens.assign(grad_norm_sq=exact_norms(tokens))
    for name in SIZES if written.any() else ():
        values = column_values(tokens, name)
        if np.isfinite(values[written]).all():
            scale = scale_of(values, name, dark=st.context.theme.type == "dark")
            ends = number(scale.low), number(scale.high) + " (log)" * scale.log
            levels = color_levels(values, scale).tolist()
            return {"levels": levels, "palette": palette(scale), "sizes": [TITLES[name], *ends], "by": name}
    return {"levels": [-1] * len(tokens), "palette": [], "sizes": [], "by": ""}


def _cell(value: Any) -> str:
    return legible(cell(value), ONE_LINE, LONGEST)


def _line(row: Any, asked: str, find: str) -> list[Any]:
    """Return the one line below a rollout's facts: where a match stands, else how its prompt and its answer begin."""
    if find:
        return surroundings([row["completion"], row["prompt"]], find)
    return [("asked", f"{asked} → ")] * bool(asked) + surroundings([row["completion"]])


def reader(
    table: pd.DataFrame,
    columns: Mapping[str, str],
    chosen: int,
    tokens: pd.DataFrame,
    prompts: Iterable[str],
    find: str,
) -> None:
    """Show rollouts as a list, and the text of one beside it; the name of another is in the session once it is chosen.

    Args:
        table: Rows of the table `rollouts`.
        columns: Which columns are listed, and how they are called.
        chosen: Which row is read.
        tokens: Its tokens, as `passages` takes them, with `t` and the columns of `SIZES`.
        prompts: All prompts of its step, whose shared beginning is folded.
        find: What was searched for, which is marked.
    """
    table = table.fillna(dict.fromkeys(("completion", "prompt"), ""))
    different = list(dict.fromkeys(map(str, table["prompt"])))
    told = distinct(dict(enumerate(different)), ASKED) if len(different) > 1 else {}
    asked = {different[at]: label for at, label in told.items()}
    rows = [
        {
            "id": name_of(row),
            "cells": [_cell(row[name]) for name in columns],
            "line": _line(row, asked.get(row["prompt"], ""), find),
        }
        for row in table.to_dict("records")
    ]
    row: Any = table.iloc[chosen]
    head, facts = shared_head(prompts), {**columns, "answer": "reference answer"}
    cut = passages(row["completion"], tokens)
    # A piece that no token tells has row −1.
    sized, ts = _sizes(tokens if any(p.tokens for p in cut) else tokens.head(0)), [*tokens["t"].tolist(), None]
    levels, by = [*sized.pop("levels"), -1], sized.pop("by")
    shown = sized | {
        "facts": [f"{one_line(title)} {_cell(row[name])}" for name, title in facts.items()],
        "prompt": pieces(row["prompt"][head:], find), "head": pieces(row["prompt"][:head], find),
        "folded": f"The {head:,} characters before it, with which all prompts of this step begin",
        "passages": [
            (p.turn, p.tool, [(*piece, levels[at], ts[at]) for *piece, at in token_pieces(p, find)])
            for p in cut
        ],
        "of": [*(int(row[name]) for name in ("step", "group", "rollout")), by],
    }  # fmt: skip
    payload = {"columns": one_line(list(columns.values())), "rows": rows}
    # The browser builds its list anew only where this changes.
    version = hashlib.sha256(json.dumps(payload).encode()).hexdigest()
    data = payload | {"version": version, "chosen": name_of(row), "shown": shown}
    _component(data=data, key="reader", on_rollout_change=_on_rollout, on_token_change=_on_token)
