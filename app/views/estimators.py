"""Estimators: which baseline makes the gradient less noisy, and what the proxy costs."""

import comparing
import proxy
import selection
import streamlit as st
from widgets import go_to, one_run, page

PARTS = {"comparison": "Comparison", "proxy": "Proxy"}

with page("Estimators", "Which baseline makes the gradient less noisy, and what does the proxy cost?"):
    if st.session_state.pop("_tokens", False):
        go_to("tokens")
    run = one_run()
    st.session_state["part"] = asked if (asked := selection.remembered("part")) in PARTS else "comparison"
    part = st.segmented_control(
        "Part", list(PARTS), format_func=lambda name: PARTS[name], key="part", required=True,
        label_visibility="collapsed", on_change=lambda: selection.remember("part", st.session_state["part"]),
    )  # fmt: skip
    selection.remember("part", part)
    (proxy.proxy if part == "proxy" else comparing.comparison)(run)
