"""Token weights on enumerated policies: how far they move the mean of `rloo`, and what that costs or saves."""

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.objectives.token_weights import (
    TOKEN_WEIGHTS,
    CriticalOptions,
    DelightOptions,
    StapoOptions,
    TokenWeightInputs,
    token_weights,
)
from otb_analysis.types import Float
from studies.lib.enumeration.groups import linear_gradients, multisets
from studies.lib.enumeration.moments import GroupMoments, weighted_moments
from studies.lib.enumeration.trees import Tree, TreeSpec

PEAKED = TreeSpec(vocabulary=3, horizon=3, shared=5, end_token=True, scale=2.0)
"""Policies that are sure of most tokens, as trained ones are."""
WEIGHT_CASES: dict[str, tuple[str, object]] = {
    "`none`": ("none", None),
    "`stapo`, τ_p = .2, τ_h = .6": ("stapo", StapoOptions(0.2, 0.6)),
    "`delightful`": ("delightful", None),
    "`delightful`, η = .25": ("delightful", DelightOptions(0.25)),
    "`critical`": ("critical", None),
    "`critical`, κ = ½": ("critical", CriticalOptions(0.5)),
}
"""Every token weight; with options where the defaults do nothing on three tokens."""


def exact_contrast(tree: Tree) -> Float:
    """Return the contrast of every token [M, T] by copies without error: π given that the answer is right, or wrong.

    π(y|h, right) = π(y|h)·v(hy)/v(h) and π(y|h, wrong) = π(y|h)·(1 − v(hy))/(1 − v(h)), v the chance to be right, so
    the contrast is π(y|h)·v(hy)²/(1 − v(hy)) over its sum: a likely token has a high one whatever it does. Where a
    token cannot be wrong any more, such tokens share 1.

    Raises:
        InputError: Rewards are not 0 or 1 at the end.
    """
    right = tree.total
    if not np.isin(right, (0.0, 1.0)).all():
        raise InputError("rewards of the tree are not 0 or 1, so no answer is right or wrong; draw it without dense.")
    at, out = tree.mask, np.zeros(tree.mask.shape)
    answer, paid = (np.broadcast_to(x[:, None], at.shape)[at] for x in (np.exp(tree.logprob.sum(axis=1)), right))
    pairs = tree.prefix[at] * (int(tree.token.max()) + 1) + tree.token[at]  # h and y
    _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
    chance = np.bincount(place, answer * paid) / np.bincount(place, answer)
    pi, prefix = np.exp(tree.logprob[at][first]), tree.prefix[at][first]
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = pi * chance**2 / (1 - chance)
        sure = np.where(np.isinf(odds), pi, 0.0)
        total, certain = (np.bincount(prefix, x)[prefix] for x in (odds, sure))
        share = np.where(certain > 0, sure / certain, np.where(total > 0, odds / total, pi))
    out[at] = share[place]
    return out


def weighed_moments(tree: Tree, name: str, n: int, options: object = None) -> tuple[GroupMoments, float]:
    """Return the exact moments of (1/N) Σ m_{i,t} A_{i,t} s_{i,t} with A of `rloo`, and the share of tokens with m < ½.

    Raises:
        InputError: The tree has no entropies.
    """
    if tree.entropy is None:
        raise InputError("the tree has no entropies, which token weights read; draw it by random_tree.")
    members, prob = multisets(tree, n)
    rows = members.reshape(-1)
    inputs = tree.inputs(rows, np.repeat(np.arange(len(members)), n))
    advantage = estimate("rloo", inputs).advantage
    contrast = exact_contrast(tree)[rows] if "contrast" in TOKEN_WEIGHTS[name].needs else None
    weight = token_weights(
        name, TokenWeightInputs(inputs.mask, advantage, tree.logprob[rows], tree.entropy[rows], contrast), options
    )
    low = (inputs.mask & (weight < 0.5)).reshape(len(members), -1).sum(axis=1)
    tokens = inputs.mask.reshape(len(members), -1).sum(axis=1)
    moments = weighted_moments(linear_gradients(tree, members, advantage * weight), prob, tree.gradient, n)
    return moments, float(prob @ low / (prob @ tokens))
