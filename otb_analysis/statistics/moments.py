"""What a gradient estimator is worth, as functions of five moments, and those moments from Gram matrices.

m = E ĝ is the mean of the estimator's group gradient, V = tr Cov of one prompt's group gradient, ∇J the gradient that
the unbiased reference estimates. Raw variance alone ranks estimators wrongly, since a baseline that includes its own
rollout shrinks the gradient: read it beside `projection`, and compare by `sf` and `efficiency`.

Every measure is vectorised over the shape of the moments and gives NaN, without a warning, where the quantity is
undefined. All of them are invariant under an orthogonal change of the parameters' coordinates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.types import Float, Gram, Int, Label, Proved


@dataclass(frozen=True)
class Moments:
    """First and second moments of group gradients, each of any one shape; estimated here, or exact by enumeration."""

    power: Float  # E‖g_p‖² = ‖m‖² + V of one prompt's group gradient
    mean_sq: Float
    along: Float
    truth_sq: Float
    reference_power: Float  # E‖g_p‖² of the reference


def batch_variance(moments: Moments, n_prompts: float) -> Float:
    """Variance of the mean gradient of P prompts: V/P = (E‖g_p‖² − ‖m‖²)/P.

    With moments estimated from P prompts this equals Σ_p‖ḡ_p − ḡ‖²/(P(P−1)). Prompts are independent, so it holds for
    any baseline. Scaling the gradients by a multiplies it by a².
    """
    # The estimate of ‖m‖² has no bias, so by chance it exceeds the power; a variance is not negative.
    return np.maximum(moments.power - moments.mean_sq, 0) / n_prompts


def projection(moments: Moments) -> Float:
    """Progress per step relative to ∇J: c = ⟨m, ∇J⟩/‖∇J‖².

    1 for an unbiased estimator; 1 − 1/N for the group mean in groups of N; scales with the estimator.
    """
    return quotient(moments.along, moments.truth_sq)


def relative_bias(moments: Moments) -> Float:
    """Length of the bias relative to ∇J: ‖m − ∇J‖/‖∇J‖, with ‖m − ∇J‖² = ‖m‖² − 2⟨m, ∇J⟩ + ‖∇J‖².

    0 for an unbiased estimator, 1/N for the group mean. The estimated square can be negative and is then taken as 0, so
    the estimate is not itself unbiased.
    """
    # Of three unbiased terms, so it is often negative where the bias is small; √ of its positive part is biased up.
    return np.sqrt(np.maximum(bias_sq(moments), 0))


def bias_sq(moments: Moments) -> Float:
    """Return the squared relative bias ‖m − ∇J‖²/‖∇J‖²; an estimate can be negative."""
    return quotient(moments.mean_sq - 2 * moments.along + moments.truth_sq, moments.truth_sq)


def sf(moments: Moments, n_prompts: float) -> Float:
    """Variance at equal progress: SF = batch variance / c².

    Multiplying an estimator by a constant leaves it unchanged; it does not charge bias in direction, which
    `efficiency` does. It equals the batch variance for an unbiased estimator.
    """
    return quotient(batch_variance(moments, n_prompts), projection(moments) ** 2)


def efficiency(moments: Moments, n_prompts: float) -> Float:
    """Share of an update of P prompts that points along ∇J: ⟨m,∇J⟩² / (‖∇J‖² · (‖m‖² + V/P)).

    In [0, 1] for exact moments; an estimate can leave that range through noise and is not clipped. It tends to
    cos²(m, ∇J) as P grows, does not change when the estimator is multiplied by a constant, and is 1/(1 + V/(P‖∇J‖²))
    for an unbiased one.
    """
    # ‖m‖² + V/P is E‖ĝ‖²: the squared length of the whole update, noise included.
    update_sq = moments.mean_sq + batch_variance(moments, n_prompts)
    return quotient(quotient(moments.along**2, moments.truth_sq), update_sq)


def rollout_equivalents(moments: Moments, n_prompts: float, n_rollouts: float) -> Float:
    """Rollouts that the reference would need for the same efficiency, with more prompts at the same group size.

    The reference reaches efficiency e with P' prompts where e = 1/(1 + V_ref/(P'‖∇J‖²)); the answer is
    n_rollouts · P'/P. It is n_rollouts for the reference itself, and ∞ where no number of rollouts reaches e (e ≥ 1,
    which only an estimate can be).
    """
    share = efficiency(moments, n_prompts)
    noise = np.maximum(moments.reference_power - moments.truth_sq, 0) / n_prompts
    # e/(1 − e) is the signal-to-noise ratio of an unbiased update; equal efficiency is equal odds.
    odds = np.where(share >= 1, np.inf, quotient(share, 1 - share))
    with np.errstate(invalid="ignore"):  # no noise in either is 0·∞: undefined
        return n_rollouts * quotient(noise, moments.truth_sq) * odds


def with_projection(moments: Moments, c: float | None) -> Moments:
    """Use a proved projection instead of an estimate: m = c·∇J, so ‖m‖² = c²‖∇J‖² and ⟨m, ∇J⟩ = c‖∇J‖².

    E‖g_p‖² stays as it was measured, so V = E‖g_p‖² − c²‖∇J‖². Two proved estimators on the same prompts have the same
    ‖∇J‖², so that E‖g_p‖²/c² alone says which of them has less variance at equal progress.
    """
    if c is None:
        return moments
    # m is known to be c·∇J, so estimating its length and direction a second time would only add noise.
    return replace(moments, mean_sq=c**2 * moments.truth_sq, along=c * moments.truth_sq)


def crossing(moments: Moments) -> Float:
    """Prompts P above which the reference is the more efficient of the two: where the two efficiencies are equal.

    P = (⟨m,∇J⟩²·V_ref − ‖∇J‖⁴·V) / (‖∇J‖²·(‖∇J‖²·‖m‖² − ⟨m,∇J⟩²)). A biased but quiet estimator is ahead below it. ∞
    where it is quieter at equal progress and its direction is right, so that it stays ahead; 0 where it never is.
    """
    truth, along_sq = np.asarray(moments.truth_sq, dtype=float), np.asarray(moments.along, dtype=float) ** 2
    noise = (np.maximum(a - b, 0) for a, b in ((moments.reference_power, truth), (moments.power, moments.mean_sq)))
    reference_noise, own_noise = noise
    lead = along_sq * reference_noise - truth**2 * own_noise
    sideways = truth * moments.mean_sq - along_sq  # ‖∇J‖² times what of ‖m‖² is not along ∇J
    straight = sideways <= 1e-12 * along_sq  # what rounding leaves of an unbiased direction
    finite = quotient(np.maximum(lead, 0), np.where(straight, np.nan, truth * sideways))
    ahead = lead > 1e-12 * along_sq * reference_noise
    return np.where(truth > 0, np.where(straight, np.where(ahead, np.inf, 0.0), finite), np.nan)


def known_number(value: float) -> float | None:
    """Return a number, None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def quotient(numerator: Float, denominator: Float) -> Float:
    """Return the quotient where the denominator is positive, NaN elsewhere."""
    numerator, denominator = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    shape = np.broadcast_shapes(numerator.shape, denominator.shape)
    # An estimated ‖∇J‖² at or below 0 is lost in noise: what it divides is unknown, not infinite.
    return np.divide(numerator, denominator, out=np.full(shape, np.nan), where=denominator > 0)


REFERENCE: Label = ("rloo", "none")
"""The unbiased estimator that stands for ∇J unless the caller names another."""

NOTHING = Proved()
"""Every projection is estimated."""

Truth = Label | frozenset[Label]
"""What stands for ∇J: one unbiased estimator, or the mean of several, which is unbiased too and less noisy."""


def truth_of(grams: Sequence[Gram], reference: Label, known: Proved) -> Truth:
    """Return what stands for ∇J: the proved unbiased estimators that were measured, or else the reference.

    With g the mean of M unbiased gradients of a prompt, ⟨g_p, g_q⟩ is the mean over all M² pairs of estimators, each of
    which has the expectation ‖∇J‖² where p ≠ q.
    """
    # The mean of M unbiased gradients is unbiased too, and as a rule less noisy than any of them.
    return frozenset(label for label in known.truth if any(label in gram.labels for gram in grams)) or reference


def clusters(grams: Sequence[Gram]) -> tuple[list[Int], list[object]]:
    """Number the prompts of several steps: codes 0 … K−1 per step [P_s], equal where the prompt is the same; and names.

    The names are in the order in which `deleted_moments` leaves prompts out; one without a name is its step and place.
    """
    steps = tuple(grams)
    derived = steps[0].derived if steps else dict[object, Any]()  # kept as `deleted_moments` keeps its own
    if (key := ("clusters", *map(id, steps))) not in derived:
        number: dict[object, int] = {}
        codes = []
        for step, gram in enumerate(steps):
            names = [(step, p) for p in range(gram.n_prompts)] if gram.prompt is None else [(p,) for p in gram.prompt]
            codes.append(np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64))
        derived[key] = codes, list(number), steps
    return derived[key][:2]


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
    steps = tuple(grams)
    # Kept beside the first step's matrix. The key's steps are kept as well: no other object can take their place.
    derived = steps[0].derived if steps else dict[object, Any]()
    by_label: dict[Label, Moments] = derived.setdefault(("moments", reference, *map(id, steps)), ({}, steps))[0]
    if label not in by_label:
        alike = all(gram.labels == steps[0].labels and gram.stands(reference) for gram in steps)
        labels = steps[0].labels if alike and steps else (label,)  # all at once, where every step has the same ones
        codes, names = clusters(steps)
        parts = [_shares(gram, labels, reference) for gram in steps]
        # Sums over steps of what `_shares` returns, from all clusters and without each [M, 1 + K, 11].
        kept = np.zeros((len(labels), 1 + len(names), 11)) + sum(whole[:, None] for whole, _ in parts)
        for code, (_, changes) in zip(codes, parts, strict=True):
            kept[:, 1 + np.fromiter(dict.fromkeys(code.tolist()), np.int64)] += changes
        # A cluster left out may leave no pair: NaN there, which gives no interval.
        counts = np.where(kept[..., [0, 7]] > 0, kept[..., [0, 7]], np.nan)
        means, alone = kept[..., 1:7] / counts[..., :1], kept[..., 8:] / counts[..., 1:]
        powers = np.where(kept[..., :1] > 0, means[..., :3], alone)
        signal, (power, _, truth) = means[..., 3:], np.moveaxis(powers, -1, 0)
        signal[np.abs(signal) <= ROUNDING * np.sqrt(np.stack([power**2, power * truth, truth**2], axis=-1))] = 0.0
        columns = power, *np.moveaxis(signal, -1, 0), truth
        by_label.update({one: Moments(*(column[m] for column in columns)) for m, one in enumerate(labels)})
    return by_label[label]


ROUNDING = 1e-12
"""Part of the power up to which ‖m‖², ⟨m, ∇J⟩ and ‖∇J‖² are what rounding leaves of zero, which no ratio may use."""


MOST_NUMBERS = 2_000_000
"""Numbers of Gram matrices that are worked on at once: 16 MB."""

HALVES = np.array([1.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5])
"""A pair is charged to both of its clusters, so the totals of the pair columns are half their sums."""


def _shares(gram: Gram, labels: tuple[Label, ...], reference: Truth) -> tuple[Float, Float]:
    """Return what a step adds to the sums [M, 11], and what each of its clusters changes by being left out [M, k, 11].

    All labels of a step are worked out at once, a tenth of the work of one after the other.
    """
    if (labels, reference) not in gram.derived:
        (code,), names = clusters([gram])
        # Two groups of one prompt share its difficulty, so their product estimates no product of independent means.
        other = code[:, None] != code
        # Of labels and clusters [M, k, 8]: prompts, diagonal [3], pairs it takes part in, their products [3]
        sums = np.zeros((len(labels), len(names), 8))
        some = max(1, MOST_NUMBERS // (3 * code.size**2 or 1))
        for first in range(0, len(labels), some):
            # E⟨g_p, g_p⟩ = ‖m‖² + V holds the noise of one prompt; for p ≠ q the noises are independent and leave ‖m‖².
            block = gram.blocks(labels[first : first + some], reference)
            rows = np.empty((len(block), code.size, 8))
            rows[..., 0], rows[..., 4] = 1, 2 * other.sum(axis=1)
            rows[..., 1:4] = np.einsum("mjpp->mpj", block)
            block[..., ~other] = 0
            # ⟨m_p, ∇J_q⟩ and ⟨m_q, ∇J_p⟩ are two products; a cluster takes part as row and as column.
            rows[..., 5:] = (block.sum(axis=2) + block.sum(axis=3)).swapaxes(1, 2)
            # A prompt may be there twice in a step.
            np.add.at(sums[first : first + some].swapaxes(0, 1), code, rows.swapaxes(0, 1))
        total = sums.sum(axis=1, keepdims=True) * HALVES
        # Without a cluster a step loses its row and its column of pairs. What adds up over steps [..., 11] are, where
        # there is a pair, prompts, and prompts times the means of the diagonal [3] and of the pairs [3], else zeros;
        # then prompts and diagonal [3], whether or not there is one.
        parts = np.concatenate([total, total - sums], axis=1)
        prompts, diagonal, pairs = parts[..., :1], parts[..., 1:4], parts[..., 4:5]
        means = parts[..., 5:] / np.where(pairs > 0, pairs, np.nan)
        with_pairs = np.where(pairs > 0, np.concatenate([prompts, diagonal, prompts * means], axis=-1), 0.0)
        added = np.concatenate([with_pairs, prompts, diagonal], axis=-1)
        gram.derived[labels, reference] = added[:, 0], added[:, 1:] - added[:, :1]
    return gram.derived[labels, reference]


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
                block = gram.blocks([label], reference)[0, 2]
                centred = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
                gram.derived[named] = (centred**2).sum() - (np.diag(centred) ** 2).sum()
            weight += count
            square += 2 * gram.derived[named] / (count - 1) ** 2
    return float(np.sqrt(square) / weight) if weight else np.nan


def against_reference(grams: Sequence[Gram], label: Label, reference: Truth) -> list[Gram]:
    """Return the steps that have the label, and the reference too wherever any of them has it."""
    having = [gram for gram in grams if label in gram.labels]
    # One set of steps for both: on unlike steps a ratio would compare prompts, not estimators.
    return [gram for gram in having if gram.measured(reference)] or having


def typical(counts: list[int]) -> int:
    """Return the rounded mean of counts, 0 without any."""
    return round(sum(counts) / len(counts)) if counts else 0


def vector_moments(mean: ArrayLike, power: ArrayLike, truth: ArrayLike, truth_power: ArrayLike) -> Moments:
    """Return what `deleted_moments` returns of one step of different prompts, in time and memory O(P·K) instead of P².

    ‖m‖², ⟨m, ∇J⟩ and ‖∇J‖² are means over pairs of different prompts, Σ_{p≠q} a_p·b_q = (Σ a)·(Σ b) − Σ_p a_p·b_p;
    without prompt p they lose a_p·Σb + b_p·Σa − 2 a_p·b_p.

    Args:
        mean: Gradient of every prompt [P, K], the mean over its groups where there are several.
        power: Mean of ‖g‖² over its groups [P].
        truth: The same of what stands for ∇J [P, K].
        truth_power: And its ‖g‖² [P].

    Returns:
        Arrays [1 + P]: entry 0 from all prompts, entry 1 + p without prompt p. NaN where no pair is left.

    Raises:
        InputError: The shapes do not fit.
    """
    g, u, size, other = (np.asarray(x, dtype=float) for x in (mean, truth, power, truth_power))
    if g.ndim != 2 or u.shape != g.shape or size.shape != g.shape[:1] or other.shape != g.shape[:1]:
        raise InputError(
            f"mean has shape {g.shape}, truth {u.shape}, power {size.shape} and truth_power {other.shape}; pass "
            "[P, K], [P, K], [P] and [P]."
        )
    n = len(g)
    counts = np.array([n, *[n - 1] * n])
    pairs = counts * (counts - 1)
    mean_power, mean_truth_power = (
        np.concatenate([[x.sum()], x.sum() - x]) / np.where(counts > 0, counts, np.nan) for x in (size, other)
    )
    products = []
    for a, b in ((g, g), (g, u), (u, u)):
        same = np.einsum("pk,pk->p", a, b)
        total = float(a.sum(axis=0) @ b.sum(axis=0) - same.sum())
        touched = a @ b.sum(axis=0) + b @ a.sum(axis=0) - 2 * same
        products.append(np.concatenate([[total], total - touched]) / np.where(pairs > 0, pairs, np.nan))
    mean_sq, along, truth_sq = products
    return Moments(mean_power, mean_sq, along, truth_sq, mean_truth_power)


@dataclass(frozen=True)
class SketchNoise:
    """Standard errors that sketching adds, given the gradients, without the sampling error of prompts and rollouts."""

    variance: Float  # Of the batch variance of each of M estimators [M], in its unit
    log_ratio: Float  # Of log(V_m/V_m') [M, M], zero on the diagonal; NaN where a variance is not positive


def sketch_noise(gram: ArrayLike, dim: int) -> SketchNoise:
    """How far batch variances from sketches lie from those of the gradients themselves; NaN below two prompts.

    V_m = tr K_mm with K_mm' = H G_mm' H/(P(P−1)), H the centring matrix. A count sketch estimates any trace
    ⟨A, G⟩ = tr Q with variance at most 2‖Q‖²/dim, hence SE(V_m)² ≤ 2 tr(K_mm²)/dim and, to first order,
    SE(log V_m/V_m')² ≤ (2/dim)[tr(K_mm²)/V_m² + tr(K_m'm'²)/V_m'² − 2 tr(K_mm' K_m'm)/(V_m V_m')]. It falls with the
    number of independent directions: with one prompt pair SE(V) = V √(2/dim), with P orthogonal gradients of one norm
    √(P−1) times less. Estimators that share their rollouts share the sketch's noise, and a ratio keeps what they do not
    share. With a matrix that is itself from sketches, traces of squares come out larger by about (tr K)²/dim.

    Source: the variance of feature hashing (Weinberger et al., 2009) applied to a quadratic form; checked over seeds.
    """
    inner = np.asarray(gram, dtype=float)
    prompts = inner.shape[-1]
    if prompts < 2:
        missing = np.full(len(inner), np.nan)
        return SketchNoise(missing, np.full(inner.shape[:2], np.nan))
    # H G H from both sides: the variance is around the mean of the prompts.
    centred = inner - inner.mean(-1, keepdims=True)
    centred = (centred - centred.mean(-2, keepdims=True)) / (prompts * (prompts - 1))
    squares = np.einsum("mnpq,mnpq->mn", centred, centred)  # tr(K_mn K_nm), since K_nm = K_mnᵀ
    self_products, variance = np.diag(squares), np.einsum("mmpp->m", centred)
    # A sketched variance can come out negative, and has no logarithm then.
    v = np.where(variance > 0, variance, np.nan)
    spread = self_products / v**2
    shared = squares / np.multiply.outer(v, v)
    log_ratio = np.sqrt(np.maximum(spread[:, None] + spread - 2 * shared, 0.0) * 2 / dim)
    return SketchNoise(np.sqrt(2 * self_products / dim), log_ratio)
