"""Tokens: all rollouts of one prompt, coloured by any column or difference, beside those of another step or run."""

from typing import Any

import data
import estimating
import numpy as np
import pandas as pd
import scripts
import streamlit as st
from address import asked, box, write
from places import Place, choose_beside, choose_prompt, choose_step
from plain_text import plain
from token_panel import token_panel
from token_view import Chosen, Pane, clicked, stepped, token_view
from widgets import chart, clicked_data, download, errors_as_sentences, one_run, page

from otb_analysis.figures.numbers import number
from otb_analysis.figures.token_colors import KINDS
from otb_analysis.figures.token_columns import ADVANTAGES, COLOURS, described, measured, with_differences
from otb_analysis.figures.token_grid import grid_info, plot_tokens
from otb_analysis.figures.tokens import column_values, prompt_head, scale_of, tokens_info
from otb_analysis.store.prompt import in_words
from otb_analysis.types import Label

SCALE = "auto: logarithmic where a few values are far larger than the rest, else linear between robust ends."
FIRST = ("grad_norm_sq", "energy_proxy")
NOTHING = (
    "This run has no step whose tokens and rollouts are both stored; a run of `otb train` stores them at every step, "
    "and `otb score --model DIR --rollouts FILE` stores those of recorded rollouts."
)
EMPTY = "All answers {} are empty, so there is no token to show; choose another step or prompt."
NOT_HERE = "Not measured for this prompt at this step"
ORDERS = {"rollout": "as sampled", "reward": "by reward", "length": "by length"}
LONGEST = 20_000  # Characters of a prompt that are shown


def choose_label(name: str, title: str, labels: list[Label], default: Label, within: Any) -> Label:
    """Let the page choose an estimator and its energies."""
    by_words = {in_words(label): label for label in labels}
    first = in_words(default if default in labels else labels[0])
    return by_words[box(within, title, name, list(by_words), first)]


def head(place: Place) -> None:
    """Show the prompt, its reference answer and what its rollouts were paid."""
    found = prompt_head(place.rollouts, place.tokens, place.run.estimator)
    cut = f"… ({len(found.text):,} characters)" if len(found.text) > LONGEST else ""
    with st.container(key="prompt-text"):
        st.code(found.text[:LONGEST] + cut, language=None, wrap_lines=True)
    facts = [f"**Reference answer** {plain(found.answer[:LONGEST])}"] if found.answer else []
    facts += [f"**Rewards** {plain(found.rewards)}"] if found.rewards else []
    st.markdown(" · ".join(facts))
    if found.equal:
        st.info(plain(found.equal), icon=":material/block:")


def choices(here: Place, row: Any) -> tuple[str, Label | None, Label | None, str, str]:
    """Let the page choose colour, estimator, the one to compare with, order and scale."""
    tokens = here.tokens
    labels = estimating.labels(here.run, here.step, here.group)
    trained = estimating.trained(here.run)
    names = measured(with_differences(tokens))
    names += [ADVANTAGES] if len(labels) > 1 else []
    kept = st.session_state.get("color")  # where a step did not measure it, too
    names += [kept] if kept in COLOURS and kept not in names else []
    if not names:
        st.info("No number was stored for any token of this prompt, so nothing can colour it.", icon=":material/inbox:")
        st.stop()
    first = next((c for c in FIRST if c in names), names[0])
    words = {c: described(tokens, c).title for c in names}
    name = box(row.container(width=210), "Colour by", "color", words, first)
    label = against = None
    if labels:
        label = choose_label("estimator", "Estimator", labels, trained, row.container(width=190))
        if name == ADVANTAGES:
            other: Label = ("rloo", "none") if label != ("rloo", "none") else ("group_mean", "none")
            against = choose_label("against", "minus that of", labels, other, row.container(width=190))
    with row.container(width=120):
        order = box(st, "Order", "order", ORDERS)
    with row.container(width=90):
        scale = box(st, "Scale", "scale", KINDS, help=SCALE)
    return name, label, against, order, scale


def coloured(place: Place, label: Label | None, against: Label | None) -> pd.DataFrame:
    """Return the tokens of a place with the chosen estimator's advantages and all differences."""
    tokens, other = place.tokens, None
    if label is not None and label in estimating.labels(place.run, place.step, place.group):
        tokens = estimating.as_estimated(place.run, place.step, place.group, label)
    if against is not None and against in estimating.labels(place.run, place.step, place.group):
        theirs: Any = estimating.as_estimated(place.run, place.step, place.group, against)
        other = theirs["advantage"]
    return with_differences(tokens, other)


def chosen_token(panes: int) -> Chosen | None:
    """Return the selected token: `rollout.t`, with a b in front on the right of two."""
    text = st.session_state.get("token", "")
    rollout, _, t = text.removeprefix("b").partition(".")
    pane = int(text.startswith("b"))
    return (pane, int(rollout), int(t)) if rollout.isdigit() and t.isdigit() and pane < panes else None


def select(pane: int, rollout: int, t: int) -> None:
    """Select a token."""
    st.session_state["token"] = f"{'b' * pane}{rollout}.{t}"


def prompt_share(place: Place, name: str) -> str:
    """Say what this prompt's tokens add up to, beside the step's whole ‖ḡ‖²."""
    shares = place.tokens[name].to_numpy(float, na_value=0.0)
    steps = data.steps([place.run])[place.run.name]
    whole: Any = steps.loc[steps["step"] == place.step, "grad_norm"]
    along, against = (number(float(part.sum())) for part in (shares[shares > 0], -shares[shares < 0]))
    return (
        "Blue pushes along the update, orange against it. "
        f"This prompt's tokens add up to {number(float(shares.sum()))} ({along} for, {against} against) "
        f"of ‖ḡ‖² = {number(float(whole.iloc[0]) ** 2)} of the whole step."
    )


def shown(places: list[Place], panes: list[Pane], titles: dict[str, str], label: Label | None) -> None:
    """Show the tokens, what the chosen one says, and the grid."""

    def on_token() -> None:
        if (token := clicked()) is not None:
            select(*token)

    def on_step() -> None:
        steps = data.token_steps(places[0].run)
        # Keys can be faster than the page: the step is the one selected by now, not the one that is still drawn.
        here = st.session_state["step"]
        at = steps.index(here if here in steps else places[0].step) + stepped()
        if 0 <= at < len(steps):
            st.session_state["step"] = steps[at]

    chosen = chosen_token(len(places))
    left_out = token_view(panes, titles, chosen, on_token, on_step)
    if left_out:
        st.caption(
            f"Rollouts left out, because they are too many for one page: {left_out}. Choose any in the grid below."
        )
    if chosen is not None:
        place = places[chosen[0]]
        with st.container(key="token-panel"), errors_as_sentences():
            token_panel(place.run, place.step, place.group, place.tokens, (chosen[1], chosen[2]), label)
    st.subheader("By position", anchor=False)
    for p, side in enumerate(st.columns(len(panes))):
        with side:
            grid(p, places[p], panes[p], titles[panes[p].info.column], chosen)


def grid(pane: int, place: Place, drawn: Pane, title: str, chosen: Chosen | None) -> None:
    """Draw the tokens by position; a click chooses one."""
    key = "tokens" + "b" * pane

    def on_point() -> None:
        if cell := clicked_data(key):
            select(pane, int(cell[0]), int(cell[1]))

    at = (chosen[1], chosen[2]) if chosen is not None and chosen[0] == pane else None
    column, stored = drawn.info.column, place.tokens
    as_stored = column in stored and drawn.tokens[column].equals(stored[column])
    python = scripts.TOKENS.format(path=place.run.path, step=place.step, group=place.group, column=column)
    can = as_stored or (column not in stored and column != ADVANTAGES)
    chart(plot_tokens(drawn.info, title, at), key, python=python if can else "", clicked=on_point)
    width = grid_info(drawn.info).width
    many = f"Each cell holds {width} tokens and shows the one that stands out most. " if width > 1 else ""
    st.caption(f"Where in the answers such tokens stand. {many}Click a cell to choose its token.")
    download(drawn.tokens, f"tokens-of-one-prompt{'b' * pane}")


with page("Tokens", "Which tokens make the gradient noisy? All rollouts of one prompt, coloured by what you ask."):
    row = st.container(horizontal=True, vertical_alignment="bottom")
    run = one_run(row, 260)
    if not data.token_steps(run):
        st.info(NOTHING, icon=":material/inbox:")
        st.stop()
    step = choose_step(run, row.container(width=110))
    here = Place(run, step, choose_prompt(run, step, row.container(width=520)))
    if (token := asked("token")) is not None:
        st.session_state["token"] = token
    write(prompt=here.group, token=st.session_state.get("token"))
    head(here)
    if here.tokens.empty:
        st.info(EMPTY.format("to this prompt at this step"), icon=":material/inbox:")
        st.stop()
    row = st.container(horizontal=True, vertical_alignment="bottom")
    name, label, against, order, scale = choices(here, row)
    beside = choose_beside(here, row)
    if beside is not None and beside.tokens.empty:
        st.info(EMPTY.format("beside these"), icon=":material/inbox:")
        beside = None
    places = [here] if beside is None else [here, beside]
    tables = [coloured(place, label, against) for place in places]
    words = [in_words(chosen) if chosen is not None else "" for chosen in (label, against)]
    about = described(tables[0], name, *words)
    unit = f" ({about.unit})" if about.unit else ""
    st.caption(plain(f"{about.title}{unit}: {about.meaning}") + " Hover for all values, click for the formulas.")
    if name in ("attribution", "signal", "noise"):
        st.caption(plain(prompt_share(here, name)))
    values = np.concatenate([column_values(table, name) for table in tables])
    colors = scale_of(values, name, scale, dark=st.context.theme.type == "dark")
    if np.isnan(values).all():
        st.info(
            "Not measured for this prompt at this step; choose another colour, step or prompt.", icon=":material/inbox:"
        )
    titles = {c: described(tables[0], c, *words).title for c in dict.fromkeys([*measured(tables[0]), name])}
    panes = [
        Pane(place.words() if beside else "", tokens_info(table, place.rollouts, name, order, colors), table)
        for place, table in zip(places, tables, strict=True)
    ]
    shown(places, panes, titles, label)
