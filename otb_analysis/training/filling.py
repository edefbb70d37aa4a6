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

    Raises:
        InputError: The filter did not fill the batch in `sample.filter_rounds` draws.
    """
    config = trainer.config.sample
    if config.filter == "none":
        prompts = draw_prompts(trainer.task, "train", step * config.prompts, config.prompts)
        group = trainer.processes.shard(np.repeat(np.arange(len(prompts)), config.group_size))
        return _sampled_and_paid(trainer, prompts, group), {}
    return _filled(trainer, step)


def _sampled_and_paid(trainer: Trainer, prompts: list[Prompt], group: Int) -> Rollouts:
    with trainer.policy.sampling():
        rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, trainer.config.sample, group)
    with trainer.timed("estimate"):
        return compute_rewards(trainer.task, rollouts)


def _filled(trainer: Trainer, step: int) -> tuple[Rollouts, dict[str, object]]:
    """Draw until the batch is full; what is kept first stays, so that when drawing ends depends on no kept rollout."""
    config = trainer.config.sample
    fresh = FILTERS[config.filter].keeps == "group"
    prompts, wanted = [], np.repeat(np.arange(config.prompts), config.group_size)
    parts, totals, missing = list[Rollouts](), list[float](), wanted
    for turn in range(config.filter_rounds):
        if fresh or not turn:  # a step has so many prompts in store that no two steps share one by its number
            start = (step * (config.filter_rounds if fresh else 1) + turn) * config.prompts
            prompts = draw_prompts(trainer.task, "train", start, config.prompts)
        rollouts = _sampled_and_paid(trainer, prompts, wanted if fresh else missing)
        stays = _kept_by_filter(rollouts, config)
        totals += rollouts.reward.sum(axis=1).tolist()
        done = len(wanted) - len(missing)
        kept = rollouts.take(np.flatnonzero(stays))
        if fresh:
            numbers, group = np.unique(kept.group, return_inverse=True)
            group = group + done // config.group_size
            kept = replace(kept, group=group, prompts=tuple(prompts[k] for k in numbers))
            parts.append(kept.take(np.flatnonzero(group < config.prompts)))
        else:
            parts.append(kept)
        count = sum(len(part.group) for part in parts)
        missing = wanted[count:] if fresh else missing[~stays]
        if not len(missing):
            return _concatenated(parts, fresh, config.prompts), _seen(totals, turn + 1, len(wanted))
    raise InputError(_never(config, step, len(wanted) - len(missing), totals))


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


def _concatenated(parts: list[Rollouts], fresh: bool, prompts: int) -> Rollouts:
    """Put the kept rollouts together, group after group."""
    every = tuple(prompt for part in parts for prompt in part.prompts)[:prompts] if fresh else parts[0].prompts
    whole = Rollouts.concatenate([replace(part, prompts=every) for part in parts])
    return whole.take(np.argsort(whole.group, kind="stable"))


def _seen(totals: list[float], rounds: int, kept: int) -> dict[str, object]:
    return {
        "filter_rounds": rounds,
        "filter_kept_share": kept / len(totals),
        "filter_reward_mean": float(np.mean(totals)),
    }


def _never(config: SampleConfig, step: int, kept: int, totals: list[float]) -> str:
    size = config.prompts * config.group_size
    return (
        f"step {step}: sample.filter {config.filter!r} filled {kept} of {size} rollouts in {config.filter_rounds} "
        f"rounds; it drew {len(totals)} rollouts with rewards from {min(totals):g} to {max(totals):g} and a mean of "
        f"{np.mean(totals):.3g}; raise sample.filter_rounds, change sample.filter_options, or take prompts that the "
        "policy solves sometimes."
    )
