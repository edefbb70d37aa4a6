"""Where tokens are looked at: a prompt at a step of a run, and the same prompt elsewhere."""

from dataclasses import dataclass
from typing import Any

import data
import listing
import pandas as pd
import streamlit as st
from address import asked, box
from plain_text import plain
from widgets import chosen_runs

from otb_analysis.figures.numbers import number
from otb_analysis.figures.prompts import distinct
from otb_analysis.store.measured import first_step


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
    return box(within, "Step", "step", steps, first_step(steps, data.exact_steps(run)))


def choose_prompt(run: listing.Run, step: int, within: Any) -> int:
    """Let the page choose a prompt; labels say in what it differs from the others, and its mean reward."""
    rollouts = data.rollouts(run, step)
    means: Any = rollouts.groupby("group")["reward"].mean()
    texts = distinct({int(str(g)): str(text) for g, text in rollouts.groupby("group")["prompt"].first().items()})
    labels = {group: f"{group} · reward {number(float(means[group]))} · {text}" for group, text in texts.items()}
    text = asked("prompt") or ""
    wanted = int(text) if text.isdigit() else st.session_state.get("prompt")
    # Set each time: at another step the same prompt has another label, which a browser would not learn otherwise.
    st.session_state["prompt"] = wanted if wanted in labels else next(iter(labels))
    return within.selectbox(
        "Prompt", list(labels), format_func=lambda group: labels.get(group, ""), key="prompt", persist_state="session"
    )


def choose_beside(here: Place, row: Any) -> Place | None:
    """Let the page choose where else to look at the same prompt: another step, or another of the chosen runs."""
    if not row.toggle("Side by side", key="two", bind="query-params", help="The same prompt at another step or run."):
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
    options = {f"{p.words()}, prompt {p.group}": p for p in places if p.step in tokens[p.run.name]}
    if not options:
        row.caption("No other step of the chosen runs has this prompt. Choose more runs in the sidebar.")
        return None
    of, run, nearest = st.session_state.get("_beside", (here, "", ""))
    if of != here and st.session_state.get("beside") == nearest:  # not chosen by hand: it goes with the step
        st.session_state.pop("beside", None)
    # The same step, else the nearest; of the run that stood beside before, if any.
    same = [name for name, place in options.items() if place.run.name == run] or list(options)
    nearest = min(same, key=lambda name: (options[name].step != here.step, abs(options[name].step - here.step)))
    chosen = box(row, "Beside", "beside", list(options), nearest, width=220)
    st.session_state["_beside"] = here, options[chosen].run.name, nearest
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
