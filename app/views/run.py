"""Run: what happened when, in one run; a click on a step shows who held its gradient."""

from functools import partial
from typing import Any

import data
import pandas as pd
import scripts
import streamlit as st
from data import Run
from widgets import box, chart, download, frame, go_to, one_run, plain

from otb_analysis.answers.holders import NotAttributed
from otb_analysis.answers.triage import UNFIRED, state_of
from otb_analysis.diagnostics import LEVELS, Finding
from otb_analysis.figures.alarms import alarms_table, false_alarms, fired_first, foresight
from otb_analysis.figures.attribution import attribution_info, plot_attribution
from otb_analysis.figures.curves import degenerate_table
from otb_analysis.figures.timeline import first_look, plot_timeline, timeline_info

ROWS = 50
PERCENT = st.column_config.NumberColumn(format="percent")
COLUMNS: Any = {
    "reward": st.column_config.NumberColumn(format="%.3g"), "share": PERCENT, "signal": PERCENT, "noise": PERCENT,
}  # fmt: skip
HELD = {"prompt": "prompts", "rollout": "rollouts", "token": "tokens"}
FIRED = (
    "What went wrong, since when, and how far to trust it. A step is the one at which you would have seen it while the "
    "run was going. **False alarms**: the largest share of simulated healthy runs of 50 to 500 steps in which it ever "
    "fires (docs/results/alarms.md). **Study 05**: of 79 runs that collapsed, how many it called before the collapse, "
    "and at all. No detector is shown to foresee one."
)
SHARES = (
    "Shares of ‖ḡ‖², the squared length of the update's gradient; all tokens together are 100 %. Negative: the token "
    "pushed against the update, so that the others hold more than 100 %. **Signal** points along other prompts' "
    "gradients, **noise** only along its own."
)


def clicked() -> None:
    """Select the step of the point that was clicked."""
    points = st.session_state["timeline"]["selection"]["points"]
    if points:
        st.session_state["step"] = int(points[0]["x"])


def cells(findings: list[Finding]) -> pd.DataFrame:
    """Return alarms in this order, with their rates, as text that is no markup; a dash where nothing fired."""
    rows = [alarms_table({"": [finding]}).astype("string") for finding in findings]
    table = pd.concat(rows or [alarms_table({})]).drop(columns="run").fillna("–").map(plain)
    names = [finding.detector for finding in findings]
    return table.assign(**{"false alarms": list(map(false_alarms, names)), "study 05": list(map(foresight, names))})


def attribution(run: Run, step: int) -> None:
    """Show which tokens hold the gradient of the chosen step; a row leads to its tokens."""
    st.subheader(f"Who holds the gradient of step {step}", anchor=False)
    found = data.attribution(run, step)
    if isinstance(found, NotAttributed):
        st.info(found.missing, icon=":material/inbox:")
        if found.command:
            st.code(found.command, language="bash", wrap_lines=True)
        if found.nearest is not None:
            st.button(f"Go to step {found.nearest}", on_click=st.session_state.update, args=({"step": found.nearest},))
        return
    st.caption(plain(found.says))
    words = {name: HELD[name] for name in LEVELS}
    level = box(st, "Break down by", "level", words, "token", look="buttons")
    python = scripts.ATTRIBUTION.format(path=run.path, step=step)
    chart(plot_attribution(attribution_info(found.shares)), "attribution", python=python)
    st.caption(SHARES)
    table, total = found.holders(level, ROWS), len(found.shares.at(level))
    st.caption(f"The {len(table)} of {total:,} {HELD[level]} with the largest share. Click one to see it.")
    st.dataframe(
        table, hide_index=True, height=330, key="blamed", placeholder="–", selection_mode="single-cell",
        on_select=partial(open_clicked, table),
        column_config=COLUMNS,
    )  # fmt: skip
    download(found.holders(level), f"attribution-{level}s")


def open_clicked(table: pd.DataFrame) -> None:
    """Open the tokens of the row that was clicked, coloured by their share."""
    chosen = st.session_state["blamed"]["selection"]["cells"]
    if not chosen:
        return
    row: Any = table.iloc[chosen[0][0]]
    token = {"token": f"{row['rollout']}.{row['t']}"} if "t" in row else {}
    go_to("tokens", prompt=row["prompt"], color="attribution", **token)


with frame("Run", "What happened when, and which tokens held the gradient of a step?"):
    run = one_run()
    steps: Any = data.answers(run).steps.sort_values("step")
    findings = data.answers(run).findings
    row = data.answers(run).triage
    facts = [f"**{plain(run.name)}**", plain(run.estimator), run.status, f"{len(steps)} step{'s' * (len(steps) != 1)}"]
    st.markdown(f"{' · '.join(filter(None, facts))}: {plain(row.sentence)}.")
    if data.answers(run).alarm:
        st.warning(plain(data.answers(run).alarm), icon=":material/warning:")

    known = [int(step) for step in steps["step"]]
    bar, more, log = st.columns([4, 1, 1], vertical_alignment="bottom")
    st.caption(
        "What happened when: events first, then what changes as a run collapses. A click on a point chooses its step."
    )
    step = box(bar, "Step", "step", known, first_look(known, findings), "slider")
    every = more.toggle("All panels", key="all", bind="query-params")
    log_y = log.toggle("Log axes", key="log", bind="query-params")
    info = timeline_info(steps, findings, data.answers(run).changes, every, data.answers(run).outliers)
    python = scripts.TIMELINE.format(path=run.path, more=every, step=step, log_y=log_y)
    chart(plot_timeline(info, step, log_y=log_y), "timeline", steps, python, clicked=clicked)

    seen = data.answers(run).outlier_line, data.answers(run).mismatch_line
    st.caption("  \n".join(plain(line) for line in seen if line))

    fired, rest = fired_first(findings)
    st.subheader("Alarms", anchor=False)
    if fired:
        st.table(cells(fired), hide_index=True)
    elif (state := state_of(findings)) in UNFIRED:
        st.info(f"{UNFIRED[state].capitalize()}.", icon=":material/hourglass_empty:")
    else:
        st.success("Nothing fired.", icon=":material/check:")
    st.caption(FIRED)
    with st.expander(f"What the other {len(rest)} saw"):
        st.table(cells(rest), hide_index=True)

    with frame():
        attribution(run, step)
    st.subheader("Which baseline for the next run?", anchor=False)
    if st.toggle("Compare all baselines on this run's own rollouts", key="advise", bind="query-params"):
        with frame():
            st.markdown("  \n".join(map(plain, data.answers(data.measured(run)).lines)))
    st.subheader("Rollouts that teach nothing", anchor=False)
    st.caption("How often nothing could be learned or measured, counted over all steps. It is allowed, and no error.")
    st.dataframe(degenerate_table({run.name: steps}), hide_index=True, placeholder="–")
