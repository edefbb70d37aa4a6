"""Samplers that fill a batch with rollouts that pass a filter: dynamic sampling, and rejection of lazy right answers.

A filter that looks at what a rollout earned makes rollouts that are not independent draws of the policy, so that no
estimator's proof of unbiasedness holds as it stands. docs/methods/filters.md says what is left of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.config import SampleConfig
from otb_analysis.objectives.profiled import quality
from otb_analysis.phases import plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.tasks import Prompt
from otb_analysis.types import Bool, Float, Int

Draw = Callable[[Sequence[Prompt], Int], Rollouts]
"""Samples and pays rollouts: gets prompts, and the index of the prompt that each rollout answers [N]."""
EXTRA = 1_000_000_000
"""Number of the first problem of the training split that only a filter draws; plain batches stay below."""


@dataclass(frozen=True)
class Filled:
    """A batch of full size, and what filling it took."""

    rollouts: Rollouts
    drawn: int  # Rollouts that were sampled
    failed: int  # Groups that no round could fill, which hold what the filter refuses
    seen: str  # What the filter saw, in words


def live_groups(reward: Float, group: Int) -> Bool:
    """Return which rollouts are in a group whose rewards are not all equal [N]."""
    groups = Groups.of(group)
    away = np.abs(reward - groups.spread(groups.sum(reward) / groups.count))
    return groups.spread(groups.sum(away)) > 1e-12 * np.maximum(np.abs(reward).max(initial=0.0), 1.0)


def dynamic(config: SampleConfig, prompts: Sequence[Prompt], more: Callable[[int], list[Prompt]], draw: Draw) -> Filled:
    """Draw groups of other prompts in place of those whose rewards are all equal, for at most `filter_rounds` rounds.

    Source: DAPO, arXiv 2503.14476, dynamic sampling.

    Args:
        more: Returns the further prompts of a round, from 1.
    """
    size, wanted = config.group_size, len(prompts)
    kept, dead, drawn, equal = list[Rollouts](), list[Rollouts](), 0, list[float]()
    for turn in range(config.filter_rounds):
        batch = list(prompts) if turn == 0 else more(turn)
        rollouts = draw(batch, np.repeat(np.arange(len(batch)), size))
        drawn += len(rollouts.group)
        reward = rollouts.reward.sum(axis=1)
        live = live_groups(reward, rollouts.group)
        for g in range(len(batch)):
            rows = np.flatnonzero(rollouts.group == g)
            (kept if live[rows].all() else dead).append(_alone(rollouts, rows))
            equal += [] if live[rows].all() else [float(reward[rows[0]])]
        if len(kept) >= wanted:
            break
    groups = [*kept, *dead][:wanted]
    right = sum(value > 0.5 for value in equal)
    seen = f"{plural(len(kept) + len(dead), 'group')}: {len(kept)} with unequal rewards, {right} all right, "
    seen += f"{len(equal) - right} all wrong"
    return Filled(_joined(groups), drawn, max(wanted - len(kept), 0), seen)


def profiled(config: SampleConfig, prompts: Sequence[Prompt], rng: np.random.Generator, draw: Draw) -> Filled:
    """Draw anew what the filter rejects: a right rollout stays with probability floor + (1 − floor)·quality.

    Quality falls from 1 to 0 with the policy tokens and tool calls spent (`objectives.profiled`); wrong rollouts stay.
    Source: PRS of Dr. Kernel, arXiv 2602.05885, by its abstract; the quality and its probability are our choice.
    """
    group = np.repeat(np.arange(len(prompts)), config.group_size)
    kept, rejected, drawn, right, lazy = list[Rollouts](), list[Rollouts](), 0, 0, 0
    missing = group
    for _ in range(config.filter_rounds):
        rollouts = draw(prompts, missing)
        drawn += len(missing)
        reward, calls = rollouts.reward.sum(axis=1), np.array([len(turns) - 1 for turns in rollouts.turns])
        worth = quality(rollouts.mask.sum(axis=1), calls, config.filter_most_tokens or config.limit)
        stays = rng.random(len(missing)) < config.filter_floor + (1 - config.filter_floor) * worth
        passes = stays | (reward <= 0.5)
        right, lazy = right + int((reward > 0.5).sum()), lazy + int((~passes).sum())
        kept.append(rollouts.take(np.flatnonzero(passes)))
        rejected = [rollouts.take(np.flatnonzero(~passes))]
        missing = missing[~passes]
        if not len(missing):
            break
    whole = Rollouts.concatenate([part for part in [*kept, *rejected] if len(part.group)])
    whole = whole.take(np.argsort(whole.group, kind="stable"))
    seen = f"{plural(drawn, 'rollout')}: {right} right, {lazy} of them rejected"
    return Filled(whole, drawn, len(set(missing.tolist())), seen)


def _alone(rollouts: Rollouts, rows: Int) -> Rollouts:
    """Return one group by itself, its prompt the only one."""
    part = rollouts.take(rows)
    return replace(part, prompts=(rollouts.prompts[part.group[0]],), group=np.zeros(len(rows), part.group.dtype))


def _joined(groups: Sequence[Rollouts]) -> Rollouts:
    """Return groups of one prompt each as one batch, numbered in this order."""
    prompts = tuple(group.prompts[0] for group in groups)
    numbered = [replace(one, prompts=prompts, group=one.group + i) for i, one in enumerate(groups)]
    return Rollouts.concatenate(numbered)
