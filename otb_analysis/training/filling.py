"""The rollouts of one step: one draw, or as many as a filter of sampling takes to fill the batch."""

from dataclasses import replace

import numpy as np
import torch

from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import entry_of
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.objectives.filters import FILTERS, FilterInputs, keep_chance
from otb_analysis.objectives.registry import options_from_table
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Bool, Int


def broken_condition(config: TrainConfig) -> str:
    """Return a warning where the filter breaks a condition of an unbiased estimator that trains, or nothing."""
    name, entry = config.estimator.name, FILTERS[config.sample.filter]
    if not entry.effect or not entry_of(name).unbiased:
        return ""
    return (
        f"sample.filter {config.sample.filter!r} breaks a condition of {name}, which is unbiased for i.i.d. rollouts "
        f"only: {entry.effect}; docs/methods/filters.md has the bias of each estimator."
    )


def draw_batch(trainer: Trainer, step: int) -> tuple[Rollouts, dict[str, object]]:
    """Return this process's paid rollouts of a step, and scalars about what the filter saw.

    With a filter it draws until the batch is full. What is kept first stays, so that when drawing ends depends on no
    kept rollout.

    Raises:
        InputError: The filter did not fill the batch in `sample.filter_rounds` draws.
    """
    config = trainer.config.sample
    wanted = np.repeat(np.arange(config.prompts), config.group_size)
    if config.filter == "none":
        prompts = draw_prompts(trainer.task, "train", step * config.prompts, config.prompts)
        return _sampled_and_paid(trainer, prompts, trainer.processes.shard(wanted)), {}
    fresh = FILTERS[config.filter].keeps == "group"
    prompts, parts, totals, missing = list[Prompt](), list[Rollouts](), list[float](), wanted
    for turn in range(config.filter_rounds):
        if fresh or not turn:  # a step has so many prompts in store that no two steps share one by its number
            start = (step * (config.filter_rounds if fresh else 1) + turn) * config.prompts
            prompts = draw_prompts(trainer.task, "train", start, config.prompts)
        rollouts = _sampled_and_paid(trainer, prompts, wanted if fresh else missing)
        stays = _kept_by_filter(rollouts, config)
        totals += rollouts.reward.sum(axis=1).tolist()
        kept, done = rollouts.take(np.flatnonzero(stays)), len(wanted) - len(missing)
        if fresh:
            numbers, group = np.unique(kept.group, return_inverse=True)
            group = group + done // config.group_size
            kept = replace(kept, group=group, prompts=tuple(prompts[k] for k in numbers))
            kept = kept.take(np.flatnonzero(group < config.prompts))
        parts.append(kept)
        count = sum(len(part.group) for part in parts)
        missing = wanted[count:] if fresh else missing[~stays]
        if not len(missing):
            every = tuple(prompt for part in parts for prompt in part.prompts)[: config.prompts] if fresh else prompts
            whole = Rollouts.concatenate([replace(part, prompts=tuple(every)) for part in parts])
            return whole.take(np.argsort(whole.group, kind="stable")), {
                "filter_rounds": turn + 1,
                "filter_kept_share": len(wanted) / len(totals),
                "filter_reward_mean": float(np.mean(totals)),
            }
    raise InputError(
        f"step {step}: sample.filter {config.filter!r} filled {len(wanted) - len(missing)} of {len(wanted)} rollouts "
        f"in {config.filter_rounds} rounds; it drew {len(totals)} rollouts with rewards from {min(totals):g} to "
        f"{max(totals):g} and a mean of {np.mean(totals):.3g}; raise sample.filter_rounds, change "
        "sample.filter_options, or take prompts that the policy solves sometimes."
    )


def _sampled_and_paid(trainer: Trainer, prompts: list[Prompt], group: Int) -> Rollouts:
    with trainer.policy.sampling():
        rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, trainer.config.sample, group)
    with trainer.timed("estimate"):
        return compute_rewards(trainer.task, rollouts)


def _kept_by_filter(rollouts: Rollouts, config: SampleConfig) -> Bool:
    """Which rollouts stay [N]: the filter's chances, by lot."""
    inputs = FilterInputs(
        total=rollouts.reward.sum(axis=1),
        tokens=rollouts.mask.sum(axis=1).astype(np.float64),
        calls=np.array([len(turns) - 1.0 for turns in rollouts.turns]),
        group=rollouts.group,
    )
    options = options_from_table(config.filter, FILTERS[config.filter].options, config.filter_options)
    chance = keep_chance(config.filter, inputs, options)
    return torch.rand(len(chance), dtype=torch.float64, device="cpu").numpy() < chance
