"""Weights of a portfolio of estimators that maximise the efficiency of an update, fitted on Gram matrices."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from otb_analysis.errors import InputError, nearest
from otb_analysis.statistics.moments import NOTHING, REFERENCE, clusters, truth_of
from otb_analysis.types import Bool, Float, Gram, Label, Proved

RANK = 1e-10
"""Below this share of the largest, an eigenvalue is rounding: two members are alike."""
RIDGE = 1.0
"""Of fitted weights. In study 03 (studies/LOG.md) five members so weighed had .95 to .99 of the mean square of equal
weights; without a ridge they had 6 to 9 times as much when 16 prompts fitted them."""


def best_weights(mean: Float, spread: Float, along: Float, n_prompts: float, ridge: float = 0.0) -> Float | None:
    """Return the weights a, of sum 1, that maximise efficiency(P) of Σ_k a_k ĝ_k: a ∝ (M + V/P)⁻¹ c.

    M_kl = ⟨m_k, m_l⟩ and V_kl = tr Cov(g_k, g_l) of one prompt [K, K], c_k = ⟨m_k, ∇J⟩ [K]. efficiency(P) is
    (a·c)²/(‖∇J‖²·a(M + V/P)a). Unbiased members (M = ‖∇J‖²·11ᵀ, c = ‖∇J‖²·1) get a ∝ V⁻¹1, whatever P and ∇J are.

    With U = M + V/P a ridge ρ gives a ∝ (U + τ·1)⁻¹(c + τ·e), τ = ρ·tr U/K and e = Σc/ΣU, the best multiple of equal
    weights: ρ = 0 is the optimum above, which moments that are exact ask for, and ρ → ∞ is 1/K each.

    Returns:
        None where noise hides the answer: M + V/P has a direction of negative length, or a·1 is not positive.
    """
    update_sq = mean + spread / n_prompts
    if not (np.isfinite(update_sq).all() and np.isfinite(along).all()):
        return None
    if ridge:
        if update_sq.sum() <= 0:
            return None
        pull = ridge * np.trace(update_sq) / len(along)
        along = along + pull * along.sum() / update_sq.sum()
        update_sq = update_sq + pull * np.eye(len(along))
    size = np.sqrt(np.maximum(np.diagonal(update_sq), np.finfo(float).tiny))
    scaled = update_sq / np.outer(size, size)
    lengths = np.linalg.eigvalsh(scaled)
    if lengths[0] < -RANK * lengths[-1]:
        return None
    weights = np.linalg.pinv(scaled, rcond=RANK, hermitian=True) @ (along / size) / size
    total = weights.sum()
    return weights / total if total > RANK * np.abs(weights).sum() else None


def fitted_weights(
    grams: Sequence[Gram],
    labels: Sequence[Label],
    n_prompts: float,
    known: Proved = NOTHING,
    kept: Sequence[Bool] | None = None,
    ridge: float = RIDGE,
) -> Float | None:
    """Return `best_weights` of estimators for an update of P prompts, from the moments of all prompts measured.

    Moments of few prompts are noisy, so a ridge pulls the weights towards 1/K each. They sum to 1 under any ridge, so a
    portfolio of unbiased members stays unbiased on prompts that its weights were not fitted on.

    M, V and c are means over pairs of different prompts, as everywhere. Where a projection c is proved it is used
    instead of an estimate; where all are, neither P nor ∇J matters, and V alone is estimated. What is judged on the
    prompts that it was fitted on looks better than it is: see `with_portfolio`.

    Args:
        kept: True at the prompts that count [P], for each matrix; by default all do.
        ridge: ρ of `best_weights`; 0 fits without one.

    Raises:
        InputError: A label was not measured.
    """
    for label in labels:
        if not any(label in gram.labels for gram in grams):
            measured = dict.fromkeys(str(one) for gram in grams for one in gram.labels)
            raise InputError(f"label is {label}; {nearest(str(label), measured)}")
    c = np.array([known.projection.get(label, np.nan) for label in labels])
    proved, truth = ~np.isnan(c), truth_of(grams, REFERENCE, known)
    power, mean, along = np.zeros((len(c), len(c))), np.zeros((len(c), len(c))), np.zeros(len(c))
    truth_sq = n_prompts_seen = n_pairs = 0.0
    kept = [np.ones(gram.n_prompts, bool) for gram in grams] if kept is None else kept
    for gram, code, keep in zip(grams, clusters(grams)[0], kept, strict=True):
        if not set(labels) <= set(gram.labels) or not (proved.all() or gram.measured(truth)):
            continue
        rows = [gram.labels.index(label) for label in labels]
        pairs = (code[:, None] != code) & keep[:, None] & keep
        members, blocks = gram.inner[np.ix_(rows, rows)], [gram.blocks([label], truth)[0] for label in labels]
        power += np.einsum("klpp,p->kl", members, keep)
        mean += np.einsum("klpq,pq->kl", members, pairs)
        along += [block[1][pairs].sum() for block in blocks]
        truth_sq += blocks[0][2][pairs].sum()
        n_prompts_seen, n_pairs = n_prompts_seen + keep.sum(), n_pairs + pairs.sum()
    if not n_pairs:
        return None
    mean, along, truth_sq = (mean + mean.T) / 2 / n_pairs, along / n_pairs, truth_sq / n_pairs
    spread = power / n_prompts_seen - mean
    if proved.all():
        return best_weights(np.zeros_like(mean), spread, c, 1.0, ridge)
    # m_l = c_l·∇J of a proved member, so its products with others are those of ∇J, which all unbiased ones estimate
    along = np.where(proved, c * truth_sq, along)
    mean = np.where(proved, np.outer(along, c), np.where(proved[:, None], np.outer(c, along), mean))
    return best_weights(mean, spread, along, n_prompts, ridge)


def with_portfolio(
    grams: Sequence[Gram],
    labels: Sequence[Label],
    n_prompts: float,
    name: Label,
    known: Proved = NOTHING,
    folds: int = 5,
) -> list[Gram]:
    """Return the Gram matrices with one more estimator: the portfolio of some others, its weights cross-fitted.

    Prompts are dealt into folds, a prompt that comes back always into the same one. The group gradient of prompt p is
    Σ_k a_k g_{k,p} with `fitted_weights` a from all other folds, so no prompt is judged by weights that it chose; all
    statistics of the new label follow as those of any other. Weights that noise hides are 1/K each.

    Raises:
        InputError: A label was not measured, the name is taken, or there are fewer prompts than folds.
    """
    codes, prompts = clusters(grams)
    if not 2 <= folds <= len(prompts):
        raise InputError(f"folds is {folds} but {len(prompts)} prompts were measured; take from 2 up to that.")
    fold = [code % folds for code in codes]
    weights = [fitted_weights(grams, labels, n_prompts, known, [f != k for f in fold]) for k in range(folds)]
    equal = np.full(len(labels), 1 / len(labels))
    by_fold = np.stack([equal if one is None else one for one in weights])
    extended = []
    for gram, of_prompt in zip(grams, fold, strict=True):
        if not set(labels) <= set(gram.labels):  # without one of the members a step is left as it is
            extended.append(gram)
            continue
        if name in gram.labels:
            raise InputError(f"name is {name}, which is measured already; choose another.")
        rows, size = [gram.labels.index(label) for label in labels], len(gram.labels)
        # ⟨Σ_k a_{p,k} g_{k,p}, g_{m,q}⟩ with every measured m, and then with the portfolio itself
        across = np.einsum("pk,kmpq->mpq", by_fold[of_prompt], gram.inner[rows])
        inner = np.empty((size + 1, size + 1, gram.n_prompts, gram.n_prompts))
        inner[:size, :size], inner[size, :size], inner[:size, size] = gram.inner, across, across.swapaxes(1, 2)
        inner[size, size] = np.einsum("qk,kpq->pq", by_fold[of_prompt], across[rows])
        extended.append(replace(gram, inner=inner, labels=(*gram.labels, name)))
    return extended
