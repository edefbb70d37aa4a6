"""Variance: every estimator on the same rollouts, over steps and in one comparison."""

from typing import Any

import data
import listing
import streamlit as st
from widgets import chart, one_run, page, plain

from otb_analysis.figures.comparison import comparison_info, comparison_table, display_table, plot_comparison
from otb_analysis.figures.gradient_table import MEASURES, NOISE_SCALE
from otb_analysis.figures.variance import VarianceInfo, plot_variance, variance_info
from otb_analysis.statistics import MIN_CLUSTERS

USUAL = ("none", "group_mean", "rloo", "otb", "otb_loo", "energy_across_loo", "energy_regression", "value")
NOT_MEASURED = """This run has no gradient measurements yet. They are made at scheduled steps:
`otb train --measure.exact.every 10 --measure.exact.prompts 16` measures 16 whole groups exactly every 10 steps.
For recorded rollouts `otb audit --model DIR --rollouts FILE` measures them."""
SOURCES = {"exact": "exact norms", "proxy": "proxy", "calibrated": "calibrated proxy", "both": "all"}


def by_source(table: Any, source: str) -> Any:
    """Keep estimators that read no energy, and those that read this kind."""
    return table if source == "both" else table[table["energy_source"].isin(["none", source])]


def choose_estimators(table: Any, trained: str) -> list[str]:
    """Let the page choose estimators, for both figures; the usual ones and the one that trains to begin with."""
    names = list(dict.fromkeys(table["estimator"]))
    usual = [n for n in names if n in (*USUAL, trained)] or names[:8]
    return st.multiselect("Estimators", names, default=usual, key="estimator", bind="query-params", wrap=True)


def over_steps(table: Any, chosen: list[str], window: int) -> None:
    """Draw the four measures over steps."""
    info = variance_info(table, chosen)
    chart(plot_variance(info), "variance", table[table["estimator"].isin(chosen)])
    st.caption(footnote(info, window))
    with st.expander("What these are"):
        for title, formula in (*((measure.title, measure.formula) for measure in MEASURES), NOISE_SCALE):
            st.markdown(f"**{plain(title)}** = {plain(formula)}")
        st.markdown(
            "Halving the step also cuts variance, so compare estimators by efficiency or SF, not by variance alone."
        )


def footnote(info: VarianceInfo, window: int) -> str:
    """Say what a point rests on."""
    low, high = info.n_prompts
    prompts = f"{low}" if low == high else f"{low}–{high}"
    intervals = (
        "Bars: 95 % intervals clustered by prompt."
        if info.has_intervals
        else f"Points only: an interval needs {MIN_CLUSTERS} prompts; pool more measured steps or measure more prompts."
    )
    hidden = sum(info.hidden)
    lost = f" {hidden} values at or below 0 cannot be drawn on a logarithmic axis." if hidden else ""
    others = " and the others proved unbiased" if info.c_known else ""
    against = f" ∇J is estimated by {', '.join(info.reference)}{others} on other prompts." if info.reference else ""
    if info.undefined:
        lost += (
            f" {info.undefined:,} of {info.n_points:,} points have no efficiency, and where c is not proved no SF or "
            "projection: too few prompts to tell ∇J from noise."
        )
    return f"{prompts} prompts a step, {window} measured step{'s' * (window > 1)} per point. {intervals}{against}{lost}"


def compared(run: listing.Run, source: str, estimators: list[str]) -> None:
    """Draw the forest plot and its table."""
    grams = data.grams(run)
    if not grams:
        st.info("A comparison needs the Gram matrices of measured steps; this run has none.", icon=":material/inbox:")
        return
    left, right = st.columns(2)
    steps = ["all measured steps", *map(str, grams)]
    step = left.selectbox("Measured steps", steps, key="at", bind="query-params")
    names = list(dict.fromkeys(m for gram in grams.values() for m, _ in gram.labels))
    against = right.selectbox(
        "Compare with", names, index=names.index("rloo") if "rloo" in names else 0,
        key="against", bind="query-params",
    )  # fmt: skip
    chosen = list(grams.values()) if step == steps[0] else [grams[int(str(step))]]
    info = comparison_info(chosen, str(against), source, estimators, data.known(run))
    chart(plot_comparison(info), "comparison", comparison_table(info))
    st.caption(f"{info.estimand} Noise scale: the number of prompts at which an update's noise equals its signal.")
    shown = display_table(info)
    three = st.column_config.NumberColumn(format="%.3g")
    columns: dict[str, Any] = dict.fromkeys(shown.select_dtypes("number").columns, three)
    columns["estimator"] = st.column_config.TextColumn(width=170)
    st.dataframe(shown, hide_index=True, height="content", placeholder="–", column_config=columns)


with page("Variance", "How noisy is the gradient under each baseline, on the same rollouts and at equal progress?"):
    run = one_run()
    if data.statistics(run, 1).empty:
        st.info(NOT_MEASURED, icon=":material/inbox:")
        st.stop()
    st.markdown(plain(" ".join(data.conclusion(run))))
    left, right = st.columns([3, 2])
    calibrated = bool((data.statistics(run, 1)["energy_source"] == "calibrated").any())
    offered = [s for s in SOURCES if calibrated or s != "calibrated"]
    source = left.segmented_control(
        "Weights from", offered, format_func=lambda s: SOURCES[s],
        default="exact", key="energy", bind="query-params", required=True,
    )  # fmt: skip
    window = right.slider(
        "Measured steps pooled into one point", 1, data.MAX_WINDOW, data.default_window(run),
        key="pool", bind="query-params",
        help="More prompts in a point, narrower intervals. Ratios are of averages, not averages of ratios.",
    )  # fmt: skip
    table = by_source(data.statistics(run, window), str(source))
    estimators = choose_estimators(table, run.estimator)
    st.subheader("Over training", anchor=False)
    over_steps(table, estimators, window)
    st.subheader("Side by side", anchor=False)
    compared(run, str(source), estimators)
