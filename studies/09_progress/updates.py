"""One batch of rollouts and the gradient that every arm makes of it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otb_analysis.estimators import EstimatorInputs, estimate, with_limit
from otb_analysis.measurement.forward import completion_logprobs
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.types import Float
from studies.lib.critics import with_values
from studies.lib.policies import write

from .setup import FIRST_BATCH, Checkpoint, flattened

ARMS = ("rloo", "none", "grpo", "otb", "otb_loo", "energy_regression", "blend_otb_regression", "value")
"""What is measured, `rloo` first. `group_mean` is (1 − 1/N)·`rloo`: its gains are those of `rloo` at shorter steps."""
UNBIASED = ("rloo", "none", "otb_loo", "energy_regression", "value")
"""Proved unbiased: their mean is ∇J."""


@dataclass(frozen=True)
class Batch:
    """The gradients of one batch; made by `batch_gradients`."""

    gradient: Tensor  # ĝ of every arm, by ascent [A, D]
    mixed: float  # Share of prompts answered both rightly and wrongly
    success: float


def batch_gradients(at: Checkpoint, number: int) -> Batch:
    """Sample the batch of a number, the same for all arms, and return every arm's ĝ = (1/N) Σ A·∇log π."""
    prompts = draw_prompts(at.policy.task, "train", FIRST_BATCH + number * at.sample.prompts, at.sample.prompts)
    written = with_values(at.policy, at.critic, write(at.policy, prompts, at.sample, seed=10_000 + number))
    table = written.table
    advantages = arm_advantages(table.inputs(np.where(table.mask, table.stats.energy, 0.0)), table.limit)
    logprob = completion_logprobs(at.policy.model, written.rollouts, written.temperature).logprob
    parameters = list(at.policy.model.parameters())
    rows = []
    for name in ARMS:
        weights = torch.as_tensor(advantages[name] / len(table.mask)).to(logprob)
        rows.append(flattened(torch.autograd.grad((weights * logprob).sum(), parameters, retain_graph=True)))
    paid = table.total_reward.reshape(len(prompts), -1)
    return Batch(torch.stack(rows), float((np.ptp(paid, axis=1) > 0).mean()), float(paid.mean()))


def arm_advantages(inputs: EstimatorInputs, limit: int) -> dict[str, Float]:
    """Return the advantages of every arm [N, T]."""
    return {name: estimate(name, inputs, with_limit(name, None, limit)).advantage for name in ARMS}
