"""Run: what is going on, what is worth reading, who held a step's gradient, and what happened when."""

from functools import partial
from typing import Any

import data
import pandas as pd
import scripts
import streamlit as st
from data import Run
from widgets import as_wide_as_texts, box, chart, download, frame, go_to, one_line, one_run, plain, raw, sentences

from otb_analysis.answers.holders import Attributed, NotAttributed, Sized
from otb_analysis.answers.telling import Telling, telling_rollouts
from otb_analysis.answers.triage import silence, thinned
from otb_analysis.diagnostics import LEVELS, Finding
from otb_analysis.figures.alarms import MARKS, TITLES, alarms_table, false_alarms, fired_first, foresight
from otb_analysis.figures.attribution import attribution_info, plot_attribution
from otb_analysis.figures.curves import degenerate_table, sparkline
from otb_analysis.figures.styles import number
from otb_analysis.figures.texts import legible
from otb_analysis.figures.timeline import TimelineInfo, plot_timeline, timeline_info

ROWS = 50
PERCENT = st.column_config.NumberColumn(format="percent")
COLUMNS: Any = {
    "reward": st.column_config.NumberColumn(format="%.3g"), "share": PERCENT, "size": PERCENT, "signal": PERCENT,
    "noise": PERCENT,
}  # fmt: skip
HELD = {"prompt": "prompts", "rollout": "rollouts", "token": "tokens"}
SPOKE = "The step is that at which you would have seen it while the run was going; what it tells began earlier."
RATES = (
    "**False alarms**: the largest share of "
    "simulated healthy runs of 50 to 500 steps in which it ever fires (docs/results/alarms.md). **Study 05**: of 93 "
    "runs that collapsed, how many it called before the collapse, and at all. No detector is shown to foresee one."
)
CURVES, POINTS = 5, 60  # above the page, and the points of each; a string below would be shown on the page
SIGNS = {"watch": "△", "alarm": "▲"}
READ = 400  # Characters of an answer that are shown above the page
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


def go_to_step(within: Any, label: str, step: int | None, key: str) -> None:
    """Offer a step to the box of steps, whose address goes with it."""
    within.button(label, key=key, type="tertiary", on_click=st.session_state.update, args=({"step": step},))


def cells(findings: list[Finding]) -> pd.DataFrame:
    """Return alarms in this order, with their rates, as text that is no markup; a dash where nothing fired."""
    rows = [alarms_table({"": [finding]}).astype("string") for finding in findings]
    table = pd.concat(rows or [alarms_table({})]).drop(columns="run").fillna("–").map(plain)
    names = [finding.detector for finding in findings]
    return table.assign(**{"false alarms": list(map(false_alarms, names)), "study 05": list(map(foresight, names))})


def alarms(findings: list[Finding]) -> None:
    """Say what fired, one line each in the order of the steps; how far to trust it waits below."""
    fired, rest = fired_first(findings)
    if fired:
        st.caption(SPOKE)
    within = st.container(key="fired", gap=None)
    for one in fired:
        later = "" if one.alarm_step in (None, one.watch_step) else f", alarm at {one.alarm_step}"
        at = f"step {one.watch_step}{later}"
        row = within.container(horizontal=True, vertical_alignment="center")
        row.markdown(f"{SIGNS[one.level]} **{TITLES[one.detector]}**, {at}: {plain(one.reason)}")
        go_to_step(row, f"Go to step {one.watch_step}", one.watch_step, f"fired-{one.detector}")
    all_detectors([*fired, *rest])


@st.fragment  # opening it draws it and no more of the page
def all_detectors(findings: list[Finding]) -> None:
    """Show what every detector says once it is asked for: a browser takes half a second to draw that."""
    place = st.expander(f"All {len(findings)} detectors, and how far to trust them", key="trust", on_change="rerun")
    if place.open:
        place.caption(RATES)
        place.table(cells(findings), hide_index=True)


@st.fragment
def teaches_nothing(run: Run, steps: pd.DataFrame) -> None:
    """Count what nothing could be learned from, once that is asked for: a browser takes a while to draw a table."""
    place = st.expander("Rollouts that teach nothing", key="nothing", on_change="rerun")
    if place.open:
        place.caption("How often nothing could be learned or measured, over all steps. It is allowed, and no error.")
        place.dataframe(one_line(degenerate_table({run.name: steps})), hide_index=True, placeholder="–")


def curves(info: TimelineInfo, color: str) -> None:
    """Show the first curves small, each with its last value, its first one, and the alarms that are about it."""
    within = st.container(key="curves")  # in two rows where the window is narrow
    for place, series in zip(within.columns(CURVES), info.series[:CURVES], strict=False):
        named = [e for e in info.events if e.kind in SIGNS and e.column == series.quantity.column]
        first, last = series.value[[0, -1]].tolist()
        with place.container(border=True, height="stretch"):
            st.metric(
                series.quantity.title, number(last), f"from {number(first)}", "off", help=series.quantity.line,
                delta_arrow="off",
            )  # fmt: skip
            at = [series.step.searchsorted(e.step) / max(len(series.step) - 1, 1) for e in named]
            marks = [(share, MARKS[e.kind][2]) for share, e in zip(at, named, strict=True)]
            st.html(sparkline(thinned(series.value, POINTS), color, marks))
            for e in named:
                go_to_step(
                    st, f"{SIGNS[e.kind]} {plain(e.text)}, step {e.step}", e.step, f"{e.kind}-{e.text}-{e.column}"
                )
            if not named:
                st.caption("no alarm")


@st.fragment  # its switches draw this part of the page again, and no other
def happened(run: Run, steps: pd.DataFrame, step: int) -> None:
    """Show the events and curves of a run over its steps."""
    st.subheader("What happened when", anchor=False)
    st.caption("Events first, then what changes as a run collapses. A click on a point chooses its step.")
    told, toggles = data.answers(run), st.container(horizontal=True)
    every = toggles.toggle("All panels", key="all", bind="query-params")
    log_y = toggles.toggle("Log axes", key="log", bind="query-params")
    info = timeline_info(steps, told.findings, told.changes, every, told.outliers)
    python = scripts.TIMELINE.format(path=run.path, more=every, step=step, log_y=log_y, color=run.style.color)
    width = {"width": 260} if st.session_state.get("_narrow") else {}
    figure = plot_timeline(info, step, log_y=log_y, color=run.style.color, **width)
    chart(figure, "timeline", f"{run.name} over its steps: {told.triage.sentence}", steps, python, clicked=clicked)
    st.caption("  \n".join(plain(line) for line in (told.outlier_line, told.mismatch_line) if line))


def worth_reading(run: Run, last: int) -> None:
    """Show rollouts new since this browser last looked, else of the newest step, or from before a collapse."""
    looks, page = data.looks(), st.session_state
    if run.path not in looks or not (page["_stayed"] and page.get("_read") == run.path) or last < looks[run.path]:
        # While a page stays open what is new stays so; fewer steps: another run of this name.
        page["_since"] = min(looks.get(run.path, last), last) + 1
    looks[run.path], page["_read"], since = last, run.path, page["_since"]
    since = min(since, last)
    says = f"Of step {last}." if since == last else f"Of steps {since} to {last}, new since you last looked."
    if (fallen := data.answers(run).worth_reading) is not None:
        last, says = fallen
        since = last
    if not (told := data.cached(run, telling_rollouts, since, last)):
        return
    st.subheader("Worth reading", anchor=False)
    st.caption(says)
    for n, (place, one) in enumerate(zip(st.columns(3), told, strict=False)):
        with place.container(border=True, height="stretch", vertical_alignment="distribute"):
            above = st.container()  # so that the buttons of all stand at one height, below texts of any
            above.caption(f"**{plain(one.why)}** · reward {number(one.reward)}")
            asked = one.prompt.rstrip().rpartition("\n\n")[2][-READ:]  # what stands before may be examples
            raw(legible(f"{asked}\n{one.completion[:READ]}"), above.container(height=120, border=False))
            st.button(
                "Open its tokens", key=f"read-{n}", type="tertiary", icon=":material/abc:", on_click=read, args=(one,),
            )  # fmt: skip


def read(one: Telling) -> None:
    """Open a rollout's tokens; the step is a box's of this page, too, and no address may set that."""
    st.session_state["step"] = one.step
    go_to("tokens", prompt=one.group, token=f"{one.rollout}.{one.t}")


def attribution(run: Run, step: int) -> None:
    """Show which tokens hold the gradient of the chosen step, else which are large; a row leads to its tokens."""
    holding = data.attribution(run, step)
    shown = data.sizes(run, step) if isinstance(holding, NotAttributed) else holding
    st.subheader(f"{(shown or Attributed).heading} step {step}", anchor=False)
    if shown is not None:
        holders(run, step, shown)
    if isinstance(holding, NotAttributed):
        st.info(holding.missing, icon=":material/inbox:")
        if holding.command:
            st.code(holding.command, language="bash", wrap_lines=True)
        if holding.nearest is not None:
            go_to_step(st, f"Go to step {holding.nearest}", holding.nearest, "nearest")


def holders(run: Run, step: int, found: Attributed) -> None:
    """Draw what prompts, rollouts and tokens hold, or their sizes, and list the largest."""
    large = isinstance(found, Sized)
    script = scripts.SIZES if large else scripts.ATTRIBUTION
    st.caption(plain(found.says))
    words = {name: HELD[name] for name in LEVELS}
    level = box(st, "Break down by", "level", words, "token", look="buttons")
    info = attribution_info(found.shares, found.whole)
    chart(plot_attribution(info), "attribution", found.says, python=script.format(path=run.path, step=step))
    if not large:
        st.caption(SHARES)
    named, total = {"share": found.part, "text": "prompt's text"}, len(found.shares.at_level(level))
    table = found.holders(level, ROWS).rename(columns=named)
    st.caption(f"The {len(table)} of {total:,} {HELD[level]} with the largest {found.part}. Click one to see it.")
    st.dataframe(
        table, hide_index=True, height=min(330, 38 + 35 * len(table)), key="blamed", placeholder="–",
        selection_mode="single-cell", on_select=partial(open_clicked, table, found.column),
        column_config=COLUMNS | as_wide_as_texts(table.select_dtypes(exclude="number")),
    )  # fmt: skip
    download(lambda: found.holders(level).rename(columns=named), f"attribution-{level}s")


def open_clicked(table: pd.DataFrame, column: str) -> None:
    """Open the tokens of the row that was clicked, coloured by what ranks it."""
    for place, _ in st.session_state["blamed"]["selection"]["cells"]:  # one, or none
        row: Any = table.iloc[place]
        token = {"token": f"{row['rollout']}.{row['t']}"} if "t" in row else {}
        go_to("tokens", prompt=row["prompt"], color=column, **token)


with frame("Run", "What is going on in this run, since when, and which tokens did it?"):
    run = one_run()
    told = data.answers(run)
    findings = told.findings
    steps: Any = told.steps.sort_values("step")
    known = [int(step) for step in steps["step"]]
    count = f"{len(known)} step{'s' * (len(known) != 1)}"
    stale = f"off-policy as configured (staleness {told.staleness})" * bool(told.staleness)
    facts = [f"**{plain(run.name)}**", *map(plain, (run.estimator, run.status, count, stale))]
    first = fired_first(findings)[0][:1]
    sure = f"It fires in {false_alarms(first[0].detector)} of simulated healthy runs." if first else ""
    sure = silence() if told.triage.state == "calm" else sure
    st.markdown(f"{' · '.join(filter(None, facts))}: {plain(f'{told.triage.sentence}. {sure}')}")
    alarms(findings)
    curves(timeline_info(steps, findings, told.changes), run.style.color)
    with frame():
        worth_reading(run, known[-1])

    step = box(st, "Step", "step", known, told.look, "slider", of=run.name)
    if step == told.look and told.look_line:
        st.caption(told.look_line)
    with frame():
        attribution(run, step)

    happened(run, steps, step)

    st.subheader("Which baseline for the next run?", anchor=False)
    if st.toggle("Compare all baselines on this run's own rollouts", key="advise", bind="query-params"):
        with frame():
            sentences(data.answers(data.measured(run)).lines)
    teaches_nothing(run, steps)
