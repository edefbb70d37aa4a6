"""Attribution of ‖ḡ‖² at a step to tokens, rollouts and prompts, each share split into signal and noise.

‖ḡ‖² = Σ_{i,t} c_{i,t} s_{i,t}·ḡ exactly, so shares add up at every level: a rollout's is the sum of its tokens', a
prompt's the sum of its rollouts'. Shares are signed: a negative one pushes against the update. signal = c·s·(ḡ − ḡ_p),
what the token did for *other* prompts; noise = c·s·ḡ_p, what it did for its own. The gradient engine measures the
shares (`gradient_attribution`, `signal_noise`); here they are only added up.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.types import Float, Int

LEVELS = ("prompt", "rollout", "token")


@dataclass(frozen=True)
class AttributedTokens:
    """One step's policy tokens with their shares, [n] each; made by the store, read by `attribute_step`.

    `rollout` counts within the step, `t` within the completion. `signal` and `noise` are the parts of `share` along
    other prompts' gradients and along the prompt's own; both are None where the share was not split.
    """

    group: Int
    rollout: Int
    t: Int
    share: Float
    signal: Float | None = None
    noise: Float | None = None


@dataclass(frozen=True)
class Holders:
    """Shares of ‖ḡ‖² at one of `LEVELS`, [K] each, the largest |share| first.

    `rollout` is −1 at level prompt, `t` is −1 above level token. `signal` and `noise` are None without the split.
    """

    level: str
    group: Int
    rollout: Int
    t: Int
    n_tokens: Int
    share: Float
    signal: Float | None
    noise: Float | None

    def __len__(self) -> int:
        return len(self.share)

    def head(self, n: int) -> "Holders":
        """Return the n largest."""
        names = ("group", "rollout", "t", "n_tokens", "share", "signal", "noise")
        kept: dict[str, Any] = {name: None if (x := getattr(self, name)) is None else x[:n] for name in names}
        return replace(self, **kept)

    def holding(self, part: float = 0.5) -> int:
        """Return how many of the largest hold a part of Σ|share|."""
        size = np.abs(self.share)
        if size.sum() == 0:
            return 0
        return int(np.searchsorted(np.cumsum(size), part * size.sum() * (1 - 1e-12))) + 1


@dataclass(frozen=True)
class StepAttribution:
    """One step's attribution at every level."""

    step: int
    norm_sq: float  # Σ share = ‖ḡ‖²
    # Σ signal, what different prompts' gradients have in common of it; None without the split.
    signal_total: float | None
    noise_total: float | None  # Σ noise, each prompt's own part; None without the split
    # ‖ḡ‖² of the step's first update as the optimiser saw it, None where it was not recorded.
    recorded_norm_sq: float | None
    prompts: Holders
    rollouts: Holders
    tokens: Holders

    @property
    def gap(self) -> float | None:
        """(Σ share − recorded ‖ḡ‖²)/recorded ‖ḡ‖²; about 1e-6 where one update follows the attributed gradient."""
        if not self.recorded_norm_sq:
            return None
        return self.norm_sq / self.recorded_norm_sq - 1

    def at_level(self, level: str) -> Holders:
        """Return the holders of a level."""
        return {"prompt": self.prompts, "rollout": self.rollouts, "token": self.tokens}[level]


def attribute_step(step: int, tokens: AttributedTokens, grad_norm: float | None = None) -> StepAttribution:
    """Add a step's shares up by prompt and rollout, and rank every level by |share|.

    `grad_norm` is ‖ḡ‖ of the step's first update, where it was recorded; the sum is checked against it.

    Raises:
        InputError: There is no token, or a share is not finite.
    """
    if len(tokens.share) == 0:
        raise InputError(f"step {step} has no attributed token; pass the tokens of a step that was attributed.")
    share = np.asarray(tokens.share, dtype=float)
    if not np.isfinite(share).all():
        raise InputError("share has entries that are not finite; pass the tokens that were attributed only.")
    return StepAttribution(
        step, norm_sq=float(share.sum()),
        signal_total=None if tokens.signal is None else float(tokens.signal.sum()),
        noise_total=None if tokens.noise is None else float(tokens.noise.sum()),
        recorded_norm_sq=None if grad_norm is None or not np.isfinite(grad_norm) else float(grad_norm) ** 2,
        prompts=_by("prompt", tokens, np.stack([tokens.group])),
        rollouts=_by("rollout", tokens, np.stack([tokens.group, tokens.rollout])),
        tokens=_by("token", tokens, np.stack([tokens.group, tokens.rollout, tokens.t])),
    )  # fmt: skip


def _by(level: str, tokens: AttributedTokens, keys: Int) -> Holders:
    """Sum the shares of tokens that have the same keys [1 to 3, n], and order by size."""
    by_key = np.lexsort(keys[::-1])
    keys = keys[:, by_key]
    first = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))  # of each holder's tokens
    parts = tokens.share, tokens.signal, tokens.noise
    sums: list[Any] = [None if part is None else np.add.reduceat(part[by_key], first) for part in parts]
    # Largest first; equals keep the order of their keys, so the ranking is reproducible.
    order = np.argsort(-np.abs(sums[0]), kind="stable")
    absent = np.full((3 - len(keys), len(first)), -1)
    columns = (*keys[:, first], *absent, np.diff(first, append=keys.shape[1]), *sums)
    ordered: list[Any] = [column if column is None else column[order] for column in columns]
    return Holders(level, *ordered)
