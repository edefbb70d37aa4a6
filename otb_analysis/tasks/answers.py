"""How a prompt asks for the final answer, and where a completion has it."""

import re
from dataclasses import dataclass

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
