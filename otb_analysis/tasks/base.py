"""What a task is: prompts from disjoint splits, an optional environment that answers, and a verifiable reward.

Problems may be drawn from a seed; each belongs to one split for good.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from otb_analysis.errors import InputError

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 0.1
MOST_DRAWS = 20_000  # Draws after which a split counts as empty
FINAL = re.compile(r"#([0-9]{1,12})\Z")


@dataclass(frozen=True)
class Prompt:
    """One problem; made by a task, read by sampling and the reward."""

    id: str  # Stable name, the same across steps, runs and machines; intervals cluster by it
    text: str  # What the policy is given
    answer: str  # The right final answer, in the task's own notation
    chat: bool = False  # True asks for the tokenizer's chat template around the text, where it has one
    # Other problems' texts and right answers, shown before the text
    examples: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def shown(self) -> str:
        """What the policy is given where there is no chat template: the examples and the text."""
        shown = "".join(f"{text}\n{answer}\n\n" for text, answer in self.examples)
        return f"{shown}{self.text}\n" if shown else self.text


@dataclass(frozen=True)
class Turn:
    """One policy turn and the environment's reply to it."""

    text: str  # What the policy wrote, without the end token
    finished: bool  # True when the policy wrote the end token within its budget
    reply: str = ""  # What the environment inserted afterwards; empty after the last turn


class SingleTurn:
    """The part that tasks of one turn share: no reply, and a reward of 1 for an ended text that is right."""

    def is_right(self, prompt: Prompt, text: str) -> bool:
        """Return whether an ended text answers the prompt: here, whether it ends in `#` and the right whole number."""
        final = FINAL.search(text)
        return final is not None and int(final[1]) == int(prompt.answer)

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Return None: one turn ends the episode."""
        return None

    def reward(self, prompt: Prompt, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return {"correct": 1} when the text ends and is right, else {"correct": 0}."""
        last = turns[-1]
        return [{"correct": float(last.finished and self.is_right(prompt, last.text))}]


class Task(Protocol):
    """A verifiable task, single- or multi-turn."""

    name: str
    alphabet: str  # Every character that prompts, demonstrations and replies can contain

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split: the same for the same seed, never in both splits."""
        ...

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return a right solution, for the supervised start."""
        ...

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Return the environment's answer to the last turn, or None when the episode is over."""
        ...

    def reward(self, prompt: Prompt, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return one mapping of named reward parts per policy turn; a turn's reward is their sum.

        Parts that the task names in a set `unpaid`, if it has one, are recorded and not added.
        """
        ...


def split_of(name: str, share: float = HELDOUT_SHARE) -> Split:
    """Return the split of a problem: a hash of its name decides, so that it is the same for every seed and machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < share * 2**64 else "train"


def draw_prompt(
    name: str, seed: int, split: Split, index: int, draw: Callable[[np.random.Generator], Prompt | None]
) -> Prompt:
    """Return problem `index` of a split: drawn from (seed, split, index) until one is fit and falls into the split.

    Args:
        draw: Makes a problem from random numbers, or None when what came out is not fit; its id decides the split.

    Raises:
        InputError: None of many draws was in the split.
    """
    rng = np.random.default_rng([seed, split == "heldout", index])
    for _ in range(MOST_DRAWS):
        prompt = draw(rng)
        if prompt is not None and split_of(prompt.id) == split:
            return prompt
    raise InputError(
        f"{name} found no problem for the {split} split in {MOST_DRAWS} draws; widen the ranges of its settings."
    )


class DrawnProblems:
    """The part that tasks share whose problems are drawn one by one; they have a `seed` and a method `draw`."""

    name: str
    seed: int

    def draw(self, rng: np.random.Generator) -> Prompt | None:
        """Return a problem made from random numbers, or None where what came out is not fit."""
        raise NotImplementedError

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split: drawn from (seed, split, index) until its hash falls into the split."""
        return draw_prompt(self.name, self.seed, split, index, self.draw)
