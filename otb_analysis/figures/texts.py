"""Texts of a model as they are shown: characters without a shape made visible, and cut where something else begins.

Model output is passed on as text, with a visible sign for every character that would not show or would rearrange its
neighbours; it is never markup.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import pandas as pd

GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
LINES = {"\n": "\n", "\t": "\t"}
"""What stays as it is in a text of several lines."""
ONE_LINE = {"\n": "↵", "\t": "⇥", "\r": "␍"}
SPECIAL = re.compile(
    r"<[|\uff5c][^<>]{1,60}[|\uff5c]>|\[/?[A-Z_]{2,24}\]"
    r"|</?(s|pad|eos|bos|unk|mask|end|think|tools?|tool_\w{1,20}|\w{1,20}_of_\w{1,20})>"
)
"""Tokens that a tokenizer adds to text: ends, roles, padding, and what stands around a call of a tool."""
SHAPELESS, JOINERS = ("Cc", "Cf", "Cs", "Zl", "Zp"), "\u200d\ufe0f"
"""Categories of characters that show nothing or rearrange others, and those of them that hold emoji together."""
LONGEST = 240
"""Characters of one token that are shown."""
MOST = 100_000
"""Characters of a text that are shown."""

Piece = tuple[str, str]
"""A kind, `match`, `special` or empty, and a text of that kind."""


@dataclass(frozen=True)
class Passage:
    """A part of an answer that one turn's policy wrote, or that something else did, such as a tool."""

    turn: int
    tool: bool
    text: str
    tokens: tuple[tuple[int, str], ...] = field(default=(), repr=False, compare=False)  # Row and text, where known


def legible(text: str, glyphs: Mapping[str, str] = LINES, most: int = MOST) -> str:
    """Return a text with a glyph or a code point for each character that has no shape of its own.

    These are controls, bidirectional overrides and invisible formatting; joiners inside emoji stay. Longer texts are
    cut, and then end with how long they are.
    """
    if len(text) <= most and text.isprintable() and not any(c in text for c in glyphs):
        return text
    shown = "".join(
        glyphs.get(c) or (f"⟨{ord(c):04X}⟩" if c not in JOINERS and unicodedata.category(c) in SHAPELESS else c)
        for c in text[:most]
    )
    return shown + (f"… ({len(text):,} characters)" if len(text) > most else "")


def visible(text: str, flowing: bool = False) -> str:
    """Return a token's text with a sign for each character that has no shape of its own, a blank too.

    A `flowing` text keeps the blank before a word, so that a line of tokens reads as prose.
    """
    if text == "":
        return "∅"
    kept = flowing and text[0] == " " and not text[1:2].isspace() and len(text) > 1
    return " " * kept + legible(text, GLYPHS, LONGEST)[kept:]


def pieces(text: str, find: str = "", glyphs: Mapping[str, str] = LINES) -> list[Piece]:
    """Cut a text where special tokens stand and what is looked for, in upper or lower case; all of it legible."""
    left_out = [("", f"… ({len(text):,} characters)")] * (len(text) > MOST)
    return [(kind, legible(part, glyphs)) for kind, part in _cut(text[:MOST], find)] + left_out


def _cut(text: str, find: str) -> list[Piece]:
    pattern = f"(?P<special>{SPECIAL.pattern})" + (f"|(?P<match>(?i:{re.escape(find)}))" if find else "")
    cut, end = list[Piece](), 0
    for found in re.finditer(pattern, text):
        cut += [("", text[end : found.start()]), (str(found.lastgroup), found[0])]
        end = found.end()
    return [piece for piece in (*cut, ("", text[end:])) if piece[1]]


def token_pieces(passage: Passage, find: str = "") -> list[tuple[str, str, int]]:
    """Cut a passage as `pieces` does, and where a token begins, too; return the row of the token of each piece.

    What no token tells has row −1.
    """
    if not passage.tokens:
        return [(*piece, -1) for piece in pieces(passage.text, find)]
    cut, left = list[tuple[str, str, int]](), [[row, len(text)] for row, text in passage.tokens[::-1] if text]
    for kind, part in _cut(passage.text[:MOST], find):
        while part:
            row, size = left[-1]
            cut.append((kind, legible(part[:size]), row))
            part, left[-1][1] = part[size:], size - len(part[:size])
            if not left[-1][1]:
                left.pop()
    return cut + [(*piece, -1) for piece in pieces(passage.text, find)[-1:] if len(passage.text) > MOST]


def surroundings(texts: Sequence[str], find: str = "", most: int = 140) -> list[Piece]:
    """Return one line of the first text that holds what is looked for, from a little before it, else of the first."""
    text = next((text for text in texts if find.lower() in text.lower()), texts[0])
    start = max(0, text.lower().find(find.lower()) - most // 4)
    return [("", "…")] * (start > 0) + pieces(text[start : start + most], find, ONE_LINE)


def passages(completion: str, tokens: pd.DataFrame) -> list[Passage]:
    """Cut an answer where a turn or another writer begins; it is one passage where its tokens do not tell.

    Args:
        completion: All of the answer, as its tokenizer decoded it.
        tokens: The columns `turn`, `mask` and `token` of its tokens in order; special tokens are among them.
    """
    texts = tokens["token"].fillna("").tolist()
    # A character that several tokens hold is in none of them, and some tokenizers decode each without its blank.
    blanks = sum(text.count(" ") for text in texts)
    if not any(texts) or any("\ufffd" in text for text in texts) or blanks < completion.count(" "):
        return [Passage(0, False, completion)]
    tool = ~tokens["mask"].fillna(True).to_numpy(bool)
    rows = zip(tokens["turn"].fillna(0).astype(int), tool.tolist(), enumerate(texts), strict=True)
    cut = [(*of, tuple(row for *_, row in part)) for of, part in groupby(rows, key=itemgetter(0, 1))]
    return [Passage(turn, written, "".join(text for _, text in part), part) for turn, written, part in cut]
