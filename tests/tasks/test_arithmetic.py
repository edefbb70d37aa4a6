"""Arithmetic on text: what paper says, exactly, and a refusal for everything else."""

import re
from fractions import Fraction

import numpy as np
import pytest

from otb_analysis.tasks.calculator import (
    DIVISION_BY_ZERO,
    NOT_ARITHMETIC,
    REFUSALS,
    TOO_DEEP,
    TOO_HIGH,
    TOO_LARGE,
    TOO_LONG,
    TOO_MANY,
    Limits,
    Refused,
    evaluate,
    reductions,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("007", 7),
        ("12+7*3", 33),
        ("(12+7)*3", 57),
        ("10-4-3", 3),  # from the left
        ("2^3^2", 512),  # from the right
        ("-2^2", -4),  # the sign binds less than the power
        ("(-2)^2", 4),
        ("2^-2", Fraction(1, 4)),
        ("2*-3", -6),
        ("--2", 2),
        ("7/2", Fraction(7, 2)),
        ("7/2*2", 7),
        ("1/3+1/6", Fraction(1, 2)),
        ("0^0", 1),
        (" 1 + 2 ", 3),
    ],
)
def test_value_is_exact_and_follows_the_rules_of_precedence(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", NOT_ARITHMETIC),
        ("+", NOT_ARITHMETIC),
        ("1+", NOT_ARITHMETIC),
        ("(1", NOT_ARITHMETIC),
        ("1)", NOT_ARITHMETIC),
        ("()", NOT_ARITHMETIC),
        ("1 2", NOT_ARITHMETIC),
        ("1.5", NOT_ARITHMETIC),
        ("2**3", NOT_ARITHMETIC),
        ("7//2", NOT_ARITHMETIC),
        ("+1", NOT_ARITHMETIC),
        ("1e9", NOT_ARITHMETIC),
        ("0x10", NOT_ARITHMETIC),
        ("1_000", NOT_ARITHMETIC),
        ("٣+4", NOT_ARITHMETIC),  # 3 in Arabic digits
        ("1+2\n", NOT_ARITHMETIC),
        ("__import__('os')", NOT_ARITHMETIC),
        ("abs(3)", NOT_ARITHMETIC),
        ("2^(1/2)", NOT_ARITHMETIC),  # no whole exponent
        ("1/0", DIVISION_BY_ZERO),
        ("1/(3-3)", DIVISION_BY_ZERO),
        ("0^-1", DIVISION_BY_ZERO),
        ("1" * 13, TOO_LARGE),
        ("999999*9999999", TOO_LARGE),
        ("1/999999/9999999", TOO_LARGE),  # the denominator counts as well
        ("2^33", TOO_HIGH),
        ("2^-33", TOO_HIGH),
        ("9^9^9", TOO_HIGH),
        ("99^32", TOO_LARGE),
        ("(" * 20 + "1" + ")" * 20, TOO_DEEP),
        ("-" * 20 + "1", TOO_DEEP),
        ("2^" * 20 + "1", TOO_DEEP),
        ("1+" * 33 + "1", TOO_MANY),
        ("1" * 200, TOO_LONG),
        ("(" * 100_000, TOO_LONG),
    ],
)
def test_everything_else_is_refused_in_a_few_words(text, refusal):
    with pytest.raises(Refused) as caught:
        evaluate(text)
    assert str(caught.value) == refusal
    assert refusal in REFUSALS


@pytest.mark.parametrize(
    ("limits", "kept", "broken", "refusal"),
    [
        (Limits(length=3), "1+2", "1+23", TOO_LONG),
        (Limits(depth=2), "(1)", "((1))", TOO_DEEP),
        (Limits(digits=2), "49+50", "50+50", TOO_LARGE),
        (Limits(digits=2), "99", "100", TOO_LARGE),
        (Limits(exponent=3), "2^3", "2^4", TOO_HIGH),
        (Limits(operations=1), "-1+-2", "1+2+3", TOO_MANY),
    ],
)
def test_each_limit_is_the_last_value_allowed(limits, kept, broken, refusal):
    evaluate(kept, limits)
    with pytest.raises(Refused, match=refusal):
        evaluate(broken, limits)


def test_random_expressions_have_the_value_that_python_gives_them():
    # Written by this test, so that Python may evaluate them: the slow twin of the parser.
    rng = np.random.default_rng(0)

    def written(depth):
        if depth == 0 or rng.random() < 0.3:
            return str(rng.integers(0, 20))
        return f"({written(depth - 1)}{rng.choice(list('+-*/'))}{written(depth - 1)})"

    compared = 0
    for _ in range(300):
        text = written(4)
        exact = "".join(f"Fraction({c})" if c.isdigit() else c for c in _numbers(text))
        try:
            expected = eval(exact, {"Fraction": Fraction})
        except ZeroDivisionError:
            with pytest.raises(Refused, match=DIVISION_BY_ZERO):
                evaluate(text)
            continue
        try:
            assert evaluate(text) == expected
            compared += 1
        except Refused as refusal:
            assert str(refusal) in (TOO_LONG, TOO_LARGE)
    assert compared > 200


def _numbers(text):
    return re.findall(r"[0-9]+|[^0-9]", text)


def test_reductions_go_from_the_inside_out_and_end_at_the_value():
    # 7·(12+3) = 105 − 2^2^1 = 2^2 = 4: 101; of powers the last first.
    assert list(reductions("7*(12+3)-2^2^1")) == [("12+3", 15), ("2^1", 2), ("2^2", 4), ("7*15", 105), ("105-4", 101)]
    assert list(reductions("((2+3))*4")) == [("2+3", 5), ("5*4", 20)]
    assert list(reductions("10-4-3")) == [("10-4", 6), ("6-3", 3)]
    assert list(reductions("5")) == []


@pytest.mark.parametrize("text", ["3-5+4", "7/2*2"])
def test_step_that_cannot_be_written_as_a_whole_number_ends_the_reduction(text):
    with pytest.raises(Refused):
        list(reductions(text))
