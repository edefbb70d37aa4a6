"""Loss aggregation: the weight a_{i,t} of every token in the gradient ĝ = Σ_{i,t} a_{i,t} r_{i,t} A_{i,t} s_{i,t}.

Every entry answers weights [N, T] that are zero outside the mask and divide by whatever it divides by, so nothing else
may divide again. N counts rollouts with policy tokens, P their prompts, L_i policy tokens. With weights that do not
depend on lengths the gradient is that of the expected return; token means weigh rollouts by their length.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import (
    Formula,
    NoOptions,
    boolean_mask,
    checked_options,
    group_vector,
    lookup,
    policy_values,
)
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class AggregationInputs:
    """What an aggregation may look at; made by `training`."""

    mask: Bool  # True at policy tokens [N, T]
    group: Int  # Prompt of each rollout [N]
    advantage: Float | None = None  # A [N, T], for the aggregations that read its sign

    def __post_init__(self) -> None:
        """Check shapes and values."""
        mask = boolean_mask(self.mask)
        group_vector(self.group, len(mask))
        if self.advantage is not None:
            object.__setattr__(self, "advantage", policy_values("advantage", self.advantage, mask))

    @property
    def length(self) -> Float:
        """L_i, policy tokens of each rollout [N]."""
        return np.count_nonzero(self.mask, axis=1).astype(np.float64)

    @property
    def present(self) -> Float:
        """1 for rollouts with policy tokens, else 0 [N]."""
        return (self.length > 0).astype(np.float64)


@dataclass(frozen=True)
class ConstantOptions:
    """The constant of `constant`."""

    length: int = 1024  # Tokens that every rollout's sum is divided by: the generation limit, the same at every step

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"length is {self.length} but must be at least 1; pass the generation limit in tokens.")


def sequence_sum(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Sum over tokens and average over rollouts.

    a = 1/N: the gradient of the expected return, without a length in it.
    """
    return _per_rollout(inputs, _share(inputs.present, inputs.present.sum()))


def token_mean(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Average over all tokens of the batch.

    a = 1/Σ_j L_j: a long rollout weighs as much as its tokens. Public code.
    """
    return _per_rollout(inputs, _share(inputs.present, inputs.length.sum()))


def sequence_mean(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Average each rollout's tokens, then the rollouts.

    a = 1/(N L_i): a token of a long rollout weighs less. Equal lengths give `token_mean`. Public code of GRPO.
    """
    return _per_rollout(inputs, _share(inputs.present, inputs.length * inputs.present.sum()))


def constant(inputs: AggregationInputs, options: ConstantOptions) -> Float:
    """Divide each rollout's sum by the same constant, and average the rollouts.

    a = 1/(N C): `sequence_sum` over C, so that a learning rate for `sequence_mean` fits. Public code of Dr. GRPO.
    """
    return sequence_sum(inputs, NoOptions()) / options.length


def dapo(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Average over the tokens of each prompt's group, then over the prompts.

    a = 1/(P Σ_{j in group} L_j). One group gives `token_mean`, and so do groups with equally many tokens. The paper's
    formula; its code averages over the tokens of the whole batch, which is `token_mean`. Public code.
    """
    groups = Groups.of(inputs.group)
    tokens = groups.sum(inputs.length)
    return _per_rollout(inputs, _share(inputs.present, groups.spread(tokens) * np.count_nonzero(tokens)))


def balanced(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Average over the tokens of equal sign of A within each group, and weigh the parts by their rollouts.

    a = (1/P) · (n_s/n) / Σ_{j in part s} L_j, n_s of the group's n rollouts in part s, s the sign of Σ_t A_{i,t}: the
    lengths of good and of bad rollouts no longer decide which weigh more. One sign gives `dapo`. Abstract of Balanced
    Aggregation, arXiv 2605.04077; that a rollout without advantage is a part of its own is ours.
    """
    if inputs.advantage is None:
        raise InputError("balanced needs advantage, which is None; pass it in AggregationInputs.")
    groups = Groups.of(inputs.group)
    sign = np.sign(inputs.advantage.sum(axis=1)).astype(np.int64)
    parts = Groups.of(groups.index * 3 + sign + 1)
    members, tokens = parts.spread(parts.sum(inputs.present)), parts.spread(parts.sum(inputs.length))
    rollouts = groups.sum(inputs.present)
    return _per_rollout(
        inputs, _share(inputs.present * members, tokens * groups.spread(rollouts) * np.count_nonzero(rollouts))
    )


# fmt: off
AGGREGATIONS: dict[str, Formula] = {
    "sequence_sum": Formula(sequence_sum, "1/N", "REINFORCE", "code", needs=("group",)),
    "token_mean": Formula(token_mean, "1/Σ_j L_j over the batch", "PPO", "code", needs=("group",)),
    "sequence_mean": Formula(sequence_mean, "1/(N L_i)", "GRPO", "code", needs=("group",)),
    "constant": Formula(
        constant, "1/(N C)", "Dr. GRPO, arXiv 2503.20783", "code", needs=("group",), options=ConstantOptions
    ),
    "dapo": Formula(dapo, "1/(P Σ_j L_j), j in the group", "DAPO, arXiv 2503.14476", "code", needs=("group",)),
    "balanced": Formula(
        balanced, "(1/P)(n_s/n) / Σ_j L_j, j in the group with the same sign s of A",
        "Balanced Aggregation, arXiv 2605.04077", "abstract", needs=("group", "advantage"),
    ),
}
# fmt: on


def aggregation_weights(name: str, inputs: AggregationInputs, options: Any = None) -> Float:
    """Return the weight a of every token in the batch gradient [N, T], zero outside the mask.

    Raises:
        InputError: Unknown name, missing advantages or wrong options.
    """
    entry = lookup("aggregation", name, AGGREGATIONS)
    return entry.function(inputs, checked_options(name, entry.options, options))


def _share(part: Float, whole: Float | float) -> Float:
    return np.divide(part, whole, out=np.zeros(part.shape), where=part > 0)


def _per_rollout(inputs: AggregationInputs, weight: Float) -> Float:
    return np.where(inputs.mask, weight[:, None], 0.0)
