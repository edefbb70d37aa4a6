"""Filters of sampling: with which probability a rollout stays in the batch, once its reward is known.

The trainer samples again until the batch is full (`training.filling`). So rollouts are no longer i.i.d. from the
policy: those that a `rollout` filter keeps are i.i.d. from π(y)·k(y)/E k, and a `group` filter keeps whole groups by
their outcome. `studies.lib.enumeration.filters` shows what that does to the mean of an update.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import Formula, NoOptions, checked_options, lookup
from otb_analysis.objectives.shaping import SpentOptions, differing, quality
from otb_analysis.types import Float, Int


@dataclass(frozen=True)
class FilterInputs:
    """What a filter may look at, one number per rollout [N]; made by `training`."""

    total: Float  # R_i, as the task pays it
    tokens: Float  # Policy tokens
    calls: Float  # Tool calls: policy turns before the last
    group: Int  # Prompt of each rollout


@dataclass(frozen=True)
class RejectionOptions(SpentOptions):
    """Options of `prs`."""

    low: float = 0.0  # Quality at or below which a right rollout never stays
    high: float = 0.5  # Quality from which on it always does

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise InputError(f"low is {self.low} and high is {self.high}; pass low < high.")


@dataclass(frozen=True)
class Filter(Formula):
    """One row of `FILTERS`."""

    keeps: Literal["rollout", "group"] = "rollout"  # What is drawn again: single rollouts, or groups of other prompts
    effect: str = ""  # What becomes of estimators that are unbiased for i.i.d. rollouts


def none(inputs: FilterInputs, options: NoOptions) -> Float:
    """Keep every rollout: 1."""
    return np.ones(len(inputs.total))


def dynamic(inputs: FilterInputs, options: NoOptions) -> Float:
    """Keep the groups whose rollouts were not all paid the same; other prompts take the place of the rest.

    k_i = 1 where not all R_j of the group are equal, else 0. DAPO's dynamic sampling, arXiv 2503.14476, abstract.
    """
    return Groups.of(inputs.group).spread(differing(inputs.total, inputs.group)).astype(np.float64)


def prs(inputs: FilterInputs, options: RejectionOptions) -> Float:
    """Reject lazy right rollouts, those that spent much, with a probability that depends on how much.

    k_i = clip((q_i − low)/(high − low), 0, 1) where right, else 1, q_i = 1 − (tokens + call·calls)/budget.
    Profiling-based rejection sampling of Dr. Kernel, arXiv 2602.05885, abstract; the ramp and this quality are
    our choices.
    """
    chance = (quality(inputs.tokens, inputs.calls, options) - options.low) / (options.high - options.low)
    return np.where(inputs.total >= options.correct, np.clip(chance, 0.0, 1.0), 1.0)


# fmt: off
FILTERS: dict[str, Filter] = {
    "none": Filter(none, "1", "plain sampling", "code"),
    "dynamic": Filter(
        dynamic, "1 where not all R_j of the group are equal, else 0", "DAPO, arXiv 2503.14476", "abstract",
        needs=("reward", "group"), keeps="group",
        effect="only estimators without a gradient in groups of equal rewards, such as rloo, keep the direction of ∇J "
        "over prompts, and their gradient is 1/P(rewards differ) times as long",
    ),
    "prs": Filter(
        prs, "clip((q − low)/(high − low), 0, 1) where right, else 1; q = 1 − (tokens + call·calls)/budget",
        "PRS of Dr. Kernel, arXiv 2602.05885", "abstract", needs=("reward", "turn"), options=RejectionOptions,
        effect="rloo then follows the gradient of the mean reward of kept rollouts, E[R·k]/E[k], and other estimators "
        "follow neither that nor ∇J",
    ),
}
# fmt: on


def keep_chance(name: str, inputs: FilterInputs, options: Any = None) -> Float:
    """Return k [N], the probability with which each rollout stays; equal in a group where groups are kept.

    Raises:
        InputError: Unknown name or wrong options.
    """
    entry = lookup("filter", name, FILTERS)
    return entry.function(inputs, checked_options(name, entry.options, options))
