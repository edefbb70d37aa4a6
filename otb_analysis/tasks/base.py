"""What a task is: prompts from disjoint splits, an optional environment that answers, and a verifiable reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Prompt:
    """One problem; made by a task, read by sampling and the reward."""

    id: str  # Stable name, the same across steps, runs and machines; intervals cluster by it
    text: str  # What the policy is given
    answer: str  # The right final answer, in the task's own notation
    chat: bool = False  # True asks for the tokenizer's chat template around the text, where it has one


@dataclass(frozen=True)
class Turn:
    """One policy turn and the environment's reply to it."""

    text: str  # What the policy wrote, without the end token
    finished: bool  # True when the policy wrote the end token within its budget
    reply: str = ""  # What the environment inserted afterwards; empty after the last turn


class Task(Protocol):
    """A verifiable task, single- or multi-turn."""

    name: str
    alphabet: str
    """Every character that prompts, demonstrations and replies can contain."""

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
        """Return one mapping of named reward parts per policy turn; a turn's reward is their sum."""
        ...
