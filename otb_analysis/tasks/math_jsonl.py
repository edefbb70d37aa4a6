"""`math_jsonl`: any local file of prompts and answers, as GSM8K's, graded by math-verify."""

import hashlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from otb_analysis.config.tasks import MathJsonlConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.tasks.base import Prompt, SingleTurn, Split, Turn
from otb_analysis.tasks.final_number import boxed, final_number, is_number, is_worked_out
from otb_analysis.tasks.rows import read_rows
from otb_analysis.tasks.splits import split_of

LONGEST_ANSWER = 300  # Characters of a final answer that are looked at
SECONDS = 1  # Time after which reading or comparing an answer counts as wrong: 9^9^9^9 has no value in any time


class MathJsonl(SingleTurn):
    """Prompts of a file in a seeded order, epoch after epoch; the reward is 1 for an ended text with the right answer.

    The final answer is what follows the last `answer_marker`, or else the last boxed expression, or else what the text
    ends at: its final number where the reference is a number, otherwise the last expression that math-verify finds. It
    is right when it is the reference answer's text or equals it mathematically; a number must be worked out.
    A prompt of both files is held out; the same text is never in both splits.

    Raises:
        InputError: A file, a column or math-verify is missing, or a split is empty.
    """

    name = "math_jsonl"

    def __init__(self, config: MathJsonlConfig, seed: int = 0):
        if not config.train:
            raise InputError("math_jsonl.train is empty; pass --math-jsonl.train FILE.jsonl (or .parquet).")
        if "{prompt}" not in config.template:
            raise InputError(f"math_jsonl.template is {config.template!r}; it must contain {{prompt}}.")
        if not config.heldout and not 0 < config.heldout_share < 1:
            raise InputError(f"math_jsonl.heldout_share is {config.heldout_share}; choose a share between 0 and 1.")
        self.config, self.seed = config, seed
        self.equal = _equality()
        self.rows = self._split_rows()
        texts = {text for rows in self.rows.values() for row in rows for text in row}
        self.alphabet = "".join(sorted(set(config.template).union(*texts)))
        self.solutions = {self._prompt(row).id: row[1] for rows in self.rows.values() for row in rows}

    def _split_rows(self) -> dict[Split, list[tuple[str, str]]]:
        config = self.config
        columns = (config.prompt_column, config.answer_column)
        train = read_rows(config.train, columns)
        if config.heldout:
            heldout = read_rows(config.heldout, columns)
            kept = {prompt for prompt, _ in heldout}
            train = [row for row in train if row[0] not in kept]
        else:
            heldout = [row for row in train if split_of(row[0], config.heldout_share) == "heldout"]
            train = [row for row in train if split_of(row[0], config.heldout_share) == "train"]
        for split, rows in (("train", train), ("heldout", heldout)):
            if not rows:
                raise InputError(
                    f"math_jsonl has no {split} prompts in {config.train}; pass more rows or a different share."
                )
        return {"train": train, "heldout": heldout}

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split: held-out ones in the file's order, the others reshuffled every epoch."""
        rows = self.rows[split]
        epoch, place = divmod(index, len(rows))
        if split == "heldout":
            return self._prompt(rows[place])
        return self._prompt(rows[int(np.random.default_rng([self.seed, epoch]).permutation(len(rows))[place])])

    def _prompt(self, row: tuple[str, str]) -> Prompt:
        question, solution = row
        return Prompt(
            id=hashlib.sha256(question.encode()).hexdigest()[:16],
            text=self.config.template.replace("{prompt}", question),
            answer=_after(solution, self.config.answer_marker),
            chat=self.config.chat,
        )

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return the answer column as it is, solution and all."""
        return [Turn(self.solutions[prompt.id], finished=True)]

    def is_right(self, prompt: Prompt, text: str) -> bool:
        """Return whether the final answer of the text is the reference's."""
        marker = self.config.answer_marker
        answer, explicit = _after(text, marker), bool(marker) and marker in text
        if answer == prompt.answer:
            return True
        if not explicit and (inside := boxed(answer)) is not None:
            answer, explicit = inside, True
        if is_number(prompt.answer):
            answer = answer.rpartition("=")[2].strip() if explicit else final_number(answer)
            if not answer or not is_worked_out(answer, prompt.answer):
                return False
        return self.equal(prompt.answer, answer)


def _after(text: str, marker: str) -> str:
    """Return the line behind the last marker, or the whole text without one."""
    if not marker or marker not in text:
        return text.strip()
    lines = text.rpartition(marker)[2].strip().splitlines()
    return lines[0].strip() if lines else ""


def _equality() -> Callable[[str, str], bool]:
    """Return math-verify's comparison of a reference and an answer, with limits on length and time.

    Raises:
        InputError: It is not installed.
    """
    require("math_verify", "grading the task 'math_jsonl'")
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a wrong answer is a reward of 0, not a message

    def equal(reference: str, answer: str) -> bool:
        answer = answer[-LONGEST_ANSWER:]
        # A bare reference may be LaTeX without its signs: \frac{1}{2}.
        wanted = parse(f"${reference}$", parsing_timeout=SECONDS) or parse(reference, parsing_timeout=SECONDS)
        for form in (answer, f"${answer}$"):
            if verify(wanted, parse(form, parsing_timeout=SECONDS), timeout_seconds=SECONDS):
                return True
        return False

    return equal
