"""Rollouts: all answers of a run, filtered and searched; a row opens its tokens."""

from typing import Any

import data
import pandas as pd
import scripts
import selection
import streamlit as st
from listing import Run
from widgets import chart, download, errors_as_sentences, go_to, one_run, page

from otb_analysis.figures.rewards import plot_rewards, rewards_info
from otb_analysis.schema import TABLES
from otb_analysis.store import ASKED_MEGABYTES, ASKED_ROWS, ASKED_SECONDS, RolloutFilter

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
    text = row.text_input("Text", key="text", bind="query-params", placeholder="in prompt or answer", width=240)
    steps = chosen_range(row, "Steps", "steps", facts["first"], facts["last"])
    reward = chosen_range(row, "Reward", "reward_range", facts["low"], facts["high"])
    length = chosen_range(row, "Length", "lengths", facts["short"], facts["long"])
    reasons = row.multiselect("Finish reason", facts["reasons"], key="finish", bind="query-params", width=200)
    groups = row.selectbox("Groups with", list(GROUPS), key="groups", bind="query-params", width=160)
    turns = None
    if facts["turns"] > 1:
        turns = int(row.number_input("Turns, at least", 1, facts["turns"], key="turns", bind="query-params", width=120))
    return RolloutFilter(steps, reward, length, tuple(reasons), GROUPS[str(groups)], turns, text)


def chosen_range(row: Any, label: str, key: str, low: Any, high: Any) -> tuple[Any, Any] | None:
    """Let the page choose a range; None for the whole one, or where there is only one value."""
    if low is None or low == high:
        return None
    begun = st.session_state.get(key)
    if begun is not None:  # another run has other ends
        st.session_state[key] = (max(low, min(begun[0], high)), min(high, max(begun[1], low)))
    ends = row.slider(label, low, high, (low, high), key=key, bind="query-params", width=180)
    return None if ends == (low, high) else ends


def histogram(run: Run, what: RolloutFilter) -> None:
    """Draw rewards by step; a click on a cell asks for its rollouts."""
    table = data.rewards(run, what)
    if table.empty:
        return
    info = rewards_info(table)

    def clicked() -> None:
        points = st.session_state["rewards"]["selection"]["points"]
        if points:
            steps, reward = info.ranges(*points[0]["customdata"][:2])
            st.session_state["_cell"] = (steps, reward)

    st.caption("Share of each reward among the rollouts of a step. Click a cell to list its rollouts.")
    python = scripts.REWARDS.format(path=run.path, asked=what)
    chart(plot_rewards(info), "rewards", table, python, clicked=clicked)


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


def query(run: Run) -> None:
    """A box for one read-only SELECT over the run's tables."""
    st.subheader("Ask in SQL", anchor=False)
    st.session_state.setdefault("sql", next(iter(EXAMPLES.values())))
    example = st.selectbox("Example", list(EXAMPLES), index=None, placeholder="choose an example", width=320)
    if example and st.session_state.get("_example") != example:
        st.session_state.update(sql=EXAMPLES[str(example)], _example=example)
    text = st.text_area("One SELECT; it can change nothing and reach no other file.", key="sql", height=110)
    if st.button("Run", type="primary") and text.strip():
        with errors_as_sentences():
            answer = data.store(run).sql(text, seconds=ASKED_SECONDS, rows=ASKED_ROWS, megabytes=ASKED_MEGABYTES)
            st.dataframe(answer.head(1000), hide_index=True)
            cut = f"The first {ASKED_ROWS:,} rows were read" if len(answer) == ASKED_ROWS else f"{len(answer):,} rows"
            st.caption(cut + (", the first 1,000 are shown." if len(answer) > 1000 else "."))
            download(answer, "query")
    with st.expander("Tables and columns"):
        table = str(st.segmented_control("Table", list(TABLES), default="rollouts", required=True, key="glossary"))
        rows = [{"column": c.name, "unit": c.unit, "meaning": c.meaning} for c in TABLES[table]]
        st.dataframe(pd.DataFrame(rows), hide_index=True, height=300)


with page("Rollouts", "What did the policy answer, and where is an answer like this one?"):
    if st.session_state.pop("_tokens", False):
        go_to("tokens")
    run = one_run()
    cell = st.session_state.pop("_cell", None)
    if cell is not None:
        st.session_state.update(steps=cell[0], reward_range=cell[1])
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
