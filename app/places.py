"""Where tokens are looked at: a prompt at a step of a run, and the same prompt elsewhere."""

from dataclasses import dataclass
from typing import Any

import data
import listing
import pandas as pd
import selection
from kept import switch
from widgets import chosen_runs

from otb_analysis.figures.numbers import number
from otb_analysis.figures.prompts import distinct


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
    first = data.exact_steps(run)[-1:] or steps[-1:]
    default = first[0] if first[0] in steps else steps[-1]
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
    nearest = min(options, key=lambda o: (options[o].step != here.step, abs(options[o].step - here.step)))
    chosen = selection.choose(
        "beside", "Beside", list(options), nearest, within=row, of=f"{here.run.name}-{here.step}-{here.group}",
        words=lambda o: options[o].words(), width=220,
    )  # fmt: skip
    return options[chosen]
