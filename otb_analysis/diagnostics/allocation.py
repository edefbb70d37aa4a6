"""How many rollouts each prompt of a batch gets: by predicted p(1 − p), as VIP does, or by any variance that is known.

With one term per prompt, the batch gradient (1/P) Σ_p ḡ_p has within it Σ_p V_p(n_p)/P², V_p(n) the variance of prompt
p's gradient in a group of n. VIP (arXiv 2602.01601, read in its paper and code) takes V_p(n) ∝ p(1 − p)/(n − 1) for
`rloo`, so that n_p − 1 is in proportion to √(p(1 − p)) between the bounds. Our choices: p has a Beta posterior from
earlier rollouts of the prompt (a Gaussian process over prompts in the paper), and sizes are whole numbers, exactly.

The mean stays ∇J only where sizes are chosen before sampling and every prompt keeps its weight 1/P. An average over
rollouts weighs prompt p by n_p instead, which moves the mean towards prompts with p near ½.
"""

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.errors import InputError
from otb_analysis.types import Float, Int

LEAST = 2
"""Fewest rollouts of a prompt: a leave-one-out mean needs another one."""


def bernoulli_variance(successes: ArrayLike, rollouts: ArrayLike) -> Float:
    """Return E[p(1 − p)] of each prompt under a uniform prior and its earlier rollouts.

    αβ/((α + β)(α + β + 1)), α = successes + 1, β = failures + 1: 1/6 without a rollout, p(1 − p) with very many.

    Raises:
        InputError: Successes are not between 0 and the number of rollouts.
    """
    won, tried = np.asarray(successes, float), np.asarray(rollouts, float)
    if not np.all((won >= 0) & (won <= tried)):
        raise InputError("successes must lie between 0 and the number of rollouts of each prompt; pass counts.")
    a, b = won + 1, tried - won + 1
    return a * b / ((a + b) * (a + b + 1))


def vip_variance(weight: ArrayLike, most: int) -> Float:
    """Return V_p(n) = a_p/(n − 1) [P, most + 1], a_p the weight p(1 − p); infinite for n < 2."""
    table = np.full((np.size(weight), most + 1), np.inf)  # for a weight of 0, too: nobody has fewer than two rollouts
    table[:, LEAST:] = np.asarray(weight, float)[:, None] * (1 / np.arange(1, most))
    return table


def allocate(variance: ArrayLike, budget: int) -> Int:
    """Return the sizes n_p [P] with Σ n_p = budget that minimise Σ_p V_p(n_p), each from 2 to `most`.

    The rollouts beyond two a prompt go where they lower the sum most, which is exact since V_p falls and is convex in
    n. A flat V_p takes part last; ties go to the smaller group, so equal prompts get equal groups.

    Args:
        variance: V_p(n) of prompt p in groups of n [P, most + 1]; columns 0 and 1 are not read.

    Raises:
        InputError: The budget does not fit between the bounds, or a variance is not finite or rises with n.
    """
    table = np.asarray(variance, float)
    if table.ndim != 2 or table.shape[1] <= LEAST or not len(table):
        raise InputError(f"variance has shape {table.shape}; pass [P, most + 1] with most at least {LEAST}.")
    prompts, most = len(table), table.shape[1] - 1
    if not prompts * LEAST <= budget <= prompts * most:
        raise InputError(
            f"budget is {budget} rollouts for {prompts} prompts of {LEAST} to {most} each; pass one from "
            f"{prompts * LEAST} to {prompts * most}, or other prompts."
        )
    gain = -np.diff(table[:, LEAST:], axis=1)  # of the rollout that makes n + 1 of n
    rounding = 1e-12 * np.abs(table[:, LEAST:]).max(initial=0)
    wrong = ~np.isfinite(table[:, LEAST:]).all(axis=1) | (gain < -rounding).any(axis=1)
    wrong |= (np.diff(gain, axis=1) > rounding).any(axis=1)
    if wrong.any():
        raise InputError(
            f"variance of prompt {int(wrong.argmax())} is not finite, rises with the group or falls faster in larger "
            "ones; pass V_p(n) = a/n + b/(n(n − 1)) with a and b not below 0."
        )
    prompt, size = np.indices(gain.shape).reshape(2, -1)
    order = np.lexsort((prompt, size, -gain.ravel()))  # by gain, then the smaller group, then the earlier prompt
    return LEAST + np.bincount(prompt[order[: budget - prompts * LEAST]], minlength=prompts)
