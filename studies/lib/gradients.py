"""Group gradients of one policy over several batches of rollouts of the same prompts, compared prompt by prompt.

A study of off-policy objectives needs the gradient that stale rollouts give beside the one that fresh rollouts give, at
the same parameters; one of baselines needs all of them on the same rollouts. Both are one Gram matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from otb_analysis.types import Float, Gram, Int, Label

PROMPTS_FROM = 1_000_000
"""Index of the first training prompt that is measured: far beyond those trained on."""


@dataclass(frozen=True)
class Weighed:
    """Rollouts and, under each name, what multiplies their tokens' scores; made by a study, read by `prompt_gram`.

    The group gradient is (1/N_p) Σ_{n in p} Σ_t c_{n,t} s_{n,t}.
    """

    rollouts: Rollouts
    coefficient: Mapping[Label, Float]  # Label → c [N, T]


def prompt_gram(model: PreTrainedModel, batches: Sequence[Weighed], temperature: float = 1.0) -> Gram:
    """Return ⟨ḡ_{m,p}, ḡ_{m',q}⟩ of mean group gradients of the log-probability, m over the labels of all batches.

    ḡ_{m,p} = (1/N_p) Σ_{n in p} Σ_t c_{m,n,t} ∇θ log π(y_{n,t}), θ all parameters that require grad; no other factor.
    Group p of every batch belongs to the same prompt, whose id names it: groups of one prompt are one cluster.

    Returns:
        The matrix [M, M, P, P], with the rollouts of the first batch as its count.

    Raises:
        InputError: The batches are not of the same prompts, or two share a label.
    """
    names = [tuple(prompt.id for prompt in batch.rollouts.prompts) for batch in batches]
    if len(set(names)) != 1:
        raise InputError(f"batches have prompts {names}; draw rollouts of the same prompts, in the same order.")
    size, labels = len(names[0]), [label for batch in batches for label in batch.coefficient]
    ids, mask, weights, group, attention = _side_by_side(batches, size, len(labels))
    inner = group_gradient_gram(model, ids, mask, weights, group, attention, temperature=temperature)
    source = np.repeat(np.arange(len(batches)), [len(batch.coefficient) for batch in batches])
    rows = np.arange(len(labels))[:, None]
    at = source[:, None] * size + np.arange(size)
    picked = inner[rows[:, :, None, None], rows.T[:, :, None, None], at[:, None, :, None], at[None, :, None, :]]
    return Gram(picked, tuple(labels), len(batches[0].rollouts.group), prompt=names[0])


def estimator_gram(trainer: Trainer, rollouts: Rollouts, table: TokenTable, labels: Sequence[Label]) -> Gram:
    """Return the Gram matrix of estimators on rollouts in their present groups, with proxy energies.

    The token table may be of the same rollouts in other groups.
    """
    inputs = replace(table.inputs(table.stats.energy), group=rollouts.group)
    advantages = {k: estimate(k[0], inputs, with_limit(k[0], None, table.limit)).advantage for k in labels}
    return prompt_gram(trainer.model, [Weighed(rollouts, advantages)])


def _side_by_side(
    batches: Sequence[Weighed], size: int, n_labels: int
) -> tuple[torch.Tensor, torch.Tensor, Float, Int, torch.Tensor]:
    """Return ids, mask, weights [n, M, L], groups and attention of all batches, padded to one width."""
    width = max(batch.rollouts.input_ids.shape[1] for batch in batches)
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    first = 0
    for number, batch in enumerate(batches):
        rollouts, every = batch.rollouts, np.ones(len(batch.rollouts.group), bool)
        count = np.bincount(rollouts.group, minlength=size)[rollouts.group]
        stacked = np.stack(list(batch.coefficient.values())) / count[:, None]
        weights = np.zeros((len(every), n_labels, width))
        weights[:, first : first + len(stacked), : rollouts.input_ids.shape[1]] = rollouts.by_column(stacked)
        first += len(stacked)
        wide = ((0, 0), (0, width - rollouts.input_ids.shape[1]))
        parts = (np.pad(rollouts.input_ids, wide), np.pad(rollouts.mask, wide), weights, number * size + rollouts.group)
        for column, part in zip(columns, (*parts, np.pad(rollouts.attention_mask, wide)), strict=True):
            column.append(part)
    ids, mask, weights, group, attention = (np.concatenate(column) for column in columns)
    return torch.from_numpy(ids), torch.from_numpy(mask), weights, group, torch.from_numpy(attention).long()


def drawn(trainer: Trainer, n_prompts: int, group_size: int, seed: int = 1, start: int = PROMPTS_FROM) -> Rollouts:
    """Sample groups of rollouts of training prompts `start` … from the trainer's policy as it is now.

    The trainer's random state is left alone.
    """
    prompts = draw_prompts(trainer.task, "train", start, n_prompts)
    settings = replace(trainer.config.sample, prompts=n_prompts, group_size=group_size)
    with random_forked(trainer.model.device):
        torch.manual_seed(seed_of(trainer.config.seed, seed))
        return sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, settings)


def scored(trainer: Trainer, rollouts: Rollouts) -> TokenTable:
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
