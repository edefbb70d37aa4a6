"""Exact arithmetic on text from a policy: a parser of its own with limits; nothing is ever evaluated as code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from otb_analysis.errors import InputError

TOKEN = re.compile(r" *([0-9]+|[-+*/^()])")

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
    return _Parser(tokens_of(text), limits).value()


def tokens_of(text: str) -> list[str]:
    """Cut an expression into numbers, operators and brackets.

    Raises:
        Refused: A character is none of them.
    """
    tokens, at = [], 0
    text = text.rstrip(" ")
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise Refused(NOT_ARITHMETIC)
        tokens.append(match[1])
        at = match.end()
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
        at = start + _first_operator(tokens[start:close])
        step = "".join(tokens[at - 1 : at + 2])
        value = evaluate(step)
        if value.denominator != 1 or value < 0:
            raise Refused(NOT_ARITHMETIC)
        yield step, value
        tokens[at - 1 : at + 2] = [str(value)]


def _first_operator(tokens: list[str]) -> int:
    """Return where a flat expression is reduced first: the last power, else the first × or ÷, else the first + or −."""
    powers = [i for i, token in enumerate(tokens) if token == "^"]
    products = [i for i, token in enumerate(tokens) if token in "*/"]
    sums = [i for i, token in enumerate(tokens) if token in "+-"]
    return [*powers[::-1], *products, *sums][0]


class _Parser:
    """Recursive descent over tokens, evaluating on the way."""

    def __init__(self, tokens: list[str], limits: Limits):
        self.tokens, self.limits = tokens, limits
        self.at, self.depth, self.operations = 0, 0, 0

    def value(self) -> Fraction:
        value = self.expression()
        if self.at < len(self.tokens):
            raise Refused(NOT_ARITHMETIC)
        return value

    def take(self, wanted: str) -> str | None:
        """Take the next token if it is one of the wanted signs."""
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def expression(self) -> Fraction:
        value = self.term()
        while sign := self.take("+-"):
            value = self.apply(sign, value, self.term())
        return value

    def term(self) -> Fraction:
        value = self.signed()
        while sign := self.take("*/"):
            value = self.apply(sign, value, self.signed())
        return value

    def signed(self) -> Fraction:
        self.depth += 1
        if self.depth > self.limits.depth:
            raise Refused(TOO_DEEP)
        value = -self.signed() if self.take("-") else self.power()
        self.depth -= 1
        return value

    def power(self) -> Fraction:
        base = self.atom()
        return self.apply("^", base, self.signed()) if self.take("^") else base

    def atom(self) -> Fraction:
        if self.take("("):
            value = self.expression()
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
        if sign == "^":
            value = self.raised(left, right)
        else:
            value = {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[sign](right)
        if max(abs(value.numerator), value.denominator) >= 10**self.limits.digits:
            raise Refused(TOO_LARGE)
        return value

    def raised(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise Refused(NOT_ARITHMETIC)
        if abs(exponent) > self.limits.exponent:
            raise Refused(TOO_HIGH)
        return base ** int(exponent)
