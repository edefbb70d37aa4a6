"""From advantages to new weights: coefficients of scores, epochs, mini-batches of whole groups, the optimizer.

Every objective is run as ĝ = Σ c·∇ log π with c = ratio × advantage × aggregation weight, minus the divergence's slope,
which NumPy computes. The loss is −Σ c·log π with c held fixed, so autograd computes nothing but the scores (and the
entropy bonus).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from otb_analysis.config import ObjectiveConfig, OptimizeConfig
from otb_analysis.errors import NonFiniteError
from otb_analysis.measurement.forward import CompletionLogprobs, ForwardPass
from otb_analysis.measurement.table import TokenTable
from otb_analysis.objectives.aggregation import (
    AGGREGATIONS,
    TOKEN_WEIGHTS,
    AggregationInputs,
    TokenWeightInputs,
    aggregation_weights,
    divergence,
    divergence_slope,
    drift_penalty,
    token_weights,
)
from otb_analysis.objectives.ratios import RATIOS, RatioInputs, importance_ratio
from otb_analysis.objectives.registry import lookup, options_from_table
from otb_analysis.objectives.shaping import SHAPINGS, Shaped, ShapingInputs, shape_rewards
from otb_analysis.phases import counted
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.training.policy import Policy
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
    penalty: Float | None = None  # What a nat of drift from the sampler costs at each token [N, T]
    seed: int = 0  # Seed of the mini-batches' order
    rate_factor: float = 1.0  # Multiplies the learning rate of these updates

    def take(self, rows: Int) -> "TokenBatch":
        """Return some rollouts, padded to the longest of them."""
        rollouts = self.rollouts.take(rows)
        width = rollouts.width
        names = ("mask", "advantage", "behavior", "reference", "weight", "penalty")
        arrays = {name: getattr(self, name) for name in names}
        cut = {name: None if x is None else x[rows, :width] for name, x in arrays.items()}
        return replace(self, rollouts=rollouts, number=self.number[rows], **cut)


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

    def shaped(self, inputs: ShapingInputs, logprob: Float, reference: Float | None) -> Shaped:
        """Return the rewards that the estimator sees [N, T] and the rollouts that take part in the update [N].

        The inputs' rewards are what the task paid. What the divergence from the reference takes from the reward, where
        the run has it there, comes after the shaping; `logprob` and `reference` [N, T] are in nats.
        """
        shaped = shape_rewards(self.config.shaping, inputs, self._options["shaping"])
        if reference is None or self.config.kl_in != "reward":
            return shaped
        penalty = self.config.kl_coefficient * divergence(self.config.kl_estimator, logprob, reference)
        return replace(shaped, reward=shaped.reward - np.where(inputs.mask, penalty, 0.0))

    def with_weights(self, batch: TokenBatch) -> TokenBatch:
        """Return a mini-batch with the aggregation weight of each token."""
        inputs = AggregationInputs(batch.mask, batch.rollouts.group, batch.advantage)
        weight = aggregation_weights(self.config.aggregation, inputs, self._options["aggregation"])
        return replace(batch, weight=weight)

    def coefficients(self, batch: TokenBatch, logprob: Float) -> tuple[Float, dict[str, Float]]:
        """Return c at log-probabilities [n, T], in nats, for n rollouts of a weighed mini-batch.

        c = coefficient of the ratio's surrogate at u = weight·advantage, minus β·weight·∂divergence/∂log π, minus
        weight·penalty·∂|log ρ|/∂log π.

        Returns:
            c [n, T], zero outside the mask: ĝ = Σ c·∇ log π(y_t) ascends the objective. And other numbers of each token
            [n, T], whose means become scalars of these names.
        """
        behavior = np.where(batch.mask, batch.behavior, 0.0)
        inputs = RatioInputs(np.where(batch.mask, logprob, 0.0), behavior, batch.mask)
        ratio = importance_ratio(self.config.ratio, inputs, self._options["ratio"])
        advantage = batch.weight * batch.advantage
        value = ratio.coefficient(advantage)
        by_token = {}
        if self.off_policy:
            by_token["ratio_mean"] = ratio.value
            by_token["ratio_clip_share"] = (ratio.clipped(advantage) | ratio.limited).astype(np.float64)
        if batch.penalty is not None:
            value = value - batch.weight * batch.penalty * np.sign(inputs.log_ratio)
        if batch.reference is not None:
            name = self.config.kl_estimator
            by_token["kl_reference"] = np.where(batch.mask, divergence(name, logprob, batch.reference), 0.0)
            if self.config.kl_in == "loss":
                slope = np.where(batch.mask, divergence_slope(name, logprob, batch.reference), 0.0)
                value = value - self.config.kl_coefficient * batch.weight * slope
        return value, by_token

    def batch(self, rollouts: Rollouts, table: TokenTable, advantage: Float, reference: Float | None) -> TokenBatch:
        """Return what the updates of one batch read; `weight` and `seed` are set later.

        Token weights are those of the policy before the first update, and part of the advantage from here on.
        """
        mask, penalty = table.mask & table.keep[:, None], None
        if self.config.token_weight != "none":
            contrast = None if table.contrast is None else np.nan_to_num(table.contrast)  # unknown: weighs nothing
            inputs = TokenWeightInputs(mask, advantage, table.stats.logprob, table.stats.entropy, contrast)
            factor = token_weights(self.config.token_weight, inputs, self._options["token_weight"])
            advantage = factor * np.where(mask, advantage, 0.0)
            if self.config.token_weight == "kl_cov":
                penalty = drift_penalty(inputs, self._options["token_weight"])
        return TokenBatch(
            rollouts=rollouts,
            mask=mask,
            advantage=np.where(mask, advantage, 0.0),
            behavior=table.behavior_logprob,
            reference=reference,
            weight=np.zeros(mask.shape),
            number=np.arange(len(mask)),
            penalty=penalty,
        )


class PolicyOptimizer:
    """AdamW over the trained parameters; the schedule reads `batch`, the number of finished batches."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], config: OptimizeConfig, processes: Processes = SINGLE_PROCESS
    ) -> None:
        self.config, self.parameters, self.batch, self.processes = config, parameters, 0, processes
        self.optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def learning_rate(self, batch: int) -> float:
        """Return the scheduled learning rate of a batch, from 0: linear warm-up, then constant, linear or cosine."""
        config = self.config
        if batch < config.warmup_steps:
            return config.learning_rate * (batch + 1) / (config.warmup_steps + 1)
        if config.schedule == "constant":
            return config.learning_rate
        done = (batch - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        fall = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return config.learning_rate * max(0.0, fall)

    def step(self, factor: float = 1.0) -> tuple[float, float]:
        """Sum `.grad` over processes, clip, step and clear; return ‖ĝ‖ before clipping and the learning rate.

        `factor` multiplies the scheduled learning rate of this step.

        Raises:
            NonFiniteError: The gradient is not finite; nothing was changed.
        """
        rate = self.learning_rate(self.batch) * factor
        if not self.processes.sharded:  # sharded gradients were summed on their way back
            self.processes.sum_gradients(self.parameters)
        clipping = self.config.max_grad_norm or float("inf")
        whole = torch.nn.utils.clip_grad_norm_(self.parameters, clipping)
        norm = float(whole.full_tensor() if isinstance(whole, DTensor) else whole)
        if not np.isfinite(norm):
            raise NonFiniteError(f"grad_norm is {norm}; lower optimize.learning_rate.")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        torch.autograd.graph.increment_version(self.parameters)  # the fused kernel does not mark weights as written
        self.optimizer.zero_grad(set_to_none=True)
        return norm, rate


def update(
    policy: Policy, optimizer: PolicyOptimizer, objective: Objective, batch: TokenBatch, forward: ForwardPass
) -> dict[str, object]:
    """Take every update of one batch and return its scalars.

    `batch` holds the rollouts of all processes. `forward` is this process's pass before the first update; the first
    update uses its graph where it was kept.

    Raises:
        NonFiniteError: A loss or a gradient is not finite; the updates before it stay.
    """
    losses, norms, rate, with_entropy = list[float](), list[float](), 0.0, objective.config.entropy_bonus > 0
    sums: dict[str, float] = {"tokens": 0}  # over this process's tokens, by name
    for number, rows in enumerate(minibatches(batch.rollouts, objective.config, batch.seed)):
        part, total = objective.with_weights(batch.take(rows)), 0.0
        shard = policy.processes.shard(np.arange(len(part.mask)))
        whole = number == 0 and len(rows) == len(batch.mask)
        if whole and forward.logprob.requires_grad and not with_entropy:
            total = _backward(objective, part, shard, CompletionLogprobs(forward.logprob), sums)
        else:
            parts, more = policy.shared_parts(part.rollouts, shard)
            for some in counted(parts, "micro-batch"):
                total += _backward(objective, part, some, policy.score(part.rollouts, some, with_entropy), sums)
            for _ in range(more):  # sharded weights: every backward pass sums over processes, so all make equally many
                (0.0 * policy.score(part.rollouts, np.arange(1)).logprob).sum().backward()
        losses.append(total)
        norm, rate = optimizer.step(batch.rate_factor)
        norms.append(norm)
    # Loss and ‖ĝ‖ are those of the first update, from the policy that was recorded.
    every = policy.processes.gather(sums | {"loss": losses[0]})
    names = dict.fromkeys(name for one in every for name in one)
    sums = {name: sum(one.get(name, 0.0) for one in every) for name in names}
    loss, tokens = sums.pop("loss"), max(sums.pop("tokens"), 1)
    return {
        "loss": loss,
        "grad_norm": norms[0],
        "grad_norm_max": max(norms),
        "learning_rate": rate,  # of the last update
        "n_updates": len(norms),
        **{name: value / tokens for name, value in sums.items()},
        "clipped": 0 < optimizer.config.max_grad_norm < max(norms),
    }


def minibatches(rollouts: Rollouts, config: ObjectiveConfig, seed: int) -> Iterator[Int]:
    """Cut a batch into parts of whole groups, in a new random order each epoch; a single part keeps the order."""
    groups = np.unique(rollouts.group)
    rng = np.random.default_rng(seed)  # the global random state is left alone
    for _ in range(config.epochs):
        order = rng.permutation(groups) if config.minibatches > 1 else groups
        for part in np.array_split(order, min(config.minibatches, len(groups))):
            yield np.flatnonzero(np.isin(rollouts.group, part))


def _backward(
    objective: Objective, batch: TokenBatch, rows: Int, scored: CompletionLogprobs, sums: dict[str, float]
) -> float:
    """Back-propagate −Σ c·log π − bonus·Σ weight·entropy of some rollouts of a mini-batch; return it, add to `sums`."""
    part = batch.take(rows)
    value, by_token = objective.coefficients(part, scored.logprob.detach().cpu().double().numpy())
    terms = scored.logprob.new_tensor(value) * scored.logprob
    losses = -terms.sum(dim=1)
    if scored.entropy is not None:
        share = objective.config.entropy_bonus * part.mask / batch.mask.sum()
        losses = losses - (scored.entropy.new_tensor(share) * scored.entropy).sum(dim=1)
    plain = losses.detach()
    bad = ~plain.isfinite()
    if bool(bad.any()):
        n = int(bad.nonzero()[0])
        tokens = (~terms[n].detach().isfinite()).nonzero()
        token = f", token {int(tokens[0])}," if len(tokens) else ""
        raise NonFiniteError(
            f"the loss of rollout {part.number[n]}{token} is {float(plain[n])}; scale the task's rewards down, "
            "or lower the learning rate and resume from the last checkpoint."
        )
    losses.sum().backward()
    sums["tokens"] += int(part.mask.sum())
    for name, values in by_token.items():
        sums[name] = sums.get(name, 0.0) + float(values[part.mask].sum())
    return float(plain.sum())
