"""Group gradients of a trainer's policy under several estimators, compared prompt by prompt in one Gram matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.devices import random_forked
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate, with_limit
from otb_analysis.gradients import group_gradient_gram
from otb_analysis.measurement.table import TokenTable, compute_rewards
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.setup import Trainer, seed_of
from otb_analysis.types import Float, Gram, Label

PROMPTS_FROM = 1_000_000
"""Index of the first training prompt that is measured: far beyond those trained on."""


def prompt_gram(
    model: PreTrainedModel, rollouts: Rollouts, coefficient: Mapping[Label, Float], temperature: float = 1.0
) -> Gram:
    """Return ⟨ḡ_{m,p}, ḡ_{m',q}⟩ of mean group gradients of the log-probability, m over the labels.

    ḡ_{m,p} = (1/N_p) Σ_{n in p} Σ_t c_{m,n,t} ∇θ log π(y_{n,t}), θ all parameters that require grad; no other factor.
    Groups of one prompt are one cluster.

    Args:
        coefficient: Label → c [N, T].
    """
    weights = np.stack(list(coefficient.values())) / np.bincount(rollouts.group)[rollouts.group][:, None]
    ids, mask, attention = rollouts.tensors(model.device)
    inner = group_gradient_gram(
        model, ids, mask, rollouts.by_column(weights), rollouts.group, attention, temperature=temperature
    )
    return Gram(inner, tuple(coefficient), len(rollouts.group), prompt=tuple(p.id for p in rollouts.prompts))


def estimator_gram(trainer: Trainer, rollouts: Rollouts, table: TokenTable, labels: Sequence[Label]) -> Gram:
    """Return the Gram matrix of estimators on rollouts in their present groups, with proxy energies.

    The token table may be of the same rollouts in other groups.
    """
    inputs = replace(table.inputs(table.stats.energy), group=rollouts.group)
    advantages = {k: estimate(k[0], inputs, with_limit(k[0], None, table.limit)).advantage for k in labels}
    return prompt_gram(trainer.model, rollouts, advantages)


def drawn_groups(
    trainer: Trainer, n_prompts: int, group_size: int, seed: int = 1, start: int = PROMPTS_FROM
) -> Rollouts:
    """Sample groups of rollouts of training prompts `start` … from the trainer's policy as it is now.

    The trainer's random state is left alone.
    """
    prompts = draw_prompts(trainer.task, "train", start, n_prompts)
    settings = replace(trainer.config.sample, prompts=n_prompts, group_size=group_size)
    with random_forked(trainer.model.device):
        torch.manual_seed(seed_of(trainer.config.seed, seed))
        return sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, settings)


def scored_table(trainer: Trainer, rollouts: Rollouts) -> TokenTable:
    """Return the token table of rollouts under the trainer's policy as it is now, whoever sampled them."""
    forward = trainer.policy.forward(rollouts, keep_graph=False)
    return trainer.table(compute_rewards(trainer.task, rollouts), forward, None)


def regrouped(rollouts: Rollouts, size: int) -> Rollouts:
    """Return the same rollouts in smaller groups: each prompt's are cut into disjoint ones of equal size.

    The rollouts come group by group, as `sample` returns them.

    Raises:
        InputError: The present groups do not divide.
    """
    count = np.bincount(rollouts.group)
    if (count % size).any() or (np.diff(rollouts.group) < 0).any():
        raise InputError(f"groups have {np.unique(count)} rollouts; cut them into parts of a divisor, not of {size}.")
    prompts: list[Prompt] = [p for p, n in zip(rollouts.prompts, count, strict=True) for _ in range(n // size)]
    return replace(rollouts, prompts=tuple(prompts), group=np.arange(len(rollouts.group)) // size)
