"""The clickable, coloured tokens: a component that only ever creates text nodes.

Token text is model output. It reaches the browser as JSON and the page through `textContent`; nothing of it is parsed
as HTML, Markdown or a template.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from streamlit.components.v2 import component

from otb_analysis.figures.numbers import number
from otb_analysis.figures.tokens import Token, TokensInfo

_HERE = Path(__file__)
_STYLE, _SCRIPT = (_HERE.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
_component = component("otb_analysis.tokens", css=_STYLE, js=_SCRIPT)


def token_view(
    info: TokensInfo,
    tokens: pd.DataFrame,
    finish: Mapping[int, object],
    columns: Sequence[str],
    chosen: tuple[int, int] | None,
) -> tuple[int, int] | None:
    """Show all rollouts of one prompt; return (rollout, t) of a token that was just clicked.

    Args:
        finish: Finish reason by rollout.
    """
    texts = [[number(v) if v == v else "" for v in tokens[c].astype(float)] for c in columns]
    values = dict(zip(zip(tokens["rollout"], tokens["t"], strict=True), zip(*texts, strict=True), strict=True))
    rows = [
        {
            "rollout": row.rollout,
            "reward": number(row.reward),
            "length": row.length,
            "finish": str(finish.get(row.rollout) or ""),
            "tokens": [[t.t, t.text, t.breaks, _kind(t), t.color, t.ink, values[row.rollout, t.t]] for t in row.tokens],
        }
        for row in info.rollouts
    ]
    marks = [("missing", f"not measured ({info.n_missing:,})")] if info.n_missing else []
    if any(t.tool for row in info.rollouts for t in row.tokens):
        marks.append(("tool", "tool output, not sampled by the policy"))
    payload = {
        "rows": rows,
        "column": info.column,
        "columns": list(columns),
        "colors": list(info.scale.colors),
        "low": ("≤ " if info.n_below else "") + number(info.scale.low),
        "high": ("≥ " if info.n_above else "") + number(info.scale.high) + (" (log)" if info.scale.log else ""),
        "marks": marks,
        "chosen": list(chosen) if chosen else None,
    }
    result = _component(data=payload, key="token_view", on_token_change=lambda: None)
    clicked = getattr(result, "token", None)
    return (int(clicked[0]), int(clicked[1])) if clicked else None


def _kind(token: Token) -> str:
    """Return the class of the page's style that a token has beside `tok`."""
    if token.tool:
        return "tool"
    return "missing" if token.color is None else ""
