"""`calculator`: tool use; `12+7*3=` is solved by `?7*3` (answered `=21`), `?12+21` (answered `=33`), then `#33`."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil

import numpy as np

from otb_analysis.config.tasks import CalculatorConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks.arithmetic import REFUSALS, Limits, Refused, evaluate, reductions
from otb_analysis.tasks.base import Prompt, Split, Turn
from otb_analysis.tasks.splits import draw_prompt

CALL = re.compile(r"\?([^?#]*)\Z")
FINAL = re.compile(r"#(-?[0-9]{1,12}(?:/[1-9][0-9]{0,11})?)\Z")
OPERATORS = "+-*/^"
BRACKETED_SHARE = 0.5


class Calculator:
    """Solve an arithmetic expression with a calculator that takes only short calls.

    A turn that ends in `?` and an expression is a call; the calculator's `=value`, or `!` and what is wrong, follows,
    masked. A turn that ends in `#` and a number is the answer: the reward is 1 when it equals the expression's value.
    Any other turn ends the episode unpaid. One operator per call, the default, leaves their order to the policy.

    Raises:
        InputError: A configured range is empty, or an operator does not exist.
    """

    name = "calculator"
    alphabet = "".join(sorted({*"0123456789()=?#!", *OPERATORS, *"".join(REFUSALS)}))

    def __init__(self, config: CalculatorConfig, seed: int = 0):
        _check(config)
        self.config, self.seed = config, seed
        self.limits = Limits(operations=config.call_operations)
        self.turns_needed = ceil(config.operations_max / config.call_operations) + 1

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split; every result on the way is whole and from 0 to `largest_result`."""
        return draw_prompt(self.name, self.seed, split, index, self._draw)

    def _draw(self, rng: np.random.Generator) -> Prompt | None:
        text = self._expression(rng)
        try:
            results = [value for _, value in reductions(text)]
        except Refused:
            return None
        if max(results) > self.config.largest_result:
            return None
        return Prompt(id=f"{text}=", text=f"{text}=", answer=str(results[-1]))

    def _expression(self, rng: np.random.Generator) -> str:
        count = int(rng.integers(self.config.operations_min, self.config.operations_max + 1)) + 1
        terms = [str(n) for n in rng.integers(1, self.config.largest + 1, size=count)]
        signs = [self.config.operators[k] for k in rng.integers(len(self.config.operators), size=count - 1)]
        if count > 2 and rng.random() < BRACKETED_SHARE:
            first = int(rng.integers(0, count - 1))
            last = int(rng.integers(first + 1, count - (first == 0)))
            terms[first], terms[last] = f"({terms[first]}", f"{terms[last]})"
        return terms[0] + "".join(sign + term for sign, term in zip(signs, terms[1:], strict=True))

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return one call per operator, innermost brackets first, and the answer."""
        calls = [Turn(f"?{step}", True, f"={value}") for step, value in reductions(prompt.text.removesuffix("="))]
        return [*calls, Turn(f"#{prompt.answer}", finished=True)]

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Return the calculator's answer to a call, or None when the last turn is none."""
        call = CALL.search(turns[-1].text)
        if call is None:
            return None
        try:
            return f"={evaluate(call[1], self.limits)}"
        except Refused as refusal:
            return f"!{refusal}"

    def reward(self, prompt: Prompt, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return {"correct": 1} for an ended last turn that ends in # and the right number, else {"correct": 0}."""
        last = turns[-1]
        final = FINAL.search(last.text)
        right = last.finished and final is not None and Fraction(final[1]) == Fraction(prompt.answer)
        return [*({} for _ in turns[:-1]), {"correct": float(right)}]


def _check(config: CalculatorConfig) -> None:
    """Refuse settings that leave nothing to draw."""
    if not 1 <= config.operations_min <= config.operations_max <= 16:
        raise InputError(
            f"calculator.operations_min is {config.operations_min} and operations_max is {config.operations_max}; "
            "choose 1 ≤ operations_min ≤ operations_max ≤ 16."
        )
    if not config.operators or set(config.operators) - set(OPERATORS):
        raise InputError(f"calculator.operators is {config.operators!r}; choose some of {OPERATORS}.")
    for name, most in (("largest", 10**9), ("largest_result", 10**11), ("call_operations", 16)):
        number = getattr(config, name)
        if not 1 <= number <= most:
            raise InputError(f"calculator.{name} is {number}; choose a number from 1 to {most}.")
