"""Groups of N rollouts: every multiset of completions with its probability, through the public `estimate`."""

from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import comb, factorial
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from otb_analysis.errors import InputError
from otb_analysis.estimators import entry_of, estimate
from otb_analysis.types import Float, Int
from studies.lib.enumeration.population import position_optimum, values
from studies.lib.enumeration.trees import GroupMoments, Tree, weighted_moments

MOST_GROUPS = 200_000


def multisets(tree: Tree, n: int, chance: Float | None = None) -> tuple[Int, Float]:
    """Return every group of n rollouts up to order [K, N], with its probability [K].

    P = N!/Π_k c_k! · Π_k p_k^{c_k}, for estimators that do not depend on the order of a group. p is how often each
    completion is sampled, or `chance` [M].

    Raises:
        InputError: There are too many groups to enumerate.
    """
    size = comb(len(tree.prob) + n - 1, n)
    if size > MOST_GROUPS:
        raise InputError(
            f"{len(tree.prob)} completions in groups of {n} make {size} groups but at most {MOST_GROUPS} are "
            "enumerated; take a smaller tree or group."
        )
    members = np.array(list(combinations_with_replacement(range(len(tree.prob)), n)), np.int64).reshape(-1, n)
    repeats = np.ones(members.shape)  # 1, 2, 3, … along equal neighbours, so the product is Π c_k!
    for k in range(1, n):
        repeats[:, k] = np.where(members[:, k] == members[:, k - 1], repeats[:, k - 1] + 1, 1)
    chance = tree.prob if chance is None else chance
    return members, factorial(n) / repeats.prod(axis=1) * chance[members].prod(axis=1)


def sequences(tree: Tree, n: int) -> tuple[Int, Float]:
    """Return every group of n rollouts in every order [K, N], with its probability [K].

    Raises:
        InputError: There are too many groups to enumerate.
    """
    if len(tree.prob) ** n > MOST_GROUPS:
        raise InputError(
            f"{len(tree.prob)} completions in groups of {n} make {len(tree.prob) ** n} ordered groups but at most "
            f"{MOST_GROUPS} are enumerated; take a smaller tree or group."
        )
    members = np.array(list(product(range(len(tree.prob)), repeat=n)), np.int64).reshape(-1, n)
    return members, tree.prob[members].prod(axis=1)


def group_gradients(name: str, tree: Tree, members: Int, options: Any = None, source: str = "exact") -> Float:
    """Return ḡ = (1/N) Σ_i Σ_t A_{i,t} s_{i,t} of each group; off-policy each score carries its token's ratio."""
    entry, m, value = entry_of(name), len(tree.prob), values(tree)
    if entry.batch_coupled:
        # Each group is a batch of its own; those that are alike in everything the estimator reads are estimated once
        whole = replace(tree.inputs(np.arange(m), np.zeros(m, np.int64), source), value=value)
        read = [getattr(whole, field) for field in ("reward", "mask", *entry.needs, *entry.uses)]
        _, kind = np.unique(np.column_stack([x for x in read if x is not None]), axis=0, return_inverse=True)
        kind = kind.reshape(-1)  # NumPy 2.0 keeps the axis
        if not entry.ordered:
            members = np.take_along_axis(members, np.argsort(kind[members], axis=1), axis=1)
        _, first, same = np.unique(kind[members], axis=0, return_index=True, return_inverse=True)
        alone = np.zeros(members.shape[1], np.int64)
        batches = [replace(tree.inputs(one, alone, source), value=value[one]) for one in members[first]]
        advantages = np.stack([estimate(name, inputs, options).advantage for inputs in batches])
        advantage = advantages[same.reshape(-1)].reshape(members.size, -1)
    else:
        rows, group = members.reshape(-1), np.repeat(np.arange(len(members)), members.shape[1])
        optimum = np.broadcast_to(position_optimum(tree), tree.mask.shape)[rows]
        inputs = replace(tree.inputs(rows, group, source), value=value[rows], position_baseline=optimum)
        advantage = estimate(name, inputs, options).advantage
    return linear_gradients(tree, members, advantage * tree.ratio[members.reshape(-1)])


def linear_gradients(tree: Tree, members: Int, weight: Float) -> Float:
    """Return (1/N) Σ_i Σ_t c_{i,t} s_{i,t} of each group [K, D]; c holds the rollouts of all groups [K·N, T]."""
    k, n = members.shape
    t = tree.mask.shape[1]
    # Gradients are linear in the scores: one sparse matrix of weights times the scores of all completions.
    column = (members.reshape(k, n, 1) * t + np.arange(t)).reshape(-1)
    coefficient = csr_array((weight.reshape(-1) / n, column, np.arange(k + 1) * (n * t)), shape=(k, len(tree.prob) * t))
    return coefficient @ tree.score.reshape(-1, tree.score.shape[2])


def group_moments(name: str, tree: Tree, n: int, options: Any = None, source: str = "exact") -> GroupMoments:
    """Return the exact moments of an estimator's group gradient."""
    members, prob = sequences(tree, n) if entry_of(name).ordered else multisets(tree, n)
    return weighted_moments(group_gradients(name, tree, members, options, source), prob, tree.gradient, n)
