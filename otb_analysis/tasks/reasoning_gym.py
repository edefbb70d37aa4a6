"""`reasoning_gym`: any of reasoning-gym's tasks, or a mixture of them; right is what the task itself scores with 1."""

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from otb_analysis.config.tasks import ReasoningGymConfig
from otb_analysis.errors import InputError, nearest
from otb_analysis.tasks.answers import FORMATS, bare_forms
from otb_analysis.tasks.base import Prompt, SingleTurn, Split, Turn
from otb_analysis.tasks.gym_source import GymSource, Problem, settings_from_json
from otb_analysis.tasks.splits import draw_prompt

RIGHT = 1 - 1e-6
"""Least score of a right answer; scores are sums of floats now and then."""
EXAMPLES_FROM = 30_000_000
"""Index of the first problem that is shown as an example."""
PLACE = re.compile(r"\{(question|instruction)\}")


@dataclass(frozen=True)
class _Origin:
    """Where a prompt's problem came from."""

    source: int
    number: int


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
        self.share = _shares(config)
        if config.answer_format not in FORMATS:
            raise InputError(
                f"reasoning_gym.answer_format is {config.answer_format!r}; {nearest(config.answer_format, FORMATS)}"
            )
        self.format = FORMATS[config.answer_format]
        if "{question}" not in config.template:
            raise InputError(f"reasoning_gym.template is {config.template!r}; it must contain {{question}}.")
        added = "" if config.shots or "{instruction}" in config.template else "\n{instruction}"
        self.template = config.template + added
        texts = config.config or ("{}",) * len(config.name)
        settings = [settings_from_json(name, text) for name, text in zip(config.name, texts, strict=True)]
        self.sources = [GymSource(name, fields, seed) for name, fields in zip(config.name, settings, strict=True)]
        self.problem = lru_cache(maxsize=1024)(self._problem)
        self.origins: dict[str, _Origin] = {}
        self.heldout: dict[int, Prompt] = {}  # drawn once: each takes ten problems, and some are slow to make
        # One more than are shown to a prompt: it may be one of them.
        self.examples = [self._examples(source) for source in range(len(self.sources))] if config.shots else []
        for source in range(len(self.sources)):
            self._draw(source, "heldout", 0)  # refuses a task with too few questions before the run begins

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split."""
        if split == "heldout" and index in self.heldout:
            return self.heldout[index]
        rng = np.random.default_rng([self.seed, split == "heldout", index, len(self.share)])
        source = int(rng.choice(len(self.share), p=self.share))
        drawn = self._draw(source, split, index)
        examples = self._shown(source, drawn.text)
        prompt = Prompt(drawn.id, self._filled_template(drawn.text), drawn.answer, self.config.chat, examples)
        if split == "heldout":
            self.heldout[index] = prompt
        return prompt

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return the right answer in the prompt's form.

        Raises:
            InputError: The task knows none.
        """
        problem = self._problem_of(prompt)
        if problem.answer is None:
            raise _no_answer(self.sources[self.origins[prompt.id].source].name, "pass a --model")
        return [Turn(self.format.write(problem.answer), finished=True)]

    def final_answer(self, prompt: Prompt, text: str) -> str | None:
        """Return the answer that a text gives in the asked form, or None."""
        return self.format.read(text, lines=prompt.answer.count("\n") + 1)

    def reward(self, prompt: Prompt, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return {"correct": 0 or 1, "score": the task's own score}; a text that does not end scores 0."""
        last, score = turns[-1], 0.0
        answer = self.final_answer(prompt, last.text) if last.finished else None
        if answer is not None:
            source, problem = self.sources[self.origins[prompt.id].source], self._problem_of(prompt)
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
            self.origins.setdefault(key, _Origin(source, number))
            return Prompt(key, problem.question, problem.answer or "")

        return draw_prompt(f"{self.name} {self.sources[source].name}", self.seed, split, index, draw)

    def _problem(self, origin: _Origin) -> Problem:
        problem = self.sources[origin.source].problem(origin.number)
        assert problem is not None  # it was made before
        return problem

    def _problem_of(self, prompt: Prompt) -> Problem:
        return self.problem(self.origins[prompt.id])

    def _examples(self, source: int) -> list[Problem]:
        problems: dict[str, Problem] = {}
        for j in range(10 * (self.config.shots + 1)):
            drawn = self._draw(source, "train", EXAMPLES_FROM + j)
            problem = problems.setdefault(drawn.id, self._problem_of(drawn))
            if problem.answer is None:
                raise _no_answer(self.sources[source].name, "set --reasoning-gym.shots 0")
            if len(problems) > self.config.shots:
                break
        return list(problems.values())

    def _shown(self, source: int, question: str) -> tuple[tuple[str, str], ...]:
        """Return the examples that a question's prompt shows."""
        others = [p for p in (self.examples[source] if self.config.shots else []) if p.question != question]
        shown = others[: self.config.shots]
        return tuple((self._filled_template(p.question), self.format.write(p.answer or "")) for p in shown)

    def _filled_template(self, question: str) -> str:
        values = {"question": question.strip(), "instruction": self.format.instruction}
        return PLACE.sub(lambda place: values[place[1]], self.template)  # questions may have braces, too


def _shares(config: ReasoningGymConfig) -> np.ndarray:
    """Return the share of each task [sources]."""
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
    return np.array(weights) / np.sum(weights)


def _no_answer(name: str, remedy: str) -> InputError:
    return InputError(f"reasoning-gym's {name} scores answers but gives none that is right to show; {remedy}.")
