"""Where tokens are looked at: a prompt at a step of a run, and the same prompt elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import data
import listing
import pandas as pd
import selection
import streamlit as st
from kept import switch
from plain_text import plain
from widgets import chosen_runs

from otb_analysis.figures.numbers import number
from otb_analysis.figures.prompts import distinct
from otb_analysis.store.measured import first_step

_BESIDE = "_beside"
"""Beside what, and which place was nearest to it."""


@dataclass(frozen=True)
class Place:
    """One prompt at one step of one run."""

    run: listing.Run
    step: int
    group: int

    @property
    def rollouts(self) -> Any:
        """The rollouts of this prompt."""
        table = data.rollouts(self.run, self.step)
        return table[table["group"] == self.group]

    @property
    def tokens(self) -> Any:
        """The tokens of this prompt, with the baseline and advantage of the estimator that trained."""
        return data.tokens(self.run, self.step, self.group)

    def words(self, run: bool = True) -> str:
        """Say which step, and of which run if asked."""
        return f"step {self.step}" + (f" of {self.run.name}" if run else "")


def choose_step(run: listing.Run, within: Any) -> int:
    """Let the page choose a step; the last one with exact norms to begin with, else the last one."""
    steps = data.token_steps(run)
    default = first_step(steps, data.exact_steps(run))
    return selection.choose("step", "Step", steps, default, within=within, of=run.name)


def choose_prompt(run: listing.Run, step: int, within: Any) -> int:
    """Let the page choose a prompt; labels say in what it differs from the others, and its mean reward."""
    rollouts = data.rollouts(run, step)
    means: Any = rollouts.groupby("group")["reward"].mean()
    texts = distinct({int(str(g)): str(text) for g, text in rollouts.groupby("group")["prompt"].first().items()})
    labels = {group: f"{group} · reward {number(float(means[group]))} · {text}" for group, text in texts.items()}
    groups, of = list(labels), f"{run.name}-{step}"
    return selection.choose("prompt", "Prompt", groups, groups[0], within=within, of=of, words=labels.__getitem__)


def choose_beside(here: Place, row: Any) -> Place | None:
    """Let the page choose where else to look at the same prompt: another step, or another of the chosen runs."""
    if not switch(row, "Side by side", "two", help="The same prompt at another step or run."):
        return None
    first: Any = here.rollouts.iloc[0]
    prompt_id = None if pd.isna(first["prompt_id"]) else str(first["prompt_id"])
    places = [
        Place(run, step, group)
        for run in chosen_runs()
        for step, group in data.occurrences(run, prompt_id, str(first["prompt"]))
        if (run.name, step, group) != (here.run.name, here.step, here.group)
    ]
    tokens = {run.name: set(data.token_steps(run)) for run in {place.run for place in places}}
    options = {f"{p.run.name}:{p.step}:{p.group}": p for p in places if p.step in tokens[p.run.name]}
    if not options:
        row.caption("No other step of the chosen runs has this prompt. Choose more runs in the sidebar.")
        return None
    nearest, of = _nearest(here, options), f"{here.run.name}-{here.step}-{here.group}"
    before = st.session_state.get(_BESIDE, (of, ""))
    if before[0] != of and before[1] == selection.remembered("beside"):  # not chosen by hand
        selection.remember("beside", None)
    chosen = selection.choose(
        "beside", "Beside", list(options), nearest, within=row, of=of, words=lambda o: options[o].words(), width=220,
    )  # fmt: skip
    st.session_state[_BESIDE] = of, nearest
    say_what_is_elsewhere(here, options[chosen], list(options.values()))
    return options[chosen]


def say_what_is_elsewhere(here: Place, beside: Place, places: list[Place]) -> None:
    """Say which of the chosen runs has the prompt at other steps only, or not at all."""
    at = {run.name: [p.step for p in places if p.run.name == run.name] for run in chosen_runs()}
    name = beside.run.name
    if name != here.run.name and here.step not in at[name]:
        st.caption(plain(f"{name} has no tokens of this prompt at step {here.step}; step {beside.step} is shown."))
    never = [run for run, steps in at.items() if not steps and run != here.run.name]
    if never:
        st.caption(plain(f"No step of {', '.join(never)} has this prompt."))


def _nearest(here: Place, options: Mapping[str, Place]) -> str:
    """Return the place to begin with: the same step, else the nearest; in the run that stood beside before, if any.

    Two runs stay side by side at the same step while that changes.
    """
    run = (selection.remembered("beside") or "").rsplit(":", 2)[0]
    same = [name for name, place in options.items() if place.run.name == run] or list(options)
    return min(same, key=lambda name: (options[name].step != here.step, abs(options[name].step - here.step)))
