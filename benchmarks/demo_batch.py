"""The batch on which measurements are timed and compared: one step's rollouts, of the demo's policy as a rule."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.measurement.forward import forward_pass
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Float


@dataclass(frozen=True)
class DemoBatch:
    """What engines take."""

    args: tuple[PreTrainedModel, Tensor, Tensor, Tensor]  # Model, token ids, sampled and real tokens [N, L]
    proxy: Float  # Energy proxy [N, L], zero outside the mask


def sampled_step(config: SampleConfig, model: str = "demo") -> tuple[Trainer, Rollouts]:
    """Return the trainer of a model and the rollouts of its first step, the same at every call.

    Raises:
        InputError: The model cannot be loaded.
    """
    trainer = Trainer.from_config(TrainConfig(model=model, sample=config))
    prompts = draw_prompts(trainer.task, "train", 0, config.prompts)
    group = np.repeat(np.arange(config.prompts), config.group_size)
    torch.manual_seed(0)
    with trainer.policy.sampling():
        return trainer, sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, config, group)


def demo_batch(prompts: int, group_size: int = 8) -> DemoBatch:
    """Return a batch of the demo's policy."""
    trainer, rollouts = sampled_step(SampleConfig(prompts=prompts, group_size=group_size))
    energy = forward_pass(trainer.model, rollouts, 1.0).stats.energy
    proxy = rollouts.by_column(energy[None])[:, 0]
    return DemoBatch((trainer.model, *rollouts.tensors(trainer.model.device)), proxy)
