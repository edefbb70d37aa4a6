"""Tokens: all rollouts of one prompt, coloured by any column or difference, beside those of another step or run."""

from functools import partial
from typing import Any

import data
import numpy as np
import pandas as pd
import scripts
import streamlit as st
from data import Run
from token_view import KEY, Chosen, Pane, Place, choose_beside, choose_prompt, token_panel, token_view
from widgets import box, chart, clicked_data, download, frame, new_query_value, one_run, plain, raw, write

from otb_analysis.answers.prompt import described, prompt_head
from otb_analysis.figures.rollouts import shared_head
from otb_analysis.figures.styles import number
from otb_analysis.figures.texts import ONE_LINE, legible
from otb_analysis.figures.token_columns import ADVANTAGES, COLOURS, KINDS, measured, with_differences
from otb_analysis.figures.tokens import column_values, grid_info, plot_tokens, scale_of, tokens_info
from otb_analysis.store.measured import exact_steps, first_step, token_steps
from otb_analysis.store.token_arrays import in_words, trained_label
from otb_analysis.types import Label

SCALE = "auto: logarithmic where a few values are far larger than the rest, else linear between robust ends."
FIRST = ("grad_norm_sq", "energy_proxy")
NOTHING = (
    "This run has no step whose tokens and rollouts are both stored; a run of `otb train` stores them at every step, "
    "and `otb score --model DIR --rollouts FILE` stores those of recorded rollouts."
)
EMPTY = "All answers {} are empty, so there is no token to show; choose another step or prompt."
ORDERS = {"rollout": "as sampled", "reward": "by reward", "length": "by length"}
LONGEST = 20_000  # Characters of a prompt that are shown


def choose_label(name: str, title: str, labels: list[Label], default: Label, within: Any) -> Label:
    """Let the page choose an estimator and its energies."""
    by_words = {in_words(label): label for label in labels}
    first = in_words(default if default in labels else labels[0])
    return by_words[box(within, title, name, list(by_words), first)]


def choices(here: Place, row: Any) -> tuple[str, Label | None, Label | None, str, str]:
    """Let the page choose colour, estimator, the one to compare with, order and scale."""
    tokens = here.tokens
    labels = data.prompt_labels(here.run, here.step, here.group)
    trained = trained_label(here.run.estimator, data.answers(here.run).config)
    names = measured(with_differences(tokens))
    names += [ADVANTAGES] if len(labels) > 1 else []
    kept = st.session_state.get("color")  # where a step did not measure it, too
    names += [kept] if kept in COLOURS and kept not in names else []
    if not names:
        st.info("No number was stored for any token of this prompt, so nothing can colour it.", icon=":material/inbox:")
        st.stop()
    first = next((c for c in FIRST if c in names), names[0])
    words = {c: described(tokens, c).title for c in names}
    if words.get(old := st.query_params.get("color", ""), old) != old:  # an address may name the column itself
        st.query_params["color"] = words[old]
        st.rerun()
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
    if label is not None and label in data.prompt_labels(place.run, place.step, place.group):
        tokens = data.as_estimated(place.run, place.step, place.group, label)
    if against is not None and against in data.prompt_labels(place.run, place.step, place.group):
        theirs: Any = data.as_estimated(place.run, place.step, place.group, against)
        other = theirs["advantage"]
    return with_differences(tokens, other)


def select(pane: int, rollout: int, t: int) -> None:
    """Select a token; the name of one on the right of two begins with a b."""
    st.session_state["token"] = f"{'b' * pane}{rollout}.{t}"


def on_token() -> None:
    """Select the token that was clicked."""
    if (token := st.session_state[KEY].get("token")) is not None:
        select(*map(int, token))


def on_step(run: Run, drawn: int) -> None:
    """Go to the next step or the one before."""
    steps = data.cached(run, token_steps)
    # Keys can be faster than the page: the step is the one selected by now, not the one that is still drawn.
    here = st.session_state["step"]
    at = steps.index(here if here in steps else drawn) + int((st.session_state[KEY].get("step") or [0])[0])
    if 0 <= at < len(steps):
        st.session_state["step"] = steps[at]


def on_cell(key: str, pane: int) -> None:
    """Select the token of the cell that was clicked."""
    if cell := clicked_data(key):
        select(pane, int(cell[0]), int(cell[1]))


with frame("Tokens", "Which tokens make the gradient noisy? All rollouts of one prompt, coloured by what you ask."):
    row = st.container(horizontal=True, vertical_alignment="bottom", key="one-row-1")
    run = one_run(row, 260)
    if not (steps := data.cached(run, token_steps)):
        st.info(NOTHING, icon=":material/inbox:")
        st.stop()
    # That of page Run, else the last one with exact norms.
    first = look if (look := data.answers(run).look) in steps else first_step(steps, data.cached(run, exact_steps))
    step = box(row.container(width=110), "Step", "step", steps, first, of=run.name)
    here = Place(run, step, choose_prompt(run, step, row.container(width=520)))
    if (token := new_query_value("token")) is not None:
        st.session_state["token"] = token
    write(prompt=here.group, token=st.session_state.get("token"))
    head = prompt_head(here.rollouts, here.tokens, run.estimator)
    shared = shared_head(data.rollouts(run, step)["prompt"].dropna())
    with st.container(key="prompt-text"):
        raw(legible(head.text[shared:], most=LONGEST))
    if shared:
        with st.expander(f"The {shared:,} characters before it, with which all prompts of this step begin"):
            raw(legible(head.text[:shared], most=LONGEST))
    paid = {"Reference answer": legible(head.answer, ONE_LINE, LONGEST), "Rewards": head.rewards}
    st.markdown(" · ".join(f"**{name}** {plain(value)}" for name, value in paid.items() if value))
    if head.equal:
        st.info(plain(head.equal), icon=":material/block:")
    if here.tokens.empty:
        st.info(EMPTY.format("to this prompt at this step"), icon=":material/inbox:")
        st.stop()
    row = st.container(horizontal=True, vertical_alignment="bottom", key="one-row-2")
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
        shares = here.tokens[name].to_numpy(float, na_value=0.0)
        scalars = data.answers(run).steps
        whole: Any = scalars.loc[scalars["step"] == step, "grad_norm"]
        along, off = (number(float(part.sum())) for part in (shares[shares > 0], -shares[shares < 0]))
        st.caption(
            plain(
                "Blue pushes along the update, orange against it. "
                f"This prompt's tokens add up to {number(float(shares.sum()))} ({along} for, {off} against) "
                f"of ‖ḡ‖² = {number(float(whole.iloc[0]) ** 2)} of the whole step."
            )
        )
    values = np.concatenate([column_values(table, name) for table in tables])
    colors = scale_of(values, name, scale, dark=st.context.theme.type == "dark")
    if np.isnan(values).all():
        st.info(
            "Not measured for this prompt at this step; choose another colour, step or prompt.", icon=":material/inbox:"
        )
    titles = {c: described(tables[0], c, *words).title for c in dict.fromkeys([*measured(tables[0]), name])}
    panes = [
        Pane(place.label if beside else "", tokens_info(table, place.rollouts, name, order, colors), table)
        for place, table in zip(places, tables, strict=True)
    ]
    chosen: Chosen | None = None
    rollout, _, t = st.session_state.get("token", "").removeprefix("b").partition(".")
    right = st.session_state.get("token", "").startswith("b")
    if rollout.isdecimal() and t.isdecimal() and right < len(places):
        chosen = int(right), int(rollout), int(t)
    if maps := token_view(panes, titles, chosen, on_token, partial(on_step, run, step)):
        st.caption(f"Shown as maps alone, since their texts are too many for one page: {maps}. Click one to read.")
    if chosen is not None:
        place = places[chosen[0]]
        with st.container(key="token-panel"), frame():
            token_panel(place.run, place.step, place.group, place.tokens, chosen[1:], label)

    st.subheader("By position", anchor=False)
    for p, side in enumerate(st.columns(len(panes))):
        place, drawn, key = places[p], panes[p], "tokens" + "b" * p
        column, stored = drawn.info.column, place.tokens
        as_stored = column in stored and drawn.tokens[column].equals(stored[column])
        can = as_stored or (column not in stored and column != ADVANTAGES)
        python = scripts.TOKENS.format(path=place.run.path, step=place.step, group=place.group, column=column)
        figure = plot_tokens(drawn.info, titles[column], chosen[1:] if chosen and chosen[0] == p else None)
        width = grid_info(drawn.info).width
        many = f"Each cell holds {width} tokens and shows the one that stands out most. " if width > 1 else ""
        known = [x for x in column_values(drawn.tokens, column) if np.isfinite(x)]
        ends = f"from {number(min(known))} to {number(max(known))}" if known else "not measured"
        with side:
            chart(
                figure,
                key,
                f"{titles[column]} by rollout and position, {ends}",
                python=python if can else "",
                clicked=partial(on_cell, key, p),
            )
            st.caption(f"Where in the answers such tokens stand. {many}Click a cell to choose its token.")
            download(drawn.tokens, f"tokens-of-one-prompt{'b' * p}")
