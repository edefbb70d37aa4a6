"""What measurements are timed on: one step's rollouts, of the demo's policy as a rule, and one pass over them."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Batch, prepare
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.setup import Trainer


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


def group_passes(model: PreTrainedModel, rollouts: Rollouts) -> Callable[[], None]:
    """Return a call that takes one forward and one backward pass of every group's rollouts: the yardstick."""
    problem = prepare(model, Batch(*rollouts.tensors(model.device)), "all", 1.0)
    groups = [tuple(r for r in problem.rollouts if rollouts.group[r.row] == g) for g in np.unique(rollouts.group)]

    def passes() -> None:
        for own in groups:
            torch.autograd.grad(sampled_logprobs(problem, own).sum(), problem.scope.parameters)

    return passes
