"""Who holds the gradient: attributed tokens added up by kind of token, by position and by prompt."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.audit.results import Share, Tokens
from otb_analysis.store import RunStore
from otb_analysis.store.token_arrays import floats
from otb_analysis.types import Float

LISTED = 10
"""Prompts that are named."""


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
    more. Classes sum to 1.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    columns = ["step", "group", "t", "token", "attribution", "signal", "noise"]
    table = store.tokens_df(columns=columns, where="attribution IS NOT NULL")
    if table.empty:
        return None
    share, signal, noise = (floats(table, name) for name in ("attribution", "signal", "noise"))
    split = not (np.isnan(signal).any() or np.isnan(noise).any())
    prompts = store.rollouts_df(columns=["step", "group", "prompt"])
    texts = {(s, g): p for s, g, p in zip(prompts["step"], prompts["group"], prompts["prompt"], strict=True)}
    positions = [position_class(t) for t in table["t"].to_numpy(np.int64).tolist()]
    names = [str(texts.get(key, "")) for key in zip(table["step"], table["group"], strict=True)]
    values = (share, signal, noise) if split else (share, None, None)
    by_position = _added(positions, *values)
    size = np.sort(np.abs(share))[::-1]
    half = int(np.searchsorted(np.cumsum(size), size.sum() / 2)) + 1 if size.sum() > 0 else 0
    return Tokens(
        steps=len(set(table["step"])),
        n_tokens=len(share),
        half=half,
        by_class=_added([token_class(text) for text in table["token"]], *values),
        by_position=tuple(sorted(by_position, key=lambda one: int(one.name.split("–")[0]))),
        by_prompt=_added(names, *values)[:LISTED],
    )


def _added(names: Sequence[str], share: Float, signal: Float | None, noise: Float | None) -> tuple[Share, ...]:
    """Sum by name, largest Σ|share| first."""
    kinds, index = np.unique(np.asarray(names, dtype=object).astype(str), return_inverse=True)
    total, pull = share.sum(), np.abs(share).sum()

    def part(values: Float, whole: float) -> Float:
        return np.bincount(index, values, len(kinds)).astype(np.float64) / (whole or 1.0)

    pulls, shares = part(np.abs(share), pull), part(share, total)
    parts = [None if values is None else part(values, total) for values in (signal, noise)]
    counts = np.bincount(index, minlength=len(kinds))
    return tuple(
        Share(
            str(kinds[k]), int(counts[k]), float(shares[k]), float(pulls[k]),
            *(None if values is None else float(values[k]) for values in parts),
        )
        for k in np.argsort(-pulls, kind="stable")
    )  # fmt: skip
