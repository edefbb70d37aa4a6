"""Triage: which run is in trouble, since when, and in what it differs from the others."""

from functools import partial
from typing import Any

import data
import scripts
import streamlit as st
from widgets import box, chart, chosen_runs, download, frame, go_to, plain, reasons

from otb_analysis.answers.triage import triage_table, verdict, worst_first
from otb_analysis.figures.curves import curves_table, grouped_info, learning_info, plot_learning
from otb_analysis.figures.runs import config_differences, grouped

SIGNS = {
    "collapsed": "■",
    "failed": "✕",
    "alarm": "▲",
    "watch": "△",
    "calm": "·",
    "too short": "○",
    "not judged": "?",
    "broken": "∅",
}
RED, ORANGE, AMBER = "rgba(193, 18, 31, 0.16)", "rgba(213, 94, 0, 0.14)", "rgba(201, 138, 0, 0.12)"
TINTS = {"collapsed": RED, "failed": RED, "alarm": ORANGE, "watch": AMBER}
REWARD = "Mean of every step, thinned to 40 points."
EACH = "each run alone"
GROUPS = "A setting in which the chosen runs differ: one curve per value, the mean over its runs, such as its seeds."
# Columns of texts: as wide as the longest needs, at most so many pixels; a string below would be shown on the page.
TEXTS = {"run": 190, "state": 110, "status": 110, "estimator": 150, "what happened": 400}
ORDER = (  # what a narrow window cuts off matters least
    *("run", "state", "held-out", "what happened", "reward", "first", "last", "first warning", "steps", "age"),
    *("estimator", "status"),
)
NOTHING: dict[str, list[Any]] = {"status": ["complete"], "held-out": [None, float("nan")]}  # these columns go then
WARNING = "The step at which any detector first fired, known at that step."
THREE = st.column_config.NumberColumn(format="%.3f", width=60)
COLUMNS: Any = {
    "reward": st.column_config.LineChartColumn(help=REWARD, width=75),
    "first warning": st.column_config.NumberColumn(help=WARNING, format="%d", width=95),
    "steps": st.column_config.NumberColumn(format="%d", width=55),
    "age": st.column_config.TextColumn(help="Since the last step was written.", width=70),
    "first": THREE, "last": THREE, "held-out": THREE,
}  # fmt: skip


def opened(names: list[str]) -> None:
    """Open the run whose row was clicked, or leave its name for a sentence that says why it cannot be opened."""
    cells = st.session_state["listed"]["selection"]["cells"]
    if cells:
        name = names[cells[0][0]]
        if name in {run.name for run in st.session_state["_readable"]}:
            st.session_state["run"] = [name]
            go_to("run")
        else:
            st.session_state["_refused"] = name


with frame("Triage", "Which run is in trouble, since when, and in what does it differ?"):
    readable = {run.name: run for run in st.session_state["_readable"]}
    folder: Any = st.session_state["_runs"]
    triaged = worst_first([data.triaged(row, readable.get(str(row["run"]))) for _, row in folder.iterrows()])
    refused = st.session_state.pop("_refused", None)
    for row in (row for row in triaged if row.run == refused):
        ended = {"broken": row.sentence, "failed": f"it has no complete step; {row.sentence}"}
        why = ended.get(row.state, "it has no complete step yet")
        st.info(plain(f"{row.run} cannot be opened: {why.rstrip('.')}."), icon=":material/block:")
    st.markdown(f"**{plain(verdict(triaged))}**")
    table: Any = triage_table(triaged)
    signs = [f"{SIGNS[state]} {state}" for state in table["state"]]
    tints = [f"background-color: {TINTS.get(state, 'transparent')}" for state in table["state"]]
    empty = [name for name, nothing in NOTHING.items() if table[name].isin(nothing).all()]
    said = table[table["state"] != "broken"]  # why a run is broken stands below in full
    longest = {name: max([0, *(len(str(text)) for text in said[name])]) for name in TEXTS}
    widths = {name: min(most, max(70, 22 + 13 * longest[name] // 2)) for name, most in TEXTS.items()}
    st.dataframe(
        table.assign(state=signs).style.apply(lambda column: tints), hide_index=True, placeholder="–",
        height="content" if len(table) < 12 else 460,
        key="listed", on_select=partial(opened, list(table["run"])), selection_mode="single-cell",
        column_order=[name for name in ORDER if name not in empty],
        column_config={name: st.column_config.TextColumn(width=width) for name, width in widths.items()} | COLUMNS,
    )  # fmt: skip
    st.caption("Click a row to open the run.")
    download(table, "runs")
    if st.session_state["_readable"]:
        reasons(st.session_state["_runs"])
    chosen = chosen_runs()
    st.subheader("Learning curves", anchor=False)
    st.caption("Does it learn, on prompts it trains on and on prompts it never sees?")
    steps = {run.name: data.answers(run).steps for run in chosen}
    differences = config_differences({run.name: data.answers(run).config for run in chosen})
    left, right = st.columns(2)
    window = left.slider("Running mean over steps", 1, 100, 10, key="smooth", bind="query-params", width=320)
    by = box(right, "Group runs by", "by", [EACH, *differences.table["setting"]], width=320, help=GROUPS)
    if by == EACH:
        estimators = {run.name: run.estimator for run in chosen}
        info = learning_info(steps, estimators, window)
        python = scripts.LEARNING.format(root=data.root(), estimators=estimators, window=window)
    else:
        groups = grouped(differences, by)
        info = grouped_info(steps, groups, window)
        python = scripts.GROUPED.format(root=data.root(), groups=groups, window=window)
    chart(plot_learning(info), "learning", partial(curves_table, info), python)

    st.subheader("Configuration differences", anchor=False)
    if len(chosen) < 2:
        st.caption("Choose two or more runs to compare their configurations.")
    elif differences.table.empty:
        st.caption(f"These runs have the same configuration. {differences.note}")
    else:
        st.dataframe(differences.table, hide_index=True)
        if differences.note:
            st.caption(differences.note)
        download(differences.table, "config-differences")
