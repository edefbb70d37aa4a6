"""Tokens: all rollouts of one prompt side by side, coloured by any column."""

from typing import Any

import data
import listing
import pandas as pd
import selection
import streamlit as st
from token_view import token_view
from widgets import chart, download, one_run, page, plain

from otb_analysis.figures.numbers import number
from otb_analysis.figures.prompts import distinct
from otb_analysis.figures.token_colors import KINDS
from otb_analysis.figures.token_details import token_details
from otb_analysis.figures.tokens import NUMERIC, SIGNED, plot_tokens, tokens_info
from otb_analysis.schema import column

SCALE = "auto: logarithmic where a few values are far larger than the rest, else linear between robust ends."
WIDTHS = (110, 380, 210, 150, 120)
FIRST = ("grad_norm_sq", "energy_proxy")
NORM = {False: "Exact ‖∇log π‖²", True: "Estimated ‖∇log π‖²"}  # by whether some of it was sketched
SKETCHED = "Estimated from projections on random directions: a click shows each standard error; some are below 0."
NOTHING = (
    "This run has no step whose tokens and rollouts are both stored; a run of `otb train` stores them at every step, "
    "and `otb score --model DIR --rollouts FILE` stores those of recorded rollouts."
)
ORDERS = {"rollout": "as sampled", "reward": "by reward", "length": "by length"}


def choose_step(run: listing.Run) -> int:
    """Let the page choose a step; the last one with exact norms to begin with, else the last one."""
    steps = data.token_steps(run)
    first = data.exact_steps(run)[-1:] or steps[-1:]
    return selection.choose("step", "Step", steps, first[0] if first[0] in steps else steps[-1], of=run.name)


def choose_prompt(run: listing.Run, step: int, rollouts: pd.DataFrame) -> int:
    """Let the page choose a prompt; labels say in what it differs from the others, and its mean reward."""
    means: Any = rollouts.groupby("group")["reward"].mean()
    texts = distinct({int(str(g)): str(text) for g, text in rollouts.groupby("group")["prompt"].first().items()})
    labels = {group: f"{group} · {text} · mean reward {number(float(means[group]))}" for group, text in texts.items()}
    groups = list(labels)
    return selection.choose("prompt", "Prompt", groups, groups[0], of=f"{run.name}-{step}", words=lambda g: labels[g])


def chosen_token() -> tuple[int, int] | None:
    """Return the selected token as (rollout, t)."""
    rollout, _, t = (selection.remembered("token") or "").partition(".")
    return (int(rollout), int(t)) if rollout.isdigit() and t.isdigit() else None


def prompt_share(tokens: pd.DataFrame, name: str, steps: pd.DataFrame, step: int) -> str:
    """Say what this prompt's tokens add up to, beside the step's whole ‖ḡ‖²."""
    shares = tokens[name].to_numpy(float, na_value=0.0)
    whole: Any = steps.loc[steps["step"] == step, "grad_norm"]
    along, against = (number(float(part.sum())) for part in (shares[shares > 0], -shares[shares < 0]))
    return (
        "Blue pushes along the update, orange against it. "
        f"This prompt's tokens add up to {number(float(shares.sum()))} ({along} for, {against} against) "
        f"of ‖ḡ‖² = {number(float(whole.iloc[0]) ** 2)} of the whole step."
    )


def details(tokens: pd.DataFrame, chosen: tuple[int, int], estimator: str) -> None:
    """Show one token's numbers and how they come about."""
    token = token_details(tokens, *chosen, estimator)
    if token is None:
        return
    with st.container(border=True):
        left, right = st.columns([1, 4])
        left.caption(f"token {token.t} of rollout {token.rollout}")
        left.code(token.text, language=None)
        right.dataframe(
            pd.DataFrame(token.formulas, columns=["quantity", "with this token's numbers"]), hide_index=True
        )


with page("Tokens", "Which tokens make the gradient noisy? All rollouts of one prompt, coloured by what you ask."):
    run = one_run()
    if not data.token_steps(run):
        st.info(NOTHING, icon=":material/inbox:")
        st.stop()
    controls = st.container(horizontal=True)
    places = [controls.container(width=width) for width in WIDTHS]
    with places[0]:
        step = choose_step(run)
    rollouts = data.rollouts(run, step)
    with places[1]:
        group = choose_prompt(run, step, rollouts)
    tokens = data.tokens(run, step, group)
    measured = [c for c in NUMERIC if c in tokens and bool(tokens[c].notna().any()) and c != "token_id"]
    sketched = bool((tokens["measured_by"] == "sketch").any())
    with places[2]:
        first = next((c for c in FIRST if c in measured), measured[0])
        words = {c: NORM[sketched] if c == "grad_norm_sq" else c for c in measured}
        name = selection.choose("color", "Colour by", measured, first, words=words.__getitem__)
    with places[3]:
        order = st.selectbox("Order", list(ORDERS), format_func=lambda o: ORDERS[o], key="order", bind="query-params")
    chosen: Any = rollouts[rollouts["group"] == group]
    with places[4]:
        scale = st.selectbox("Scale", KINDS, key="scale", bind="query-params", help=SCALE)
    of_prompt = chosen.set_index("rollout")
    info = tokens_info(tokens, of_prompt["reward"], name, str(order), str(scale))
    described = column("tokens", name)
    unit = f" ({described.unit})" if described.unit else ""
    st.caption(plain(f"{described.name}{unit}: {described.meaning}") + " Hover for all values, click for the formulas.")
    if name == "grad_norm_sq" and sketched:
        st.caption(SKETCHED)
    if name in SIGNED:
        st.caption(plain(prompt_share(tokens, name, data.steps([run])[run.name], step)))
    st.code(str(of_prompt["prompt"].iloc[0]), language=None, wrap_lines=True)
    clicked = token_view(info, tokens, of_prompt["finish_reason"].to_dict(), measured, chosen_token())
    if clicked and clicked != chosen_token():
        selection.remember("rollout", clicked[0])
        selection.remember("token", f"{clicked[0]}.{clicked[1]}")
        st.rerun()
    if (token := chosen_token()) is not None:
        details(tokens, token, run.estimator)
    st.subheader("By position", anchor=False)
    chart(plot_tokens(info), "tokens")
    download(tokens, "tokens-of-one-prompt")
