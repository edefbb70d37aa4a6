"""Tokens of a prompt: where they are looked at, the clickable, coloured view of them, and what one token says.

Token text is model output. It reaches the browser as JSON and the page through `textContent`; nothing of it is parsed
as HTML, Markdown or a template: the component only ever creates text nodes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import numpy as np
import pandas as pd
import streamlit as st
from data import Run
from streamlit.components.v2 import component
from widgets import box, chosen_runs, new_query_value, one_line, plain

from otb_analysis.answers.token_formula import token_details
from otb_analysis.errors import STOPS
from otb_analysis.figures.rollouts import distinct
from otb_analysis.figures.styles import number
from otb_analysis.figures.token_columns import color_levels, palette
from otb_analysis.figures.tokens import TokensInfo, grid_info
from otb_analysis.store.measured import token_steps
from otb_analysis.store.token_arrays import in_words, trained_label
from otb_analysis.types import Label


@dataclass(frozen=True)
class Place:
    """One prompt at one step of one run."""

    run: data.Run
    step: int
    group: int

    @property
    def rollouts(self) -> Any:
        """The rollouts of this prompt."""
        table = data.rollouts(self.run, self.step)
        return table[table["group"] == self.group]

    @property
    def tokens(self) -> Any:
        """The tokens of this prompt, with the baseline and advantage of the estimator that trained."""
        return data.tokens(self.run, self.step, self.group)

    @property
    def label(self) -> str:
        """Which step of which run."""
        return f"step {self.step} of {self.run.name}"


def choose_prompt(run: data.Run, step: int, within: Any) -> int:
    """Let the page choose a prompt, to begin with the one that holds most of the gradient, or has the largest tokens.

    Labels say in what it differs from the others, and its mean reward.
    """
    rollouts = data.rollouts(run, step)
    means: Any = rollouts.groupby("group")["reward"].mean()
    texts = distinct({int(str(g)): str(text) for g, text in rollouts.groupby("group")["prompt"].first().items()})
    labels = {group: f"{group} · reward {number(float(means[group]))} · {text}" for group, text in texts.items()}
    text = new_query_value("prompt") or ""
    wanted = int(text) if text.isdecimal() else st.session_state.get("prompt")
    if wanted not in labels:
        told = data.first_prompt(run, step)
        wanted = told if told in labels else next(iter(labels))
    # Set each time: at another step the same prompt has another label, which a browser would not learn otherwise.
    st.session_state["prompt"] = wanted
    return within.selectbox(
        "Prompt", list(labels), format_func=lambda group: labels.get(group, ""), key="prompt", persist_state="session"
    )


def choose_beside(here: Place, row: Any) -> Place | None:
    """Let the page choose where else to look at the same prompt: another step, or another of the chosen runs."""
    if not row.toggle("Side by side", key="two", bind="query-params", help="The same prompt at another step or run."):
        return None
    first: Any = here.rollouts.iloc[0]
    prompt_id = None if pd.isna(first["prompt_id"]) else str(first["prompt_id"])
    options = {}
    for run in chosen_runs():
        with_tokens = set(data.cached(run, token_steps))
        for step, group in data.occurrences(run, prompt_id, str(first["prompt"])):
            place = Place(run, step, group)
            if place != here and step in with_tokens:
                options[f"{place.label}, prompt {group}"] = place
    if not options:
        row.caption("No other step of the chosen runs has this prompt. Choose more runs in the sidebar.")
        return None
    of, run, nearest = st.session_state.get("_beside", (here, "", ""))
    if of != here and st.session_state.get("beside") == nearest:  # not chosen by hand: it goes with the step
        st.session_state.pop("beside", None)
    # The same step, else the nearest; of the run that stood beside before, if any.
    same = [name for name, place in options.items() if place.run.name == run] or list(options)
    nearest = min(same, key=lambda name: (options[name].step != here.step, abs(options[name].step - here.step)))
    beside = options[box(row, "Beside", "beside", list(options), nearest, width=220)]
    st.session_state["_beside"] = here, (name := beside.run.name), nearest
    at = {run.name: [p.step for p in options.values() if p.run.name == run.name] for run in chosen_runs()}
    if name != here.run.name and here.step not in at[name]:
        st.caption(plain(f"{name} has no tokens of this prompt at step {here.step}; step {beside.step} is shown."))
    if never := [run for run, steps in at.items() if not steps and run != here.run.name]:
        st.caption(plain(f"No step of {', '.join(never)} has this prompt."))
    return beside


_HERE = Path(__file__)
_STYLE, _SCRIPT = (_HERE.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
_component = component("otb_analysis.tokens", css=_STYLE, js=_SCRIPT)
KEY = "token_view"

MOST = 20_000
"""Most tokens whose texts and numbers a browser is given at once; of further rollouts it has the map."""
KINDS = {"tool": "not written by the policy, such as a tool's output", "special": "special token"}
"""How the legend calls the kinds of tokens."""
CARDS, CHARACTERS, LINES = 3, 40, 12  # beside one another in a wide window; of a line; that a box shows
LINE, HEAD, FOLD = 22, 60, 700  # pixels of a line, of what stands around those of a box, and of a window
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
    """Show all rollouts of a prompt, or of two side by side; return of how many only the map is shown.

    Args:
        columns: Columns to show where the mouse is, and how they are called.
        chosen: Its rollout has its text even if not all fit.
        on_token: Called when a token was chosen, which is then in the session: `KEY`, `token`.
        on_step: Called when another step was asked for; `step` then holds by how many.
    """
    scale, infos = panes[0].info.scale, [pane.info for pane in panes]
    rows = [
        _rows(pane, columns, chosen[1] if chosen and chosen[0] == k else None, MOST // len(panes))
        for k, pane in enumerate(panes)
    ]
    kinds = {kind for shown in rows for row in shown for kind in row.get("kinds", ())}
    missing = sum(info.n_missing for info in infos)
    marks = [("missing", f"not measured ({missing:,})")] if missing else []
    marks += [(kind, words) for kind, words in KINDS.items() if kind in kinds]
    below, above = any(info.n_below for info in infos), any(info.n_above for info in infos)
    payload: dict[str, Any] = {
        "panes": [{"title": one_line(pane.title), "rows": shown} for pane, shown in zip(panes, rows, strict=True)],
        "column": infos[0].column,
        "title": columns[infos[0].column],
        "columns": list(columns.items()),
        "colors": list(scale.colors),
        "palette": palette(scale),
        "quiet": 0.5 if scale.diverging else float(scale.backward),
        "low": "≤ " * below + number(scale.low),
        "high": "≥ " * above + number(scale.high) + " (log)" * (scale.log and not scale.diverging),
        "marks": marks,
        "wide": max(row.length for info in infos for row in info.rollouts) > LONG,
    }
    narrow = len(panes) > 1 or payload["wide"]
    per_row = 1 if narrow or st.session_state.get("_narrow") else CARDS
    lines = [1 + sum(map(len, row.get("texts", ()))) // CHARACTERS for shown in rows for row in shown]
    tall = [min(LINES, n) * LINE + HEAD for n in lines]
    height = HEAD + sum(max(tall[first : first + per_row]) for first in range(0, len(tall), per_row)) // len(panes)
    # What stands below does not move when the tokens have been drawn.
    st.html(f"<style>.st-key-{KEY} {{ min-height: {min(height, FOLD)}px; }}</style>")
    # The browser builds its page anew only where this changes.
    version = hashlib.sha256(json.dumps(payload, ensure_ascii=False).encode()).hexdigest()
    data = payload | {"version": version, "chosen": chosen}
    _component(data=data, key=KEY, on_token_change=on_token, on_step_change=on_step)
    return sum("texts" not in row for shown in rows for row in shown)


def _rows(pane: Pane, columns: Mapping[str, str], chosen: int | None, most: int) -> list[dict[str, Any]]:
    """Return all rollouts: those that fit and the chosen one with four digits of each value, the others as cells."""
    ends, grid = np.cumsum([len(row.rows) for row in pane.info.rollouts]), grid_info(pane.info)
    fits, levels = max(1, int((ends <= most).sum())), color_levels(grid.values.astype(float), pane.info.scale)
    rows = []
    for i, row in enumerate(pane.info.rollouts):
        rows.append(one_line({
            "rollout": row.rollout,
            "reward": number(row.reward),
            "parts": ", ".join(f"{name} {number(value)}" for name, value in row.parts),
            "facts": [f"{row.length:,} token{'s' * (row.length != 1)}", *([row.finish] if row.finish else [])],
            "warning": row.warning,
        }))  # fmt: skip
        if i >= fits and row.rollout != chosen:
            cells = -(-len(row.rows) // grid.width)
            ts = row.rows["t"].to_numpy()[grid.token[i, :cells]]
            rows[-1] |= {"ts": ts.tolist(), "levels": levels[i, :cells].tolist(), "width": grid.width}
            continue
        values = row.rows[list(columns)].to_numpy(np.float64, na_value=np.nan)
        size = np.where(np.isfinite(values) & (values != 0), np.abs(values), 1.0)
        unit = 10.0 ** (np.floor(np.log10(size)) - 3)
        rounded = np.round(values / unit) * unit
        by_column = [[None if v != v else v for v in column] for column in rounded.T.tolist()]
        rows[-1] |= {**row.tokens, "values": dict(zip(columns, by_column, strict=True))}
    return rows


HELP = {
    "weight": "How much this rollout's return counts in B: what B gains when its reward grows by 1.",
    "return": "What the weight multiplies: the return from this position on, or the total return.",
    "w": "Energy of the rollout's token at this position.",
    "W": "Energy realized up to this position, or to the rollout's end.",
}


def token_panel(
    run: Run, step: int, group: int, tokens: pd.DataFrame, token: tuple[int, int], label: Label | None
) -> None:
    """Show the numbers of a token as stored, beside the formula of an estimator with them."""
    formula, error = None, None
    try:
        if label is not None:
            formula = data.written_out(run, step, group, label, *token)
    except STOPS as refused:
        error = refused
    of_trained = formula if label == trained_label(run.estimator, data.answers(run).config) else None
    stored = token_details(tokens, *token, run.estimator, of_trained)
    if stored is None:
        st.caption(f"Rollout {token[0]} has no token {token[1]} here; choose another.")
        return
    left, right = st.columns([5, 6])
    with left:
        line = st.container(horizontal=True, vertical_alignment="center")
        line.caption(f"token {stored.t} of rollout {stored.rollout}", width="content")
        line.code(stored.text, language=None, width="content")
        pairs(stored.formulas)
    with right:
        if error is not None:
            st.warning(plain(str(error)), icon=":material/warning:")
        if formula is None or label is None:
            return
        st.caption(f"Baseline and advantage of **{plain(in_words(label))}**")
        pairs(formula.lines)
        terms = formula.terms.assign(rollout=["this" if r == token[0] else str(r) for r in formula.terms["rollout"]])
        if not formula.is_sum:
            st.caption("This baseline is no weighted sum of returns.")
            terms = terms.drop(columns="weight")
        columns: dict[str, Any] = {n: st.column_config.NumberColumn(format="%.3g", help=h) for n, h in HELP.items()}
        st.dataframe(terms, hide_index=True, column_config=columns, height=min(220, 38 + 35 * len(terms)))


def pairs(lines: tuple[tuple[str, str], ...]) -> None:
    """Show names and formulas as a table of text."""
    table = pd.DataFrame(lines, columns=["quantity", "with this token's numbers"])
    st.table(table.map(plain), border="horizontal", hide_index=True, hide_header=True)
