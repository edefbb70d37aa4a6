"""`reasoning_gym`: any of reasoning-gym's tasks, or a mixture of them; right is what the task itself scores with 1.

Its problems by number, the same in every process, and the score of an answer; how a prompt asks for the final answer,
and where a completion has it.
"""

import hashlib
import json
import os
import random
import re
import signal
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from otb_analysis.config.train import ReasoningGymConfig
from otb_analysis.custom import foreign
from otb_analysis.errors import InputError, nearest
from otb_analysis.extras import require
from otb_analysis.tasks.base import Prompt, SingleTurn, Split, Turn, draw_prompt

RIGHT = 1 - 1e-6
"""Least score of a right answer; scores are sums of floats now and then."""
EXAMPLES_FROM = 30_000_000
"""Index of the first problem that is shown as an example."""
PLACE = re.compile(r"\{(question|instruction)\}")
SIZE = 1_000_000
"""Problems of a task; problem k is made from the random numbers of (seed · SIZE + k)."""
SIZES = {"acre": 5_000, "word_ladder": 20_000}
"""Those that make all problems at once, or refuse a large size."""
HASHED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Their problems or answers follow the order of sets, which differs between processes unless PYTHONHASHSEED is set."""
SECONDS = 1.0
"""Time after which scoring an answer ends with 0."""
LONGEST_ANSWER = 2_000
FAILURES = 20
"""Problems that may fail in a row before a task counts as one that makes none with its settings."""

# These scorers hand the answer to Python's eval, or to SymPy's parse_expr, which calls it.
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
FORMULA = re.compile(r"[0-9A-Za-z+\-*/^(). ]*")
FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "pi", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
LINE = re.compile(r"answer:[ \t*]*\n?(.*)", re.IGNORECASE)
TAGS = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class AnswerFormat:
    """One way of writing a final answer."""

    instruction: str  # What the prompt asks for
    written: str  # An answer in this form; {answer} stands for it

    def write(self, answer: str) -> str:
        """Return an answer in this form; one of several lines begins on a line of its own."""
        return self.written.replace("{answer}", f"\n{answer}" if "\n" in answer else answer)

    def read(self, text: str, lines: int = 1) -> str | None:
        """Return the last answer in a completion, or None where it has none in this form.

        Args:
            lines: How many lines the answer has, where this form does not say where it ends.
        """
        if self is FORMATS["whole"]:
            return text.strip() or None
        if self is FORMATS["tags"]:
            tagged = TAGS.findall(text)
            return tagged[-1].strip() if tagged else None
        marks = list(LINE.finditer(text))
        if not marks:
            return None
        if lines == 1:
            return marks[-1][1].strip() or None
        behind = text[marks[-1].start(1) :].lstrip("\n").split("\n")
        answer = "\n".join(behind[:lines])
        return answer if answer.strip() else None


FORMATS = {
    "line": AnswerFormat("Write the answer on the last line, after 'Answer:'.", "Answer: {answer}"),
    "tags": AnswerFormat("Write the answer between <answer> and </answer>.", "<answer>{answer}</answer>"),
    "whole": AnswerFormat("Write the answer and nothing else.", "{answer}"),
}
"""The values of `reasoning_gym.answer_format`."""


def bare_forms(answer: str) -> tuple[str, ...]:
    """Return an answer as it stands, and without the full stop, quotes, stars or dollar signs around it."""
    bare = answer.strip(" \t\n*`\"'$").removesuffix(".").strip(" \t\n*`\"'$")
    return (answer,) if bare in ("", answer) else (answer, bare)


@dataclass(frozen=True)
class Problem:
    """One problem, as reasoning-gym makes it."""

    question: str
    answer: str | None  # None where the task knows no right answer, and only scores one
    entry: dict[str, Any]  # What its scorer reads


class GymSource:
    """Problems of one task.

    Args:
        settings: Fields of the task's own configuration.
        seed: Two seeds share no problem number; they may share questions, which a hash assigns to one split.

    Raises:
        InputError: The task does not exist, refuses its settings, makes no problem with them, or makes other problems
            in every process.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], seed: int = 0):
        require("reasoning_gym", "the task 'reasoning_gym'")
        registry = import_module("reasoning_gym.factory").DATASETS  # classes of problems and configuration, by name
        if name == "composite":
            raise InputError(
                "reasoning_gym.name is 'composite', which mixes tasks itself; pass the tasks, as in "
                "--reasoning-gym.name gcd lcm --reasoning-gym.weight 2 1."
            )
        if name not in registry:
            close = get_close_matches(name, registry, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "docs/tasks.md names them."
            raise InputError(f"reasoning_gym.name is {name!r}, which is none of its {len(registry)} tasks; {hint}")
        if name in HASHED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise InputError(
                f"reasoning_gym.name is {name!r}, whose problems differ in every process unless PYTHONHASHSEED is set; "
                "begin the command with PYTHONHASHSEED=0, also when you resume the run."
            )
        known = {field.name for field in fields(registry[name][1])} - {"seed", "size"}
        for field in settings:
            if field in ("seed", "size"):
                raise InputError(f"reasoning_gym.config of {name} has {field!r}, which the run sets; leave it out.")
            if field not in known:
                raise InputError(
                    f"reasoning_gym.config of {name} has no field {field!r}; {nearest(field, sorted(known))}"
                )
        self.name, self.size, self.start = name, SIZES.get(name, SIZE), seed * SIZE
        with foreign(f"reasoning-gym refuses reasoning_gym.config of {name}", "change that or leave it out."):
            with _own_random(self.start):
                self.dataset: Any = import_module("reasoning_gym").create_dataset(
                    name, seed=self.start, size=self.size, **settings
                )
            if not any(self.problem(k) for k in range(FAILURES)):
                self._problem(0)  # raises what it fails with

    def problem(self, k: int) -> Problem | None:
        """Return problem k, or None where reasoning-gym fails to make it, as a few tasks do now and then."""
        try:
            return self._problem(k)
        except Exception:  # someone else's code can fail in any way
            return None

    def score(self, problem: Problem, answer: str) -> float:
        """Return the task's own score of an answer, from 0 to 1; 0 for one that would run as code or takes too long."""
        if len(answer) > LONGEST_ANSWER or not harmless(self.name, answer):
            return 0.0
        try:
            with _own_random(self.start), _time_limit(SECONDS):
                return float(self.dataset.score_answer(answer, problem.entry))
        except (Exception, _OutOfTime):  # an answer that the scorer cannot read is wrong
            return 0.0

    def _problem(self, k: int) -> Problem:
        with _own_random(self.start + k):
            entry = self.dataset[k]
        answer = entry["answer"]
        return Problem(str(entry["question"]), None if answer is None else str(answer), entry)


def harmless(name: str, answer: str) -> bool:
    """Return whether a task's scorer can be given an answer: no code of the policy's may run."""
    if name in EVALUATED:
        return "(" not in answer and "__" not in answer  # nothing is called
    if name in PARSED:
        words = re.findall(r"[A-Za-z]+", answer)
        return bool(FORMULA.fullmatch(answer)) and all(len(word) == 1 or word in FUNCTIONS for word in words)
    return True


@contextmanager
def _own_random(seed: int) -> Iterator[None]:
    """Seed the global generators for a block, as some tasks draw from them, and put back what they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _OutOfTime(BaseException):
    """Passes through `except Exception` of a scorer."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block; only the main thread of a process gets signals, and elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class ReasoningGym(SingleTurn):
    """Problems of one task, or of several by weight; the reward is 1 for an ended text whose answer scores 1.

    The task's own score, which may be partial, is recorded as the part `score` and not paid. A hash of the question
    decides the split, so a question is never in both. Examples are right answers to questions of the training split,
    the same for all prompts of a task, except where one is the prompt's own.

    Raises:
        InputError: reasoning-gym is missing, or a task, its settings, a weight or the template does not fit.
    """

    name = "reasoning_gym"
    alphabet = string.printable
    unpaid = frozenset({"score"})

    def __init__(self, config: ReasoningGymConfig, seed: int = 0):
        self.config, self.seed = config, seed
        self.share, settings = _shares_and_settings(config)
        if config.answer_format not in FORMATS:
            raise InputError(
                f"reasoning_gym.answer_format is {config.answer_format!r}; {nearest(config.answer_format, FORMATS)}"
            )
        self.format = FORMATS[config.answer_format]
        if "{question}" not in config.template:
            raise InputError(f"reasoning_gym.template is {config.template!r}; it must contain {{question}}.")
        added = "" if config.shots or "{instruction}" in config.template else "\n{instruction}"
        self.template = config.template + added
        self.sources = [GymSource(name, fields, seed) for name, fields in zip(config.name, settings, strict=True)]
        # Of one problem prompt, reward of each rollout and demonstration are asked, and some take a second to make.
        self.problem = lru_cache(maxsize=1024)(self._problem)
        self.origins: dict[str, tuple[int, int]] = {}  # Prompt → its source, and the problem's number there
        self.heldout: dict[int, Prompt] = {}  # drawn once: each takes ten problems, and some are slow to make
        self.examples: list[list[Problem]] = []
        for source in range(len(self.sources) if config.shots else 0):
            problems: dict[str, Problem] = {}
            for j in range(10 * (config.shots + 1)):
                drawn = self._draw(source, "train", EXAMPLES_FROM + j)
                problem = problems.setdefault(drawn.id, self.problem(drawn.id))
                if problem.answer is None:
                    raise _no_answer(self.sources[source].name, "set --reasoning-gym.shots 0")
                if len(problems) > config.shots:  # one more than are shown to a prompt: it may be one of them
                    break
            self.examples.append(list(problems.values()))
        for source in range(len(self.sources)):
            self._draw(source, "heldout", 0)  # refuses a task with too few questions before the run begins

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split."""
        if split == "heldout" and index in self.heldout:
            return self.heldout[index]
        rng = np.random.default_rng([self.seed, split == "heldout", index, len(self.share)])
        source = int(rng.choice(len(self.share), p=self.share))
        drawn = self._draw(source, split, index)
        others = [p for p in (self.examples[source] if self.config.shots else []) if p.question != drawn.text]
        examples = [
            (self._filled_template(p.question), self.format.write(p.answer or "")) for p in others[: self.config.shots]
        ]
        prompt = Prompt(drawn.id, self._filled_template(drawn.text), drawn.answer, self.config.chat, tuple(examples))
        if split == "heldout":
            self.heldout[index] = prompt
        return prompt

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return the right answer in the prompt's form.

        Raises:
            InputError: The task knows none.
        """
        problem = self.problem(prompt.id)
        if problem.answer is None:
            raise _no_answer(self.sources[self.origins[prompt.id][0]].name, "pass a --model")
        return [Turn(self.format.write(problem.answer), finished=True)]

    def final_answer(self, prompt: Prompt, text: str) -> str | None:
        """Return the answer that a text gives in the asked form, or None."""
        return self.format.read(text, lines=prompt.answer.count("\n") + 1)

    def reward(self, prompt: Prompt, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return {"correct": 0 or 1, "score": the task's own score}; a text that does not end scores 0."""
        last, score = turns[-1], 0.0
        answer = self.final_answer(prompt, last.text) if last.finished else None
        if answer is not None:
            source, problem = self.sources[self.origins[prompt.id][0]], self.problem(prompt.id)
            score = max(source.score(problem, form) for form in bare_forms(answer))
        return [{"correct": float(score >= RIGHT), "score": score}]

    def _draw(self, source: int, split: Split, index: int) -> Prompt:
        """Return a problem of one task as a prompt whose text is the question alone."""

        def draw(rng: np.random.Generator) -> Prompt | None:
            number = int(rng.integers(self.sources[source].size))
            problem = self.sources[source].problem(number)
            if problem is None:
                return None
            key = hashlib.sha256(problem.question.encode()).hexdigest()[:16]
            self.origins.setdefault(key, (source, number))
            return Prompt(key, problem.question, problem.answer or "")

        return draw_prompt(f"{self.name} {self.sources[source].name}", self.seed, split, index, draw)

    def _problem(self, name: str) -> Problem:
        source, number = self.origins[name]
        problem = self.sources[source].problem(number)
        assert problem is not None  # it was made before
        return problem

    def _filled_template(self, question: str) -> str:
        values = {"question": question.strip(), "instruction": self.format.instruction}
        return PLACE.sub(lambda place: values[place[1]], self.template)  # questions may have braces, too


def _shares_and_settings(config: ReasoningGymConfig) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Return the share of each task [sources], and the fields of each one's own configuration."""
    if not config.name:
        raise InputError("reasoning_gym.name is empty; pass --reasoning-gym.name TASK, as in letter_counting.")
    if config.shots < 0:
        raise InputError(f"reasoning_gym.shots is {config.shots}; choose a number of at least 0.")
    count = len(config.name)
    if len(config.config) not in (0, count):
        raise InputError(
            f"reasoning_gym.config has {len(config.config)} entries for {count} names; pass one JSON object for each "
            "name, in the same order ('{}' leaves a task as it is), or none."
        )
    weights = config.weight * count if len(config.weight) == 1 else config.weight
    if len(weights) != count:
        raise InputError(
            f"reasoning_gym.weight has {len(weights)} entries for {count} names; pass one for each, or one for all."
        )
    if not all(0 < weight < float("inf") for weight in weights):
        raise InputError(f"reasoning_gym.weight is {weights}; choose finite weights above 0.")
    settings = list[dict[str, Any]]()
    for name, text in zip(config.name, config.config or ("",) * count, strict=True):
        try:
            settings.append(json.loads(text or "{}"))
        except json.JSONDecodeError as error:
            raise InputError(
                f"reasoning_gym.config of {name} is not JSON ({error.msg} at character {error.pos + 1} of {text!r}); "
                """write an object, as in '{"min_words": 1}'."""
            ) from error
        if not isinstance(settings[-1], dict):
            example = """'{"min_words": 1}'."""
            raise InputError(f"reasoning_gym.config of {name} is {text!r}; write a JSON object, as in {example}")
    return np.array(weights) / np.sum(weights), settings


def _no_answer(name: str, remedy: str) -> InputError:
    return InputError(f"reasoning-gym's {name} scores answers but gives none that is right to show; {remedy}.")
