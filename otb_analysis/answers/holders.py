"""Who holds the gradient: of a step, by prompt, rollout and token; of all attributed steps, by kind of token.

Classes of all attributed steps sum to 1: shares are c·s·ḡ of their own step, added up and divided by Σ‖ḡ‖².
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import LEVELS, AttributedTokens, StepAttribution, attribute_step
from otb_analysis.figures.attribution import attribution_table
from otb_analysis.figures.styles import number
from otb_analysis.store import RunStore
from otb_analysis.store.token_arrays import EXACT_ROWS, floats
from otb_analysis.types import Float

RECORDED = ("model", "rollouts", "format", "prompts", "group_size", "text", "ended", "temperature")
"""Settings of `otb score` that say which rollouts are measured, and how they were sampled."""
LISTED = 10
"""Prompts that are named."""
AT_ONCE = 8
"""Steps whose tokens are read by one query."""
SIZED_BY = {
    "grad_norm_sq": ("exact norms", EXACT_ROWS), "energy_proxy": ("the proxy", "energy_proxy IS NOT NULL"),
}  # fmt: skip
"""What can stand for ‖∇ log π‖² in a token's size, the best first: its column → its name and the rows that have it."""


@dataclass(frozen=True)
class Attributed:
    """The attribution of one step, with what its holders are."""

    shares: StepAttribution
    tokens: pd.DataFrame  # rollout, t and text of the step's tokens
    rollouts: pd.DataFrame  # group, rollout, prompt and reward
    column: str = "attribution"  # Of the table `tokens`, what it is made of
    part: ClassVar[str] = "share"  # What each has
    whole: ClassVar[str] = "‖ḡ‖²"  # What they add up to
    heading: ClassVar[str] = "Who holds the gradient of"

    @property
    def says(self) -> str:
        """In two sentences how few tokens decide the step's update, and how much of it is signal."""
        of, few, total = self.shares, self.shares.tokens.holding(), len(self.shares.tokens)
        text = (
            f"At step {of.step}, {few:,} of {total:,} tokens ({few / total:.1%}) hold half of the gradient, by the "
            f"size of their shares. Its squared length ‖ḡ‖² is {number(of.norm_sq)}"
        )
        if of.signal_total is None or of.noise_total is None:
            return f"{text}; signal and noise were not measured (--measure.attribution.split)."
        return (
            f"{text}: {number(of.signal_total)} is signal, which prompts have in common, and "
            f"{number(of.noise_total)} is noise, each prompt's own."
        )

    def holders(self, level: str, top: int | None = None) -> pd.DataFrame:
        """Return the holders of a level with the largest shares, shares of ‖ḡ‖² as fractions; `top` None keeps all."""
        of = self.shares.at_level(level)
        return attribution_table(self.shares, of if top is None else of.head(top), self.tokens, self.rollouts)

    def record(self, top: int) -> dict[str, object]:
        """Return the numbers of all levels for JSON."""
        return {
            "step": self.shares.step,
            "grad_norm_sq": self.shares.norm_sq,
            "says": self.says,
            "holders": {level: len(self.shares.at_level(level)) for level in LEVELS},
            **{f"{level}s": self.holders(level, top) for level in LEVELS},
        }


@dataclass(frozen=True)
class Sized(Attributed):
    """The tokens of a step that was not attributed by size: ‖∇ log π‖² · A², the squared length of a token's own term.

    `shares` then holds parts of the sum of sizes. That sum is no ‖ḡ‖², since terms that point apart cancel in ḡ.
    """

    by: str = ""  # What stands for ‖∇ log π‖², in words, and of how many prompts
    part: ClassVar[str] = "size"
    whole: ClassVar[str] = "all size"
    heading: ClassVar[str] = "Which tokens are large at"

    @property
    def says(self) -> str:
        """In two sentences how few tokens are large, and what that does not say."""
        of, few, total = self.shares, self.shares.tokens.holding(), len(self.shares.tokens)
        half = f"{few:,} of {total:,} tokens {'has' if few == 1 else 'have'} half of all size"
        return (
            f"At step {of.step}, {half}, ‖∇ log π‖² × advantage², by {self.by}. That is each token's own length, not "
            "its share of the summed gradient, where tokens cancel."
        )

    def record(self, top: int) -> dict[str, object]:
        """Return the numbers of all levels for JSON; no ‖ḡ‖² is known."""
        return super().record(top) | {"grad_norm_sq": None}


def sized(store: RunStore, step: int) -> Sized | None:
    """Return the tokens of a step by size, by exact norms where there are any; None where none has a size above 0.

    A prompt counts if all its tokens have one: of drawn tokens no share of a whole is known.

    Raises:
        StoreError: The run cannot be read.
    """
    counts: Any = store.tokens_df([step], ["group"], "mask AND isfinite(advantage)")["group"].value_counts()
    for column, (by, known) in SIZED_BY.items():
        names = ["group", "rollout", "t", "token", "advantage", column]
        tokens: Any = store.tokens_df([step], names, f"mask AND isfinite(advantage) AND isfinite({column}) AND {known}")
        tokens = tokens[tokens["group"].map(tokens["group"].value_counts()) == tokens["group"].map(counts)]
        size = floats(tokens, column).astype(float) * floats(tokens, "advantage") ** 2
        if size.any():
            keys = (tokens[name].to_numpy(np.int64) for name in names[:3])
            rollouts: Any = store.rollouts_df([step], ["group", "rollout", "prompt", "reward"])
            seen, every = tokens["group"].nunique(), rollouts["group"].nunique()
            by += f" of {seen} of {every} prompts" * (seen < every)
            shares = attribute_step(step, AttributedTokens(*keys, share=size))
            return Sized(shares, tokens, rollouts, column, by)
    return None


@dataclass(frozen=True)
class NotAttributed:
    """Why a step has no attribution."""

    step: int
    missing: str  # In a sentence or two, with what measures it
    command: str  # Empty where it is not known
    # The last step before it that has one and a gradient, else the first behind it; where its own gradient is 0 and no
    # step has one, of those whose tokens have a size.
    nearest: int | None


def attribution_command(run: str, config: Mapping[str, Any], step: int) -> tuple[str, str]:
    """Return how a step's attribution is measured for a run that lacks it: a sentence, and the command if it is known.

    A past step's weights are gone, so a trained run is trained again from its configuration and seed.
    """
    path = Path(run)
    if "optimize" in config:
        command = ["otb", "train", "--config", str(path / "run.json"), "--run", f"{path.name}-attributed"]
        command += ["--measure.attribution.first", str(step), "--measure.attribution.every", "1"]
        how = f"This trains the run again, from the same seed, and measures it from step {step} on:"
        return how, shlex.join(command)
    if config.get("model") and config.get("rollouts"):
        same = [w for name in RECORDED if name in config for w in (f"--{name.replace('_', '-')}", str(config[name]))]
        command = ["otb", "score", *same, "--root", str(path.parent), "--run", f"{path.name}-attributed"]
        command += ["--measure.attribution.every", "1"]
        return "This scores the same rollouts again and measures it:", shlex.join(command)
    return "`otb train --measure.attribution.every 1` measures every step, `otb audit` those of recorded rollouts.", ""


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


SHARES = ("attribution", "signal", "noise")


def attributed_tokens(store: RunStore) -> Tokens | None:
    """Return the attribution of all attributed steps, None where there is none.

    Shares are c·s·ḡ of their own step, added up over steps and divided by Σ‖ḡ‖²: a step with a larger gradient counts
    more. Classes sum to 1. A few steps' tokens are in memory at a time, and of all tokens one number each.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    steps = store.steps_with("tokens", "attribution")
    sums = {name: dict[str, Float]() for name in ("class", "position", "prompt")}
    sizes, attributed = list[Float](), 0
    for some in (steps[first : first + AT_ONCE] for first in range(0, len(steps), AT_ONCE)):
        table = store.tokens_df(some, ["step", "group", "t", "token", *SHARES], "attribution IS NOT NULL")
        values = np.stack([floats(table, name) for name in SHARES])
        prompts = store.rollouts_df(some, ["step", "group", "prompt"])
        texts = {(s, g): p for s, g, p in zip(prompts["step"], prompts["group"], prompts["prompt"], strict=True)}
        names = {
            "class": [token_class(text) for text in table["token"]],
            "position": [position_class(t) for t in table["t"].to_numpy(np.int64).tolist()],
            "prompt": [str(texts.get(key, "")) for key in zip(table["step"], table["group"], strict=True)],
        }
        rows = (np.ones(len(table)), *values, np.abs(values[0]))  # tokens, share, signal, noise and |share|
        for name, of_tokens in names.items():
            kinds, index = np.unique(np.asarray(of_tokens, dtype=object).astype(str), return_inverse=True)
            of_kinds = np.stack([np.bincount(index, row, len(kinds)) for row in rows], axis=1)
            for kind, row in zip(kinds.tolist(), of_kinds, strict=True):
                sums[name][kind] = sums[name].get(kind, 0.0) + row
        sizes.append(rows[-1])
        attributed += len(set(table["step"]))
    if not sizes:
        return None
    size = np.sort(np.concatenate(sizes))[::-1]
    half = int(np.searchsorted(np.cumsum(size), size.sum() / 2)) + 1 if size.sum() > 0 else 0
    return Tokens(
        steps=attributed,
        n_tokens=len(size),
        half=half,
        by_class=_shares(sums["class"]),
        by_position=tuple(sorted(_shares(sums["position"]), key=lambda one: int(one.name.split("–")[0]))),
        by_prompt=_shares(sums["prompt"])[:LISTED],
    )


def _shares(sums: Mapping[str, Float]) -> tuple[Share, ...]:
    """Return the parts of Σ tokens, share, signal, noise and |share| by name, largest Σ|share| first."""
    total = np.sum(list(sums.values()), axis=0)
    whole, pull = total[1] or 1.0, total[4] or 1.0
    split = not np.isnan(total[2:4]).any()  # an attribution without its split has neither signal nor noise
    return tuple(
        Share(
            name, int(row[0]), float(row[1] / whole), float(row[4] / pull),
            float(row[2] / whole) if split else None, float(row[3] / whole) if split else None,
        )
        for name, row in sorted(sums.items(), key=lambda item: -item[1][4])
    )  # fmt: skip
