"""Fidelity: does the cheap proxy say what the exact norm says?"""

import data
import streamlit as st
from widgets import chart, one_run, page

from otb_analysis.figures.fidelity import (
    COEFFICIENTS,
    fidelity_table,
    gain_lost_words,
    plot_fidelity,
    plot_fidelity_steps,
)
from otb_analysis.figures.numbers import number

CALIBRATED = "c·proxy^b, fitted at each step to the tokens measured there. c changes no baseline, the exponent b does."
KINDS = {"token": "token energy w", "realized": "realized energy W"}

ENERGY = "A token's energy w_t is its ‖∇ log π‖². OTB weights by W_t, the sum of w_j over the tokens so far."
WITHIN = "Within: among rollouts of one prompt at one position, the only comparison OTB makes. Pooled: all tokens."
DRAWN = (
    "No group was measured whole: these tokens were drawn with unequal probabilities, so large energies are "
    "over-represented in the figure and in the correlations. "
)
LEFT_OUT = "Tokens that were drawn one by one, large energies more often, are left out. "
LOST = (
    "(e_exact − e_proxy)/(e_exact − e_rloo), e the efficiency of otb over all measured steps. 0: the proxy costs "
    "nothing. 1: the gain over rloo is gone. A dash: no interval, or exact energies show no gain. "
    "Judge a proxy by this, not by a correlation."
)


with page("Fidelity", "Can the proxy, free in the forward pass, stand in for the exact gradient norm of a token?"):
    run = one_run()
    controls = st.container(horizontal=True)
    kind = controls.segmented_control(
        "Energy", list(KINDS), format_func=lambda k: KINDS[k], default="token", key="kind", bind="query-params",
        required=True, help=ENERGY,
    )  # fmt: skip
    known = data.cheap_sources(run)
    source = "proxy"
    if len(known) > 1:
        source = str(controls.segmented_control(
            "Against exact", known, default="proxy", key="source", bind="query-params", required=True,
            help=CALIBRATED,
        ))  # fmt: skip
    measured = data.fidelity(run, str(kind), source)
    info = measured.info
    places = st.columns(len(COEFFICIENTS) + 1)
    for place, (key, title) in zip(places, COEFFICIENTS, strict=False):
        within = getattr(info.overall.within, key) if info.overall.within else None
        pooled = getattr(info.overall.pooled, key)
        place.metric(
            f"{title} within", number(within), f"{number(pooled)} pooled",
            delta_color="off", delta_arrow="off", help=WITHIN,
        )  # fmt: skip
    share, rests_on = gain_lost_words(data.lost_by_proxy(run, source))
    places[-1].metric(
        "OTB's gain lost by the proxy", share, rests_on,
        delta_color="off", delta_arrow="off", help=LOST,
    )  # fmt: skip
    left, right = st.columns(2)
    with left:
        chart(plot_fidelity(info), "fidelity")
    with right:
        chart(plot_fidelity_steps(info), "fidelity-steps")
    part = "all" if measured.loaded == measured.total else f"{measured.loaded:,} of"
    st.caption(
        f"{info.n_tokens:,} tokens compared, from {part} {measured.total:,} with an exact norm. "
        + (f"{info.n_zero:,} with a zero energy are not drawn on the logarithmic axes. " if info.n_zero else "")
        + (DRAWN if info.drawn else LEFT_OUT if info.n_tokens < measured.loaded and len(known) > 1 else "")
        + "OTB compares only rollouts of one prompt at one position, so the correlations within decide. "
        "The pooled ones also count differences between positions and prompts, which OTB never sees."
    )
    table = fidelity_table(info)
    with st.expander("Numbers by step"):
        st.dataframe(
            table, hide_index=True,
            column_config={c: st.column_config.NumberColumn(format="%.3f") for c in table.columns[3:]},
        )  # fmt: skip
