"""Importance weights of one batch: what goes in, the exact gradient coefficients that come out, and how much is left.

A surrogate objective is Σ_t f(r_t, u_t), r the ratio that one entry of `ratios.RATIOS` defines and u_t = a_t A_t the
advantage times its aggregation weight. Its gradient is Σ_t c_t s_t with s_t = ∇ log π(y_t) and coefficients c that are
plain numbers, so a trainer needs no ratio in its graph: c = ratio.coefficient(advantage * weights), and the loss
−Σ_t c_t log π(y_t), c held constant, has exactly the surrogate's gradient at the parameters that gave the ratio.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.arrays import masked
from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import boolean_mask, policy_values
from otb_analysis.types import Bool, Float

LOG_LIMIT = 700.0  # A sum of log ratios is held in ±700, so that no weight is infinite (e^709 is the largest float64)


@dataclass(frozen=True)
class ClipOptions:
    """A clip around 1."""

    low: float = 0.2  # Below 1 − low a negative advantage has no gradient
    high: float = 0.2  # Above 1 + high a positive advantage has none (DAPO takes .28)
    dual: float = float("inf")  # Above it a negative advantage has none (dual clip, usually 3); infinite turns it off

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0 and self.dual > 1):
            raise InputError(f"{self} does not clip; low and high are 0 or more, and dual is above 1.")


@dataclass(frozen=True)
class GspoOptions(ClipOptions):
    """The clip of a geometric mean, whose spread is that of a token's ratio over √L."""

    low: float = 3e-4
    high: float = 4e-4


@dataclass(frozen=True)
class BoundOptions:
    """Bounds of a logarithm that widen with the square root of the position."""

    low: float = 0.025  # The log ratio is held at −low·√t or above, t counting policy tokens from 1
    high: float = 0.05  # And at high·√t or below

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise InputError(f"{self} has no room for a ratio of 1; low and high are 0 or more.")


@dataclass(frozen=True)
class PositionOptions(BoundOptions):
    """A clip at the same bounds."""

    dual: float = 3.0  # Above it a negative advantage has no gradient (dual clip); infinite turns it off

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dual > 1:
            raise InputError(f"dual is {self.dual} but must be above 1; 3 is usual and infinity turns it off.")


@dataclass(frozen=True)
class TruncationOptions:
    """A cap."""

    cap: float = 2.0  # Ratios above it are replaced by it

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise InputError(f"cap is {self.cap} but must be above 0; 2 is usual.")


@dataclass(frozen=True)
class MaskOptions:
    """Which rollouts count."""

    low: float = 0.001  # Rollouts whose geometric mean ratio is below 1 − low are dropped
    high: float = 0.001  # And those above 1 + high
    veto: float = 1e-4  # And those with any token ratio below it

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0 and self.veto >= 0):
            raise InputError(f"{self} is no mask; low, high and veto are 0 or more.")


@dataclass(frozen=True)
class Limits:
    """Where a clip stops the gradient, each a number or one per token [N, T]."""

    low: Float  # Below it, for a negative advantage
    high: Float  # Above it, for a positive one
    dual: Float  # Above it, for a negative one (dual clip)


FREE = Limits(np.array(0.0), np.array(np.inf), np.array(np.inf))  # No clip


@dataclass(frozen=True)
class RatioInputs:
    """What an importance ratio may look at; made by `training`."""

    logprob: Float  # log π(y_t) in nats under the parameters being updated [N, T]
    behavior_logprob: Float  # log μ(y_t) under the policy that sampled [N, T]
    mask: Bool  # True at policy tokens [N, T]; entries outside are never read

    def __post_init__(self) -> None:
        """Check shapes and values; keep float64 columns that are zero outside the mask."""
        mask = boolean_mask(self.mask)
        for name in ("logprob", "behavior_logprob"):
            object.__setattr__(self, name, policy_values(name, getattr(self, name), mask))

    @cached_property
    def log_ratio(self) -> Float:
        """Log-ratio log ρ_t = log π(y_t) − log μ(y_t) [N, T], zero outside the mask."""
        return np.clip(self.logprob - self.behavior_logprob, -LOG_LIMIT, LOG_LIMIT)

    @cached_property
    def length(self) -> Float:
        """L_i, policy tokens of each rollout [N, 1], at least 1."""
        return np.maximum(np.count_nonzero(self.mask, axis=1, keepdims=True), 1).astype(np.float64)


@dataclass(frozen=True)
class Ratio:
    """The ratio of one surrogate and where its gradient flows; made by `ratios.importance_ratio`.

    The surrogate of a token with weighted advantage u is, inside `kept`,
    min(r u, clip(r, low, high) u) and, for u < 0, not below dual·u.
    """

    value: Float  # r_t [N, T], after truncation, zero outside the mask
    mask: Bool  # True at policy tokens [N, T]
    limits: Limits  # low, high and dual of the clip
    kept: Bool  # False where a mask removes the token whatever its advantage [N, T]
    limited: Bool  # True where a truncation replaced the ratio, or a mask removed it, whatever the advantage [N, T]
    # `token`: the gradient of r_t flows through log π(y_t) alone, as r_t s_t; what else r_t holds is a constant.
    # `rollout`: through every token of the rollout, as r (1/L) Σ_k s_k.
    through: Literal["token", "rollout"] = "token"

    def clipped(self, weighted: ArrayLike) -> Bool:
        """Return where the clip stops the gradient of a token whose advantage has this sign."""
        u = masked(weighted, self.mask)
        r, limits = self.value, self.limits
        negative = (u < 0) & ((r < limits.low) | (r > limits.dual))
        return self.mask & (negative | ((u > 0) & (r > limits.high)))

    def coefficient(self, weighted: ArrayLike) -> Float:
        """Return c [N, T], what multiplies each score in the gradient of the surrogate; zero outside the mask.

        ∇ Σ_t f(r_t, u_t) = Σ_t c_t s_t. Through the token c_t = r_t u_t where neither clip nor mask stops it; through
        the rollout c_k = (1/L) Σ_t r u_t over the same tokens, for every k of the rollout. Exact at the parameters of
        `value`, in log-probability, with no 1/N: whatever averages is in u.
        """
        u = masked(weighted, self.mask)
        flows = self.kept & ~self.clipped(u)
        carried = np.where(flows, self.value, 0.0) * u
        if self.through == "token":
            return carried
        length = np.maximum(np.count_nonzero(self.mask, axis=1, keepdims=True), 1)
        return np.where(self.mask, carried.sum(axis=1, keepdims=True) / length, 0.0)


def effective_sample_size(weight: ArrayLike) -> float:
    """Return how many equally weighted samples carry as much information.

    ESS = (Σ_i w_i)² / Σ_i w_i² of weights ≥ 0 [B]: B for B equal weights, 1 when one weight has everything, 0 when all
    are zero.

    Raises:
        InputError: A weight is negative, NaN or infinite.
    """
    w = np.asarray(weight, np.float64).ravel()
    if not (np.isfinite(w).all() and (w >= 0).all()):
        raise InputError(f"weight has a value of {w[~(w >= 0) | ~np.isfinite(w)][0]}; pass finite weights, 0 or more.")
    top = w.max(initial=0.0)
    return 0.0 if top == 0 else float((w / top).sum() ** 2 / ((w / top) ** 2).sum())


def learning_rate_factor(weight: ArrayLike) -> float:
    """Return by what `opob` scales the learning rate off-policy.

    √(ESS/B) of the sequence ratios Π_t ρ_t [B]: 1 on-policy, less the more unequal the weights. Public code of VCPO,
    arXiv 2602.17616.

    Raises:
        InputError: There is no weight, or one is negative, NaN or infinite.
    """
    size = np.size(weight)
    if not size:
        raise InputError("weight is empty; pass the sequence ratio of every rollout, shape [B].")
    return float(np.sqrt(effective_sample_size(weight) / size))
