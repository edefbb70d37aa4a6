"""The coefficient of each token's score: ratio × advantage × aggregation weight, minus the divergence's slope."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.config import ObjectiveConfig
from otb_analysis.measurement.table import TokenTable
from otb_analysis.objectives.aggregation import AGGREGATIONS, AggregationInputs, aggregation_weights
from otb_analysis.objectives.divergence import divergence, divergence_slope
from otb_analysis.objectives.importance import LOG_LIMIT
from otb_analysis.objectives.ratios import RATIOS, Ratio, RatioInputs, importance_ratio
from otb_analysis.objectives.registry import lookup, options_from_table
from otb_analysis.objectives.shaping import SHAPINGS, Shaped, ShapingInputs, shape_rewards
from otb_analysis.objectives.token_weights import TOKEN_WEIGHTS, TokenWeightInputs, token_weights
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class TokenBatch:
    """What the updates of one batch read, by completion token [N, T]."""

    rollouts: Rollouts
    mask: Bool  # True at policy tokens that train
    advantage: Float
    behavior: Float  # log-probability under the policy that sampled, in nats; NaN outside the mask
    reference: Float | None  # log π_ref in nats, or None
    weight: Float  # Aggregation weight of each token within its mini-batch; set by `Objective.with_weights`
    number: Int  # Each rollout's index in the step [N]
    seed: int = 0  # Seed of the mini-batches' order
    rate_factor: float = 1.0  # Multiplies the learning rate of these updates

    def take(self, rows: Int) -> "TokenBatch":
        """Return some rollouts, padded to the longest of them."""
        rollouts = self.rollouts.take(rows)
        width = rollouts.width
        names = ("mask", "advantage", "behavior", "reference", "weight")
        arrays = {name: getattr(self, name) for name in names}
        cut = {name: None if x is None else x[rows, :width] for name, x in arrays.items()}
        return replace(self, rollouts=rollouts, number=self.number[rows], **cut)

    def sequence_ratio(self, logprob: Float) -> Float:
        """Return Π_t π(y_t)/μ(y_t) of each rollout [N] at log-probabilities [N, T]."""
        difference = np.where(self.mask, logprob - np.nan_to_num(self.behavior), 0.0).sum(axis=1)
        return np.exp(np.clip(difference, -LOG_LIMIT, LOG_LIMIT))


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of scores: ĝ = Σ c·∇ log π(y_t) ascends the objective."""

    value: Float  # c [n, T], zero outside the mask
    by_token: dict[str, Float]  # Other numbers of each token [n, T]; their means become scalars of these names


class Objective:
    """Ratio, aggregation, token weight, shaping and divergence of the catalogue, turned into coefficients."""

    def __init__(self, config: ObjectiveConfig):
        self.config = config
        self.off_policy = config.ratio != "none"
        catalogue = {"ratio": RATIOS, "aggregation": AGGREGATIONS, "token_weight": TOKEN_WEIGHTS, "shaping": SHAPINGS}
        self._options: dict[str, Any] = {}
        for kind, entries in catalogue.items():
            name, given = getattr(config, kind), getattr(config, f"{kind}_options")
            self._options[kind] = options_from_table(name, lookup(kind, name, entries).options, given)

    def shaped(self, inputs: ShapingInputs, penalty: Float | None) -> Shaped:
        """Return the rewards that the estimator sees [N, T] and the rollouts that take part in the update [N].

        The inputs' rewards are what the task paid, `penalty` [N, T] is what the method `penalty` returned.
        """
        shaped = shape_rewards(self.config.shaping, inputs, self._options["shaping"])
        return shaped if penalty is None else replace(shaped, reward=shaped.reward - penalty)

    def with_weights(self, batch: TokenBatch) -> TokenBatch:
        """Return a mini-batch with the aggregation weight of each token."""
        inputs = AggregationInputs(batch.mask, batch.rollouts.group, batch.advantage)
        weight = aggregation_weights(self.config.aggregation, inputs, self._options["aggregation"])
        return replace(batch, weight=weight)

    def ratio(self, batch: TokenBatch, logprob: Float) -> Ratio:
        """Return the importance ratio of rollouts at log-probabilities [n, T]."""
        behavior = np.where(batch.mask, batch.behavior, 0.0)
        inputs = RatioInputs(np.where(batch.mask, logprob, 0.0), behavior, batch.mask)
        return importance_ratio(self.config.ratio, inputs, self._options["ratio"])

    def coefficients(self, batch: TokenBatch, logprob: Float) -> Coefficients:
        """Return c at log-probabilities [n, T], in nats, for n rollouts of a weighed mini-batch.

        c = coefficient of the ratio's surrogate at u = weight·advantage, minus β·weight·∂divergence/∂log π.
        """
        ratio = self.ratio(batch, logprob)
        advantage = batch.weight * batch.advantage
        value = ratio.coefficient(advantage)
        by_token = {}
        if self.off_policy:
            by_token["ratio_mean"] = ratio.value
            by_token["ratio_clip_share"] = (ratio.clipped(advantage) | ratio.limited).astype(np.float64)
        if batch.reference is not None:
            name = self.config.kl_estimator
            by_token["kl_reference"] = np.where(batch.mask, divergence(name, logprob, batch.reference), 0.0)
            if self.config.kl_in == "loss":
                slope = np.where(batch.mask, divergence_slope(name, logprob, batch.reference), 0.0)
                value = value - self.config.kl_coefficient * batch.weight * slope
        return Coefficients(value, by_token)

    def first_coefficients(self, batch: TokenBatch, logprob: Float) -> Float:
        """Return c [N, T] of a whole batch before its first update.

        With several mini-batches their mean has these coefficients, up to how each normalises its own part. The entropy
        bonus is left out: its gradient is no sum of scores.
        """
        return self.coefficients(self.with_weights(batch), logprob).value

    def penalty(self, logprob: Float, reference: Float | None, mask: Bool) -> Float | None:
        """Return what the divergence subtracts from each token's reward [N, T], or None."""
        if reference is None or self.config.kl_in != "reward":
            return None
        value = divergence(self.config.kl_estimator, logprob, reference)
        return np.where(mask, self.config.kl_coefficient * value, 0.0)

    def batch(self, rollouts: Rollouts, table: TokenTable, advantage: Float, reference: Float | None) -> TokenBatch:
        """Return what the updates of one batch read; `weight` and `seed` are set later.

        Token weights are those of the policy before the first update, and part of the advantage from here on.
        """
        mask = table.mask & table.keep[:, None]
        if self.config.token_weight != "none":
            contrast = None if table.contrast is None else np.nan_to_num(table.contrast)  # unknown: weighs nothing
            inputs = TokenWeightInputs(mask, advantage, table.stats.logprob, table.stats.entropy, contrast)
            factor = token_weights(self.config.token_weight, inputs, self._options["token_weight"])
            advantage = factor * np.where(mask, advantage, 0.0)
        return TokenBatch(
            rollouts=rollouts,
            mask=mask,
            advantage=np.where(mask, advantage, 0.0),
            behavior=table.behavior_logprob,
            reference=reference,
            weight=np.zeros(mask.shape),
            number=np.arange(len(mask)),
        )
