"""The final number of a solution in words: what it states at its end, not what it mentions on the way."""

import re

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


def is_number(text: str) -> bool:
    """Return whether a reference answer is one number: 27, -1,234.5, 3/4, the same as a LaTeX fraction, or 50%."""
    return WHOLE.fullmatch(_plain(text).strip(" $")) is not None


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
    stated = list(STATED.finditer(text))
    if stated:
        return _number(SENTENCE.split(text[stated[-1].end() :].strip())[0], first=True)
    for sentence in reversed(SENTENCE.split(text.strip())):
        if WHOLE.search(sentence):
            return _number(sentence, first=False)
    return ""


def is_worked_out(text: str, reference: str) -> bool:
    """Return whether an expression is a result: 26 + 1 is none, and neither is 54/2 where the reference is whole."""
    text, reference = _plain(text), _plain(reference)
    if "/" not in reference and "." not in reference and "/" in text:
        return False
    numbers = JOINED.search(text)
    return numbers is None or WHOLE.fullmatch(numbers[0]) is not None


def _number(sentence: str, first: bool) -> str:
    behind = sentence.rpartition("=")
    numbers = JOINED.findall(behind[2])
    number = numbers[0 if first or behind[1] else -1] if numbers else ""
    return number if WHOLE.fullmatch(number) else ""


def _plain(text: str) -> str:
    for pattern, replacement in PLAIN:
        text = re.sub(pattern, replacement, text)
    return text
