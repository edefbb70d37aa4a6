"""Triage: which run is in trouble, since when, and in what it differs from the others."""

from functools import partial
from typing import Any

import data
import scripts
import streamlit as st
from widgets import as_wide_as_texts, box, chart, chosen_runs, download, frame, go_to, one_line, plain

from otb_analysis.answers.pairs import left_out_note
from otb_analysis.answers.triage import IN_TROUBLE, triage_table, verdict, worst_first
from otb_analysis.figures.curves import LABELLED, curves_table, grouped_info, learning_info, plot_learning
from otb_analysis.figures.runs import config_differences, grouped
from otb_analysis.figures.styles import estimator_style, number

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
ESTIMATOR = ("estimator.name", "estimator")  # the setting, which has a column and colours of its own
GROUPS = (
    "A setting in which the chosen runs differ: one curve per value, the mean over its runs, such as its seeds. "
    "From seven runs on by estimator, or where all have one by the first setting with few values, to begin with."
)
TEXTS = ["run", "state", "status", "estimator"]  # columns that are as wide as the longest text needs
PIN = " "  # the column whose square pins
# What a narrow window cuts off matters least.
ORDER = (PIN, "run", "held-out", "state", "reward", "last", "steps", "age", "estimator")
ORDER += ("reward fell", "detector spoke", "first", "status")
SETTING = "config."
CLICKS = "Click a row to open the run, its box to choose it for all pages, its ■ to make it the reference, ★."
NO_FIT = "No run fits what is looked for in the sidebar."
TOLD = 8  # runs in trouble that have a sentence above the fold; a string below would be shown on the page
NONE = [None, float("nan")]
# A column goes where all of it is this.
NOTHING: dict[str, list[Any]] = {"status": ["complete"], "held-out": NONE, "reward fell": NONE, "detector spoke": NONE}
FELL = "The first step at which the reward was less than halfway from its old level to the new one, seen afterwards."
SPOKE = "The step at which a detector first spoke, known at that step; what it tells began earlier."
THREE = st.column_config.NumberColumn(format="%.3f", width=60)
COLUMNS: Any = {
    "reward": st.column_config.LineChartColumn(help=REWARD, width=75, color="gray"),
    "reward fell": st.column_config.NumberColumn(help=FELL, format="%d", width=85),
    "detector spoke": st.column_config.NumberColumn(help=SPOKE, format="%d", width=105),
    "steps": st.column_config.NumberColumn(format="%d", width=55),
    "age": st.column_config.TextColumn(help="Since the last step was written.", width=70),
    "first": THREE, "last": THREE, "held-out": THREE, PIN: st.column_config.TextColumn(width=30),
}  # fmt: skip


def clicked(names: list[str]) -> None:
    """Choose the runs that are ticked, pin the one whose square was clicked, or open the one of another cell.

    The name of one that cannot be opened is left for a sentence that says why.
    """
    state, touched = st.session_state, st.session_state["listed"]["selection"]
    readable, cells = [run.name for run in state["_readable"]], touched["cells"]
    at = {names[row] for row in ([row for row, _ in cells] if cells else touched["rows"])}
    if at - set(readable):
        state["_refused"] = min(at - set(readable))
    elif not cells:
        at -= {state["_reference"]} - set(state["run"])  # ticked since it is pinned, chosen by nobody
        at |= set(state["run"]) - set(names)  # what is looked for hides these
        state["run"] = [name for name in readable if name in at]
    elif cells[0][1] == PIN and len(readable) > 1:
        state["reference"] = "" if {state["reference"]} == at else min(at)
    else:
        opened(*at)


def opened(name: str) -> None:
    """Open the page of a run; it is chosen for all pages, beside the others."""
    state = st.session_state
    state["run"] = [run.name for run in state["_readable"] if run.name in (*state["run"], name)]
    state["focus"] = name
    go_to("run")


@st.fragment  # its boxes draw this part of the page again, and no other
@frame()
def learning(chosen: list[data.Run], rewards: dict[str, str]) -> None:
    """Draw reward and held-out reward of the chosen runs, each alone or together with those alike in a setting."""
    st.subheader("Learning curves", anchor=False)
    st.caption("Does it learn, on prompts it trains on and on prompts it never sees?")
    steps, styles = {run.name: data.answers(run).steps for run in chosen}, {run.name: run.style for run in chosen}
    estimators = {run.name: run.estimator for run in chosen}
    differences = config_differences({run.name: data.answers(run).config for run in chosen})
    left, right = st.columns(2)
    window = left.slider("Running mean over steps", 1, 100, 10, key="smooth", bind="query-params", width=320)
    values = list(differences.table["setting"])
    few = [one for one in values if one in ESTIMATOR or len(grouped(differences, one)) <= LABELLED]
    few = few if len(chosen) > LABELLED else []
    by = box(right, "Group runs by", "by", [EACH, *values], *few[:1], width=320, help=GROUPS)
    if by == EACH:
        info = learning_info(steps, styles, window)
        python = scripts.LEARNING.format(root=data.root(), names=list(steps), window=window)
    else:
        groups = grouped(differences, by)
        styles = {name: estimator_style(estimators[runs[0]]) for name, runs in groups.items()}
        info = grouped_info(steps, groups, window, styles if by in ESTIMATOR else {})
        python = scripts.GROUPED.format(root=data.root(), groups=groups, window=window)
    says = "; ".join(f"{name}: reward {rewards[name]}" for name in steps)
    chart(plot_learning(info), "learning", says, partial(curves_table, info), python)


with frame("Triage", "Which run is in trouble, since when, and in what does it differ?"):
    readable = {run.name: run for run in st.session_state["_readable"]}
    folder: Any = st.session_state["_runs"]
    triaged = worst_first([data.triaged(row, readable.get(str(row["run"]))) for _, row in folder.iterrows()])
    refused = st.session_state.pop("_refused", None)
    for row in (row for row in triaged if row.run == refused):
        ended = {"broken": row.sentence, "failed": f"it has no complete step; {row.sentence}"}
        why = ended.get(row.state, "it has no complete step yet")
        st.info(plain(f"{row.run} cannot be opened: {why.rstrip('.')}."), icon=":material/block:")
    st.markdown(f"**{plain(verdict(triaged))}**" if triaged or not st.session_state.get("find") else f"**{NO_FIT}**")
    if not triaged:
        st.stop()
    if (worst := triaged[0].run) in readable:  # by keys as well: a table with ticks takes no cell by them
        st.button(
            f"Open {plain(worst)}", on_click=opened, args=(worst,), type="tertiary", icon=":material/arrow_forward:"
        )
    listed = [readable[row.run] for row in triaged if row.run in readable]
    settings = config_differences({run.name: data.answers(run).config for run in listed})
    of_runs: Any = settings.table[~settings.table["setting"].isin(ESTIMATOR)].set_index("setting").T
    of_runs = one_line(of_runs).add_prefix(SETTING)  # a setting may have the name of a column
    trouble = [row for row in triaged if row.state in (*IN_TROUBLE, "broken")]
    for row in trouble[triaged[0].state in IN_TROUBLE : TOLD]:  # the worst is named above
        st.caption(f"{SIGNS[row.state]} **{plain(row.run)}**: {plain(row.sentence)}")
    table: Any = triage_table(triaged).join(of_runs, on="run")
    table = table.sort_values("run", key=lambda names: names != st.session_state.get("_reference"), kind="stable")
    colors = [f"color: {readable[name].style.color if name in readable else 'transparent'}" for name in table["run"]]
    signs = [f"{SIGNS[state]} {state}" for state in table["state"]]
    tints = [f"background-color: {TINTS.get(state, 'transparent')}" for state in table["state"]]
    empty = [name for name, nothing in NOTHING.items() if table[name].isin(nothing).all()]
    working = table[table["state"] != "broken"]  # why a run is broken stands below in full
    full = {name: name.removeprefix(SETTING) for name in of_runs}
    named = {name: st.column_config.TextColumn(one.rpartition(".")[2], help=one) for name, one in full.items()}
    marks = ["★" if name == st.session_state.get("_reference") else "■" for name in table["run"]]
    ticked = {run.name for run in st.session_state["_selection"]}
    rows = [row for row, name in enumerate(table["run"]) if name in ticked]
    st.session_state["listed"] = {"selection": {"rows": rows, "columns": [], "cells": []}}
    drawn = one_line(table.assign(**{"state": signs, PIN: marks}))
    st.dataframe(
        drawn.style.apply(lambda one: colors if one.name == PIN else tints),
        hide_index=True, placeholder="–",
        height="content" if len(table) < 12 else 460,
        key="listed", on_select=partial(clicked, list(table["run"])), selection_mode=["multi-row", "single-cell"],
        column_order=[name for name in (*ORDER, *of_runs) if name not in empty],
        column_config=as_wide_as_texts(working[TEXTS]) | COLUMNS | named,
    )  # fmt: skip
    st.caption(f"{CLICKS} {left_out_note(settings)}")
    download(table, "runs")
    chosen = chosen_runs()
    learning(chosen, {row.run: f"{number(row.reward_first)} to {number(row.reward_last)}" for row in triaged})
