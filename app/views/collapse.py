"""Collapse: alarms with their reasons, health over steps, and which tokens hold a step's gradient."""

from typing import Any
from urllib.parse import urlencode

import data
import pandas as pd
import streamlit as st
from listing import Run
from widgets import chart, curves_table, download, errors_as_sentences, one_run, page, plain, selection

from otb_analysis.diagnostics import LEVELS
from otb_analysis.figures.alarms import SIGNS, alarm_marks, alarms_line, alarms_table
from otb_analysis.figures.attribution import attribution_info, attribution_line, attribution_table, plot_attribution
from otb_analysis.figures.collapse import collapse_info, degenerate_table, plot_collapse

ROWS = 50  # holders listed per level; a string below a constant would be shown on the page

HELD = {"prompt": "prompts", "rollout": "rollouts", "token": "tokens"}
FIRED = (
    "First watch and first alarm: the step at which you would have seen it while the run was going. Later steps "
    "are not used. On simulated healthy runs no detector fires in more than 5 % (docs/results/alarms.md)."
)
NOT_ATTRIBUTED = """No step of this run says which tokens held its gradient. The level *attribution* does:
`otb train --measure.attribution.every 1`, or `otb audit` for recorded rollouts."""
SHARES = (
    "Shares of ‖ḡ‖², the squared length of the update's gradient; all tokens together are 100 %. Negative: the token "
    "pushed against the update. **Signal** points along other prompts' gradients, **noise** only along its own."
)


def alarms(chosen: list[Run]) -> None:
    """Show what every detector says about the chosen runs, the worst first."""
    findings = data.findings(chosen)
    st.subheader("Alarms", anchor=False)
    st.caption(f"{alarms_line(findings)} {FIRED}")
    table: Any = alarms_table(findings)
    calm = table["level"] == SIGNS["ok"]
    if calm.all():
        st.success("Nothing fired.", icon=":material/check:")
    else:
        st.table(shown(table[~calm], len(chosen) > 1), border="horizontal", hide_index=True)
    with st.expander(f"What the other {int(calm.sum())} saw"):
        st.table(shown(table[calm], len(chosen) > 1), border="horizontal", hide_index=True)
    download(table, "alarms")


def shown(table: pd.DataFrame, several: bool) -> pd.DataFrame:
    """Return alarms as text that is no markup, a dash where nothing fired; the run only where there are several."""
    cells = table.astype("string").fillna("–").map(plain)
    return cells if several else cells.drop(columns="run")


def attribution() -> None:
    """Show which tokens hold the gradient of one step of one run; a row leads to its tokens."""
    st.subheader("Who holds the gradient", anchor=False)
    run = one_run()
    steps = data.attributed(run)
    if not steps:
        st.info(NOT_ATTRIBUTED, icon=":material/inbox:")
        return
    norms = data.steps([run])[run.name].set_index("step")["grad_norm"].reindex(steps)
    first = steps[int(norms.fillna(0).to_numpy().argmax())]
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    step = int(left.selectbox("Step", steps, index=steps.index(first), key="blame", bind="query-params") or 0)
    level = right.segmented_control(
        "Break down by", list(LEVELS), format_func=lambda name: HELD[name], default="token", key="level",
        bind="query-params", required=True,
    )  # fmt: skip
    shares, texts = data.attribution(run, step)
    st.caption(plain(attribution_line(shares)))
    chart(plot_attribution(attribution_info(shares)), "attribution")
    st.caption(SHARES)
    holders = shares.at(str(level))
    table = attribution_table(shares, holders.head(ROWS), texts, data.rollouts(run, step))
    st.caption(
        f"The {len(table)} of {len(holders):,} {HELD[str(level)]} with the largest share. A link opens the tokens of "
        "that prompt, coloured by their share."
    )
    st.dataframe(
        linked(table, run.name, step), hide_index=True, height=330, key="blamed", placeholder="–",
        column_config={
            "tokens →": st.column_config.LinkColumn(display_text="open", width=80),
            "reward": st.column_config.NumberColumn(format="%.3g"),
            **dict.fromkeys(("share", "signal", "noise"), st.column_config.NumberColumn(format="percent")),
        },
    )  # fmt: skip
    download(attribution_table(shares, holders, texts, data.rollouts(run, step)), f"attribution-{level}s")


def linked(table: pd.DataFrame, run: str, step: int) -> pd.DataFrame:
    """Return the table with a link to each row's tokens in front; a token's row also names the token to outline."""
    links = []
    for row in table.to_dict("records"):
        query = {"run": run, "step": step, "prompt": row["prompt"], "color": "attribution"}
        if "t" in row:
            query["token"] = f"{row['rollout']}.{row['t']}"
        links.append(f"/tokens?{urlencode(query)}")
    return pd.concat([pd.DataFrame({"tokens →": links}), table], axis=1)


def advice(chosen: list[Run]) -> None:
    """Say which estimator and group size each run's own rollouts advise."""
    st.subheader("Advice", anchor=False)
    st.caption("Efficiency relative to the estimator that trains, on the same rollouts. All intervals hold at once.")
    for run in chosen:
        st.markdown(f"**{plain(run.name)}**: {plain(data.advice(run))}")


with page("Collapse", "Is training about to fall apart, since when, and which tokens hold the gradient?"):
    chosen = selection()
    alarms(chosen)
    st.subheader("Health over steps", anchor=False)
    left, right = st.columns([2, 1], vertical_alignment="bottom")
    window = left.slider("Running mean over steps", 1, 100, 10, key="smooth", bind="query-params", width=320)
    log_y = right.toggle("Logarithmic axes", key="log", bind="query-params")
    steps = data.steps(chosen)
    info = collapse_info(steps, {run.name: run.estimator for run in chosen}, window)
    marks = alarm_marks(data.findings(chosen), data.changes(chosen))
    chart(plot_collapse(info, log_y=log_y, marks=marks), "collapse", curves_table(info))
    st.caption(
        "Lines are running means, faint lines the recorded values. Stars and crosses: an alarm fires for the first "
        "time. Triangles: change points, dated in hindsight. Pareto-k of exact norms: from 0.5 on, error bars of "
        "variances are unreliable; from 1 on, the variance of the gradient is infinite. That of the proxy, which is "
        "bounded, says neither. A group whose rewards are all equal has no gradient under any group baseline."
    )
    with errors_as_sentences():
        advice(chosen)
    with errors_as_sentences():
        attribution()
    st.subheader("Degenerate input", anchor=False)
    st.caption("Allowed, but nothing can be learned or measured from it. Counted over all steps.")
    st.dataframe(degenerate_table(steps), hide_index=True, placeholder="–")
