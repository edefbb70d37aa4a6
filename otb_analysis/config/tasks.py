"""Options of the tasks that come with the library."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ChainSumConfig:
    """`chain_sum`: add a chain of numbers, one partial sum at a time. The number of terms sets the horizon."""

    terms_min: int = 2  # Fewest terms of a prompt.
    terms_max: int = 4  # Most terms of a prompt.
    largest: int = 19  # Terms are drawn from 1 … largest.


@dataclass(frozen=True)
class CalculatorConfig:
    """`calculator`: solve an expression by calls of a tool, one turn each."""

    operations_min: int = 2  # Fewest operators of a prompt.
    operations_max: int = 3  # Most operators of a prompt.
    operators: str = "+-*"  # Operators of a prompt, some of + - * / ^; the calculator knows them all.
    largest: int = 19  # Numbers are drawn from 1 … largest.
    largest_result: int = 999  # Every result on the way is whole and from 0 to this.
    call_operations: int = 1  # Most operators of one call; 1 leaves their order to the policy.


@dataclass(frozen=True)
class CountingConfig:
    """`counting`: how often a letter occurs in a text."""

    length_min: int = 4  # Shortest text.
    length_max: int = 12  # Longest text.
    letters: int = 4  # Letters the text is made of.
    show: Literal["running", "direct"] = "running"
    """What demonstrations write: the text with a running count, or the number at once."""


@dataclass(frozen=True)
class GraphPathConfig:
    """`graph_path`: any walk from start to goal along the edges of a random graph is right."""

    nodes: int = 5
    edges: int = 7
    distance_min: int = 2  # Fewest edges between start and goal.
    directed: bool = False  # True allows an edge only from its first letter to its second.


@dataclass(frozen=True)
class MathJsonlConfig:
    """`math_jsonl`: prompts and answers from local JSON-lines or Parquet files, graded by math-verify."""

    train: str = ""  # A .jsonl or .parquet file.
    heldout: str = ""  # Another one for the held-out split; by default a share of `train` is held out.
    heldout_share: float = 0.1  # Share of `train` held out when there is no other file; a hash of the prompt decides.
    prompt_column: str = "question"
    answer_column: str = "answer"
    answer_marker: str = "####"  # What stands before the final answer in the answer column, and may in a completion.
    template: str = "{prompt}"  # What the policy is given; {prompt} stands for the prompt column.
    chat: bool = True  # True wraps the prompt by the tokenizer's chat template, where it has one.


@dataclass(frozen=True)
class ReasoningGymConfig:
    """`reasoning_gym`: problems made and scored by the package reasoning-gym, of one of its tasks or of several."""

    name: tuple[str, ...] = ()  # The task, as in letter_counting; several names mix tasks.
    weight: tuple[float, ...] = (1.0,)  # How often each task is drawn, in the order of the names; one number for all.
    config: tuple[str, ...] = ()
    """Settings of each task as a JSON object, in the order of the names: '{"min_words": 1, "max_words": 2}'."""
    shots: int = 2
    """Questions of the training split with right answers that a prompt shows first, as messages of a chat where the
    tokenizer has a chat template."""
    answer_format: Literal["line", "tags", "whole"] = "line"
    """Where a completion has its answer: behind its last "Answer:", between <answer> and </answer>, or all of it."""
    template: str = "{question}"
    """What a question and each example is put into; {instruction} stands for a sentence that asks for the answer's
    form. It is added where no example shows the form."""
    chat: bool = True  # True wraps the prompt by the tokenizer's chat template, where it has one.


@dataclass(frozen=True)
class TaskSections:
    """The sections of a run's configuration that tasks have, each named as its task."""

    chain_sum: ChainSumConfig = field(default_factory=ChainSumConfig)
    calculator: CalculatorConfig = field(default_factory=CalculatorConfig)
    counting: CountingConfig = field(default_factory=CountingConfig)
    graph_path: GraphPathConfig = field(default_factory=GraphPathConfig)
    math_jsonl: MathJsonlConfig = field(default_factory=MathJsonlConfig)
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
