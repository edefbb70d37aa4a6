"""Estimators: which baseline makes the gradient less noisy on the same rollouts, and what the proxy costs."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import data
import scripts
import streamlit as st
from data import Run
from widgets import COMMAND, box, chart, clicked_data, compared_runs, frame, go_to, one_line, one_run, plain, sentences

from otb_analysis.answers.measured import FORMULAS, SHORTER, forest_words, not_measured, planner_words
from otb_analysis.answers.proxy import gain_lost_words
from otb_analysis.figures import pairs
from otb_analysis.figures.comparison import (
    RATIOS,
    ComparisonInfo,
    comparison_table,
    display_table,
    planner_display,
    planner_table,
    plot_comparison,
    plot_planner,
)
from otb_analysis.figures.curves import curves_table, plot_learning
from otb_analysis.figures.fidelity import COEFFICIENTS, fidelity_table, plot_fidelity, plot_fidelity_steps
from otb_analysis.figures.fidelity import SOURCES as COLUMNS
from otb_analysis.figures.styles import number
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.store.measured import cheap_energies
from otb_analysis.types import Label

BANDS = (
    "A point is a block of measured steps; bands are its 95 % intervals clustered by prompt, where it has "
    f"{MIN_CLUSTERS} prompts. "
)
UNTOLD = "Not shown: {}, which too few prompts tell from noise in every block; measure more prompts."
PARTS = {"comparison": "Comparison", "proxy": "Proxy"}
WORDS = (
    "**Variance at equal progress** (SF): the noise of an update, scaled to one length along the true gradient; below "
    "1 is less noise than that of the one compared with. **Efficiency**: the share of an update that goes along the "
    "true gradient. **Proxy**: a token's energy as the logits show it, which is free; **exact norms** are measured."
)
USUAL = ("none", "group_mean", "rloo", "otb", "otb_loo", "energy_across_loo", "energy_regression", "value")
SOURCES = {"exact": "exact norms", "proxy": "proxy", "calibrated": "calibrated proxy", "both": "all"}
ALL = "all measured steps"
POOLED = 4  # Most runs that are pooled without being asked: each takes some tenths of a second
CALIBRATED = "c·proxy^b, fitted at each step to the tokens measured there. c changes no baseline, the exponent b does."
THREE = st.column_config.NumberColumn(format="%.3g")
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


@st.fragment  # its box draws this part of the page again, and no other
@frame()
def over_steps(run: Run, against: Label, measured: dict[str, Label]) -> None:
    """Draw up to three estimators over the one that all are compared with, over training."""
    st.subheader("Over training", anchor=False)
    st.caption("Does what holds over all steps hold at each of them?")
    usual = [*dict.fromkeys(name for name in (run.estimator, "otb", "otb_loo", *measured) if name in measured)]
    names = st.multiselect(
        "At most three", list(measured), usual[: pairs.MOST], max_selections=pairs.MOST, key=f"over-{run.name}",
        bind="query-params", format_func=one_line, width=420,
    )  # fmt: skip
    chosen = [measured[name] for name in names]
    info = data.over_training(run, against, tuple(chosen))
    shown = {quantity.column for quantity in info.quantities}
    if shown:
        python = scripts.OVER_TRAINING.format(path=run.path, against=against, chosen=chosen)
        each = zip(info.quantities, info.curves, strict=True)
        ends = [f"{q.title} of {one.run} {number(float(one.value[-1]))}" for q, curves in each for one in curves]
        says = f"{', '.join(names)} divided by {against[0]}, by block of measured steps; in the last {', '.join(ends)}"
        chart(plot_learning(info), "over-training", says, partial(curves_table, info), python)
    missing = " and ".join(title.lower() for name, title, _ in RATIOS if name not in shown)
    st.caption(f"{BANDS * bool(shown)}{UNTOLD.format(missing) * bool(missing and names)}")


@st.fragment
def numbers(info: ComparisonInfo) -> None:
    """Show the numbers of the figure with their formulas, once that is asked for: a browser draws a table slowly."""
    place = st.expander("Numbers, and what they are", key="numbers", on_change="rerun")
    if place.open:
        shown = one_line(display_table(info))
        columns: dict[str, Any] = dict.fromkeys(shown.select_dtypes("number").columns, THREE)
        columns["estimator"] = st.column_config.TextColumn(width=170)
        place.dataframe(shown, hide_index=True, height="content", placeholder="–", column_config=columns)
        place.markdown("\n\n".join([*(f"**{plain(title)}** = {plain(said)}" for title, said in FORMULAS), SHORTER]))


def token_clicked() -> None:
    """Select the token whose circle was clicked; the page that is drawn next opens it."""
    if len(token := clicked_data("fidelity")) == 4:
        step, group, rollout, t = map(int, token)
        go_to("tokens", step=step, prompt=group, token=f"{rollout}.{t}")


with frame("Estimators", "Which baseline makes the gradient less noisy, and what does the proxy cost?"):
    row = st.container(horizontal=True, vertical_alignment="bottom")
    run = one_run(row)
    part = box(row, "Part", "part", PARTS, label_visibility="collapsed", look="buttons")
    if part == "proxy":
        controls = st.container(horizontal=True)
        kind = box(controls, "Energy", "kind", KINDS, help=ENERGY, look="buttons")
        # The stamp changes only when more tokens have an exact norm: reading all of them takes long.
        exact_steps = data.store(run).steps_with("tokens", "grad_norm_sq")
        run = replace(run, stamp=f"{data.measured(run).stamp} {hash(tuple(exact_steps))}")
        cheap = data.cached(run, cheap_energies, COLUMNS)
        source = "proxy"
        if len(cheap) > 1:
            source = box(controls, "Against exact", "source", cheap, help=CALIBRATED, look="buttons")
        info, compared, total = data.fidelity(run, kind, source)
        titles = ["OTB's gain lost by the proxy", *(f"{title} within" for _, title in COEFFICIENTS)]
        places = [place.empty() for place in st.columns([2, *(1 for _ in COEFFICIENTS)])]
        for place, title in zip(places, titles, strict=True):  # their numbers follow the figure, which is there sooner
            place.metric(title, "…", "…", delta_color="off", delta_arrow="off")
        st.caption("Judge the proxy by what it costs, not by a correlation.")
        left, right = st.columns(2)
        says = f"Exact norms against {source} energies of {info.n_tokens:,} tokens"
        with left:
            python = scripts.FIDELITY.format(path=run.path, kind=kind, source=source)
            chart(plot_fidelity(info), "fidelity", says, info.far, python, clicked=token_clicked)
        share, rests_on = gain_lost_words(data.lost_by_proxy(data.measured(run), source))
        shown = [(share, rests_on, LOST)]
        for key, _ in COEFFICIENTS:
            within = getattr(info.overall.within, key) if info.overall.within else None
            shown.append((number(within), f"{number(getattr(info.overall.pooled, key))} pooled", WITHIN))
        for place, title, (value, below, explained) in zip(places, titles, shown, strict=True):
            place.metric(title, value, below, delta_color="off", delta_arrow="off", help=explained)
        with right:
            python = scripts.FIDELITY_STEPS.format(path=run.path, kind=kind, source=source)
            says = f"{says}, by step: OTB's gain lost is {share}, {rests_on}"
            chart(plot_fidelity_steps(info), "fidelity-steps", says, partial(fidelity_table, info), python)
        loaded = "all" if compared == total else f"{compared:,} of"
        dashed = ""
        if info.line is not None:
            dashed = f"Dashed: exact ∝ {info.source}^{info.line[1]:.2f}, least squares of logarithms. "
        st.caption(
            f"{dashed}Circles: the {len(info.far)} tokens furthest from it; click one to open it. "
            f"{info.n_tokens:,} tokens compared, from {loaded} {total:,} with an exact norm. "
            + (f"{info.n_zero:,} with a zero energy are not drawn on the logarithmic axes. " if info.n_zero else "")
            + (DRAWN if info.drawn else LEFT_OUT if info.n_tokens < compared and len(cheap) > 1 else "")
            + "OTB compares only rollouts of one prompt at one position, so of correlations the ones within count. "
            "The pooled ones also count differences between positions and prompts, which OTB never sees."
        )
        st.stop()

    run = data.measured(run)
    of_grams = [label for gram in data.answers(run).grams.values() for label in gram.labels]
    measured = list(dict.fromkeys(of_grams)) or data.store(run).stored_labels()
    if not measured:
        st.info(plain(not_measured(data.answers(run).config)), icon=":material/inbox:")
        st.stop()
    # Its place; the figure is there sooner. What stood there stays until it is known anew.
    verdict = st.container() if (stayed := st.session_state["_stayed"]) else st.empty()
    if not stayed:
        verdict.markdown("Comparing the estimators …")
    sources = [s for s in SOURCES if s != "calibrated" or any(of == s for _, of in measured)]
    left, middle, right = st.columns([3, 2, 2], vertical_alignment="bottom")
    source = box(left, "Weights from", "energy", {of: SOURCES[of] for of in sources}, "proxy", look="buttons")
    names = list(dict.fromkeys(name for name, of in measured if source == "both" or of in ("none", source)))
    against = box(middle, "Compare with", "against", names, "rloo")
    step = box(right, "Measured steps", "at", [ALL, *map(str, data.answers(run).grams)])
    usual = [n for n in names if n in (*USUAL, run.estimator)] or names[:8]
    # What is usual depends on what trained, so each run has a choice of its own.
    estimators = st.multiselect(
        "Estimators", names, usual, key=f"shown-{run.name}", bind="query-params", wrap=True, format_func=one_line
    )
    if (whole := data.answers(run).measured) is None:
        commands = st.container()
        st.info(
            "No comparison and no figure over training: both need Gram matrices of measured steps; none is stored.",
            icon=":material/inbox:",
        )
    else:
        info = data.comparison(run, None if step == ALL else int(step), against, source, tuple(estimators))
        words = forest_words(info)
        st.caption(plain(f"Rollouts of {run.name} alone. {words}"), help=WORDS)
        python = scripts.COMPARISON.format(path=run.path, against=against, source=source, estimators=estimators)
        chart(plot_comparison(info), "comparison", words, partial(comparison_table, info), python)
        commands = st.container()
        if whole.noise_scale_line:
            st.markdown(f"**{plain(whole.noise_scale_line)}**")
        numbers(info)
    with verdict.container(), frame():
        told, chosen = data.answers(run), compared_runs()
        some = tuple(map(data.measured, chosen)) if len(chosen) <= POOLED else ()
        alone, together = told.lines[bool(told.alarm) :], data.pooled(some, told.design)  # an alarm stands above
        sentences([line for line in alone if not COMMAND.search(line)], bold=True)
        with commands:  # below the figure, which all of this would push out of the window
            sentences([line for line in alone if COMMAND.search(line)])
            if together:
                sentences([f"The chosen runs together: {together[0]}", *together[1:]], bold=True)
            if len(chosen) > 1:
                elsewhere = [] if (root := data.root()) == Path("runs").resolve() else ["--root", str(root)]
                command = shlex.join(["otb", "compare", *(one.name for one in chosen), *elsewhere])
                sentences([f"All chosen runs in the terminal: {command}"])
    if data.answers(run).alarm:
        st.stop()  # what follows plans and follows a training whose gradients these are not
    with frame():
        planner = data.answers(run).planner
        if planner.cells or planner.note:
            st.subheader("Budget planner", anchor=False)
            if len(planner_display(planner)):
                st.caption(words := planner_words(planner))
                python = scripts.PLANNER.format(path=run.path)
                chart(plot_planner(planner), "planner", words, partial(planner_table, planner), python)
            st.markdown(plain(planner.note))
    # One energy source of each: where all are shown the first that was measured.
    offered = [label for label in measured if source == "both" or label[1] in ("none", source)]
    by_name = {name: next(label for label in offered if label[0] == name) for name, _ in offered}
    base = by_name.pop(against)
    if whole is not None and by_name:
        over_steps(run, base, by_name)
