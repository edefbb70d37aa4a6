"""Success on prompts of which each was answered several times: avg@k and pass@k, with intervals over prompts.

The answers to one prompt share its difficulty, so a prompt is one observation, however many answers it has.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from otb_analysis.errors import InputError
from otb_analysis.statistics.inference.intervals import LEVEL, MIN_CLUSTERS, Interval, cluster_jackknife
from otb_analysis.types import Float


@dataclass(frozen=True)
class Passing:
    """Success on P prompts of n answers each."""

    average: Interval  # avg@n: the share of answers that are right, which is also the estimate of pass@1
    at: dict[int, Interval]  # k → pass@k, the chance that at least one of k answers is right, for k = 1, 2, 4, … ≤ n

    @property
    def largest(self) -> int:
        """The largest k."""
        return max(self.at)


def passing(success: ArrayLike) -> Passing:
    """Return avg@n and pass@k of answers, k = 1, 2, 4, … ≤ n, each with its 95 % interval over prompts.

    Raises:
        InputError: There are no answers, or their shape is another.
    """
    right = np.asarray(success, dtype=bool)
    if right.ndim != 2 or not right.size:
        raise InputError(f"success has shape {right.shape}; pass one row per prompt and one column per answer, [P, n].")
    n, count = right.shape[1], right.sum(axis=1)
    # One number per prompt: its answers share its difficulty and are no independent observations.
    at = {k: share_interval(pass_at_k(count, n, k), f"pass@{k}") for k in powers_of_two(n)}
    return Passing(share_interval(count / n, f"avg@{n}"), at)


def pass_at_k(correct: ArrayLike, n: int, k: int) -> Float:
    """Return 1 − C(n−c, k)/C(n, k) per prompt [P], the unbiased estimate of the chance that one of k answers is right.

    c [P] counts the right ones among n answers.

    C(n−c, k)/C(n, k) is the share of the k-subsets of the n answers that hold no right one; it is computed as
    Π_{j<k} (n−c−j)/(n−j), in which nothing overflows. For k = 1 it is c/n, for k = n it is 1 where any answer is right.
    Chen et al. 2021 (arXiv 2107.03374), equation 1. Unbiased: proved there.

    Raises:
        InputError: k is not in 1 … n, or a count not in 0 … n.
    """
    count = np.asarray(correct, dtype=float)
    if not 1 <= k <= n:
        raise InputError(f"k is {k} but every prompt has {n} answers; choose k from 1 to {n}.")
    if count.size and not (count.min() >= 0 and count.max() <= n):
        raise InputError(f"correct holds {count.min():g} to {count.max():g} of {n} answers; pass counts from 0 to {n}.")
    drawn = np.arange(k)  # a factor of 0 appears as soon as k exceeds the wrong answers
    return 1.0 - (np.maximum(n - count[..., None] - drawn, 0.0) / (n - drawn)).prod(axis=-1)


def share_interval(values: ArrayLike, estimand: str) -> Interval:
    """Return the mean of one value in [0, 1] per prompt, with a 95 % interval that stays in [0, 1].

    The delete-one-prompt jackknife on the logit scale. Where that scale ends, at a mean of 0 or 1 or one prompt away
    from it, the interval is Clopper and Pearson's with S = Σ values successes in P draws, real S allowed: a value in
    [0, 1] of mean p has at most the variance p(1 − p) of a success. For S = 0 it is [0, 1 − (α/2)^{1/P}]. Below
    `MIN_CLUSTERS` prompts it is a point without interval.
    """
    x = np.asarray(values, dtype=float)
    interval = cluster_jackknife(x[:, None], lambda rows: rows[..., 0], estimand, scale="logit")
    if interval is not None and (interval.low is not None or x.size < MIN_CLUSTERS):
        return interval
    # Too near 0 or 1 for the logit: leaving out one prompt, or none, reaches the end of the scale.
    # A value in [0, 1] varies at most as much as a success, so counting it as a part of one is on the safe side.
    total, rest, tail = x.sum(), (1.0 - x).sum(), (1 - LEVEL) / 2
    low = float(special.betaincinv(total, rest + 1, tail)) if total > 0 else 0.0
    high = float(special.betainccinv(total + 1, rest, tail)) if rest > 0 else 1.0
    return Interval(float(x.mean()), low, high, x.size, estimand)


def powers_of_two(n: int) -> list[int]:
    """Return 1, 2, 4, … up to n."""
    return [1 << i for i in range(n.bit_length())]
