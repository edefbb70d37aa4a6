"""`running_total`: one rule, any length; `003:95+7=` is answered by `002:03;001:10;000:17;` and the end token.

The first number counts lines down, the second is the total, modulo 99. With `branching` an even total takes the first
term and an odd one the second: `002:12+6,9=` is answered by `001:18;000:24;`. With tool calls the lines come in turns,
and the reply to a turn gives the next turn's lines and terms: `001:95+7=`, `000:03;`, told `001+8=`, `000:11;`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from otb_analysis.config.train import RunningTotalConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks.base import DrawnProblems, Prompt, Turn

MODULUS = 99
"""A multiple of 3: from a total that is no multiple of it, steps by multiples of 3 never lead back to one."""
LAST_LINE = re.compile(r"000:[0-9]{2};\Z")
MOST_LINES = 1000


class RunningTotal(DrawnProblems):
    """Write a running total down line by line; the reward is 1 for an ended answer whose last line is right.

    With `branching` the start and all terms are multiples of 3, and so are all right totals. A slip to another number
    leads to totals that no demonstration has, and no right step leads back: the answer is doomed.

    Raises:
        InputError: A configured range is empty, or there are fewer lines than turns.
    """

    name = "running_total"
    alphabet = "0123456789:+,=;"

    def __init__(self, config: RunningTotalConfig, seed: int = 0):
        if not config.tool_calls < config.lines_min <= config.lines_max <= MOST_LINES or config.tool_calls < 0:
            raise InputError(
                f"running_total.lines_min is {config.lines_min} and lines_max is {config.lines_max} with "
                f"tool_calls={config.tool_calls}; choose 0 ≤ tool_calls < lines_min ≤ lines_max ≤ {MOST_LINES}."
            )
        least = 6 if config.branching else 1
        if not least <= config.largest < MODULUS:
            raise InputError(f"running_total.largest is {config.largest}; choose a number from {least} to 98.")
        self.config, self.seed = config, seed
        self.turns_needed = config.tool_calls + 1

    def draw(self, rng: np.random.Generator) -> Prompt:
        """Return a random start with the lines and terms of every turn; the prompt shows those of the first."""
        c, turns = self.config, self.config.tool_calls + 1
        lines = int(rng.integers(c.lines_min, c.lines_max + 1))
        unit = 3 if c.branching else 1
        total = int(rng.integers(MODULUS // unit)) * unit
        parts, start = list[str](), f":{total:02d}"
        for turn in range(turns):
            count = lines // turns + (turn < lines % turns)
            terms = unit * (1 + rng.choice(c.largest // unit, size=1 + c.branching, replace=False))
            parts.append(f"{count:03d}{start}+{','.join(map(str, terms))}=")
            *_, total = _totals(total, count, [int(term) for term in terms])
            start = ""
        return Prompt(id="|".join(parts), text=parts[0], answer=f"{total:02d}")

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return every line, in turns."""
        first, *later = prompt.id.split("|")
        total, out = int(first[4:6]), list[Turn]()
        for part, reply in zip((first, *later), (*later, ""), strict=True):
            count, terms = int(part[:3]), [int(n) for n in part.removesuffix("=").partition("+")[2].split(",")]
            totals = list(_totals(total, count, terms))
            total = totals[-1]
            lines = (f"{count - k:03d}:{after:02d};" for k, after in enumerate(totals, start=1))
            out.append(Turn("".join(lines), finished=True, reply=reply))
        return out

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Return the next turn's lines and terms, whatever the totals so far; None where lines are missing."""
        later = prompt.id.split("|")[len(turns) :]
        return later[0] if later and LAST_LINE.search(turns[-1].text) else None

    def reward(self, prompt: Prompt, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return {"correct": 1} for an ended last turn of all whose last line has the right total, else 0."""
        last, every = turns[-1], len(turns) == prompt.id.count("|") + 1
        right = every and last.finished and last.text.endswith(f"000:{prompt.answer};")
        return [*({} for _ in turns[:-1]), {"correct": float(right)}]


def _totals(total: int, count: int, terms: Sequence[int]) -> Iterator[int]:
    """Yield the totals of so many lines; an even one takes the first term, an odd one the last."""
    for _ in range(count):
        total = (total + terms[0 if total % 2 == 0 else -1]) % MODULUS
        yield total
