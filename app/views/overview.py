"""Overview: which runs there are, how they differ, whether they learn."""

from typing import Any

import data
import listing
import pandas as pd
import streamlit as st
from widgets import chart, curves_table, download, page, plain, reasons, selection

from otb_analysis.figures.learning import learning_info, plot_learning
from otb_analysis.figures.numbers import number
from otb_analysis.figures.runs import WINDOW, Headline, config_differences

REWARD = "Mean of the last tenth of the steps; change since the first tenth."
HELDOUT = "Last evaluation; change since the first."
# Decimals of rewards, rounded here for cards and table alike: a browser rounds 0.5625 up, Python to even.
DIGITS = 3


def card(headline: Headline, status: str) -> None:
    """Show one run in four numbers."""
    steps = f"{headline.steps} step{'s' * (headline.steps != 1)}"
    with st.container(border=True, width=250, height="stretch"):
        st.markdown(f"**{plain(headline.run)}**")
        st.caption(f"{plain(headline.estimator) or 'estimator unknown'} · {steps} · {status}")
        upper = st.columns(2)
        share = None if headline.clipped is None else f"{headline.clipped:.0%}"
        upper[0].metric("Reward", reward(headline.reward), **gain(headline.reward_gain), help=REWARD)
        upper[1].metric("Held-out", reward(headline.heldout), **gain(headline.heldout_gain), help=HELDOUT)
        st.caption(f"last {min(WINDOW, headline.steps)} steps:")
        lower = st.columns(2)
        lower[0].metric("Grad norm", number(headline.grad_norm), help="Median of ‖ḡ‖ before clipping.")
        lower[1].metric("Clipped", share or "–", help="Share of these steps whose gradient was clipped.")


def reward(value: float | None) -> str:
    """Return a reward as text; a dash where there is none."""
    return "–" if value is None else f"{value:.{DIGITS}f}"


def gain(change: float | None) -> dict[str, Any]:
    """Return how a change since the start of the run is shown; a dash keeps the cards aligned."""
    if change is None:
        return {"delta": "–", "delta_arrow": "off", "delta_color": "off"}
    return {"delta": f"{change:+.3f}"}


def run_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the run list as it is shown."""
    shown = pd.DataFrame({"run": table["run"], "status": table["status"]})
    shown["estimator"] = [listing.estimator_names(table).get(run) or "–" for run in table["run"]]
    shown["steps"] = table["n_steps"]
    for name in ("reward_first", "reward_last", "heldout_reward", "grad_norm_median", "n_tokens", "seconds", "created"):
        shown[name] = [round(x, DIGITS) for x in table[name]] if "reward" in name else table[name]
    return shown


with page("Overview", "Which runs are there, do they learn, and in what do they differ?"):
    table = st.session_state["_runs"]
    st.dataframe(
        run_table(table),
        hide_index=True,
        height="content" if len(table) < 10 else 390,
        placeholder="–",
        column_config={
            "reward_first": st.column_config.NumberColumn("reward, first", format="%.3f", help="First tenth of steps."),
            "reward_last": st.column_config.NumberColumn("reward, last", format="%.3f", help="Last tenth of steps."),
            "heldout_reward": st.column_config.NumberColumn("held-out", format="%.3f"),
            "grad_norm_median": st.column_config.NumberColumn(
                "grad norm, all steps", format="%.3g", help="Median of ‖ḡ‖ before clipping."
            ),
            "n_tokens": st.column_config.NumberColumn("tokens", format="localized"),
            "seconds": st.column_config.NumberColumn("seconds", format="%.0f"),
            "created": st.column_config.DatetimeColumn("created", format="YYYY-MM-DD HH:mm"),
        },
    )
    if st.session_state["_any"]:
        reasons(table)
    chosen = selection()
    with st.container(horizontal=True):
        for run in chosen:
            card(data.headline(run), run.status)

    st.subheader("Learning curves", anchor=False)
    window = st.slider("Running mean over steps", 1, 100, 10, key="smooth", bind="query-params", width=320)
    info = learning_info(data.steps(chosen), {run.name: run.estimator for run in chosen}, window)
    chart(plot_learning(info), "learning", curves_table(info))

    st.subheader("Configuration differences", anchor=False)
    differences = config_differences({run.name: data.config(run) for run in chosen})
    if len(chosen) < 2:
        st.caption("Choose two or more runs to compare their configurations.")
    elif differences.table.empty:
        st.caption(f"These runs have the same configuration. {differences.note}")
    else:
        st.dataframe(differences.table, hide_index=True)
        if differences.note:
            st.caption(differences.note)
        download(differences.table, "config-differences")
