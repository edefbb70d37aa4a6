"""A measured quality of right answers, by what they spent, as a reward (PR) and for a filter of lazy ones (PRS)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.types import Float

CALL = 16
"""Policy tokens that a tool call costs as much as: our choice."""


@dataclass(frozen=True)
class ProfiledOptions:
    """Options of the shaping `profiled`, fixed before sampling."""

    bonus: float = 0.5  # β, what a right answer of the best quality earns more
    most: int = 64  # Cost in policy tokens at which the quality is 0
    correct: float = 0.5  # Total reward at or above which a rollout is right

    def __post_init__(self) -> None:
        if not (self.bonus >= 0 and self.most > 0):
            raise InputError(f"{self} is out of range; choose a bonus of at least 0 and most of at least 1 token.")


def quality(tokens: ArrayLike, calls: ArrayLike, most: int) -> Float:
    """Return q = 1 − min(cost/most, 1), from 1 for what cost nothing to 0, with cost = tokens + `CALL` · tool calls."""
    cost = np.asarray(tokens, float) + CALL * np.asarray(calls, float)
    return 1.0 - np.minimum(cost / most, 1.0)
