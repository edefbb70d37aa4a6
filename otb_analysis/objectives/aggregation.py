"""What multiplies a token's advantage in the gradient, and the slope of a divergence that is subtracted.

**Aggregation**: the weight a_{i,t} in ĝ = Σ_{i,t} a_{i,t} r_{i,t} A_{i,t} s_{i,t}. Every entry answers weights [N, T]
that are zero outside the mask and divide by whatever it divides by, so nothing else may divide again. N counts rollouts
with policy tokens, P their prompts, L_i policy tokens. With weights that do not depend on lengths the gradient is that
of the expected return; token means weigh rollouts by their length.

**Token weights**: the factor m_{i,t} of each token's advantage. One that looks at y_t, as all here do, changes the
mean: E ĝ is no longer ∇J, whatever the baseline. What such an update is worth is its bias, projection and SF, which
docs/catalogue.md has by enumeration.

**Divergences** KL(π‖π_ref) from one sampled token, with l = log π(y) − log π_ref(y). Source: Schulman, "Approximating
KL Divergence" (2020), which names them k1, k2 and k3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from otb_analysis.arrays import Groups
from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import CheckedInputs, Formula, LimitedOptions, NoOptions, answer, lookup
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class AggregationInputs(CheckedInputs):
    """What an aggregation may look at; made by `training`."""

    columns = ("advantage",)
    mask: Bool  # True at policy tokens [N, T]
    group: Int  # Prompt of each rollout [N]
    advantage: Float | None = None  # A [N, T], for the aggregations that read its sign

    @property
    def present(self) -> Float:
        """1 for rollouts with policy tokens, else 0 [N]."""
        return (self.length > 0).astype(np.float64)


@dataclass(frozen=True)
class ConstantOptions(LimitedOptions):
    """The constant of `constant`."""

    valid = (
        lambda o: o.length >= 1,
        "length is {self.length} but must be at least 1; pass the generation limit in tokens.",
    )
    length: int = 1024  # Tokens that every rollout's sum is divided by: the generation limit, the same at every step


def _weights(inputs: AggregationInputs, part: Float, whole: Float | float) -> Float:
    """Return part/whole of each rollout at its policy tokens [N, T], 0 where it has no part."""
    share = np.divide(part, whole, out=np.zeros(part.shape), where=part > 0)
    return np.where(inputs.mask, share[:, None], 0.0)


def sequence_sum(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Sum over tokens and average over rollouts.

    a = 1/N: the gradient of the expected return, without a length in it.
    """
    return _weights(inputs, inputs.present, inputs.present.sum())


def token_mean(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Average over all tokens of the batch.

    a = 1/Σ_j L_j: a long rollout weighs as much as its tokens. Public code.
    """
    return _weights(inputs, inputs.present, inputs.length.sum())


def sequence_mean(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Average each rollout's tokens, then the rollouts.

    a = 1/(N L_i): a token of a long rollout weighs less. Equal lengths give `token_mean`. Public code of GRPO.
    """
    return _weights(inputs, inputs.present, inputs.length * inputs.present.sum())


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
    groups = Groups.from_labels(inputs.group)
    tokens = groups.sum(inputs.length)
    return _weights(inputs, inputs.present, groups.spread(tokens) * np.count_nonzero(tokens))


def balanced(inputs: AggregationInputs, options: NoOptions) -> Float:
    """Average over the tokens of equal sign of A within each group, and weigh the parts by their rollouts.

    a = (1/P) · (n_s/n) / Σ_{j in part s} L_j, n_s of the group's n rollouts in part s, s the sign of Σ_t A_{i,t}: the
    lengths of good and of bad rollouts no longer decide which weigh more. One sign gives `dapo`. Abstract of Balanced
    Aggregation, arXiv 2605.04077; that a rollout without advantage is a part of its own is ours.
    """
    if inputs.advantage is None:
        raise InputError("balanced needs advantage, which is None; pass it in AggregationInputs.")
    groups = Groups.from_labels(inputs.group)
    sign = np.sign(inputs.advantage.sum(axis=1)).astype(np.int64)
    parts = Groups.from_labels(groups.index * 3 + sign + 1)
    members, tokens = parts.spread(parts.sum(inputs.present)), parts.spread(parts.sum(inputs.length))
    rollouts = groups.sum(inputs.present)
    return _weights(inputs, inputs.present * members, tokens * groups.spread(rollouts) * np.count_nonzero(rollouts))


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
    return answer("aggregation", name, AGGREGATIONS, inputs, options)


@dataclass(frozen=True)
class TokenWeightInputs(CheckedInputs):
    """What a token weight may look at; made by `training` and studies."""

    columns = ("advantage", "logprob", "entropy", "contrast")
    mask: Bool  # True at policy tokens [N, T]
    advantage: Float  # A [N, T]
    logprob: Float  # log π(y_t) in nats [N, T]
    entropy: Float  # H of the distribution that y_t was drawn from, in nats [N, T]
    contrast: Float | None = None  # softmax(2z₊ − z₋)[y_t] [N, T], where it was measured
    update: Int | None = None  # Which update each rollout is part of [N], where the rollouts are of several

    @property
    def covariance(self) -> Float:
        """(A − mean A)(log π(y) − mean log π(y)) of every token, means over the tokens of its update [N, T]."""
        updates = Groups.from_labels(np.zeros(len(self.mask), np.int64) if self.update is None else self.update)
        tokens = np.maximum(updates.sum(self.length), 1)
        away = (
            x - updates.spread(updates.sum(x.sum(axis=1)) / tokens)[:, None] for x in (self.advantage, self.logprob)
        )
        return np.where(self.mask, np.prod(list(away), axis=0), 0.0)


@dataclass(frozen=True)
class StapoOptions(LimitedOptions):
    """Options of `stapo`, both fixed before sampling."""

    valid = (
        lambda o: 0 <= o.probability <= 1 and o.entropy >= 0,
        "{self} is out of range; choose probability from 0 to 1 and entropy of at least 0 nats.",
    )
    probability: float = 0.01  # τ_p: only tokens less likely than this are silenced
    entropy: float = 0.5  # τ_h in nats: only where the policy was surer than this


@dataclass(frozen=True)
class DelightOptions(LimitedOptions):
    """Options of `delightful`."""

    valid = (
        lambda o: o.temperature > 0,
        "temperature is {self.temperature} but must be positive; 1 is the paper's form.",
    )
    temperature: float = 1.0  # η: the larger, the closer the gate is to ½ everywhere


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


@dataclass(frozen=True)
class CriticalOptions(LimitedOptions):
    """Options of `critical`."""

    valid = (lambda o: 0 <= o.strength <= 1, "strength is {self.strength}; choose it from 0 to 1.")
    strength: float = 1.0  # κ: 0 weighs every token alike, 1 spares a token that right rollouts are sure to write


def critical(inputs: TokenWeightInputs, options: CriticalOptions) -> Float:
    """Blame the critical tokens of bad rollouts.

    m = 1 − κ·contrast where A < 0, else 1: a token that right rollouts would have written as well is spared. The
    contrast and that rejected tokens are weighed by it are of cDPO, arXiv 2411.19943; its use in a policy gradient is
    ours.
    """
    if inputs.contrast is None:
        raise InputError("token_weight critical reads the contrast of every token; set measure.contrast.every to 1.")
    return np.where(inputs.mask, 1.0 - options.strength * np.where(inputs.advantage < 0, inputs.contrast, 0.0), 0.0)


@dataclass(frozen=True)
class CovarianceOptions(LimitedOptions):
    """Options of `clip_cov`."""

    valid = (
        lambda o: 0 < o.share <= 1 and o.low < o.high,
        "{self} is out of range; choose share above 0 up to 1 and low < high.",
    )
    share: float = 2e-4  # Share of an update's tokens that is silenced, at least one where there is a candidate
    low: float = 1.0  # Candidates have a covariance above this
    high: float = 5.0  # And below this


@dataclass(frozen=True)
class PenaltyOptions(LimitedOptions):
    """Options of `kl_cov`."""

    valid = (
        lambda o: 0 < o.share <= 1 and o.coefficient >= 0,
        "{self} is out of range; choose share above 0 up to 1 and coefficient of at least 0.",
    )
    share: float = 2e-4  # Share of an update's tokens that is penalised, at least one
    coefficient: float = 1.0  # κ, what a nat of drift from the sampler costs at these tokens


def clip_cov(inputs: TokenWeightInputs, options: CovarianceOptions) -> Float:
    """Silence a few of the tokens whose advantage and log-probability vary most together.

    m = 1 − min(k/n, 1) at the n tokens with low < (A − mean A)(log π(y) − mean log π(y)) < high, else 1, k =
    max(⌊share · tokens⌋, 1). The public code of Clip-Cov, arXiv 2505.22617, silences k of the n drawn at random, among
    those its clip leaves: m is the mean over the draws, so the mean of the update is theirs and its noise is less.
    There it goes with `ratio ppo`, and is drawn anew for every mini-batch.
    """
    updates = Groups.from_labels(np.zeros(len(inputs.mask), np.int64) if inputs.update is None else inputs.update)
    candidate = inputs.mask & (inputs.covariance > options.low) & (inputs.covariance < options.high)
    wanted = np.maximum(np.floor(options.share * updates.sum(inputs.length)), 1)
    share = np.minimum(wanted / np.maximum(updates.sum(candidate.sum(axis=1)), 1), 1)
    return np.where(inputs.mask, 1 - candidate * updates.spread(share)[:, None], 0.0)


def kl_cov(inputs: TokenWeightInputs, options: PenaltyOptions) -> Float:
    """Weigh every token alike, and penalise the drift of those whose advantage and log-probability vary most together.

    m = 1; the loss gains κ·|log π(y) − log μ(y)| at the k = max(⌊share · tokens⌋, 1) tokens with the largest
    covariance, that of `clip_cov`. Where the policy samples for itself |log π − log μ| has no slope: only later updates
    on the same rollouts, or old ones, differ from `none`. Public code of KL-Cov, arXiv 2505.22617, which goes with
    `ratio token` and picks tokens anew for every mini-batch.
    """
    return np.where(inputs.mask, 1.0, 0.0)


def drift_penalty(inputs: TokenWeightInputs, options: PenaltyOptions) -> Float:
    """Return κ at the tokens that `kl_cov` penalises, 0 elsewhere [N, T]."""
    covariance = np.where(inputs.mask, inputs.covariance, -np.inf).ravel()
    wanted = min(max(int(options.share * inputs.mask.sum()), 1), int(inputs.mask.sum()))
    chosen = np.zeros(covariance.shape)
    chosen[np.argsort(-covariance, kind="stable")[:wanted]] = options.coefficient
    return chosen.reshape(inputs.mask.shape)


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
    "critical": Formula(
        critical, "1 − κ·softmax(2z₊ − z₋)[y] where A < 0, else 1", "cDPO, arXiv 2411.19943", "guess",
        needs=("advantage", "contrast"), options=CriticalOptions,
    ),
    "clip_cov": Formula(
        clip_cov, "1 − min(k/n, 1) at the n tokens with 1 < (A − mean A)(log π(y) − mean log π(y)) < 5, else 1",
        "Clip-Cov, arXiv 2505.22617", "code", needs=("advantage", "logprob"), options=CovarianceOptions,
    ),
    "kl_cov": Formula(
        kl_cov, "1; −κ·|log π(y) − log μ(y)| at the k tokens with the largest covariance", "KL-Cov, arXiv 2505.22617",
        "code", needs=("advantage", "logprob"), options=PenaltyOptions,
    ),
}
# fmt: on


def token_weights(name: str, inputs: TokenWeightInputs, options: Any = None) -> Float:
    """Return the factor of every token's advantage [N, T], zero outside the mask.

    Raises:
        InputError: Unknown name or wrong options.
    """
    return answer("token weight", name, TOKEN_WEIGHTS, inputs, options)


@dataclass(frozen=True)
class Divergence:
    """One estimator as a function of l, and its slope by log π(y): the coefficient of the score s_t in ∇ Σ value."""

    value: Callable[[Float], Float]
    slope: Callable[[Float], Float]


DIVERGENCES: dict[str, Divergence] = {
    # Unbiased. As a loss its expected gradient is zero.
    "k1": Divergence(lambda log_ratio: log_ratio, np.ones_like),
    # Biased as a value. As a loss its expected gradient is that of KL(π‖π_ref).
    "k2": Divergence(lambda log_ratio: 0.5 * log_ratio**2, lambda log_ratio: log_ratio),
    # Unbiased and never negative. As a loss its expected gradient is that of KL(π_ref‖π).
    "k3": Divergence(lambda log_ratio: np.expm1(-log_ratio) + log_ratio, lambda log_ratio: -np.expm1(-log_ratio)),
}


def divergence(name: str, logprob: ArrayLike, reference: ArrayLike) -> Float:
    """Return the estimate of KL(π‖π_ref) at each sampled token, in nats.

    k1 = l, k2 = l²/2, k3 = e^{−l} − 1 + l, l = log π(y) − log π_ref(y), y drawn from π. All three are zero where the
    policies agree. E[k1] = E[k3] = KL(π‖π_ref); E[k2] differs from it in third order.

    Raises:
        InputError: The name is unknown.
    """
    return lookup("divergence", name, DIVERGENCES).value(np.subtract(logprob, reference, dtype=np.float64))


def divergence_slope(name: str, logprob: ArrayLike, reference: ArrayLike) -> Float:
    """Return the coefficient of ∇ log π(y) in the gradient of the estimate.

    ∇k1 = s, ∇k2 = l·s, ∇k3 = (1 − e^{−l})·s with s = ∇_θ log π(y): log-probability, no 1/N, no sign change. On-policy
    E[s] = 0, so k1 as a loss does nothing but add noise; E[l·s] = ∇KL(π‖π_ref); E[(1 − e^{−l})·s] = ∇KL(π_ref‖π).

    Raises:
        InputError: The name is unknown.
    """
    return lookup("divergence", name, DIVERGENCES).slope(np.subtract(logprob, reference, dtype=np.float64))
