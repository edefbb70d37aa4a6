"""Who holds the gradient: attributed tokens added up by kind of token, by position and by prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otb_analysis.store import RunStore
from otb_analysis.store.token_arrays import floats
from otb_analysis.types import Float

LISTED = 10
"""Prompts that are named."""
AT_ONCE = 8
"""Steps whose tokens are read by one query."""
COLUMNS = ("step", "group", "t", "token", "attribution", "signal", "noise")


@dataclass(frozen=True)
class Share:
    """Tokens of one kind: their signed part of Σ‖ḡ‖² over the attributed steps."""

    name: str
    n_tokens: int
    share: float
    size: float  # Part of Σ|share|: how much they pull, in whichever direction
    signal: float | None  # Part along other prompts' gradients
    noise: float | None  # Part along their own prompt's


@dataclass(frozen=True)
class Tokens:
    """Who holds the gradient."""

    steps: int
    n_tokens: int
    half: int  # The largest so many tokens hold half of Σ|share|
    by_class: tuple[Share, ...]
    by_position: tuple[Share, ...]
    by_prompt: tuple[Share, ...]


def token_class(text: str | None) -> str:
    """Return the kind of a token: word, number, space, punctuation, other, or special without a readable text."""
    plain = (text or "").strip()
    if not text or (plain.startswith("<") and plain.endswith(">") and len(plain) > 2):
        return "special"
    if not plain:
        return "space"
    if plain.isalpha():
        return "word"
    if plain.isdigit():
        return "number"
    return "other" if any(sign.isalnum() for sign in plain) else "punctuation"


def position_class(t: int) -> str:
    """Return the range of positions that a token is in, counted from 1: 1, 2–3, 4–7, 8–15 and so on."""
    low = 1 << ((t + 1).bit_length() - 1)
    return "1" if low == 1 else f"{low}–{2 * low - 1}"


def attributed_tokens(store: RunStore) -> Tokens | None:
    """Return the attribution of all attributed steps, None where there is none.

    Shares are c·s·ḡ of their own step, added up over steps and divided by Σ‖ḡ‖²: a step with a larger gradient counts
    more. Classes sum to 1. A few steps' tokens are in memory at a time, and of all tokens one number each.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    steps = store.sql("SELECT DISTINCT step FROM tokens WHERE attribution IS NOT NULL ORDER BY step")["step"]
    sums = {name: _Sums() for name in ("class", "position", "prompt")}
    sizes: list[Float] = []
    due = steps.astype(int).tolist()
    for some in (due[first : first + AT_ONCE] for first in range(0, len(due), AT_ONCE)):
        table = store.tokens_df(some, list(COLUMNS), "attribution IS NOT NULL")
        values = np.stack([floats(table, name) for name in ("attribution", "signal", "noise")])
        prompts = store.rollouts_df(some, ["step", "group", "prompt"])
        texts = {(s, g): p for s, g, p in zip(prompts["step"], prompts["group"], prompts["prompt"], strict=True)}
        named = [str(texts.get(key, "")) for key in zip(table["step"], table["group"], strict=True)]
        sums["class"].add([token_class(text) for text in table["token"]], values)
        sums["position"].add([position_class(t) for t in table["t"].to_numpy(np.int64).tolist()], values)
        sums["prompt"].add(named, values)
        sizes.append(np.abs(values[0]))
    if not sizes:
        return None
    size = np.sort(np.concatenate(sizes))[::-1]
    half = int(np.searchsorted(np.cumsum(size), size.sum() / 2)) + 1 if size.sum() > 0 else 0
    return Tokens(
        steps=len(due),
        n_tokens=len(size),
        half=half,
        by_class=sums["class"].shares(),
        by_position=tuple(sorted(sums["position"].shares(), key=lambda one: int(one.name.split("–")[0]))),
        by_prompt=sums["prompt"].shares()[:LISTED],
    )


class _Sums:
    """Sums by name, over steps."""

    def __init__(self) -> None:
        self.by_name: dict[str, Float] = {}  # Tokens, Σ share, Σ signal, Σ noise and Σ|share| [5]

    def add(self, names: Sequence[str], values: Float) -> None:
        """Add tokens with their share, signal and noise [3, n]."""
        kinds, index = np.unique(np.asarray(names, dtype=object).astype(str), return_inverse=True)
        rows = (np.ones(len(index)), *values, np.abs(values[0]))
        sums = np.stack([np.bincount(index, row, len(kinds)) for row in rows], axis=1)
        for kind, row in zip(kinds.tolist(), sums, strict=True):
            self.by_name[kind] = self.by_name.get(kind, 0.0) + row

    def shares(self) -> tuple[Share, ...]:
        """Return the parts of all sums, largest Σ|share| first."""
        total = np.sum(list(self.by_name.values()), axis=0)
        whole, pull = total[1] or 1.0, total[4] or 1.0
        split = not np.isnan(total[2:4]).any()  # an attribution without its split has neither signal nor noise
        return tuple(
            Share(
                name, int(row[0]), float(row[1] / whole), float(row[4] / pull),
                float(row[2] / whole) if split else None, float(row[3] / whole) if split else None,
            )
            for name, row in sorted(self.by_name.items(), key=lambda item: -item[1][4])
        )  # fmt: skip
