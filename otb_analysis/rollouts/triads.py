"""Numbers in triads with a magnitude suffix (TST), as a tokenizer of the small model for arithmetic tasks.

`1234567.12345` is `1` `⟨6⟩` `234` `⟨3⟩` `567` `.` `123` `⟨.⟩` `45` `⟨.⟩` `⟨.⟩`: digits in groups of three from
the decimal point, an integer triad followed by its power of ten, a fractional one by as many markers as its depth.
Suffixes mean no character, so decoding gives the digits back.

Abstract of Triadic Suffix Tokenization, arXiv 2604.11582, in its form with marker tokens. Ours: units bear no suffix,
the marker stands behind its triad, and above 10^18 the largest one repeats, so that numbers of any length can be
written.
"""

import re
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizer

from otb_analysis.errors import InputError

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
DIGITS = "0123456789"
TRIADS = ["".join(digits) for length in (1, 2, 3) for digits in product(DIGITS, repeat=length)]
POWERS = (3, 6, 9, 12, 15, 18)
DEPTH = "⟨.⟩"
MARKERS = (*(f"⟨{power}⟩" for power in POWERS), DEPTH)
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def triads_of(number: str) -> list[str]:
    """Return the tokens of a whole or decimal number in ASCII digits, without a sign."""
    whole, point, fraction = number.partition(".")
    first = len(whole) % 3 or 3
    parts = [whole[:first], *(whole[k : k + 3] for k in range(first, len(whole), 3))]
    tokens = []
    for at, part in enumerate(parts, start=1):
        # 10^24 is ⟨6⟩⟨18⟩: the rest before the repeated largest
        times, rest = divmod(3 * (len(parts) - at), POWERS[-1])
        tokens += [part, *[f"⟨{rest}⟩"] * (rest > 0), *[f"⟨{POWERS[-1]}⟩"] * times]
    tokens += [point] if point else []
    for depth, k in enumerate(range(0, len(fraction), 3), start=1):
        tokens += [fraction[k : k + 3], *[DEPTH] * depth]
    return tokens


class TriadTokenizer(PreTrainedTokenizer):
    """Tokens of numbers are triads and suffixes; every other character of an alphabet is a token of its own."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - the base class has a list

    def __init__(self, alphabet: str = "", **kwargs: Any):
        self.alphabet = "".join(sorted(set(alphabet) - set(DIGITS)))
        tokens = [PAD, END, UNKNOWN, *self.alphabet, *TRIADS, *MARKERS]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.texts = tokens
        special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN, "padding_side": "left"}
        super().__init__(alphabet=alphabet, **special | kwargs)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.texts)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""
        return dict(self.ids)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Cut a text into tokens.

        Raises:
            InputError: A character is neither a digit nor in the alphabet: what it is part of cannot be written.
        """
        tokens, at = [], 0
        for match in NUMBER.finditer(text):
            tokens += [*text[at : match.start()], *triads_of(match[0])]
            at = match.end()
        tokens += text[at:]
        wrong = [token for token in tokens if token not in self.ids]
        if wrong:
            raise InputError(
                f"{text[:60]!r} has {wrong[0]!r}, which the triad tokenizer cannot write; it takes the digits 0 to 9 "
                f"and {self.alphabet!r}."
            )
        return tokens

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, self.ids[UNKNOWN])

    def _convert_id_to_token(self, index: int) -> str:
        return self.texts[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text without suffixes; a suffix by itself shows what it is."""
        return "".join(tokens) if len(tokens) == 1 else "".join(token for token in tokens if token not in MARKERS)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write nothing: the alphabet, which tokenizer_config.json has, is all there is to know."""
        return ()
