"""What a task is: prompts from disjoint splits, an optional environment that answers, and a verifiable reward."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Split = Literal["train", "heldout"]
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
