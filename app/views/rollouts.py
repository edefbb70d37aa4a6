"""Rollouts: all answers of a run, filtered and searched; a row opens its tokens."""

from dataclasses import replace
from typing import Any

import data
import pandas as pd
import scripts
import selection
import streamlit as st
from kept import keep, pick, pick_many, span
from listing import Run
from widgets import chart, clicked_data, download, errors_as_sentences, go_to, one_run, page

from otb_analysis.errors import STOPS
from otb_analysis.figures.rewards import plot_rewards, rewards_info
from otb_analysis.schema import TABLES
from otb_analysis.store import ASKED_ROWS, RolloutFilter
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


def asked(facts: dict[str, Any]) -> RolloutFilter:
    """Let the page ask for rollouts."""
    row = st.container(horizontal=True, vertical_alignment="bottom")
    text = keep(
        row.text_input, "Text", name="text", default="", read=str, placeholder="in prompt or answer", width=240,
    )  # fmt: skip
    steps = span(row, "Steps", "steps", facts["first"], facts["last"], width=180)
    reward = span(row, "Reward", "reward_range", facts["low"], facts["high"], width=180)
    length = span(row, "Length", "lengths", facts["short"], facts["long"], width=180)
    reasons = pick_many(row, "Finish reason", "finish", facts["reasons"], (), width=200)
    groups = pick(row.selectbox, "Groups with", "groups", list(GROUPS), width=160)
    turns = None
    if (most := facts["turns"]) > 1:
        read, label = (lambda text: max(1, min(int(text), most))), "Turns, at least"
        turns = keep(row.number_input, label, 1, most, name="turns", default=1, read=read, width=120)
    if steps or reward:
        row.button("All steps and rewards", type="tertiary", icon=":material/zoom_out_map:", on_click=asked_for)
    return RolloutFilter(steps, reward, length, tuple(reasons), GROUPS[groups], turns, text)


def asked_for(steps: str = "all", reward: str = "all") -> None:
    """Ask for the rollouts of some steps and rewards."""
    selection.remember("steps", steps)
    selection.remember("reward_range", reward)


def histogram(run: Run, what: RolloutFilter) -> None:
    """Draw rewards by step; a click on a cell asks for its rollouts."""
    everywhere = replace(what, steps=None, reward=None)  # so that another cell can be clicked
    table = data.rewards(run, everywhere)
    if table.empty:
        return
    info = rewards_info(table)

    def clicked() -> None:
        if cell := clicked_data("rewards"):
            asked_for(*("..".join(map(str, ends)) for ends in info.ranges(*cell[:2])))

    st.caption("Share of each reward among the rollouts of a step. Click a cell to list its rollouts.")
    python = scripts.REWARDS.format(path=run.path, asked=everywhere)
    chart(plot_rewards(info, what.steps, what.reward), "rewards", table, python, clicked=clicked)


def listed(run: Run, what: RolloutFilter) -> None:
    """Show the rollouts; a click on one opens its tokens."""
    table, total = data.found_rollouts(run, what, MOST)
    if not total:
        st.info("No rollout is like that; widen the filters.", icon=":material/inbox:")
        return
    shown: Any = table[[c for c in SHOWN if c in table]]

    def opened() -> None:
        cells = st.session_state["found"]["selection"]["cells"]
        if cells:
            row: Any = table.iloc[cells[0][0]]
            for name, column in (("step", "step"), ("prompt", "group"), ("rollout", "rollout")):
                selection.remember(name, int(row[column]))
            selection.remember("token", f"{int(row['rollout'])}.0")
            st.session_state["_tokens"] = True

    st.dataframe(
        shown.rename(columns={"group": "prompt #", "equal": "equal rewards"}), hide_index=True, height=420, key="found",
        on_select=opened, selection_mode="single-cell", placeholder="–",
        column_config={
            "completion": st.column_config.TextColumn("answer", width="large"),
            "prompt": st.column_config.TextColumn(width="medium"),
            "reward": st.column_config.NumberColumn(format="%.3g"),
        },
    )  # fmt: skip
    cut = "" if total == len(table) else f" The first {len(table)} are shown; narrow the filters for the others."
    st.caption(f"{total:,} rollouts.{cut} Click one to see its tokens.")
    download(shown, "rollouts")


def run_it(key: str) -> None:
    """Ask for the answer to the query in the box, a new one if there was one before."""
    st.session_state.pop("_answer", None)
    selection.remember("answered", st.session_state[key])


def answered(run: Run, text: str) -> None:
    """Show the answer to a query, or why there is none; it is that of the moment at which it was asked."""
    if st.session_state.get("_answer", (None,))[0] != (run.path, text):
        try:
            answer: Any = asked_sql(run.path, text)
        except STOPS as error:
            answer = error
        st.session_state["_answer"] = (run.path, text), answer
    answer = st.session_state["_answer"][1]
    if isinstance(answer, Exception):
        raise answer
    st.dataframe(answer.head(1000), hide_index=True)
    cut = f"The first {ASKED_ROWS:,} rows were read" if len(answer) == ASKED_ROWS else f"{len(answer):,} rows"
    st.caption(cut + (", the first 1,000 are shown." if len(answer) > 1000 else "."))
    download(answer, "query")


def query(run: Run) -> None:
    """A box for one read-only SELECT over the run's tables."""
    st.subheader("Ask in SQL", anchor=False)
    selection.take("sql")
    example = st.selectbox("Example", list(EXAMPLES), index=None, placeholder="choose an example", width=320)
    if example and st.session_state.get("_example") != example:
        st.session_state["_example"] = example
        selection.remember("sql", EXAMPLES[str(example)])
    label, first = "One SELECT; it can change nothing and reach no other file.", next(iter(EXAMPLES.values()))
    text = str(keep(st.text_area, label, name="sql", default=first, read=str, height=110))
    selection.take("answered")
    st.button("Run", type="primary", on_click=run_it, args=("sql",))
    if text.strip() and selection.remembered("answered") == text:
        with errors_as_sentences():
            answered(run, text)
    else:
        selection.remember("answered", None)
    with st.expander("Tables and columns"):
        table = str(pick(st.segmented_control, "Table", "glossary", list(TABLES), "rollouts", required=True))
        rows = [{"column": c.name, "unit": c.unit, "meaning": c.meaning} for c in TABLES[table]]
        st.dataframe(pd.DataFrame(rows), hide_index=True, height=300)


with page("Rollouts", "What did the policy answer, and where is an answer like this one?"):
    if st.session_state.pop("_tokens", False):
        go_to("tokens")
    run = one_run()
    facts = data.rollout_facts(run)
    if facts["first"] is None:
        st.info("This run has no rollouts in its store; a run of `otb train` stores them.", icon=":material/inbox:")
        st.stop()
    what = asked(facts)
    if facts["lost"]:
        st.warning(
            f"{facts['lost']:,} rollouts have a reward that is NaN or infinite; no filter of rewards finds them."
        )
    histogram(run, what)
    listed(run, what)
    query(run)
