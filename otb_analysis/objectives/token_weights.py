"""Token weights: the factor m_{i,t} of each token's advantage in ĝ = Σ m_{i,t} A_{i,t} s_{i,t}.

A weight that looks at y_t, as all here do, changes the mean: E ĝ is no longer ∇J, whatever the baseline. What such an
update is worth is its bias, projection and SF, which docs/catalogue.md has by enumeration.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import Formula, NoOptions, boolean_mask, checked_options, lookup, policy_values
from otb_analysis.types import Bool, Float


@dataclass(frozen=True)
class TokenWeightInputs:
    """What a token weight may look at; made by `training` and studies."""

    mask: Bool  # True at policy tokens [N, T]
    advantage: Float  # A [N, T]
    logprob: Float  # log π(y_t) in nats [N, T]
    entropy: Float  # H of the distribution that y_t was drawn from, in nats [N, T]

    def __post_init__(self) -> None:
        """Check shapes and values; keep float64 that is zero outside the mask."""
        mask = boolean_mask(self.mask)
        for name in ("advantage", "logprob", "entropy"):
            object.__setattr__(self, name, policy_values(name, getattr(self, name), mask))


@dataclass(frozen=True)
class StapoOptions:
    """Options of `stapo`, both fixed before sampling."""

    probability: float = 0.01  # τ_p: only tokens less likely than this are silenced
    entropy: float = 0.5  # τ_h in nats: only where the policy was surer than this

    def __post_init__(self) -> None:
        if not (0 <= self.probability <= 1 and self.entropy >= 0):
            raise InputError(f"{self} is out of range; choose probability from 0 to 1 and entropy of at least 0 nats.")


@dataclass(frozen=True)
class DelightOptions:
    """Options of `delightful`."""

    temperature: float = 1.0  # η: the larger, the closer the gate is to ½ everywhere

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(f"temperature is {self.temperature} but must be positive; 1 is the paper's form.")


def none(inputs: TokenWeightInputs, options: NoOptions) -> Float:
    """Weigh every token alike.

    m = 1.
    """
    return np.where(inputs.mask, 1.0, 0.0)


def stapo(inputs: TokenWeightInputs, options: StapoOptions) -> Float:
    """Silence unlikely tokens of confident positions where the advantage is positive.

    m = 0 where A > 0, π(y) < τ_p and H < τ_h, else 1. Abstract of STAPO, arXiv 2602.15620, which says that about .01 %
    of the tokens are such. Both thresholds are ours: fixed numbers, so that no weight depends on another rollout.
    """
    rare = (inputs.logprob < np.log(max(options.probability, 1e-300))) & (inputs.entropy < options.entropy)
    return np.where(inputs.mask & ~(rare & (inputs.advantage > 0)), 1.0, 0.0)


def delightful(inputs: TokenWeightInputs, options: DelightOptions) -> Float:
    """Gate each token by its delight, advantage times surprisal.

    m = σ(A·(−log π(y))/η): ½ for a certain token, towards 1 for a rare good one, towards 0 for a rare bad one. Abstract
    of Delightful Policy Gradient, arXiv 2603.14608. That it is a token's own surprisal is our reading.
    """
    return np.where(inputs.mask, expit(inputs.advantage * -inputs.logprob / options.temperature), 0.0)


# fmt: off
TOKEN_WEIGHTS: dict[str, Formula] = {
    "none": Formula(none, "1", "the estimator itself", "code"),
    "stapo": Formula(
        stapo, "0 where A > 0, π(y) < τ_p and H < τ_h, else 1", "STAPO, arXiv 2602.15620", "abstract",
        needs=("advantage", "logprob", "entropy"), options=StapoOptions,
    ),
    "delightful": Formula(
        delightful, "σ(A·(−log π(y))/η)", "Delightful Policy Gradient, arXiv 2603.14608", "abstract",
        needs=("advantage", "logprob"), options=DelightOptions,
    ),
}
# fmt: on


def token_weights(name: str, inputs: TokenWeightInputs, options: Any = None) -> Float:
    """Return the factor of every token's advantage [N, T], zero outside the mask.

    Raises:
        InputError: Unknown name or wrong options.
    """
    entry = lookup("token weight", name, TOKEN_WEIGHTS)
    return entry.function(inputs, checked_options(name, entry.options, options))
