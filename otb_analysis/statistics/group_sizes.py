"""Variance at other group sizes: from smaller groups of the same rollouts, and from pools of rollouts.

**Smaller groups** are whole groups cut into disjoint halves and quarters: rollouts of a prompt are drawn independently,
so its first N/2 are as good a group as any. Their baseline sees only their own rollouts, so advantages are computed
anew; an update of the same number of rollouts then has twice, or four times, as many prompts.

**A pool** of rollouts per prompt is cut into *disjoint* groups, because overlapping groups share rollouts and
understate the variance (groups of 32 out of 64 gave half of it). Several shuffles average out the luck of one cut; they
are not independent, so intervals come from prompts. ∇J is held out by construction: a group is only ever compared with
the reference's gradient on groups that share no rollout with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import ArrayLike

from otb_analysis.arrays import rank_within
from otb_analysis.errors import InputError
from otb_analysis.statistics.comparisons import NOTHING
from otb_analysis.statistics.gradients import GradientStatistics, pooled_statistics
from otb_analysis.statistics.moments import REFERENCE
from otb_analysis.types import Bool, Float, Gram, Int, Label, Proved

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


@dataclass(frozen=True)
class Partition:
    """One cut of the pools into disjoint groups."""

    group: Int  # Group of each rollout [R], −1 where it is left over
    prompt: Int  # Prompt of each group [G], numbered 0 … P−1 in sorted order of the pool's names


def partitions(prompt: ArrayLike, size: int, shuffles: int = 8, seed: int = 0) -> list[Partition]:
    """Cut each prompt's pool into disjoint groups of N, several times; `prompt` is the prompt of each rollout [R].

    Estimators are then evaluated on the rollouts with `group >= 0` and that group vector; batch-coupled ones anew for
    every partition.

    Raises:
        InputError: N is below 1, or a pool is smaller than two groups.
    """
    names, codes = np.unique(np.asarray(prompt), return_inverse=True)
    pool = np.bincount(codes, minlength=names.size)
    if size < 1:
        raise InputError(f"size is {size}; pass groups of at least one rollout.")
    # One group per prompt has no spread within the prompt; E⟨g_a, g_b⟩ takes two that share no rollout.
    if (pool < 2 * size).any():
        p = int(np.argmin(pool))
        raise InputError(
            f"size is {size} but prompt {names[p]!r} has a pool of {pool[p]} rollouts; its variance takes two disjoint "
            f"groups, so pass a size of at most {pool[p] // 2} or a larger pool."
        )
    rng, counts = np.random.default_rng(seed), pool // size
    first, cuts = np.cumsum(counts) - counts, []
    for _ in range(shuffles):
        inside = rank_within(codes, np.lexsort((rng.random(codes.size), codes))) // size  # in random order
        # What does not fill a last group is left over: a smaller group would have another variance.
        group = np.where(inside < counts[codes], first[codes] + inside, -1)
        cuts.append(Partition(group, np.repeat(np.arange(counts.size), counts)))
    return cuts


def held_out(prompt: ArrayLike, seed: int = 0) -> Bool:
    """Choose half of every prompt's rollouts to hold out, rounded down: True where held out [R].

    For a quantity that must not see the other rollouts, such as a baseline fitted on them.
    """
    codes = np.unique(np.asarray(prompt), return_inverse=True)[1]
    shuffled = np.lexsort((np.random.default_rng(seed).random(codes.size), codes))
    return rank_within(codes, shuffled) < (np.bincount(codes) // 2)[codes]


def position_optimum(features: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> Float:
    """Best baseline that depends on the position only [T]: B_t* = E[s_t · Σ_k s_k G_k]/E‖s_t‖².

    Without shared parameters it is E[w_t G_t]/E[w_t]. Estimate it on rollouts other than those it is applied to: on the
    same ones it fits their noise. Standing: proved, and confirmed by enumeration.

    Args:
        features: Scores or sketches of one prompt's rollouts [R, T, K].

    Raises:
        InputError: The shapes do not fit.
    """
    chosen, g = np.asarray(mask, dtype=bool), np.asarray(returns, dtype=float)
    f = np.asarray(features, dtype=float)
    if f.ndim != 3 or f.shape[:2] != g.shape or g.shape != chosen.shape:
        raise InputError(
            f"features has shape {f.shape}, returns {g.shape} and mask {chosen.shape}; pass [R, T, K], [R, T] and "
            "[R, T]."
        )
    # Padding may hold NaN, which a product with 0 would keep.
    f, g = np.where(chosen[..., None], f, 0.0), np.where(chosen, g, 0.0)
    # The whole rollout's gradient, since tokens share parameters: s_t·s_k is not 0 for k ≠ t.
    gradient = np.einsum("rtk,rt->rk", f, g)
    along = np.einsum("rtk,rk->t", f, gradient)
    energy = np.einsum("rtk,rtk->t", f, f)
    return np.divide(along, energy, out=np.zeros_like(along), where=energy > 0)


def group_gradients(features: ArrayLike, weights: ArrayLike, partition: Partition) -> Float:
    """Mean gradient of every group [M, G, K]: g_{m,a} = (1/N) Σ_{i in a} Σ_t A_{m,i,t} f_{i,t}.

    Args:
        features: Scores or sketches with E⟨f_t, f_k⟩ = s_t·s_k per token [R, T, K], or per rollout [R, K]. A sketch
            leaves every mean right and adds noise of its own, which intervals over prompts do not contain.
        weights: Advantage of each estimator per token [M, R, T], or per rollout [M, R].

    Raises:
        InputError: The shapes do not fit.
    """
    f, a = np.asarray(features), np.asarray(weights, dtype=float)
    if a.shape[1:] != f.shape[:-1] or f.shape[0] != partition.group.size:
        raise InputError(
            f"features has shape {f.shape} and weights {a.shape} for {partition.group.size} rollouts; pass [R, T, K] "
            "with [M, R, T], or [R, K] with [M, R]."
        )
    per_rollout = a[..., None] * f if f.ndim == 2 else np.matmul(a.transpose(1, 0, 2), f).transpose(1, 0, 2)
    kept = partition.group >= 0
    size = np.bincount(partition.group[kept], minlength=partition.prompt.size)
    return _sum_by(per_rollout[:, kept], partition.group[kept], size.size) / size[:, None]


@dataclass(frozen=True)
class PoolGram:
    """Inner products of group gradients from pools, averaged over partitions; made by `pool_gram`."""

    across: Float  # ⟨ḡ_{m,p}, ḡ_{m',q}⟩ [M, M, P, P] of the prompts' mean gradients; meaningful for p ≠ q
    same: Float  # Mean over groups of ⟨g_{m,a}, g_{m',a}⟩ [M, M, P]: a group with itself
    apart: Float  # Mean over pairs of disjoint groups of one prompt of ⟨g_{m,a}, g_{m',b}⟩ [M, M, P]
    labels: tuple[Label, ...]
    size: int

    def group_variance(self, label: Label) -> Float:
        """Variance of the group gradient given the prompt, ddof 1: E‖g_a‖² − E⟨g_a, g_b⟩ over disjoint groups.

        One estimate per prompt [P]; compare estimators by `log_ratio_t`.
        """
        # ⟨g_a, g_b⟩ of disjoint groups estimates ‖E g‖² without bias; ‖mean of groups‖² would contain their noise.
        m = self.labels.index(label)
        return self.same[m, m] - self.apart[m, m]

    def gram(self) -> Gram:
        """Gram matrix of an update with one group per prompt: `across` off the diagonal, `same` on it.

        Its expectation is that of a single such update, with much less noise.
        """
        p = self.across.shape[-1]
        # Only the diagonal differs between one group per prompt and the mean of many: it holds the noise of one group.
        inner = self.across.copy()
        inner[:, :, np.arange(p), np.arange(p)] = self.same
        return Gram(inner, self.labels, p * self.size)


def pool_gram(gradients: Sequence[ArrayLike], cuts: Sequence[Partition], labels: Sequence[Label]) -> PoolGram:
    """Combine the group gradients [M, G, K] of all partitions, which are all of one group size.

    Raises:
        InputError: The arguments differ in length or shape.
    """
    if len(gradients) != len(cuts) or not cuts:
        raise InputError(f"gradients has {len(gradients)} entries but cuts {len(cuts)}; pass one per partition.")
    parts = []
    for gradient, cut in zip(gradients, cuts, strict=True):
        g = np.asarray(gradient, dtype=float)
        if g.ndim != 3 or g.shape[:2] != (len(labels), cut.prompt.size):
            wanted = f"[M, G, K] with M = {len(labels)} and G = {cut.prompt.size}"
            raise InputError(f"group gradients have shape {g.shape}; pass {wanted}.")
        count = np.bincount(cut.prompt)
        sums = _sum_by(g, cut.prompt, count.size)
        within = np.einsum("mak,nak->man", g, g, optimize=True)
        within = _sum_by(within, cut.prompt, count.size).transpose(0, 2, 1)
        # ⟨Σ_a g_a, Σ_b g_b⟩ is all pairs at once; without the groups themselves it leaves those of disjoint groups.
        pairs = np.einsum("mpk,npk->mnp", sums, sums, optimize=True) - within
        parts.append((within / count, pairs / (count * (count - 1)), sums / count[:, None]))
    same, apart, mean = (np.mean(values, axis=0) for values in zip(*parts, strict=True))
    sizes = np.bincount(cuts[0].group[cuts[0].group >= 0])
    # Each product within a partition is averaged; across prompts the mean gradients are averaged first, since every
    # pair of groups of different prompts is as good as any.
    across = np.einsum("mpk,nqk->mnpq", mean, mean, optimize=True)
    return PoolGram(across, same, apart, tuple(labels), int(sizes[0]))


def _sum_by(x: Float, index: Int, size: int) -> Float:
    """Sum the middle axis of [M, n, K] by index: [M, size, K]."""
    m, n, k = x.shape
    # A sparse product adds whole rows; np.add.at would walk through [M, n, K] entry by entry.
    member = scipy.sparse.csr_array((np.ones(n), (index, np.arange(n))), shape=(size, n))
    return (member @ x.transpose(1, 0, 2).reshape(n, m * k)).reshape(size, m, k).transpose(1, 0, 2)


def pool_statistics(
    pool: PoolGram, reference: Label = REFERENCE, n_prompts: int | None = None, known: Proved = NOTHING
) -> list[GradientStatistics]:
    """Statistics of every estimator at this group size, the variance split into its two parts.

    P·variance = within + between: within = mean over prompts of the group variance, between = variance over prompts of
    the group gradient's mean. A baseline touches only the first. Prompts are a sample, and the clusters of every
    interval. `n_prompts` and `known` as in `pooled_statistics`.
    """
    rows = []
    for row in pooled_statistics([pool.gram()], reference, n_prompts, known):
        if row.variance is None:
            rows.append(row)
            continue
        within = float(pool.group_variance((row.estimator, row.energy_source)).mean())
        # Not clipped: an unbiased estimate of a between-prompt part near 0 is negative half of the time.
        rows.append(replace(row, within=within, between=row.variance * row.n_prompts - within))
    return rows
