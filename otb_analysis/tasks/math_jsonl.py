"""`math_jsonl`: any local file of prompts and answers, as GSM8K's, graded by math-verify.

The final number of a solution in words is what it states at its end, not what it mentions on the way.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from otb_analysis.config.train import MathJsonlConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.tasks.base import Prompt, SingleTurn, Split, Turn, split_of

LONGEST_ANSWER = 300  # Characters of a final answer that are looked at
SECONDS = 1  # Time after which reading or comparing an answer counts as wrong: 9^9^9^9 has no value in any time
NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?%?"
WHOLE = re.compile(NUMBER)
JOINED = re.compile(rf"{NUMBER}(?:\s*(?:[-+*/×÷·^]|,\s|\bor\b)\s*\(?{NUMBER})*")
"""A number, or several that are still to be computed or chosen from: 7 - 8, 27, 28."""
STATED = re.compile(r"answer\b(?:[^.\n]*?\bis\b|\s*[:=])\s*:?", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
BOXED = r"\boxed{"
PLAIN = (
    (r"[−–]", "-"),
    (r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2"),
    (r"\\text\{([^}]*)\}", r" \1"),
    (r"\\times|\\cdot", "*"),
    (r"\\div", "÷"),
    (r"\{,\}", ","),
    (r"\\\$|\\[()\[\]]|\$(?!\d)", ""),
    (r"\\%", "%"),
    (r"(?<!\d)\*\*|\*\*(?!\d)|[`_]", ""),
    (r"(?<=\d)\s*/\s*(?=\d)", "/"),
    (r"([=:]|\bis)\s*-\s+(?=\d)", r"\1 -"),
)
"""LaTeX and Markdown → the same in plain signs."""


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
        require("math_verify", "grading the task 'math_jsonl'")
        from math_verify import parse, verify

        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a wrong answer is a reward of 0, not a message
        self.parse, self.verify = parse, verify
        columns = (config.prompt_column, config.answer_column)
        train, heldout = read_rows(config.train, columns), list[tuple[str, str]]()
        if config.heldout:
            heldout = read_rows(config.heldout, columns)
            kept = {prompt for prompt, _ in heldout}
            train = [row for row in train if row[0] not in kept]
        else:
            heldout = [row for row in train if split_of(row[0], config.heldout_share) == "heldout"]
            train = [row for row in train if split_of(row[0], config.heldout_share) == "train"]
        self.rows: dict[Split, list[tuple[str, str]]] = {"train": train, "heldout": heldout}
        for split, rows in self.rows.items():
            if not rows:
                raise InputError(
                    f"math_jsonl has no {split} prompts in {config.train}; pass more rows or a different share."
                )
        texts = {text for rows in self.rows.values() for row in rows for text in row}
        self.alphabet = "".join(sorted(set(config.template).union(*texts)))
        self.solutions = {self._prompt(row).id: row[1] for rows in self.rows.values() for row in rows}

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
        reference = _plain(prompt.answer)
        if WHOLE.fullmatch(reference.strip(" $")):  # one number, as 27, -1,234.5, 3/4, a LaTeX fraction or 50%
            answer = answer.rpartition("=")[2].strip() if explicit else final_number(answer)
            plain = _plain(answer)
            # 26 + 1 is no result, and neither is 54/2 where the reference is whole.
            unfinished = "/" in plain and not {"/", "."} & set(reference)
            numbers = JOINED.search(plain)
            if not answer or unfinished or (numbers is not None and not WHOLE.fullmatch(numbers[0])):
                return False
        answer = answer[-LONGEST_ANSWER:]
        # A bare reference may be LaTeX without its signs: \frac{1}{2}.
        wanted = self.parse(f"${prompt.answer}$", parsing_timeout=SECONDS)
        wanted = wanted or self.parse(prompt.answer, parsing_timeout=SECONDS)
        forms = (self.parse(form, parsing_timeout=SECONDS) for form in (answer, f"${answer}$"))
        return any(self.verify(wanted, form, timeout_seconds=SECONDS) for form in forms)


def _after(text: str, marker: str) -> str:
    """Return the line behind the last marker, or the whole text without one."""
    if not marker or marker not in text:
        return text.strip()
    lines = text.rpartition(marker)[2].strip().splitlines()
    return lines[0].strip() if lines else ""


def read_rows(file: str | Path, columns: tuple[str, str]) -> list[tuple[str, str]]:
    """Return two columns of every row of a file, JSON lines or Parquet, as texts; numbers are written out.

    Raises:
        InputError: The file cannot be read, is empty, or a row lacks a column.
    """
    path = Path(file)
    if not path.is_file():
        raise InputError(f"{path} does not exist; pass a .jsonl or .parquet file.")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise InputError(f"{path} ends in {path.suffix!r}; pass a .jsonl or .parquet file.")
    if path.suffix != ".parquet":
        rows = _json_lines(path)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            names = pq.read_schema(path).names
            if missing := [name for name in columns if name not in names]:
                raise InputError(f"{path} has no column {missing[0]!r}; it has {', '.join(names)}.")
            rows = list(enumerate(pq.read_table(path, columns=list(columns)).to_pylist(), start=1))
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path} cannot be read ({error}); pass a Parquet file.") from error
    if not rows:
        raise InputError(f"{path} has no rows; pass a file with prompts and answers.")
    for n, row in rows:
        for column in columns:
            if column not in row:
                raise InputError(f"{path}, row {n} has no column {column!r}; it has {', '.join(map(str, row))}.")
            if isinstance(row[column], bool) or not isinstance(row[column], str | int | float):
                raise InputError(f"{path}, row {n}: {column} is {row[column]!r:.60}; it must be a text or a number.")
    return [(str(row[columns[0]]), str(row[columns[1]])) for _, row in rows]


def _json_lines(path: Path) -> list[tuple[int, dict]]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); pass a file of JSON lines in UTF-8.") from error
    for n, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {n} is no JSON ({error.msg}); write one object per line.") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {n} is a {type(row).__name__}; write one JSON object per line.")
        rows.append((n, row))
    return rows


def boxed(text: str) -> str | None:
    """Return what the last box of LaTeX holds, or None without a closed one."""
    start = text.rfind(BOXED)
    depth, begin = 0, start + len(BOXED) - 1
    for at in range(begin, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin + 1 : at].strip()
    return None


def final_number(text: str) -> str:
    """Return the number that a text ends at, or nothing where it ends at none.

    It is the first number behind the last `answer is`, else that of the last sentence with one: there the first behind
    the last equals sign, else the last. Numbers still to be computed or chosen from, as in `7 - 8`, are none.
    """
    text = _plain(text)
    if stated := list(STATED.finditer(text)):
        sentences = SENTENCE.split(text[stated[-1].end() :].strip())[:1]
    else:
        sentences = [sentence for sentence in SENTENCE.split(text.strip()) if WHOLE.search(sentence)][-1:]
    _, equals, behind = "".join(sentences).rpartition("=")
    numbers = JOINED.findall(behind)
    number = numbers[0 if stated or equals else -1] if numbers else ""
    return number if WHOLE.fullmatch(number) else ""


def _plain(text: str) -> str:
    for pattern, replacement in PLAIN:
        text = re.sub(pattern, replacement, text)
    return text
