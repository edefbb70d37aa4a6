"""Smaller groups of the same rollouts: whole groups cut into disjoint halves and quarters.

Rollouts of a prompt are drawn independently, so its first N/2 are as good a group of N/2 as any. The baseline of a
smaller group sees only that group's rollouts, so advantages are computed anew from the smaller group vector; an update
of the same number of rollouts then has twice, or four times, as many prompts.
"""

import numpy as np

from otb_analysis.arrays import rank_within
from otb_analysis.errors import InputError
from otb_analysis.types import Float, Int

PARTS = (2, 4)
"""Into how many smaller groups a whole one is cut."""


def smaller_sizes(group: Int) -> list[int]:
    """Return N/2 and N/4, largest first: those of at least 2 rollouts into which groups of N can be cut evenly.

    Groups of 8 give [4, 2], groups of 6 give [3]; groups of unequal sizes give nothing, since an update of smaller ones
    would not have the same number of rollouts.
    """
    counts = np.unique(np.unique(group, return_counts=True)[1])
    # Groups of unlike size would be cut into unlike numbers, and prompts would no longer weigh alike.
    if counts.size != 1:
        return []
    whole = int(counts[0])
    return [whole // parts for parts in PARTS if whole % parts == 0 and whole // parts >= 2]


def cut_groups(group: Int, size: int) -> Int:
    """Cut every group, in the order of its rollouts, into disjoint ones of `size`; what is left over is a smaller one.

    Raises:
        InputError: The size is below 1.
    """
    if size < 1:
        raise InputError(f"size is {size}; pass groups of at least one rollout.")
    _, codes, counts = np.unique(group, return_inverse=True, return_counts=True)
    rank = rank_within(codes, np.argsort(codes, kind="stable"))
    return codes * (1 + int(counts.max(initial=0))) + rank // size


def mean_over_subgroups(inner: Float, parts: int) -> Float:
    """Products per prompt [M, M, P, P] from those of its k smaller groups [M, M, kP, kP], one prompt's side by side.

    Between prompts p ≠ q: ⟨mean_a g_{m,a}, mean_b g_{m',b}⟩, the product of the means over a in p and b in q. Within a
    prompt: mean_a ⟨g_{m,a}, g_{m',a}⟩, whose expectation is E‖g‖² of *one* smaller group. So moments, and all that
    follows from them, are those of smaller groups, and each prompt is one cluster. With k = 1 nothing changes.

    Raises:
        InputError: The number of smaller groups is no multiple of k.
    """
    rows, groups = inner.shape[0], inner.shape[-1]
    if groups % parts:
        raise InputError(f"inner has {groups} smaller groups; pass {parts} for each prompt.")
    blocks = inner.reshape(rows, rows, groups // parts, parts, groups // parts, parts)
    # Averaging all a, b would leave ⟨g_a, g_b⟩ of different groups on the diagonal, so it is put right afterwards.
    averaged = blocks.mean(axis=(3, 5))
    place = np.arange(groups // parts)
    averaged[:, :, place, place] = np.einsum("mnpapa->mnp", blocks) / parts
    return averaged
