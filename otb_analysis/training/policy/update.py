"""From advantages to new weights: epochs, mini-batches of whole groups, micro-batches that fit memory.

Every objective is run as ĝ = Σ c·∇ log π, with a coefficient c per token that NumPy computes. The loss is −Σ c·log π
with c held fixed, so autograd computes nothing but the scores (and the entropy bonus).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from otb_analysis.config import ObjectiveConfig
from otb_analysis.errors import NonFiniteError
from otb_analysis.measurement.forward import CompletionLogprobs, ForwardPass
from otb_analysis.phases import counted
from otb_analysis.processes import Processes, total_of
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.training.policy.objective import Objective, TokenBatch
from otb_analysis.training.policy.optimizer import PolicyOptimizer
from otb_analysis.training.policy.policy import Policy
from otb_analysis.types import Float, Int


@dataclass
class Tally:
    """Numbers of the updates of one batch; `sums` and `tokens` are this process's."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rate: float = 0.0  # Learning rate of the last update
    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def scalars(self, processes: Processes) -> dict[str, object]:
        """Return columns of `steps`; loss and ‖ĝ‖ are those of the first update, from the policy that was recorded."""
        sums = total_of(processes, self.sums | {"loss": self.losses[0], "tokens": self.tokens})
        loss, tokens = sums.pop("loss"), sums.pop("tokens")
        means = {name: value / max(tokens, 1) for name, value in sums.items()}
        return {
            "loss": loss,
            "grad_norm": self.norms[0],
            "grad_norm_max": max(self.norms),
            "learning_rate": self.rate,
            "n_updates": len(self.norms),
            **means,
        }


def update(
    policy: Policy, optimizer: PolicyOptimizer, objective: Objective, batch: TokenBatch, forward: ForwardPass
) -> dict[str, object]:
    """Take every update of one batch and return its scalars.

    `batch` holds the rollouts of all processes. `forward` is this process's pass before the first update; the first
    update uses its graph where it was kept.

    Raises:
        NonFiniteError: A loss or a gradient is not finite; the updates before it stay.
    """
    tally = Tally()
    for number, rows in enumerate(minibatches(batch.rollouts, objective.config, batch.seed)):
        part = objective.with_weights(batch.take(rows))
        whole = number == 0 and len(rows) == len(batch.mask)
        kept = forward.logprob if whole and forward.logprob.requires_grad else None
        _accumulate(policy, objective, part, kept, tally)
        norm, tally.rate = optimizer.step(batch.rate_factor)
        tally.norms.append(norm)
    return tally.scalars(policy.processes) | {"clipped": optimizer.clips(max(tally.norms))}


def minibatches(rollouts: Rollouts, config: ObjectiveConfig, seed: int) -> Iterator[Int]:
    """Cut a batch into parts of whole groups, in a new random order each epoch; a single part keeps the order."""
    groups = np.unique(rollouts.group)
    rng = np.random.default_rng(seed)  # the global random state is left alone
    for _ in range(config.epochs):
        order = rng.permutation(groups) if config.minibatches > 1 else groups
        for part in np.array_split(order, min(config.minibatches, len(groups))):
            yield np.flatnonzero(np.isin(rollouts.group, part))


def _accumulate(
    policy: Policy, objective: Objective, batch: TokenBatch, kept: torch.Tensor | None, tally: Tally
) -> None:
    """Add the gradient of this process's part of a mini-batch's loss to `.grad`, by micro-batches.

    `kept`: log-probabilities of these rollouts with their graph, from an earlier pass.
    """
    total = 0.0
    with_entropy = objective.config.entropy_bonus > 0
    shard = policy.processes.shard(np.arange(len(batch.mask)))
    if kept is not None and not with_entropy:
        total = _backward(objective, batch, shard, CompletionLogprobs(kept), tally)
    else:
        parts, more = policy.shared_parts(batch.rollouts, shard)
        for rows in counted(parts, "micro-batch"):
            total += _backward(objective, batch, rows, policy.score(batch.rollouts, rows, with_entropy), tally)
        for _ in range(more):  # sharded weights: every backward pass sums over processes, so all make equally many
            (0.0 * policy.score(batch.rollouts, np.arange(1)).logprob).sum().backward()
    tally.losses.append(total)


def _backward(objective: Objective, batch: TokenBatch, rows: Int, scored: CompletionLogprobs, tally: Tally) -> float:
    """Back-propagate −Σ c·log π − bonus·Σ weight·entropy of some rollouts; return it."""
    part = batch.take(rows)
    coefficients = objective.coefficients(part, scored.logprob.detach().cpu().double().numpy())
    terms = _like(coefficients.value, scored.logprob) * scored.logprob
    parts = -terms.sum(dim=1)
    if scored.entropy is not None:
        share = objective.config.entropy_bonus * part.mask / batch.mask.sum()
        parts = parts - (_like(share, scored.entropy) * scored.entropy).sum(dim=1)
    _refuse_non_finite(parts.detach(), terms.detach(), part.number)
    parts.sum().backward()
    tally.tokens += int(part.mask.sum())
    for name, values in coefficients.by_token.items():
        tally.sums[name] = tally.sums.get(name, 0.0) + float(values[part.mask].sum())
    return float(parts.detach().sum())


def _like(x: Float, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(x, dtype=like.dtype, device=like.device)


def _refuse_non_finite(parts: torch.Tensor, terms: torch.Tensor, number: Int) -> None:
    """Raise with the rollout whose loss is not finite, and its first token that is not finite, if there is one."""
    bad = ~parts.isfinite()
    if bool(bad.any()):
        n = int(bad.nonzero()[0])
        tokens = (~terms[n].isfinite()).nonzero()
        token = f", token {int(tokens[0])}," if len(tokens) else ""
        raise NonFiniteError(
            f"the loss of rollout {number[n]}{token} is {float(parts[n])}; scale the task's rewards down, "
            "or lower the learning rate and resume from the last checkpoint."
        )
