"""What happens to rewards before any estimator sees them, and filters of sampling that look at them.

Every shaping answers rewards [N, T] in which a change of a rollout's total sits on its last policy token, and a boolean
per rollout. Shaping that looks at a group's outcome, or drops groups by it, changes the objective: leave-one-out
estimators are unbiased for the shaped reward at best.

A filter says with which probability a rollout stays in the batch, once its reward is known. The trainer samples again
until the batch is full. So rollouts are no longer i.i.d. from the policy: those that a `rollout`
filter keeps are i.i.d. from π(y)·k(y)/E k, and a `group` filter keeps whole groups by their outcome.
`studies.lib.enumeration.objectives` shows what that does to the mean of an update.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import expit

from otb_analysis.arrays import Groups
from otb_analysis.objectives.registry import CheckedInputs, Formula, LimitedOptions, NoOptions, answer
from otb_analysis.types import Bool, Float, Int

ROUNDING = 1e-12
"""Totals of a group that differ by less than this share of their size are equal: summed in another order."""


@dataclass(frozen=True)
class ShapingInputs(CheckedInputs):
    """What a reward shaping may look at; made by `training`."""

    columns = ("reward",)
    reward: Float  # Reward per token [N, T]
    mask: Bool  # True at policy tokens [N, T]
    group: Int  # Prompt of each rollout [N]
    turn: Int | None = None  # Turn of each token [N, T]; None where there is one turn

    @property
    def total(self) -> Float:
        """R_i [N]."""
        return self.reward.sum(axis=1)

    @property
    def calls(self) -> Float:
        """Tool calls of each rollout [N]: policy turns before the last."""
        turn = np.zeros(self.mask.shape) if self.turn is None else np.where(self.mask, self.turn, 0)
        return turn.max(axis=1, initial=0).astype(np.float64)


@dataclass(frozen=True)
class Shaped:
    """Rewards after shaping; read by `training`."""

    reward: Float  # Reward per token [N, T], zero outside the mask
    keep: Bool  # False for rollouts that take no part in the update [N]


@dataclass(frozen=True)
class LambdaOptions(LimitedOptions):
    """Options of `grpo_lambda`."""

    valid = (
        lambda o: 0 <= o.share <= 1 and 0 <= o.alpha <= 1,
        "{self} is out of range; choose share and alpha from 0 to 1.",
    )
    share: float = 0.2  # The share of groups, best by accuracy, whose rewards depend on length
    alpha: float = 0.6  # α, the most a long correct rollout can lose
    correct: float = 0.5  # Total reward at or above which a rollout is correct


@dataclass(frozen=True)
class OverlongOptions(LimitedOptions):
    """Options of `overlong`."""

    valid = (
        lambda o: 0 < o.buffer <= o.limit,
        "buffer is {self.buffer} and limit is {self.limit}; pass 0 < buffer ≤ limit.",
    )
    limit: int = 20480  # L_max, policy tokens at which the penalty is 1
    buffer: int = 4096  # Tokens before it over which the penalty grows from 0


@dataclass(frozen=True)
class SpentOptions(LimitedOptions):
    """How the quality of a right rollout is measured: by what it spent."""

    valid = (
        lambda o: o.budget > 0 and o.call >= 0,
        "budget is {self.budget} and call is {self.call}; pass budget > 0 and call ≥ 0.",
    )
    budget: int = 64  # Tokens at which the quality is 0
    call: float = 8.0  # Tokens that a tool call counts as
    correct: float = 0.5  # Total reward at or above which a rollout is right


@dataclass(frozen=True)
class ProfiledOptions(SpentOptions):
    """Options of `profiled`."""

    weight: float = 1.0  # What a right rollout of quality 1 gains


def none(inputs: ShapingInputs, options: NoOptions) -> Shaped:
    """Leave the rewards alone.

    r' = r.
    """
    return Shaped(inputs.reward, np.ones(len(inputs.mask), bool))


def grpo_lambda(inputs: ShapingInputs, options: LambdaOptions) -> Shaped:
    """Pay short correct rollouts more, in the groups that are solved best.

    In the top `share` of groups by accuracy R' = 1 − α·σ((L − mean_correct)/std_correct) if correct, else 0; R' is 0
    or 1 in the others. Mean and std (ddof 0) of lengths over the group's correct rollouts; one length gives 1 − α/2.
    The top ⌈share·P⌉ groups, and whoever ties with the last of them; none without a correct rollout. Abstract of
    GRPO-λ, arXiv 2505.18086.
    """
    groups = Groups.from_labels(inputs.group)
    correct = (inputs.total >= options.correct).astype(np.float64)
    accuracy = groups.sum(correct) / groups.count
    n_best = int(np.ceil(options.share * len(accuracy) - 1e-9))  # .2 · 35 is 7.000000000000001
    least = np.sort(accuracy)[-n_best] if n_best else np.inf
    chosen = groups.spread((accuracy >= least) & (accuracy > 0)) & (correct > 0)
    solved = np.maximum(groups.sum(correct), 1)
    away = inputs.length - groups.spread(groups.sum(correct * inputs.length) / solved)
    std = groups.spread(np.sqrt(groups.sum(correct * away**2) / solved))
    z = np.divide(away, std, out=np.zeros(away.shape), where=std > ROUNDING * inputs.length)
    paid = np.where(chosen, 1 - options.alpha * expit(z), correct)
    reward = np.zeros(inputs.mask.shape)
    return Shaped(add_last(reward, inputs.mask, paid), np.ones(len(paid), bool))


def overlong(inputs: ShapingInputs, options: OverlongOptions) -> Shaped:
    """Take up to 1 from rollouts that come near the length limit.

    R' = R − clip((L − (L_max − buffer))/buffer, 0, 1). Public code of DAPO, arXiv 2503.14476.
    """
    penalty = np.clip((inputs.length - (options.limit - options.buffer)) / options.buffer, 0.0, 1.0)
    return Shaped(add_last(inputs.reward, inputs.mask, -penalty), np.ones(len(penalty), bool))


def drop_equal(inputs: ShapingInputs, options: NoOptions) -> Shaped:
    """Drop the groups whose rollouts were all paid the same.

    keep_i = not all R_j of the group are equal: with a group mean they have no gradient, and a batch filled up with
    others has more. Without refilling it only changes what an average divides by. Abstract of DAPO's dynamic sampling.
    """
    return Shaped(inputs.reward, Groups.from_labels(inputs.group).spread(differing(inputs.total, inputs.group)))


def differing(total: Float, group: Int) -> Bool:
    """Return whether the totals [N] of each group differ by more than rounding [P]."""
    groups = Groups.from_labels(group)
    away = total - groups.spread(groups.sum(total) / groups.count)
    size = groups.spread(np.sqrt(groups.sum(total**2) / groups.count))
    return groups.sum(np.abs(away) > ROUNDING * size) > 0


def profiled(inputs: ShapingInputs, options: ProfiledOptions) -> Shaped:
    """Pay right rollouts more, the less they spent.

    R' = R + weight·q if right, q = 1 − (L + call·calls)/budget within 0 and 1. Profiling-based rewards of Dr. Kernel,
    arXiv 2602.05885, abstract: correctness + correctness·quality. That quality is what was spent is our choice; there
    it is the share of the running time spent in generated kernels.
    """
    gain = options.weight * quality(inputs.length, inputs.calls, options)
    paid = np.where(inputs.total >= options.correct, gain, 0.0)
    return Shaped(add_last(inputs.reward, inputs.mask, paid), np.ones(len(paid), bool))


def quality(tokens: Float, calls: Float, options: SpentOptions) -> Float:
    """Return q = 1 − (tokens + call·calls)/budget, kept within 0 and 1 [N]."""
    return np.clip(1 - (tokens + options.call * calls) / options.budget, 0.0, 1.0)


# fmt: off
SHAPINGS: dict[str, Formula] = {
    "none": Formula(none, "r", "the task's own reward", "code", needs=("reward",)),
    "grpo_lambda": Formula(
        grpo_lambda,
        "1 − α·σ((L − mean_correct)/std_correct) if correct, else 0, in the best-solved groups; else 0 or 1",
        "GRPO-λ, arXiv 2505.18086", "abstract", needs=("reward", "group"), options=LambdaOptions,
    ),
    "overlong": Formula(
        overlong, "R − clip((L − (L_max − buffer))/buffer, 0, 1)", "DAPO, arXiv 2503.14476", "code",
        needs=("reward",), options=OverlongOptions,
    ),
    "drop_equal": Formula(
        drop_equal, "keep where not all R_j of the group are equal", "DAPO, arXiv 2503.14476", "abstract",
        needs=("reward", "group"),
    ),
    "profiled": Formula(
        profiled, "R + weight·q if right, q = 1 − (L + call·calls)/budget within 0 and 1",
        "PR of Dr. Kernel, arXiv 2602.05885", "abstract", needs=("reward", "turn"), options=ProfiledOptions,
    ),
}
# fmt: on


def shape_rewards(name: str, inputs: ShapingInputs, options: Any = None) -> Shaped:
    """Return rewards after shaping and which rollouts stay.

    Raises:
        InputError: Unknown name or wrong options.
    """
    return answer("shaping", name, SHAPINGS, inputs, options)


def add_last(reward: Float, mask: Bool, change: Float) -> Float:
    """Add a change of the total on the last policy token; a rollout without tokens has none."""
    out, rows = reward.copy(), np.flatnonzero(mask.any(axis=1))
    if not len(rows):
        return out
    last = mask.shape[1] - 1 - np.argmax(mask[rows, ::-1], axis=1)
    out[rows, last] += change[rows]
    return out


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

    valid = (lambda o: o.low < o.high, "low is {self.low} and high is {self.high}; pass low < high.")
    low: float = 0.0  # Quality at or below which a right rollout never stays
    high: float = 0.5  # Quality from which on it always does


@dataclass(frozen=True)
class Filter(Formula):
    """One row of `FILTERS`."""

    keeps: Literal["rollout", "group"] = "rollout"  # What is drawn again: single rollouts, or groups of other prompts
    effect: str = ""  # What becomes of estimators that are unbiased for i.i.d. rollouts


def keep_all(inputs: FilterInputs, options: NoOptions) -> Float:
    """Keep every rollout: 1."""
    return np.ones(len(inputs.total))


def dynamic(inputs: FilterInputs, options: NoOptions) -> Float:
    """Keep the groups whose rollouts were not all paid the same; other prompts take the place of the rest.

    k_i = 1 where not all R_j of the group are equal, else 0. DAPO's dynamic sampling, arXiv 2503.14476, abstract.
    """
    return Groups.from_labels(inputs.group).spread(differing(inputs.total, inputs.group)).astype(np.float64)


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
    "none": Filter(keep_all, "1", "plain sampling", "code"),
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
    return answer("filter", name, FILTERS, inputs, options)
