"""Rollouts: all answers of a run, filtered and searched; a row opens its tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import data
import pandas as pd
import scripts
import streamlit as st
from data import Run
from widgets import box, chart, clicked_data, download, frame, go_to, one_run, span

from otb_analysis.errors import STOPS
from otb_analysis.figures.rollouts import RewardsInfo, plot_rewards, rewards_info
from otb_analysis.schema import TABLES
from otb_analysis.store import ASKED_ROWS, RolloutFilter, facts_of_rollouts, reward_histogram
from otb_analysis.store.asked import asked_sql

MOST = 500
SHOWN = ["step", "group", "rollout", "reward", "length", "turns", "finish_reason", "equal", "prompt", "completion"]
GROUPS = {"all": None, "equal rewards": True, "different rewards": False}
EXAMPLES = {
    "mean reward by finish reason": "SELECT finish_reason, count(*) AS n, avg(reward) AS reward\nFROM rollouts "
    "GROUP BY finish_reason",
    "the longest wrong answers": "SELECT step, rollout, length, completion\nFROM rollouts WHERE reward <= 0\n"
    "ORDER BY length DESC LIMIT 20",
    "tokens with the largest exact norm": "SELECT step, rollout, t, token, grad_norm_sq\nFROM tokens\n"
    "WHERE grad_norm_sq IS NOT NULL ORDER BY grad_norm_sq DESC LIMIT 20",
    "entropy by position": "SELECT t, avg(entropy) AS entropy, count(*) AS n\nFROM tokens WHERE mask\n"
    "GROUP BY t ORDER BY t",
    "variance of each estimator": "SELECT estimator, energy_source, avg(variance) AS variance\nFROM gradients "
    "GROUP BY ALL ORDER BY variance",
}


COLUMNS: Any = {
    "completion": st.column_config.TextColumn("answer", width="large"),
    "prompt": st.column_config.TextColumn(width="medium"),
    "reward": st.column_config.NumberColumn(format="%.3g"),
    "finish_reason": st.column_config.TextColumn("finish reason"),
}


def ask_for_cell(info: RewardsInfo, last_step: int, highest: float) -> None:
    """Ask for the rollouts of the cell that was clicked."""
    if cell := clicked_data("rewards"):
        steps, rewards = info.ranges(*cell[:2])
        st.session_state["steps"] = steps[0], min(steps[1], last_step)  # the last bin may go beyond
        st.session_state["reward_range"] = rewards[0], min(rewards[1], highest)


def open_rollout(table: pd.DataFrame) -> None:
    """Open the tokens of the rollout that was clicked."""
    cells = st.session_state["found"]["selection"]["cells"]
    if cells:
        row: Any = table.iloc[cells[0][0]]
        go_to("tokens", step=row["step"], prompt=row["group"], token=f"{row['rollout']}.0")


def fill() -> None:
    """Write the chosen example into the box of the query."""
    st.session_state["sql"] = EXAMPLES.get(st.session_state["example"], st.session_state["sql"])


def query(run: Run) -> None:
    """A box for one read-only SELECT over the run's tables."""
    st.selectbox(
        "Example", list(EXAMPLES), index=None, placeholder="choose an example", width=320, key="example", on_change=fill
    )
    label, first = "One SELECT; it can change nothing and reach no other file.", next(iter(EXAMPLES.values()))
    text = st.text_area(label, first, key="sql", bind="query-params", height=110)
    if st.button("Run", type="primary") and text.strip():
        try:
            answer: Any = asked_sql(run.path, text)
        except STOPS as error:
            answer = error
        st.session_state["_answer"] = (run.path, text), answer
    asked_for, answer = st.session_state.get("_answer", (None, None))
    if asked_for != (run.path, text):  # it is that of the moment at which it was asked
        return
    if isinstance(answer, Exception):
        raise answer
    st.dataframe(answer.head(1000), hide_index=True)
    cut = f"The first {ASKED_ROWS:,} rows were read" if len(answer) == ASKED_ROWS else f"{len(answer):,} rows"
    st.caption(cut + (", the first 1,000 are shown." if len(answer) > 1000 else "."))
    download(answer, "query")


with frame("Rollouts", "What did the policy answer, and where is an answer like this one?"):
    run = one_run()
    facts = data.cached(run, facts_of_rollouts)
    if facts["first"] is None:
        st.info("This run has no rollouts in its store; a run of `otb train` stores them.", icon=":material/inbox:")
        st.stop()
    whole = {"steps": (facts["first"], facts["last"]), "reward_range": (facts["low"], facts["high"])}
    row = st.container(horizontal=True, vertical_alignment="bottom")
    text = row.text_input("Text", key="text", bind="query-params", placeholder="in prompt or answer", width=240)
    steps = span(row, "Steps", "steps", *whole["steps"], width=180)
    reward = span(row, "Reward", "reward_range", *whole["reward_range"], width=180)
    length = span(row, "Length", "lengths", facts["short"], facts["long"], width=180)
    reasons = row.multiselect("Finish reason", facts["reasons"], key="finish", bind="query-params", width=200)
    groups = box(row, "Groups with", "groups", list(GROUPS), width=160)
    turns = None
    if (most := facts["turns"]) > 1:
        turns = row.number_input("Turns, at least", 1, most, key="turns", bind="query-params", width=120)
    if steps or reward:
        row.button(
            "All steps and rewards", type="tertiary", icon=":material/zoom_out_map:", on_click=st.session_state.update,
            args=(whole,),
        )  # fmt: skip
    what = RolloutFilter(steps, reward, length, tuple(reasons), GROUPS[groups], turns, text)
    if facts["lost"]:
        st.warning(
            f"{facts['lost']:,} rollouts have a reward that is NaN or infinite; no filter of rewards finds them."
        )
    everywhere = replace(what, steps=None, reward=None)  # so that another cell can be clicked
    histogram = data.cached(run, reward_histogram, everywhere)
    if len(histogram):
        info = rewards_info(histogram)
        st.caption("Share of each reward among the rollouts of a step. Click a cell to list its rollouts.")
        python = scripts.REWARDS.format(path=run.path, asked=everywhere)
        clicked = partial(ask_for_cell, info, facts["last"], facts["high"])
        chart(plot_rewards(info, steps, reward), "rewards", histogram, python, clicked=clicked)
    table, total = data.found_rollouts(run, what, MOST)
    if not total:
        st.info("No rollout is like that; widen the filters.", icon=":material/inbox:")
    else:
        shown: Any = table[[c for c in SHOWN if c in table]]
        st.dataframe(
            shown.rename(columns={"group": "prompt #", "equal": "equal rewards"}), hide_index=True, height=420,
            key="found", on_select=partial(open_rollout, table), selection_mode="single-cell", placeholder="–",
            column_config=COLUMNS,
        )  # fmt: skip
        cut = "" if total == len(table) else f" The first {len(table)} are shown; narrow the filters for the others."
        st.caption(f"{total:,} rollouts.{cut} Click one to see its tokens.")
        download(shown, "rollouts")

    st.subheader("Ask in SQL", anchor=False)
    with frame():
        query(run)
    with st.expander("Tables and columns"):
        name = box(st, "Table", "glossary", list(TABLES), "rollouts", look="buttons")
        rows = [{"column": c.name, "unit": c.unit, "meaning": c.meaning} for c in TABLES[name]]
        st.dataframe(pd.DataFrame(rows), hide_index=True, height=300)
