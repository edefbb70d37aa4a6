"""Estimators: which baseline makes the gradient less noisy, and what the proxy costs."""

import comparing
import proxy
import streamlit as st
from widgets import one_run, page

PARTS = {"comparison": "Comparison", "proxy": "Proxy"}

with page("Estimators", "Which baseline makes the gradient less noisy, and what does the proxy cost?"):
    if st.session_state.pop("_tokens", False):
        st.switch_page("views/tokens.py")
    run = one_run()
    part = st.segmented_control(
        "Part", list(PARTS), format_func=lambda name: PARTS[name], default="comparison", key="part",
        bind="query-params", required=True, label_visibility="collapsed",
    )  # fmt: skip
    (proxy.proxy if part == "proxy" else comparing.comparison)(run)
