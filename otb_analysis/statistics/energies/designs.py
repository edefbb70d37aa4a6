"""Drawing tokens with known probabilities: which ones to measure exactly when not all can be.

The design is randomised systematic sampling: the population is put in random order, its inclusion probabilities are
laid end to end, and a comb of unit pitch with a random start picks whatever its teeth hit. The size is fixed, so the
cost is known beforehand; every π_k is exact (Pareto sampling only approximates them, conditional Poisson needs a
search for working probabilities); what has π_k = 1 is always taken. In random order the design has high entropy, so
that the variance formula of `totals`, which needs no joint probabilities, holds. Sources: Madow (1949); Hartley and
Rao (1962); Brewer and Donadio (2003); Tillé, Sampling Algorithms (2006).
"""

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.types import Bool, Float

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
    # A random order gives the design high entropy, which the variance formula of `totals` takes for granted.
    order = rng.permutation(np.flatnonzero(~drawn))
    ends = np.cumsum(prob[order])
    if ends.size and abs(ends[-1] - round(ends[-1])) < 1e-6:
        ends *= round(ends[-1]) / ends[-1] if ends[-1] > 0 else 1.0  # rounding must not lose or add a unit
    teeth = np.floor(ends - rng.random()) + 1
    drawn[order] = np.diff(teeth, prepend=0.0) > 0
    return drawn
