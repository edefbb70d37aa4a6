"""How fast the mean reward of each way of answering grows along the gradient of discrete tokens.

⟨∇J, d⟩ with d = ∇J of discrete tokens, measured without a score: J at θ ± ε·d/‖d‖, on prompts that d did not see.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otb_analysis.config import SampleConfig
from otb_analysis.estimators import estimate
from otb_analysis.gradients import batch_gradient
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.sampling import sample
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import distinct_prompts
from studies.lib.policies import Policy, write

AT_ONCE = 256
"""Prompts sampled side by side."""


def slopes(policy: Policy, s: Any, base: SampleConfig) -> list[dict[str, Any]]:
    """Return (J₊ − J₋)/(2ε) of every way of answering."""
    prompts = distinct_prompts(policy.task, "train", s["prompts"] + s["others"])
    direction = discrete_gradient(policy, prompts[: s["prompts"]], replace(base, prompts=s["prompts"]), s["seed"])
    length = float(torch.sqrt(torch.stack([d.double().square().sum() for d in direction]).sum()))
    rows = []
    for arm, (soft, noise) in s["arms"].items():
        config = replace(base, soft=soft, soft_noise=noise)
        ends = []
        for sign in (1, -1):
            move_parameters(policy, direction, sign * s["step"] / length)
            ends.append(mean_reward(policy, prompts[s["prompts"] :], config, 5000 + s["seed"]))
            move_parameters(policy, direction, -sign * s["step"] / length)
        rows.append({"arm": arm, "slope": (ends[0] - ends[1]) / (2 * s["step"]), "above": ends[0], "under": ends[1]})
    return rows


def discrete_gradient(policy: Policy, prompts: Sequence[Prompt], config: SampleConfig, seed: int) -> list[Tensor]:
    """Return the gradient of `rloo` on discrete tokens, by parameter."""
    written = write(policy, prompts, config, seed=1000 + seed)
    advantage = estimate("rloo", written.table.inputs(None)).advantage
    weights = written.rollouts.by_column(advantage[None] / len(advantage))[:, 0]
    ids, mask, attention = written.batch
    found = batch_gradient(policy.model, ids, mask, weights, attention)
    return [found[name] for name, _ in policy.model.named_parameters()]


@torch.no_grad()
def move_parameters(policy: Policy, direction: Sequence[Tensor], step: float) -> None:
    """Move the policy's parameters in place."""
    for parameter, d in zip(policy.model.parameters(), direction, strict=True):
        parameter.add_(step * d)


def mean_reward(policy: Policy, prompts: Sequence[Prompt], config: SampleConfig, seed: int) -> float:
    """Return the mean reward of a group of rollouts of every prompt; the same seed draws the same noise."""
    generator, totals = TransformersGenerator(policy.model, policy.tokenizer), list[float]()
    for first in range(0, len(prompts), AT_ONCE):
        torch.manual_seed(seed + first)
        rollouts = sample(generator, policy.tokenizer, policy.task, prompts[first : first + AT_ONCE], config)
        totals += compute_rewards(policy.task, rollouts).rewards().sum(axis=1).tolist()
    return float(np.mean(totals))
