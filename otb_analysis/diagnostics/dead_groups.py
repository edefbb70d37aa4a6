"""What success rates alone say about the group size: groups whose rewards are all equal, and groups that inform."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb
from typing import Any

import numpy as np

from otb_analysis.statistics import Interval, cluster_jackknife

RISK = 0.05
"""Probability that an interval misses."""


@dataclass(frozen=True)
class DeadGroups:
    """Share of groups of one size whose rewards are all equal, with its interval over prompts."""

    size: int
    share: Interval
    n_groups: int  # Groups of at least this size

    @property
    def informative(self) -> Interval:
        """Groups with unequal rewards among 100 rollouts: 100·(1 − share)/N."""
        low, high = (None if end is None else 100 * (1 - end) / self.size for end in (self.share.high, self.share.low))
        words = "groups with unequal rewards among 100 rollouts"
        return Interval(100 * (1 - self.share.estimate) / self.size, low, high, self.share.n_clusters, words)


def reward_groups(rewards: Any) -> list[tuple[object, list[float]]]:
    """Return prompt and rewards of every group; a group whose prompt has no name is a prompt of its own.

    Args:
        rewards: A table of rollouts with step, group, reward and prompt_id.
    """
    if rewards.empty:
        return []
    rows = rewards.sort_values(["step", "group"], kind="stable")
    step, group, paid = (rows[name].to_numpy() for name in ("step", "group", "reward"))
    starts = np.flatnonzero(np.r_[True, (np.diff(step) != 0) | (np.diff(group) != 0)])
    nameless = np.logical_or.reduceat(rows["prompt_id"].isna().to_numpy(), starts)
    names = rows["prompt_id"].to_numpy(object)
    parts = np.split(paid.astype(float), starts[1:])
    return [
        ((int(step[at]), int(group[at])) if bare else names[at], part.tolist())
        for at, bare, part in zip(starts.tolist(), nameless.tolist(), parts, strict=True)
    ]


def dead_share(rewards: Sequence[float], size: int) -> float:
    """Return the probability that `size` rollouts of one prompt all have the same reward, from G ≥ size recorded ones.

    Σ_v C(k_v, n)/C(G, n) over distinct rewards v, each met k_v times: the hypergeometric estimator, the share of all
    subsets of n recorded rollouts that are dead. Unbiased for Σ_v p_v^n; with rewards of 0 and 1 that is pⁿ + (1−p)ⁿ.
    """
    return _dead_share(tuple(sorted(Counter(rewards).values())), size)


@cache
def _dead_share(counts: tuple[int, ...], size: int) -> float:
    return sum(comb(k, size) for k in counts) / comb(sum(counts), size)


def dead_groups(groups: Sequence[tuple[object, Sequence[float]]]) -> tuple[DeadGroups, ...]:
    """Return the share of dead groups at 2, 4, 8, … and at the largest recorded size, from (prompt, rewards) of groups.

    A size takes only groups of at least as many rollouts; every group counts alike, and all groups of one prompt are
    one cluster of the interval.
    """
    largest = max((len(rewards) for _, rewards in groups), default=0)
    counted = [(prompt, tuple(sorted(Counter(rewards).values())), len(rewards)) for prompt, rewards in groups]
    sizes = sorted({2**k for k in range(1, largest.bit_length()) if 2**k <= largest} | ({largest} - {0, 1}))
    rows = []
    for size in sizes:
        shares: dict[object, list[float]] = {}
        for prompt, counts, recorded in counted:
            if recorded >= size:
                shares.setdefault(prompt, []).append(_dead_share(counts, size))
        table = np.array([[sum(each), len(each)] for each in shares.values()])
        share = cluster_jackknife(table, lambda mean: mean[..., 0] / mean[..., 1], f"dead groups of {size}", "linear")
        assert share is not None
        rows.append(DeadGroups(size, _within_bounds(share), int(table[:, 1].sum())))
    return tuple(rows)


def _within_bounds(share: Interval) -> Interval:
    """Return a share's interval within 0 and 1; where no group or every group was dead, Clopper and Pearson's.

    Such prompts do not vary, so that the jackknife sees no error. A mean of values from 0 to 1 that is μ gives K zeros
    with probability (1 − μ)^K at most: 1 − .025^(1/K) bounds it.
    """
    if share.estimate in (0.0, 1.0):
        reach = 1 - (RISK / 2) ** (1 / share.n_clusters)
        return replace(share, low=max(share.estimate - reach, 0.0), high=min(share.estimate + reach, 1.0))
    if share.low is None or share.high is None:
        return share
    return replace(share, low=max(share.low, 0.0), high=min(share.high, 1.0))


def limit_ratio(size: int) -> float:
    """Return N/(N−1): variance of `rloo` at the same rollouts, over that of very large groups.

    It assumes that noise dominates, so that a rollout's score hardly depends on its reward, and that prompts share one
    gradient. In that limit the group gradient is the covariance of two independent samples: V(N) = s²·Var(R)/(N−1), s²
    the score's variance, whatever the success rates.
    """
    return size / (size - 1)


def rates_line(dead: Sequence[DeadGroups]) -> str:
    """Return what success rates say about the best group size of `rloo`; there is at least one size."""
    size = dead[-1].size
    cost = f", and groups of {size // 2} cost {limit_ratio(size // 2) / limit_ratio(size) - 1:.0%}" if size >= 4 else ""
    return (
        "From success rates alone: suppose that a completion's score hardly depends on its reward, and that all "
        "prompts share one gradient. Then the variance of rloo at the same rollouts is proportional to N/(N−1): groups "
        f"above {size} save at most {1 - 1 / limit_ratio(size):.0%}{cost}. Prompts with different gradients favour "
        "smaller groups."
    )
