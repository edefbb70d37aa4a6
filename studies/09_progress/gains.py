"""What a step gains: J after it minus J before, on held-out prompts, by importance weights and by sampling anew."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters
from transformers import PreTrainedModel

from otb_analysis.devices import random_forked
from otb_analysis.measurement.forward import completion_logprobs
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.types import Float, Int
from studies.lib.critics import with_values
from studies.lib.policies import write

from .setup import Checkpoint, flattened

POOL_SEED, SAMPLE_SEED = 7, 8
AT_ONCE = 1024
"""Rollouts that one pass scores: more leave the processor's cache."""


@dataclass(frozen=True)
class HeldOut:
    """Rollouts of held-out prompts at a checkpoint, cut into blocks; made by `held_out`, or by a test."""

    rollouts: Rollouts
    logprob: Float  # log π of each completion at the checkpoint, in nats [n]
    paid: Float  # R minus a number that depends on the prompt only [n]
    blocks: tuple[Int, ...]  # Rows of each block; steps are judged on one of them
    slopes: Tensor  # ∇J as each block estimates it [K, D]
    first: Int  # Row of the first copy of each rollout [n]: copies are scored once
    success: float = 0.0  # Mean reward of the whole pool


def held_out(at: Checkpoint, prompts: int, rollouts: int, blocks: int) -> HeldOut:
    """Draw the pool: `rollouts` of each of the first held-out prompts, centred by the critic's V(prompt)."""
    chosen = draw_prompts(at.policy.task, "heldout", 0, prompts)
    config = replace(at.sample, prompts=prompts, group_size=rollouts)
    written = with_values(at.policy, at.critic, write(at.policy, chosen, config, seed=POOL_SEED, at_once=AT_ONCE))
    value = written.table.value
    assert value is not None
    reward = written.table.total_reward
    rows = tuple(np.flatnonzero(written.rollouts.group % blocks == k) for k in range(blocks))
    pool = pool_of(at.policy.model, written.rollouts, reward - value[:, 0], rows)
    return replace(pool, success=float(reward.mean()))


def pool_of(model: PreTrainedModel, rollouts: Rollouts, paid: Float, blocks: Sequence[Int]) -> HeldOut:
    """Return a pool with the gradient of each block, (1/n) Σ paid·∇log π."""
    key = np.concatenate([rollouts.input_ids, rollouts.mask, rollouts.attention_mask], axis=1)
    _, row, back = np.unique(key, axis=0, return_index=True, return_inverse=True)
    first = row[back.reshape(-1)]
    distinct, place = np.unique(first, return_inverse=True)
    old = sequence_logprob(model, rollouts.take(distinct))[place]
    slopes = [_slope(model, rollouts, np.bincount(first[rows], paid[rows], len(old)) / len(rows)) for rows in blocks]
    return HeldOut(rollouts, old, paid, tuple(blocks), torch.stack(slopes), first)


def weighted_gain(old: Float, new: Float, paid: Float) -> tuple[float, float]:
    """Return J(θ') − J(θ) from rollouts of θ, and the effective sample size as a share.

    J(θ') − J(θ) = E_θ[(ρ − 1)(R − b)], ρ = exp(new − old) of the whole completion, b a number known before sampling:
    E ρ = 1, so b changes nothing on average. ESS/n = (Σρ)²/(n Σρ²).
    """
    ratio = np.exp(new - old)
    return float(np.mean((ratio - 1) * paid)), float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))


def pool_gain(at_base: Tensor, step: Tensor, model: PreTrainedModel, pool: HeldOut, block: int) -> tuple[float, float]:
    """Return what a step [D] gains and the ESS: slope by the whole pool, the rest by a block.

    Gain = ⟨step, ∇J⟩ + (weighted gain of the block − ⟨step, ∇J of the block⟩).
    """
    rows = pool.blocks[block]
    distinct, place = np.unique(pool.first[rows], return_inverse=True)
    with parameters_moved(model, at_base, step):
        new = sequence_logprob(model, pool.rollouts.take(distinct))[place]
    gain, ess = weighted_gain(pool.logprob[rows], new, pool.paid[rows])
    return gain + slope_of(pool, step) - float(step.double() @ pool.slopes[block].double()), ess


def slope_of(pool: HeldOut, step: Tensor) -> float:
    """Return ⟨step, ∇J⟩ with ∇J of the whole pool."""
    return float(step.double() @ pool.slopes.double().mean(dim=0))


def sampled_success(at: Checkpoint, prompts: Sequence[Prompt], step: Tensor | None = None) -> Float:
    """Return the reward of one answer to each prompt [P] after a step, with the same random numbers for every step."""
    model, config = at.policy.model, replace(at.sample, prompts=len(prompts), group_size=1)
    generator = TransformersGenerator(model, at.policy.tokenizer)
    delta = torch.zeros_like(at.base) if step is None else step
    with parameters_moved(model, at.base, delta), random_forked(model.device):
        torch.manual_seed(SAMPLE_SEED)
        rollouts = sample(generator, at.policy.tokenizer, at.policy.task, prompts, config)
    return compute_rewards(at.policy.task, rollouts).rewards().sum(axis=1)


@torch.no_grad()
def sequence_logprob(model: PreTrainedModel, rollouts: Rollouts) -> Float:
    """Return log π of each completion in nats [n]."""
    parts = [
        completion_logprobs(model, rollouts.take(slice(start, start + AT_ONCE)), 1.0).logprob.double().sum(dim=1)
        for start in range(0, len(rollouts.group), AT_ONCE)
    ]
    return torch.cat(parts).cpu().numpy()


@contextmanager
def parameters_moved(model: PreTrainedModel, base: Tensor, step: Tensor) -> Iterator[None]:
    """Run the model at base + step [D] inside the block."""
    vector_to_parameters(base + step, model.parameters())
    try:
        yield
    finally:
        vector_to_parameters(base, model.parameters())


def _slope(model: PreTrainedModel, rollouts: Rollouts, weight: Float) -> Tensor:
    """Return Σ weight·∇log π [D]."""
    rows, total = np.flatnonzero(weight), torch.zeros(model.num_parameters(), device=model.device)
    for start in range(0, len(rows), AT_ONCE // 4):
        some = rows[start : start + AT_ONCE // 4]
        logprob = completion_logprobs(model, rollouts.take(some), 1.0).logprob.sum(dim=1)
        loss = (logprob * torch.as_tensor(weight[some]).to(logprob)).sum()
        total += flattened(torch.autograd.grad(loss, list(model.parameters())))
    return total
