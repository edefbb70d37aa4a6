"""What one token says: its numbers, and the chosen estimator's formula with them."""

from typing import Any

import estimating
import pandas as pd
import streamlit as st
from listing import Run
from plain_text import plain

from otb_analysis.errors import STOPS
from otb_analysis.figures.token_details import details_beside
from otb_analysis.store.prompt import in_words
from otb_analysis.types import Label

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
    found, error = None, None
    try:
        if label is not None:
            found = estimating.written_out(run, step, group, label, *token)
    except STOPS as refused:
        error = refused
    of_trained = found if label == estimating.trained(run) else None
    stored = details_beside(of_trained, tokens, *token, run.estimator)
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
        if found is None or label is None:
            return
        st.caption(f"Baseline and advantage of **{plain(in_words(label))}**")
        pairs(found.lines)
        terms = found.terms.assign(rollout=["this" if r == token[0] else str(r) for r in found.terms["rollout"]])
        if not found.is_sum:
            st.caption("This baseline is no weighted sum of returns.")
            terms = terms.drop(columns="weight")
        columns: dict[str, Any] = {n: st.column_config.NumberColumn(format="%.3g", help=h) for n, h in HELP.items()}
        st.dataframe(terms, hide_index=True, column_config=columns, height=min(220, 38 + 35 * len(terms)))


def pairs(lines: tuple[tuple[str, str], ...]) -> None:
    """Show names and formulas as a table of text."""
    table = pd.DataFrame(lines, columns=["quantity", "with this token's numbers"])
    st.table(table.map(plain), border="horizontal", hide_index=True, hide_header=True)
