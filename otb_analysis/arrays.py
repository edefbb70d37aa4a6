"""Masked and grouped reductions on [N, T] arrays: no loop over groups or rollouts, padding never read.

Letters: N rollouts, T padded length, L_i policy tokens of rollout i, P groups. A mask is true at policy tokens [N, T],
a group is an integer per rollout [N]. Whatever comes in, float64 goes out.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from otb_analysis.types import Bool, Float, Int

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Groups:
    """Ragged groups of rollouts, as sums over them and as copies back to them."""

    index: Int  # Group number of each rollout, 0..P−1 [N]
    labels: Int  # The caller's group value of each number [P], ascending

    @classmethod
    def from_labels(cls, group: ArrayLike) -> "Groups":
        """Number the groups of a vector of arbitrary integers."""
        labels, index = np.unique(np.asarray(group), return_inverse=True)
        return cls(index.astype(np.int64), labels.astype(np.int64))

    @property
    def count(self) -> Int:
        """Rollouts per group [P]."""
        return np.bincount(self.index, minlength=len(self.labels))

    @cached_property
    def order(self) -> Int:
        """Rollouts sorted by group, stable within each [N]."""
        return np.argsort(self.index, kind="stable")

    @cached_property
    def membership(self) -> "scipy.sparse.csr_array":
        """Indicator matrix [P, N]: ones where the rollout belongs to the group."""
        # CSR written down directly: the stable order is its column index, so sums add rollouts in their order.
        entries = np.ones(len(self.index)), self.order, np.concatenate([[0], np.cumsum(self.count)])
        return scipy.sparse.csr_array(entries, shape=(len(self.labels), len(self.index)))

    def sum(self, x: ArrayLike) -> Float:
        """Return Σ over the rollouts of each group, [N, ...] → [P, ...]."""
        values = np.asarray(x, np.float64)
        if values.ndim == 1:  # the same additions in the same order, without a matrix
            return np.bincount(self.index, values, minlength=len(self.labels)).astype(np.float64, copy=False)
        return self.membership @ values

    def spread(self, per_group: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return each rollout's copy of its group's row, [P, ...] → [N, ...]."""
        return per_group[self.index]


def group_sum(x: ArrayLike, group: ArrayLike) -> Float:
    """Return at every rollout the sum over its group: y_i = Σ_{j: group_j = group_i} x_j, shape of x."""
    groups = Groups.from_labels(group)
    return groups.spread(groups.sum(x))


def rank_within(index: Int, order: Int) -> Int:
    """Return how many of each rollout's group come before it in an order that is sorted by group [N]."""
    count = np.bincount(index)
    rank = np.empty(index.size, np.int64)
    rank[order] = np.arange(index.size) - np.repeat(np.cumsum(count) - count, count)
    return rank


def masked(x: ArrayLike, mask: Bool) -> Float:
    """Return x inside the mask and 0 outside, whatever stands there (NaN included)."""
    return np.where(mask, np.asarray(x, np.float64), 0.0)  # x·mask would keep a NaN outside the mask


def at_policy_tokens(reward: Float, mask: Bool) -> Float:
    """Move rewards paid at tool tokens to the policy token before them, or else the first: totals stay [N, T].

    Trainers pay at the last response token. In a rollout that was cut off behind a tool's answer this is no policy
    token. Without policy tokens a rollout's reward comes to stand in the first column, outside the mask.
    """
    n, t = np.nonzero(reward)
    before = np.maximum.accumulate(np.where(mask, np.arange(mask.shape[1]), -1), axis=1)[n, t]
    out = np.zeros_like(reward)
    np.add.at(out, (n, np.where(before < 0, mask.argmax(axis=1)[n], before)), reward[n, t])
    return out


def returns_to_go(reward: ArrayLike, mask: Bool) -> Float:
    """Return the reward from this token on: G_t = Σ_{k≥t} r_k over policy tokens [N, T], zero outside the mask.

    With one terminal reward G_t = R at every t up to it.
    """
    paid = masked(reward, mask)
    return masked(np.cumsum(paid[:, ::-1], axis=1)[:, ::-1], mask)


def policy_position(mask: Bool) -> Int:
    """Return how many policy tokens came before each one: 0..L−1, and −1 outside the mask [N, T]."""
    return np.where(mask, np.cumsum(mask, axis=1) - 1, -1)


def prefix_length(mask: Bool) -> Int:
    """Return the column of the first false entry of each row: its length, when no policy token comes later."""
    if not mask.shape[1]:
        return np.zeros(len(mask), np.int64)
    first_false = mask.argmin(axis=1)  # 0 also where a row has no false entry
    return np.where((first_false == 0) & mask[:, 0], mask.shape[1], first_false)


def has_gaps(mask: Bool) -> bool:
    """Return True when a policy token comes after a position that is none, so that column and position differ."""
    return int(np.count_nonzero(mask)) != int(prefix_length(mask).sum())


def squeezed_mask(mask: Bool) -> Bool:
    """Return the mask after squeezing: row i is true at its first L_i columns [N, max L]."""
    length = np.count_nonzero(mask, axis=1)
    return np.arange(length.max(initial=0)) < length[:, None]


def squeeze(x: ArrayLike, mask: Bool) -> Float:
    """Move every policy token to the column of its policy position, [N, T] → [N, max L]; other tokens disappear."""
    inside = squeezed_mask(mask)
    out = np.zeros(inside.shape)
    out[inside] = np.asarray(x)[mask]
    return out


def unsqueeze(x: ArrayLike, mask: Bool) -> Float:
    """Undo `squeeze`: put the value of every policy position back at its token, [N, max L] → [N, T]."""
    out = np.zeros(mask.shape)
    out[mask] = np.asarray(x)[squeezed_mask(mask)]
    return out


def zero_variance_groups(reward: Float, group: Int) -> Bool:
    """Return, by group index, whether its rewards [N] are all equal; groups of one or none are not counted."""
    size = np.bincount(group)
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group, reward)
    np.maximum.at(high, group, reward)
    return (low == high) & (size > 1)
