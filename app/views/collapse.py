"""Collapse: what moves before, while and after a run falls apart."""

import data
import streamlit as st
from widgets import chart, curves_table, page, selection

from otb_analysis.figures import collapse_info, degenerate_table, plot_collapse

with page("Collapse", "Is training healthy: gradient, entropy, length, reward, and how heavy the energy tail is?"):
    chosen = selection()
    left, right = st.columns([2, 1], vertical_alignment="bottom")
    window = left.slider("Running mean over steps", 1, 100, 10, key="smooth", bind="query-params", width=320)
    log_y = right.toggle("Logarithmic axes", key="log", bind="query-params")
    steps = data.steps(chosen)
    info = collapse_info(steps, {run.name: run.estimator for run in chosen}, window)
    chart(plot_collapse(info, log_y=log_y), "collapse", curves_table(info))
    st.caption(
        "Lines are running means, recorded values stand faintly behind them. Pareto-k ≥ .5 on token energies makes the "
        "standard error of a variance estimate unreliable; infinite gradient variance needs k ≥ 1. A group whose "
        "rewards are all equal has no gradient under any group baseline."
    )
    st.subheader("Degenerate input", anchor=False)
    st.caption("Legal input that teaches little or cannot be measured, counted over all steps; never an error.")
    st.dataframe(degenerate_table(steps), hide_index=True, placeholder="–")
