"""The first half of the page Estimators: every estimator on the same rollouts, in one comparison and over steps."""

import shlex
from pathlib import Path
from typing import Any

import data
import listing
import scripts
import streamlit as st
from address import box, segments
from listing import Run
from plain_text import plain
from widgets import chart, chosen_runs, errors_as_sentences

from otb_analysis.answers.sentences import NOT_MEASURED
from otb_analysis.figures.comparison import comparison_table, display_table, plot_comparison
from otb_analysis.figures.gradient_table import MAX_WINDOW, MEASURES, NOISE_SCALE
from otb_analysis.figures.planner import planner_table, planner_words, plot_planner, sizes_display
from otb_analysis.figures.variance import VarianceInfo, plot_variance, variance_info
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.types import Label

USUAL = ("none", "group_mean", "rloo", "otb", "otb_loo", "energy_across_loo", "energy_regression", "value")
SOURCES = {"exact": "exact norms", "proxy": "proxy", "calibrated": "calibrated proxy", "both": "all"}
ALL = "all measured steps"


def comparison(run: Run) -> None:
    """Draw the sentence, the forest, the noise scale, the planner and the measures over steps."""
    followed, run = run, data.measured(run)
    measured = data.measured_labels(run)
    if not measured:
        st.info(plain(NOT_MEASURED), icon=":material/inbox:")
        return
    verdict = st.empty()  # its place; the figure is there sooner
    verdict.markdown("Comparing the estimators …")
    sources = [s for s in SOURCES if s != "calibrated" or any(of == s for _, of in measured)]
    left, middle, right = st.columns([3, 2, 2], vertical_alignment="bottom")
    source = segments(left, "Weights from", "energy", {of: SOURCES[of] for of in sources}, "proxy")
    names = list(dict.fromkeys(name for name, of in measured if source == "both" or of in ("none", source)))
    against = box(middle, "Compare with", "against", names, "rloo")
    step = box(right, "Measured steps", "at", [ALL, *map(str, data.answers(run).grams)])
    usual = [n for n in names if n in (*USUAL, run.estimator)] or names[:8]
    # What is usual depends on what trained, so each run has a choice of its own.
    estimators = st.multiselect("Estimators", names, usual, key=f"shown-{run.name}", bind="query-params", wrap=True)
    forest(run, source, against, step, estimators)
    with verdict.container(), errors_as_sentences():
        first, *rest = data.answers(run).lines
        st.markdown("  \n".join([f"**{plain(first)}**", *map(plain, rest)]))
    if len(names := [chosen.name for chosen in chosen_runs()]) > 1:
        elsewhere = [] if (root := listing.root()) == Path("runs").resolve() else ["--root", str(root)]
        command = shlex.join(["otb", "compare", *names, *elsewhere])
        st.caption(plain(f"This is {run.name} alone. All of them together: {command}"))
    if data.answers(run).alarm:
        return  # what follows plans and follows a training whose gradients these are not
    with errors_as_sentences():
        # It reads the rewards of all steps: while a run goes on, once for each measured step.
        planned(run if followed.status == "running" and measured else followed)
    chosen = [(name, of) for name, of in measured if name in estimators]
    over_steps(run, frozenset(label for label in chosen if source == "both" or label[1] in ("none", source)))


def forest(run: Run, source: str, against: str, step: str, estimators: list[str]) -> None:
    """Draw the forest plot, its table and the noise scale."""
    if (measured := data.answers(run).measured) is None:
        st.info("A comparison needs the Gram matrices of measured steps; this run has none.", icon=":material/inbox:")
        return
    info = data.comparison(run, None if step == ALL else int(step), against, source, tuple(estimators))
    st.caption(plain(info.words))
    python = scripts.COMPARISON.format(path=run.path, against=against, source=source, estimators=estimators)
    chart(plot_comparison(info), "comparison", comparison_table(info), python)
    if measured.noise_scale_line:
        st.markdown(f"**{plain(measured.noise_scale_line)}**")
    with st.expander("Numbers, and what they are"):
        shown = display_table(info)
        columns: dict[str, Any] = dict.fromkeys(
            shown.select_dtypes("number").columns, st.column_config.NumberColumn(format="%.3g")
        )
        columns["estimator"] = st.column_config.TextColumn(width=170)
        st.dataframe(shown, hide_index=True, height="content", placeholder="–", column_config=columns)
        for title, formula in (*((measure.title, measure.formula) for measure in MEASURES), NOISE_SCALE):
            st.markdown(f"**{plain(title)}** = {plain(formula)}")
        st.markdown("A shorter step has less variance anyway: compare by efficiency or by variance at equal progress.")


def planned(run: Run) -> None:
    """Draw how efficient the same rollouts would be in groups of other sizes."""
    planner = data.answers(run).planner
    if not (planner.cells or planner.note):
        return
    st.subheader("Budget planner", anchor=False)
    if len(sizes_display(planner)):
        st.caption(planner_words(planner))
        python = scripts.PLANNER.format(path=run.path)
        chart(plot_planner(planner), "planner", planner_table(planner), python)
    st.markdown(plain(planner.note))


@st.fragment  # its slider draws this part of the page again, and no other
def over_steps(run: Run, labels: frozenset[Label]) -> None:
    """Draw the four measures over steps."""
    st.subheader("Over training", anchor=False)
    st.caption("Does what holds over all steps hold at each of them?")
    window = st.slider(
        "Measured steps pooled into one point", 1, MAX_WINDOW, data.default_window(run), key=f"pool-{run.name}",
        bind="query-params", width=420,
        help="More prompts in a point, narrower intervals. Ratios are of averages, not averages of ratios.",
    )  # fmt: skip
    table = data.statistics(run, window, labels)
    if table.empty:
        return
    info = variance_info(table)
    python = (
        scripts.VARIANCE.format(path=run.path, window=window, labels=sorted(labels)) if data.answers(run).grams else ""
    )
    chart(plot_variance(info), "variance", table, python)
    st.caption(footnote(info, window))


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
    hollow = any(trace.style.symbol.endswith("-open") for traces in info.traces for trace in traces)
    lost += " Open marks only tell estimators apart." * hollow
    reference = ", ".join(info.reference)
    against = f" The true gradient is estimated by {reference}{others} on other prompts." if reference else ""
    if info.undefined:
        lost += (
            f" {info.undefined:,} of {info.n_points:,} points have no efficiency, nor variance at equal progress where "
            "the step length is not proved: too few prompts to tell the true gradient from noise. Pool more steps, or "
            "compare by the ratios above."
        )
    return f"{prompts} prompts a step, {window} measured step{'s' * (window > 1)} per point. {intervals}{against}{lost}"
