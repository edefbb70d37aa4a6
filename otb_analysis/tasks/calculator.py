"""`calculator`: tool use; `12+7*3=` is solved by `?7*3` (answered `=21`), `?12+21` (answered `=33`), then `#33`.

Exact arithmetic on text from a policy has a parser of its own with limits; nothing is ever evaluated as code.
"""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from otb_analysis.config.train import CalculatorConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks.base import DrawnProblems, Prompt, Turn

CALL = re.compile(r"\?([^?#]*)\Z")
FINAL = re.compile(r"#(-?[0-9]{1,12}(?:/[1-9][0-9]{0,11})?)\Z")
BRACKETED_SHARE = 0.5
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "^": operator.pow}
CHAINS = ("+-", "*/")
"""Signs that chain operands, those that bind least first."""
TOKEN = re.compile(r"[0-9]+|[-+*/^()]")

NOT_ARITHMETIC = "not arithmetic"
DIVISION_BY_ZERO = "division by zero"
TOO_LONG = "too long"
TOO_DEEP = "too deep"
TOO_LARGE = "too many digits"
TOO_HIGH = "exponent too large"
TOO_MANY = "too many operations"
REFUSALS = (NOT_ARITHMETIC, DIVISION_BY_ZERO, TOO_LONG, TOO_DEEP, TOO_LARGE, TOO_HIGH, TOO_MANY)
"""Every sentence that a refusal can carry; a task shows them to the policy."""


@dataclass(frozen=True)
class Limits:
    """How much of a calculation is too much."""

    length: int = 128  # Characters
    depth: int = 12  # Brackets, signs and powers inside each other
    digits: int = 12  # Of a number written or of any result, its numerator and its denominator each
    exponent: int = 32  # Largest absolute exponent
    operations: int = 32  # Operators with two sides


class Refused(InputError):
    """The text is no arithmetic, has no value or exceeds a limit; the message is one of `REFUSALS`."""


def evaluate(text: str, limits: Limits | None = None) -> Fraction:
    """Return the exact value of an expression.

    expression = term {(+|−) term} · term = signed {(*|/) signed} · signed = − signed | power ·
    power = atom [^ signed] · atom = digits | ( expression ). So −2^2 = −4 and 2^3^2 = 512, as on paper.

    Raises:
        Refused: With one of `REFUSALS`.
    """
    limits = limits or Limits()
    if len(text) > limits.length:
        raise Refused(TOO_LONG)
    parser = _Parser(tokens_of(text), limits)
    value = parser.chain(0)
    if parser.at < len(parser.tokens):
        raise Refused(NOT_ARITHMETIC)
    return value


def tokens_of(text: str) -> list[str]:
    """Cut an expression into numbers, operators and brackets.

    Raises:
        Refused: A character is none of them.
    """
    tokens = TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        raise Refused(NOT_ARITHMETIC)
    return tokens


def reductions(text: str) -> Iterator[tuple[str, Fraction]]:
    """Return the steps in which one solves an expression by hand, innermost brackets first, one operator at a time.

    Returns:
        Each step as (`7*3`, 21), in order; the last one's value is the expression's.

    Raises:
        Refused: A step has no value, or leaves the whole numbers from 0 on, so that it cannot be written on.
    """
    tokens = tokens_of(text)
    while len(tokens) > 1:
        close = tokens.index(")") if ")" in tokens else len(tokens)
        start = max((i for i in range(close) if tokens[i] == "("), default=-1) + 1
        if close - start == 1:
            tokens[start - 1 : close + 1] = [tokens[start]]
            continue
        # The last power first, else the first × or ÷, else the first + or −.
        powers, products, sums = ([i for i in range(start, close) if tokens[i] in signs] for signs in ("^", "*/", "+-"))
        at = [*powers[::-1], *products, *sums][0]
        step = "".join(tokens[at - 1 : at + 2])
        value = evaluate(step)
        if value.denominator != 1 or value < 0:
            raise Refused(NOT_ARITHMETIC)
        yield step, value
        tokens[at - 1 : at + 2] = [str(value)]


class _Parser:
    """Recursive descent over tokens, evaluating on the way."""

    def __init__(self, tokens: list[str], limits: Limits):
        self.tokens, self.limits = tokens, limits
        self.at, self.depth, self.operations = 0, 0, 0

    def take(self, wanted: str) -> str | None:
        """Take the next token if it is one of the wanted signs."""
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def chain(self, level: int) -> Fraction:
        """Read a sum of terms, or at level 1 a product of signed powers."""
        if level == len(CHAINS):
            return self.signed()
        value = self.chain(level + 1)
        while sign := self.take(CHAINS[level]):
            value = self.apply(sign, value, self.chain(level + 1))
        return value

    def signed(self) -> Fraction:
        self.depth += 1
        if self.depth > self.limits.depth:
            raise Refused(TOO_DEEP)
        if self.take("-"):
            value = -self.signed()
        else:
            value = self.atom()
            if self.take("^"):
                value = self.apply("^", value, self.signed())
        self.depth -= 1
        return value

    def atom(self) -> Fraction:
        if self.take("("):
            value = self.chain(0)
            if not self.take(")"):
                raise Refused(NOT_ARITHMETIC)
            return value
        if self.at == len(self.tokens) or not self.tokens[self.at].isdigit():
            raise Refused(NOT_ARITHMETIC)
        digits = self.tokens[self.at]
        self.at += 1
        if len(digits) > self.limits.digits:
            raise Refused(TOO_LARGE)
        return Fraction(int(digits))

    def apply(self, sign: str, left: Fraction, right: Fraction) -> Fraction:
        """Return one operator's result, within the limits."""
        self.operations += 1
        if self.operations > self.limits.operations:
            raise Refused(TOO_MANY)
        if (sign == "/" and right == 0) or (sign == "^" and left == 0 and right < 0):
            raise Refused(DIVISION_BY_ZERO)
        if sign == "^" and right.denominator != 1:
            raise Refused(NOT_ARITHMETIC)
        if sign == "^" and abs(right) > self.limits.exponent:
            raise Refused(TOO_HIGH)
        value = Fraction(OPERATORS[sign](left, int(right) if sign == "^" else right))
        if max(abs(value.numerator), value.denominator) >= 10**self.limits.digits:
            raise Refused(TOO_LARGE)
        return value


class Calculator(DrawnProblems):
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
        if not 1 <= config.operations_min <= config.operations_max <= 16:
            raise InputError(
                f"calculator.operations_min is {config.operations_min} and operations_max is {config.operations_max}; "
                "choose 1 ≤ operations_min ≤ operations_max ≤ 16."
            )
        if not config.operators or set(config.operators) - set(OPERATORS):
            raise InputError(f"calculator.operators is {config.operators!r}; choose some of {''.join(OPERATORS)}.")
        for name, most in (("largest", 10**9), ("largest_result", 10**11), ("call_operations", 16)):
            number = getattr(config, name)
            if not 1 <= number <= most:
                raise InputError(f"calculator.{name} is {number}; choose a number from 1 to {most}.")
        self.config, self.seed = config, seed
        self.limits = Limits(operations=config.call_operations)
        self.turns_needed = ceil(config.operations_max / config.call_operations) + 1

    def draw(self, rng: np.random.Generator) -> Prompt | None:
        """Return a problem of which every result on the way is whole and from 0 to `largest_result`."""
        count = int(rng.integers(self.config.operations_min, self.config.operations_max + 1)) + 1
        terms = [str(n) for n in rng.integers(1, self.config.largest + 1, size=count)]
        signs = [self.config.operators[k] for k in rng.integers(len(self.config.operators), size=count - 1)]
        if count > 2 and rng.random() < BRACKETED_SHARE:
            first = int(rng.integers(0, count - 1))
            last = int(rng.integers(first + 1, count - (first == 0)))
            terms[first], terms[last] = f"({terms[first]}", f"{terms[last]})"
        text = terms[0] + "".join(sign + term for sign, term in zip(signs, terms[1:], strict=True))
        try:
            results = [value for _, value in reductions(text)]
        except Refused:
            return None
        if max(results) > self.config.largest_result:
            return None
        return Prompt(id=f"{text}=", text=f"{text}=", answer=str(results[-1]))

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
