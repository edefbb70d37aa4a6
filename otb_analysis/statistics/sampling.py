"""Drawing tokens with known probabilities, to measure exactly when not all can be, and totals from such a sample.

The design is randomised systematic sampling: the population is put in random order, its inclusion probabilities are
laid end to end, and a comb of unit pitch with a random start picks whatever its teeth hit. The size is fixed, so the
cost is known beforehand; every π_k is exact (Pareto sampling only approximates them, conditional Poisson needs a
search for working probabilities); what has π_k = 1 is always taken. Sources: Madow (1949); Hartley and Rao (1962);
Brewer and Donadio (2003); Tillé, Sampling Algorithms (2006).

In random order the design has high entropy, so that variances of totals need the first-order probabilities only (Hájek,
1964; Deville, 1999). For equal probabilities the formula is exactly that of simple random sampling without replacement,
and units with π = 1 contribute nothing. Sources: Horvitz and Thompson (1952); Särndal, Swensson and Wretman (1992).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.types import Bool, Float, Int

UNIFORM_SHARE = 0.1
"""Share of every sample that is drawn uniformly. It bounds w/π by 10·K/n·w where the size measure is nearly blind, at
the price of somewhat wider errors where it is not (Hesterberg, 1995: defensive mixtures)."""


def inclusion_probabilities(size: ArrayLike, n: int, uniform_share: float = UNIFORM_SHARE) -> Float:
    """Probabilities with which a sample of n takes each unit, proportional to a size measure and at most 1.

    π_k = min(1, c·((1 − u)·x_k/Σx + u/K)) [K], u the uniform share and c such that Σ π_k = n: units large enough are
    taken for certain, and the rest share what is left of n. With equal sizes, or u = 1, π_k = n/K.

    Args:
        size: Size measure x of each unit, such as a proxy energy [K].
        n: Units to draw, at least 1; all of them where it is K or more.

    Raises:
        InputError: A size is negative or not finite, n is not positive, or u is outside [0, 1].
    """
    x = np.asarray(size, np.float64)
    if x.ndim != 1 or not (np.isfinite(x).all() and (x >= 0).all()):
        raise InputError("size holds a value that is negative or not finite; pass one number of at least 0 per unit.")
    if not (n >= 1 and 0 <= uniform_share <= 1):
        raise InputError(f"n is {n} and uniform_share {uniform_share}; pass n of at least 1 and a share from 0 to 1.")
    if n >= x.size:
        return np.ones(x.size)
    largest = x.max()  # Σx of huge sizes would overflow
    x = x / largest if largest > 0 else np.ones(x.size)
    # Without the uniform part a unit of tiny size could be drawn, once in a while, at a weight of thousands.
    mixed = (1 - uniform_share) * x / x.sum() + uniform_share / x.size
    certain = np.zeros(x.size, bool)
    while True:  # each pass takes at least one more unit for certain, or is the last
        rest = mixed[~certain].sum()
        prob = np.where(certain, 1.0, (n - certain.sum()) * mixed / rest if rest > 0 else 0.0)
        if not (prob[~certain] >= 1).any():
            return prob
        certain |= prob >= 1


def systematic_sample(inclusion_prob: ArrayLike, seed: int = 0) -> Bool:
    """Draw a sample of fixed size with exactly the given inclusion probabilities.

    Randomised systematic πps: unit k is drawn where [Σ_{j<k} π_j, Σ_{j≤k} π_j) holds one of U, U + 1, U + 2, …, over a
    random order of the units and U uniform in [0, 1). Where Σ π is no whole number the size is one of its neighbours.

    Raises:
        InputError: A probability is outside [0, 1] or not finite.
    """
    prob = np.asarray(inclusion_prob, np.float64)
    if prob.ndim != 1 or not ((prob >= 0) & (prob <= 1)).all():
        raise InputError("inclusion_prob holds a value outside [0, 1]; take them from inclusion_probabilities.")
    rng = np.random.default_rng(seed)
    drawn = prob >= 1
    # A random order gives the design high entropy, which the variance formula of totals takes for granted.
    order = rng.permutation(np.flatnonzero(~drawn))
    ends = np.cumsum(prob[order])
    if ends.size and abs(ends[-1] - round(ends[-1])) < 1e-6:
        ends *= round(ends[-1]) / ends[-1] if ends[-1] > 0 else 1.0  # rounding must not lose or add a unit
    teeth = np.floor(ends - rng.random()) + 1
    drawn[order] = np.diff(teeth, prepend=0.0) > 0
    return drawn


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
        raise InputError(f"inclusion_prob is {prob[k]} at unit {k}, which was drawn; pass what it was drawn with.")
    guess = np.asarray(predicted, np.float64)
    if guess.shape != y.shape or not np.isfinite(guess).all():
        raise InputError(f"predicted has shape {guess.shape}; pass one finite prediction per unit, shape {y.shape}.")
    labels, index = np.unique(where, return_inverse=True)
    labels = np.zeros(1, np.int64) if domain is None else labels.astype(np.int64)
    count, drawn = len(labels), ~np.isnan(y)
    expanded, of_drawn = (y - guess)[drawn] / prob[drawn], index[drawn]
    # Expanded values vary only through units that were left to chance, weighted by how much.
    c = 1 - prob[drawn]  # 0 for what was certain to be taken
    # The sample has a fixed size, so values in proportion to π cancel: only deviations from ū count.
    total = c.sum()
    squares, linear = np.bincount(of_drawn, c * expanded**2, count), np.bincount(of_drawn, c * expanded, count)
    # Where a domain has units left to chance but none of them was drawn, nothing shows their spread: NaN.
    chance = np.bincount(index[prob < 1], minlength=count) > 0
    variance = np.where(chance, np.nan, 0.0)
    # Corrects the bias of a variance around an estimated mean: 1 − 1/n for equal probabilities.
    freedom = 1 - ((c / total) ** 2).sum() if total > 0 else 0.0
    if freedom > 1e-12:
        # Two large sums nearly cancel here; rounding can leave a variance of −1e-17.
        spread = np.maximum(squares - linear**2 / total, 0.0) / freedom
        variance = np.where(chance & (np.bincount(of_drawn[c > 0], minlength=count) > 0), spread, variance)
    estimate = np.bincount(index, guess, count) + np.bincount(of_drawn, expanded, count)
    return Totals(labels, estimate.astype(np.float64), np.sqrt(variance))
