"""Prompts and answers in short: the part in which a prompt differs, and the number that a text ends with."""

import os
import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise

MOST = 60
"""Characters of a label."""
LEAD = 12
"""Characters of what they share that stay in front of the part that differs."""
DIGITS = 40
"""A longer number is noise, not an answer."""

NUMBER = re.compile(r"(?:(?<![\w)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+(?![\d.]))?|(?<!\d)\.\d+")
FRACTION = re.compile(r"\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}")


def distinct(prompts: Mapping[int, str], most: int = MOST) -> dict[int, str]:
    """Return for each prompt at most `most` characters that tell it from the others.

    White space counts as one blank. A label starts where all prompts begin to differ, or later: where the prompt
    differs from the one most like it, if its first characters would not show that.
    """
    texts = {group: " ".join(text.split()) for group, text in prompts.items()}
    ordered = sorted(set(texts.values()))
    shared = _common(ordered[0], ordered[-1]) if len(ordered) > 1 else 0
    alike = dict.fromkeys(ordered, shared)
    for one, other in pairwise(ordered):  # the prompt most like another stands beside it in order
        common = _common(one, other)
        alike[one], alike[other] = max(alike[one], common), max(alike[other], common)
    labels = {}
    for group, text in texts.items():
        start = shared - LEAD if shared > most // 2 else 0
        if alike[text] - start >= most - 2:
            start = alike[text] - LEAD
        labels[group] = _cut(text, start, most)
    return labels


def _common(one: str, other: str) -> int:
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 (characters)


def _cut(text: str, start: int, most: int) -> str:
    part = ("…" if start else "") + text[start:]
    return part if len(part) <= most else part[: most - 1] + "…"


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text; None where it has none. 1,234.5, −3, 3/4 and LaTeX's fractions are numbers."""
    plain = FRACTION.sub(r"\1/\2", text.replace("−", "-").replace("{,}", ","))
    found = NUMBER.findall(plain)
    if not found or len(found[-1]) > DIGITS:
        return None
    whole, _, divisor = found[-1].replace(",", "").partition("/")
    try:
        return Fraction(whole) / Fraction(divisor or 1)
    except ZeroDivisionError:
        return None


def ends_elsewhere(answer: str | None, completion: str | None) -> str | None:
    """Return how a completion ends instead of with the reference answer: `48, not 49`; None where it does not.

    Both are read by their last number; a reference without a number says nothing.
    """
    wanted = last_number(answer or "")
    if wanted is None or completion is None:
        return None
    found = last_number(completion)
    return None if found == wanted else f"{_number(found)}, not {_number(wanted)}"


def _number(value: Fraction | None) -> str:
    if value is None:
        return "no number"
    return str(value) if value.denominator == 1 else f"{float(value):g}"
