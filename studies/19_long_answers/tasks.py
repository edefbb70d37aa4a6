"""Two tasks whose answers are written out: letters one by one with a running count, and a sum one term a line."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.tasks.base import DrawnProblems, Prompt, SingleTurn, Turn

WORDS = """apple banana beetle bottle butter cabbage candle carpet cheese cherry circle coffee copper corner cotton
dinner dragon engine falcon feather finger flower forest garden ginger guitar hammer helmet honey island jacket kettle
ladder lemon letter lizard magnet market meadow mirror monkey needle number orange paper parrot pencil pepper pillow
planet pocket potato puppet rabbit ribbon river rocket saddle season shadow silver soccer spider summer table teapot
temple ticket tiger tomato tunnel turtle valley velvet violet walnut water whistle window winter wizard yellow zipper"""


class WrittenOut(SingleTurn, DrawnProblems):
    """What both tasks share: an answer that a question determines, and that ends in `#` and a whole number."""

    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789+=#:?HW \n"

    def __init__(self, name: str, least: int, most: int):
        self.name, self.least, self.most, self.seed = name, least, most, 0

    def draw(self, rng: np.random.Generator) -> Prompt:
        """Return a question of `least` to `most` words or terms."""
        count = int(rng.integers(self.least, self.most + 1))
        if self.name == "sums":
            text = f"What is {'+'.join(map(str, rng.integers(1, 10, count)))}?"
        else:
            words = " ".join(rng.choice(WORDS.split(), count, replace=False))
            text = f"How many {rng.choice(sorted(set(words) - {' '}))} are in {words}?"
        return Prompt(id=text, text=text, answer=worked(text).rpartition("#")[2], chat=True)

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return the right answer, written out."""
        return [Turn(worked(prompt.text), finished=True)]


def worked(question: str) -> str:
    """Return the right answer to a question of either task, line by line."""
    lines, total = list[str](), 0
    if question.startswith("What is "):
        total, *terms = map(int, question[8:-1].split("+"))
        for term in terms:
            lines.append(f"{total}+{term}={total + term}\n")
            total += term
    else:
        asked, words = question[9:-1].split(" are in ")
        for letter in words.replace(" ", ""):
            total += letter == asked
            lines.append(f"{letter} {total}\n")
    return "".join(lines) + f"#{total}"
