"""Totals of a population from a sample with known inclusion probabilities, with standard errors.

Variances use the fixed-size formula for designs of high entropy, which needs the first-order probabilities only (Hájek,
1964; Deville, 1999). For equal probabilities it is exactly that of simple random sampling without replacement, and
units with π = 1 contribute nothing. Sources: Horvitz and Thompson (1952); Särndal, Swensson and Wretman (1992).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.types import Float, Int


@dataclass(frozen=True)
class Totals:
    """Estimated totals, one per domain; made by `horvitz_thompson` and `difference_total`."""

    labels: Int  # Domains in ascending order [D]; a single 0 when none were given
    estimate: Float  # Estimated total of each [D]
    # Its standard error [D]: 0 where everything was measured; NaN where it cannot be known because fewer than two units
    # of the sample, or none of this domain's, were left to chance.
    stderr: Float


def horvitz_thompson(values: ArrayLike, inclusion_prob: ArrayLike, domain: ArrayLike | None = None) -> Totals:
    """Estimate totals without bias, whatever size measure the sample was drawn by.

    Ŷ_d = Σ_{k drawn, k in d} y_k/π_k.  With every π = 1 it is the plain sum, with standard error 0.

    Its variance is small where y is nearly proportional to π; V̂ = Σ_k c_k (u_k − ū)²/(1 − Σ_k a_k²), u = y/π within the
    domain and 0 elsewhere, c = 1 − π, a = c/Σc, ū = Σ a·u, sums over what was drawn.

    Args:
        values: y of each unit of the population, NaN where it was not drawn [K].
        inclusion_prob: π of each unit in (0, 1] [K].
        domain: Integer domain of each unit, such as its rollout [K]; None means one domain.

    Raises:
        InputError: Shapes disagree, or a drawn unit has no probability in (0, 1].
    """
    return difference_total(values, np.zeros(np.shape(values)), inclusion_prob, domain)


def difference_total(
    values: ArrayLike, predicted: ArrayLike, inclusion_prob: ArrayLike, domain: ArrayLike | None = None
) -> Totals:
    """Estimate totals with the help of a prediction for every unit.

    Ŷ_d = Σ_{k in d} ŷ_k + Σ_{k drawn, k in d} (y_k − ŷ_k)/π_k.  With ŷ = 0 it is Horvitz–Thompson.

    Unbiased for predictions that do not look at the sample, and nearly so for a fit of few parameters on it; the better
    of the two where residuals y − ŷ vary less than y. It also speaks about domains with hardly a unit drawn, such as a
    single rollout, where Horvitz–Thompson is all or nothing. The standard error is that of the residuals' total.

    Raises:
        InputError: Shapes disagree, a prediction is not finite, or a drawn unit has no probability in (0, 1].
    """
    y, prob, index, labels = _checked(values, inclusion_prob, domain)
    guess = np.asarray(predicted, np.float64)
    if guess.shape != y.shape or not np.isfinite(guess).all():
        raise InputError(f"predicted has shape {guess.shape}; pass one finite prediction per unit, shape {y.shape}.")
    return _totals(y - guess, prob, index, labels, np.bincount(index, guess, len(labels)).astype(np.float64))


def _checked(values: ArrayLike, inclusion_prob: ArrayLike, domain: ArrayLike | None) -> tuple[Float, Float, Int, Int]:
    y, prob = np.asarray(values, np.float64), np.asarray(inclusion_prob, np.float64)
    where = np.zeros(y.shape, np.int64) if domain is None else np.asarray(domain)
    if y.ndim != 1 or not y.shape == prob.shape == where.shape:
        raise InputError(
            f"values has shape {y.shape}, inclusion_prob {prob.shape} and domain {where.shape}; "
            "pass one of each per unit of the population, shape [K]."
        )
    wrong = ~np.isnan(y) & ~((prob > 0) & (prob <= 1))
    if wrong.any():
        k = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"inclusion_prob is {prob[k]} at unit {k}, which was drawn; pass the probability it was drawn with."
        )
    labels, index = np.unique(where, return_inverse=True)
    if domain is None:
        labels = np.zeros(1, np.int64)
    return y, prob, index.astype(np.int64), labels.astype(np.int64)


def _totals(y: Float, prob: Float, index: Int, labels: Int, base: Float) -> Totals:
    """Return totals by domain: `base`, known without the sample, plus the expanded sample."""
    count, drawn = len(labels), ~np.isnan(y)
    expanded, drawn_domain = y[drawn] / prob[drawn], index[drawn]
    # Expanded values vary only through units that were left to chance, weighted by how much.
    c = 1 - prob[drawn]  # 0 for what was certain to be taken
    # The sample has a fixed size, so values in proportion to π cancel: only deviations from ū count.
    total = c.sum()
    squares, linear = np.bincount(drawn_domain, c * expanded**2, count), np.bincount(drawn_domain, c * expanded, count)
    # Where a domain has units left to chance but none of them was drawn, nothing shows their spread: NaN.
    chance = np.bincount(index[(prob < 1)], minlength=count) > 0
    some_drawn = np.bincount(drawn_domain[c > 0], minlength=count) > 0
    variance = np.where(chance, np.nan, 0.0)
    # Corrects the bias of a variance around an estimated mean: 1 − 1/n for equal probabilities.
    freedom = 1 - ((c / total) ** 2).sum() if total > 0 else 0.0
    if freedom > 1e-12:
        # Two large sums nearly cancel here; rounding can leave a variance of −1e-17.
        known = np.maximum(squares - linear**2 / total, 0.0) / freedom
        variance = np.where(chance & some_drawn, known, variance)
    return Totals(labels, base + np.bincount(drawn_domain, expanded, count), np.sqrt(variance))
