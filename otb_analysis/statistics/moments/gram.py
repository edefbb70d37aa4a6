"""Group gradients as a Gram matrix, and their moments with one prompt deleted at a time."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.statistics.moments.measures import Moments
from otb_analysis.types import Float, Gram, Int, Label, Proved

REFERENCE: Label = ("rloo", "none")
"""The unbiased estimator that stands for ∇J unless the caller names another."""

Truth = Label | frozenset[Label]
"""What stands for ∇J: one unbiased estimator, or the mean of several, which is unbiased too and less noisy."""


def truth_of(grams: Sequence[Gram], reference: Label, known: Proved) -> Truth:
    """Return what stands for ∇J: the proved unbiased estimators that were measured, or else the reference.

    With g the mean of M unbiased gradients of a prompt, ⟨g_p, g_q⟩ is the mean over all M² pairs of estimators, each of
    which has the expectation ‖∇J‖² where p ≠ q.
    """
    measured = frozenset(label for gram in grams for label in gram.labels)
    # The mean of M unbiased gradients is unbiased too, and as a rule less noisy than any of them.
    return known.truth & measured or reference


def clusters(grams: Sequence[Gram]) -> list[Int]:
    """Number the prompts of several steps: codes 0 … K−1 per step [P_s], equal where the prompt is the same."""
    number = {name: code for code, name in enumerate(prompts_of(grams))}
    return [np.array([number[name] for name in _names(step, gram)], dtype=np.int64) for step, gram in enumerate(grams)]


def deleted_moments(grams: Sequence[Gram], label: Label, reference: Truth = REFERENCE) -> Moments:
    """Moments of one estimator over all steps, from all clusters and without each cluster in turn.

    Each step gives E‖g_p‖², the mean of the diagonal, and ‖m‖², ⟨m, ∇J⟩ and ‖∇J‖² as U-statistics, means over pairs of
    *different* prompts, so each is unbiased and no prompt is compared with itself. All of them are averaged over steps
    with one weight, the step's number of prompts: V = E‖g_p‖² − ‖m‖² is then the mean over prompts of their own step's
    variance, also where policies and numbers of prompts differ. Numerators and denominators are averaged before
    anything is divided. A step without a pair has no variance: it counts for the power alone, where no step has one.

    Returns:
        Arrays [1 + K]: entry 0 from all K clusters, entry 1 + k without cluster k. NaN where no pair is left.
    """
    number = {name: code for code, name in enumerate(prompts_of(grams))}
    parts = [_shares(gram, label, reference) for gram in grams]
    # Sums over steps of what `_additive_sums` returns, from all clusters and without each [1 + K, 11].
    kept = np.tile(np.sum([whole for whole, _ in parts], axis=0), (1 + len(number), 1)) if parts else np.zeros((1, 11))
    named = [number[name] for step, gram in enumerate(grams) for name in dict.fromkeys(_names(step, gram))]
    if named:
        np.add.at(kept, 1 + np.array(named), np.concatenate([change for _, change in parts]))
    # A cluster left out may leave no pair: NaN there, which gives no interval.
    counts = np.where(kept[:, [0, 7]] > 0, kept[:, [0, 7]], np.nan)
    means, alone = kept[:, 1:7] / counts[:, :1], kept[:, 8:] / counts[:, 1:]
    power = np.where(kept[:, :1] > 0, means[:, :3], alone)
    signal, (own, _, truth) = means[:, 3:], power.T
    signal[np.abs(signal) <= ROUNDING * np.sqrt(np.stack([own**2, own * truth, truth**2], axis=1))] = 0.0
    return Moments(own, signal[:, 0], signal[:, 1], signal[:, 2], truth)


ROUNDING = 1e-12
"""Part of the power up to which ‖m‖², ⟨m, ∇J⟩ and ‖∇J‖² are what rounding leaves of zero, which no ratio may use."""


MOST_NUMBERS = 2_000_000
"""Numbers of Gram matrices that are worked on at once: 16 MB."""

HALVES = np.array([1.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5])
"""A pair is charged to both of its clusters, so the totals of the pair columns are half their sums."""


def _shares(gram: Gram, label: Label, reference: Truth) -> tuple[Float, Float]:
    """Return what a step adds to the sums [11], and what each of its clusters changes by being left out [k, 11].

    All labels of a step are worked out at once, a tenth of the work of one after the other.
    """
    labels = gram.labels if gram.stands(reference) else (label,)
    if (labels, reference) not in gram.derived:
        sums = _by_cluster(gram, labels, reference)
        total = sums.sum(axis=1, keepdims=True) * HALVES
        # Without a cluster a step loses its row and its column of pairs.
        whole, without = _additive_sums(total), _additive_sums(total - sums)
        gram.derived[labels, reference] = whole[:, 0], without - whole
    whole, changes = gram.derived[labels, reference]
    return whole[labels.index(label)], changes[labels.index(label)]


def _by_cluster(gram: Gram, labels: Sequence[Label], reference: Truth) -> Float:
    """Return of labels and clusters [M, k, 8]: prompts, diagonal [3], pairs it takes part in, their products [3]."""
    code = clusters([gram])[0]
    # Two groups of one prompt share its difficulty, so their product estimates no product of independent means.
    other = code[:, None] != code
    sums = np.zeros((len(labels), code.max(initial=-1) + 1, 8))
    some = max(1, MOST_NUMBERS // (3 * code.size**2 or 1))
    for first in range(0, len(labels), some):
        # E⟨g_p, g_p⟩ = ‖m‖² + V holds the noise of one prompt; for p ≠ q the noises are independent and leave ‖m‖².
        block = gram.blocks_of(labels[first : first + some], reference)
        rows = np.empty((len(block), code.size, 8))
        rows[..., 0], rows[..., 4] = 1, 2 * other.sum(axis=1)
        rows[..., 1:4] = np.einsum("mjpp->mpj", block)
        block[..., ~other] = 0
        # ⟨m_p, ∇J_q⟩ and ⟨m_q, ∇J_p⟩ are two products; a cluster takes part as row and as column.
        rows[..., 5:] = (block.sum(axis=2) + block.sum(axis=3)).swapaxes(1, 2)
        # A prompt may be there twice in a step.
        np.add.at(sums[first : first + some].swapaxes(0, 1), code, rows.swapaxes(0, 1))
    return sums


def _additive_sums(sums: Float) -> Float:
    """Return from sums [..., 8] of one step what adds up over steps [..., 11].

    Where it has a pair: its prompts, and prompts times the means of the diagonal [3] and of the pairs [3], else zeros;
    then its prompts and its diagonal [3], whether or not it has one.
    """
    prompts, diagonal, pairs = sums[..., :1], sums[..., 1:4], sums[..., 4:5]
    means = sums[..., 5:] / np.where(pairs > 0, pairs, np.nan)
    with_pairs = np.where(pairs > 0, np.concatenate([prompts, diagonal, prompts * means], axis=-1), 0.0)
    return np.concatenate([with_pairs, prompts, diagonal], axis=-1)


def pair_noise(grams: Sequence[Gram], label: Label, reference: Truth) -> float:
    """Standard error that the estimate of ‖∇J‖² would have without any signal, from products of independent noises.

    With e_p what is left of prompt p's gradient without the mean of its step, a mean over P(P − 1) ordered pairs has
    the variance 2·mean_{p≠q}⟨e_p, e_q⟩²/(P(P − 1)); steps are averaged as in `deleted_moments`. NaN without a pair.
    """
    weight, square = 0.0, 0.0
    for gram in grams:
        count, named = gram.n_prompts, ("noise", reference, label if not gram.stands(reference) else None)
        if count > 1:
            if named not in gram.derived:
                block = gram.blocks(label, reference)[2]
                centred = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
                gram.derived[named] = (centred**2).sum() - (np.diag(centred) ** 2).sum()
            weight += count
            square += 2 * gram.derived[named] / (count - 1) ** 2
    return float(np.sqrt(square) / weight) if weight else np.nan


def prompts_of(grams: Sequence[Gram]) -> list[object]:
    """Return the clusters in the order in which `deleted_moments` leaves them out."""
    return list(dict.fromkeys(name for step, gram in enumerate(grams) for name in _names(step, gram)))


def against_reference(grams: Sequence[Gram], label: Label, reference: Truth) -> list[Gram]:
    """Return the steps that have the label, and the reference too wherever any of them has it."""
    having = [gram for gram in grams if label in gram.labels]
    # One set of steps for both: on unlike steps a ratio would compare prompts, not estimators.
    return [gram for gram in having if gram.has(reference)] or having


def typical(counts: list[int]) -> int:
    """Return the rounded mean of counts, 0 without any."""
    return round(sum(counts) / len(counts)) if counts else 0


def _names(step: int, gram: Gram) -> list[object]:
    """Identify each of a step's prompts: by its name, or else by step and place."""
    return [(step, p) for p in range(gram.n_prompts)] if gram.prompt is None else [(p,) for p in gram.prompt]
