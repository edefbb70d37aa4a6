"""Rollouts: all answers of a run, filtered, searched and read; one opens its tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import data
import pandas as pd
import scripts
import streamlit as st
from reader import name_of, reader
from widgets import (
    box,
    chart,
    clicked_data,
    download,
    frame,
    go_to,
    new_query_value,
    one_line,
    one_run,
    rendered,
    span,
    write,
)

from otb_analysis.errors import STOPS
from otb_analysis.figures.rollouts import RewardsInfo, plot_rewards, rewards_info
from otb_analysis.schema import TABLES
from otb_analysis.store import ASKED_ROWS, RolloutFilter, facts_of_rollouts, reward_histogram
from otb_analysis.store.asked import AS_SAMPLED, DISAGREEING, ORDERS, asked_sql, rollout_columns

MOST = 500
LISTED = {
    "step": "step", "group": "prompt", "rollout": "rollout", "reward": "reward", "length": "tokens",
    "finish_reason": "finish",
}  # fmt: skip
TEXTS = ("prompt", "completion")
KEYS = "Keys: j and k, or ↓ and ↑, for the next and the one before; t for its tokens."
RENDERED = "The answer as Markdown, beside the raw one."
CONDITION = "reward == 0 and tokens > 200"
EVERYTHING = {"text": "", "finish": [], "groups": "all", "sort": AS_SAMPLED}
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


def ask_for_cell(info: RewardsInfo, last_step: int, highest: float) -> None:
    """Ask for the rollouts of the cell that was clicked."""
    if cell := clicked_data("rewards"):
        steps, rewards = info.ranges(*cell[:2])
        st.session_state["steps"] = steps[0], min(steps[1], last_step)  # the last bin may go beyond
        st.session_state["reward_range"] = rewards[0], min(rewards[1], highest)


def fill() -> None:
    """Write the chosen example into the box of the query."""
    st.session_state["sql"] = EXAMPLES.get(st.session_state["example"], st.session_state["sql"])


@st.fragment
def glossary() -> None:
    """Explain the columns of a table, once that is asked for: a browser takes long to load what draws the first one."""
    asked_for = "glossary" in st.query_params
    place = st.expander("Tables and columns", expanded=asked_for, key="tables", on_change="rerun")
    if place.open:
        name = box(place, "Table", "glossary", list(TABLES), "rollouts", look="buttons")
        rows = [{"column": c.name, "unit": c.unit, "meaning": c.meaning} for c in TABLES[name]]
        place.dataframe(pd.DataFrame(rows), hide_index=True, height=300)


with frame("Rollouts", "What did the policy answer, and where is an answer like this one?"):
    run = one_run()
    facts = data.cached(run, facts_of_rollouts)
    if facts["first"] is None:
        st.info("This run has no rollouts in its store; a run of `otb train` stores them.", icon=":material/inbox:")
        st.stop()
    whole = {"steps": (facts["first"], facts["last"]), "reward_range": (facts["low"], facts["high"])}
    # One line of a window of 1,440 points even before the page's own margins are there.
    row = st.container(horizontal=True, vertical_alignment="bottom")
    text = row.text_input("Text", key="text", bind="query-params", placeholder="in prompt or answer", width=160)
    where = row.text_input("Condition", key="where", bind="query-params", placeholder=CONDITION, width=250)
    steps = span(row, "Steps", "steps", *whole["steps"], width=115)
    reward = span(row, "Reward", "reward_range", *whole["reward_range"], width=115)
    listed: dict[str, Any] = {"bind": "query-params", "format_func": one_line}
    reasons = row.multiselect("Finish reason", facts["reasons"], key="finish", width=150, **listed)
    groups = box(row, "Groups with", "groups", list(GROUPS), width=140)
    drawn = {key: ends for key, ends in whole.items() if key in st.session_state}  # no slider where all are alike
    if steps or reward:
        row.button(
            "All steps and rewards", type="tertiary", icon=":material/zoom_out_map:", on_click=st.session_state.update,
            args=(drawn,),
        )  # fmt: skip
    what = RolloutFilter(steps, reward, tuple(reasons), GROUPS[groups], where, text)
    if facts["lost"]:
        st.warning(
            f"{facts['lost']:,} rollouts have a reward that is NaN or infinite; no filter of rewards finds them."
        )
    with frame():
        everywhere = replace(what, steps=None, reward=None)  # so that another cell can be clicked
        histogram = data.cached(run, reward_histogram, everywhere)
        if len(histogram):
            info = rewards_info(histogram)
            st.caption("Share of each reward among the rollouts of a step. Click a cell to list its rollouts.")
            python = scripts.REWARDS.format(path=run.path, asked=everywhere)
            clicked = partial(ask_for_cell, info, facts["last"], facts["high"])
            title = "Share of each reward, {low:.3g} to {high:.3g}, by step, {first} to {last}".format(**facts)
            chart(plot_rewards(info, steps, reward), "rewards", title, histogram, python, clicked=clicked)
        row = st.container(horizontal=True, vertical_alignment="bottom")
        order = box(row, "Order", "sort", list(ORDERS), DISAGREEING, width=290)
        further = [name for name in data.cached(run, rollout_columns) if name not in (*LISTED, *TEXTS)]
        parts = [name for name in further if name.startswith("reward_")] + ["turns"] * (facts["turns"] > 1)
        also = row.multiselect("Further columns", further, parts, key="columns", width=290, **listed)
        table, total = data.found_rollouts(run, what, MOST, order)
        names = [name_of(one) for one in table.to_dict("records")]
        if (name := new_query_value("rollout")) is not None:
            st.session_state["rollout"] = name
        write(rollout=(name := st.session_state.get("rollout")))
        at_step, _, number = (name or "").partition(".")
        low, high = steps or whole["steps"]
        if name not in names and at_step.isdecimal() and low <= int(at_step) <= high:
            # What is read stays in the list, wherever the order has it.
            of_step, _ = data.found_rollouts(run, replace(what, steps=(int(at_step),) * 2), MOST, order)
            read: pd.DataFrame = of_step.loc[of_step["rollout"].astype(str) == number]
            table = pd.concat([read, table], ignore_index=True)
            names = [name_of(one) for one in table.to_dict("records")]
        if not total:
            st.info("No rollout is like that; widen the filters.", icon=":material/inbox:")
        else:
            one: Any = table.iloc[at := names.index(name) if name in names else 0]
            row.button(
                "Its tokens", icon=":material/abc:", shortcut="T", on_click=go_to, args=("tokens",),
                kwargs={"step": one["step"], "prompt": one["group"], "token": f"{one['rollout']}.0"},
            )  # fmt: skip
            for same in [name for name in ("prompt_id", "prompt") if pd.notna(one[name])][:1]:
                row.button(
                    "This prompt at all steps", icon=":material/history:", on_click=st.session_state.update,
                    args=(EVERYTHING | drawn | {"where": f"{same} == {one[same]!r}"},),
                )  # fmt: skip
            both = row.toggle("Rendered", key="rendered", bind="query-params", help=RENDERED)
            step, tokens = int(one["step"]), table.head(0).reindex(columns=["t", "turn", "mask", "token"])
            with frame():
                tokens = data.texts_of_tokens(run, step, int(one["rollout"]))
            left, right = st.columns([3, 2]) if both else (st.container(), None)
            with left:
                columns = LISTED | {name: name.removeprefix("reward_") for name in also}
                reader(table, columns, at, tokens, data.rollouts(run, step)["prompt"].dropna(), text)
            if right is not None:
                with right.container(border=True, height=562):
                    rendered(one["completion"] if pd.notna(one["completion"]) else "")
            cut = f" The first {len(table)} are listed; narrow the filters for the others." * (total > len(table))
            st.caption(f"{total:,} rollouts.{cut} {KEYS}")
            download(table, "rollouts")

    st.subheader("Ask in SQL", anchor=False)
    with frame():
        st.selectbox(
            "Example", list(EXAMPLES), index=None, placeholder="choose an example", width=320, key="example",
            on_change=fill,
        )  # fmt: skip
        label, first = "One SELECT; it can change nothing and reach no other file.", next(iter(EXAMPLES.values()))
        query = run.path, st.text_area(label, first, key="sql", bind="query-params", height=110)
        if st.button("Run", type="primary") and query[1].strip():
            try:
                answer: Any = asked_sql(*query)
            except STOPS as error:
                answer = error
            st.session_state["_answer"] = query, answer
        answered, answer = st.session_state.get("_answer", (None, None))
        if answered == query:  # it is that of the moment at which it was asked
            if isinstance(answer, Exception):
                raise answer
            st.dataframe(one_line(answer.head(1000)), hide_index=True)
            cut = f"The first {ASKED_ROWS:,} rows were read" if len(answer) == ASKED_ROWS else f"{len(answer):,} rows"
            st.caption(cut + (", the first 1,000 are shown." if len(answer) > 1000 else "."))
            download(answer, "query")
    glossary()
