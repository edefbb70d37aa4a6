"""The second half of the page Estimators: what it costs to weigh by the proxy instead of exact norms."""

from dataclasses import replace

import data
import scripts
import streamlit as st
from address import segments
from listing import Run
from widgets import chart, clicked_data, go_to

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
    "nothing. 1: the gain over rloo is gone. A dash: no interval, or exact energies show no gain."
)


def exactly(run: Run) -> Run:
    """Return a run whose stamp changes only when more tokens have an exact norm: reading all of them takes long."""
    steps = data.store(run).steps_with("tokens", "grad_norm_sq")
    return replace(run, stamp=f"{data.measured(run).stamp} {hash(tuple(steps))}")


def proxy(run: Run) -> None:
    """Say what the proxy costs, then how it agrees with exact norms."""
    controls = st.container(horizontal=True)
    kind = segments(controls, "Energy", "kind", KINDS, help=ENERGY)
    run = exactly(run)
    cheap = data.cheap_sources(run)
    source = segments(controls, "Against exact", "source", cheap, help=CALIBRATED) if len(cheap) > 1 else "proxy"
    measured = data.fidelity(run, kind, source)
    info = measured.info
    share, rests_on = gain_lost_words(data.lost_by_proxy(data.measured(run), source))
    places = st.columns([2, *(1 for _ in COEFFICIENTS)])
    places[0].metric("OTB's gain lost by the proxy", share, rests_on, delta_color="off", delta_arrow="off", help=LOST)
    for place, (key, title) in zip(places[1:], COEFFICIENTS, strict=True):
        within = getattr(info.overall.within, key) if info.overall.within else None
        pooled = getattr(info.overall.pooled, key)
        place.metric(
            f"{title} within", number(within), f"{number(pooled)} pooled",
            delta_color="off", delta_arrow="off", help=WITHIN,
        )  # fmt: skip
    st.caption("Judge the proxy by what it costs, not by a correlation.")
    left, right = st.columns(2)
    with left:
        python = scripts.FIDELITY.format(path=run.path, kind=kind, source=source)
        chart(plot_fidelity(info), "fidelity", info.far, python, clicked=token_clicked)
    with right:
        python = scripts.FIDELITY_STEPS.format(path=run.path, kind=kind, source=source)
        chart(plot_fidelity_steps(info), "fidelity-steps", fidelity_table(info), python)
    part = "all" if measured.loaded == measured.total else f"{measured.loaded:,} of"
    slope = (
        "" if info.line is None else f"Dashed: exact ∝ {info.source}^{info.line[1]:.2f}, least squares of logarithms. "
    )
    st.caption(
        f"{slope}Circles: the {len(info.far)} tokens furthest from it; click one to open it. "
        f"{info.n_tokens:,} tokens compared, from {part} {measured.total:,} with an exact norm. "
        + (f"{info.n_zero:,} with a zero energy are not drawn on the logarithmic axes. " if info.n_zero else "")
        + (DRAWN if info.drawn else LEFT_OUT if info.n_tokens < measured.loaded and len(cheap) > 1 else "")
        + "OTB compares only rollouts of one prompt at one position, so the correlations within decide. "
        "The pooled ones also count differences between positions and prompts, which OTB never sees."
    )


def token_clicked() -> None:
    """Select the token whose circle was clicked; the page that is drawn next opens it."""
    if len(token := clicked_data("fidelity")) == 4:
        step, group, rollout, t = map(int, token)
        go_to("tokens", step=step, prompt=group, token=f"{rollout}.{t}")
