"""Compare: A against B, two runs, two groups of runs, or two estimators of one run, with paired intervals."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import data
import pandas as pd
import scripts
import streamlit as st
from widgets import box, chart, compared_runs, download, frame, one_run, plain

from otb_analysis.answers.measured import SHORTER, not_measured
from otb_analysis.answers.pairs import Pair, estimator_names, first_estimators, left_out_note, zero_note
from otb_analysis.figures.pairs import SIDES, curves_rows, noise_display, noise_table, plot_pair
from otb_analysis.figures.runs import (
    Configs,
    config_differences,
    default_pairing,
    default_values,
    first_groups,
    group_keys,
    pair_groups,
    pair_runs,
)
from otb_analysis.figures.styles import Style, estimator_style

KINDS = {"runs": "Two runs", "groups": "Groups of runs", "estimators": "Estimators of one run"}
ONE_RUN = "Only one run is chosen. Choose a second one in the sidebar, or compare two estimators of this run."
NO_GROUPS = (
    "These runs form no groups: two of them with one seed must differ in a setting. Choose more runs in the sidebar."
)
BLOCKS = "Lower panels: B − A by block of steps; the grey band is the 95 % interval of the mean over all shared steps."
SEEDS = (
    "Lower panels: B − A by block of steps with intervals over seeds; the grey band is that of the mean over all steps."
)
RATIOS = (
    "Lower panels: B ÷ A by block of measured steps, on the same rollouts; the grey band is the 95 % interval over all "
    "of them, over prompts. Below 1 is less noise; of efficiency, above 1 is better."
)


def sides(options: Sequence[str], first: tuple[str, str], columns: Sequence[Any], of: str = "") -> tuple[str, str]:
    """Let the page choose A and B among some options, which may be those of one run."""
    each = zip("ab", first, columns, strict=True)
    a, b = (box(column, side.upper(), side, options, one, of=of) for side, one, column in each)
    return a, b


def compare_runs(runs: list[data.Run], configs: Configs, kind: str) -> None:
    """Compare two runs, or two groups of them."""
    if kind == "groups":
        if not (keys := group_keys(configs)):
            st.info(NO_GROUPS, icon=":material/inbox:")
            return
        column, *columns = st.columns(3)
        key = box(column, "Grouped by", "setting", list(keys))
        a, b = sides(keys[key], default_values(configs, key, keys[key]), columns)
        pairing = pair_groups(configs, key, a, b)
        styles = (estimator_style(a), estimator_style(b)) if key in ("estimator", "estimator.name") else SIDES
    else:
        if (first := default_pairing(configs, list(configs))) is None:
            st.info(ONE_RUN, icon=":material/inbox:")
            return
        pairing = pair_runs(*sides(list(configs), first, st.columns(2)))
        of = {run.name: run.style for run in runs}
        styles = of[pairing.a], of[pairing.b]
    if not pairing.pairs or pairing.a == pairing.b:
        st.info("A and B are the same, or no seed is in both. Choose another A or B.", icon=":material/inbox:")
        return
    pair = data.compared(tuple(runs), pairing)
    python = scripts.RUN_PAIR.format(root=data.root(), pairing=pairing, styles=styles)
    drawn(pair, styles, SEEDS if pairing.by == "seed" else BLOCKS, python)
    st.subheader("Configuration differences", anchor=False)
    differences = config_differences({run: configs[run] for run in pairing.runs})
    if differences.table.empty:
        st.caption(f"The same configuration. {left_out_note(differences)}")
        return
    by_run = differences.table.set_index("setting").T.rename_axis("run").reset_index()
    st.table(by_run.map(plain).rename(columns=plain), hide_index=True)  # whose cells wrap
    st.caption(f"What explains most stands first. {left_out_note(differences)}")
    download(by_run, "compare-config")


def compare_estimators(run: data.Run) -> None:
    """Compare two estimators on the rollouts of one run."""
    run = data.measured(run)
    measured = data.answers(run).measured
    names = estimator_names(measured) if measured is not None else {}
    if measured is None or len(names) < 2:
        st.info(plain(not_measured(data.answers(run).config)), icon=":material/inbox:")
        return
    a, b = sides(list(names), first_estimators(measured), st.columns(2), run.name)
    if a == b:
        st.info("A and B are the same estimator. Choose another A or B.", icon=":material/inbox:")
        return
    pair = data.compared_estimators(run, a, b)
    assert pair is not None  # both were measured
    styles = estimator_style(*names[a]), estimator_style(*names[b])
    drawn(pair, styles, RATIOS, scripts.ESTIMATOR_PAIR.format(path=run.path, a=a, b=b, styles=styles))


def drawn(pair: Pair, styles: tuple[Style, Style], caption: str, python: str) -> None:
    """Say what differs, then draw the curves with their differences, then the ratios of gradient noise."""
    st.markdown(f"**{plain(pair.verdict)}**")
    st.caption(plain(" ".join(pair.notes)))
    if pair.panels:
        figure = plot_pair(pair.panels, f"A: {pair.a}", f"B: {pair.b}", styles)
        chart(figure, "pair", pair.verdict, partial(curves_rows, pair.panels), python)
        st.caption(f"{caption} {zero_note(pair.panels)}")
    shown: pd.DataFrame = noise_display(pair.noise)
    if len(shown):
        st.subheader("Gradient noise, B ÷ A", anchor=False)
        st.caption(f"Whose update is noisier? Below 1 B is less noisy; of efficiency, above 1. {SHORTER}")
        st.table(shown.map(plain), hide_index=True)
        download(noise_table(pair.noise), "compare-noise")


with frame("Compare", "A against B: what differs, by how much, and is it more than chance?"):
    chosen = compared_runs()
    configs = {run.name: data.answers(run).config for run in chosen}
    # Groups to begin with where several seeds are paired, else two runs.
    first = "estimators" if len(configs) < 2 else "groups" if first_groups(configs) else "runs"
    kind = box(st, "What is compared", "compare", KINDS, first, label_visibility="collapsed", look="buttons")
    if kind == "estimators":
        compare_estimators(one_run())
    else:
        compare_runs(chosen, configs, kind)
