"""Held-out prompts: how good the policy is on prompts it never trains on. Evaluating changes no later draw."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from otb_analysis.devices import random_forked
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.phases import note
from otb_analysis.rollouts.sampling import sample
from otb_analysis.statistics import cluster_jackknife, passing
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.setup import Trainer, seed_of
from otb_analysis.types import Float, Int

EVALUATION = 2**31
"""Seed stream: the same at every evaluation, and different from that of any step."""


def evaluate(trainer: Trainer, step: int) -> dict[str, object]:
    """Return the held-out columns of `steps` where evaluation is due; the random state is not touched.

    The last step is always evaluated, unless evaluation is off.

    Raises:
        InputError, NonFiniteError: The task or a logit fails, as in training.
    """
    settings, last = trainer.config.evaluate, trainer.config.optimize.steps - 1
    if settings.every <= 0 or (step % settings.every and step != last):
        return {}
    with trainer.timed("evaluate"), random_forked(trainer.model.device), trainer.policy.whole_weights():
        torch.manual_seed(seed_of(trainer.config.seed, EVALUATION, *trainer.processes.seed))
        prompts = distinct_prompts(trainer.task, "heldout", settings.prompts)
        if len(prompts) < settings.prompts and step == 0:
            note(
                f"the held-out split of {trainer.task.name} has {len(prompts)} different prompts, so the run is "
                f"evaluated on these and not on {settings.prompts} (evaluate.prompts)."
            )
        group = trainer.processes.shard(np.repeat(np.arange(len(prompts)), settings.samples))
        total = np.concatenate(trainer.processes.gather(_rewards(trainer, prompts, group)))
    return heldout_columns(total.reshape(len(prompts), settings.samples), settings.threshold)


def _rewards(trainer: Trainer, prompts: Sequence[Prompt], group: Int) -> Float:
    """Return total rewards of this process's answers; `group` holds the prompt of each answer, and may be empty."""
    if not len(group):
        return np.zeros(0)
    settings = trainer.config.evaluate
    answers = replace(trainer.config.sample, prompts=len(prompts), group_size=settings.samples)
    with trainer.policy.arithmetic():
        rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, answers, group)
    return compute_rewards(trainer.task, rollouts).rewards().sum(axis=1)


def heldout_columns(reward: Float, threshold: float) -> dict[str, object]:
    """Return the columns of `steps` from total rewards of answers [P, n]; a success has at least the threshold."""
    success = passing(reward >= threshold)
    by_prompt = reward.mean(axis=1, keepdims=True)
    # Equal means over all prompts give no interval: a reward has no bounds from which to derive one.
    spread = bool(np.ptp(by_prompt) > 0)
    mean = cluster_jackknife(by_prompt, lambda rows: rows[..., 0], "mean reward", scale="linear") if spread else None
    shares = {"heldout_success": success.average, "heldout_pass_at_k": success.at[success.largest]}
    columns: dict[str, object] = {
        "heldout_reward": float(np.mean(reward)),
        "heldout_samples": reward.shape[1],
        "heldout_pass_k": success.largest,
        **{f"heldout_pass_at_{k}": share.estimate for k, share in success.at.items()},
    }
    for name, interval in ({"heldout_reward": mean} | shares).items():
        columns[f"{name}_low"] = interval.low if interval else None
        columns[f"{name}_high"] = interval.high if interval else None
    return columns | {name: share.estimate for name, share in shares.items()}
