"""Token weights on enumerated policies: how far they move the mean of `rloo`, and what that costs or saves."""

import numpy as np

from otb_analysis.enumeration.groups import linear_gradients, multisets
from otb_analysis.enumeration.moments import GroupMoments, weighted_moments
from otb_analysis.enumeration.trees import Tree, TreeSpec
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.objectives.token_weights import (
    DelightOptions,
    StapoOptions,
    TokenWeightInputs,
    token_weights,
)

PEAKED = TreeSpec(vocabulary=3, horizon=3, shared=5, end_token=True, scale=2.0)
"""Policies that are sure of most tokens, as trained ones are."""
WEIGHT_CASES: dict[str, tuple[str, object]] = {
    "`none`": ("none", None),
    "`stapo`, τ_p = .2, τ_h = .6": ("stapo", StapoOptions(0.2, 0.6)),
    "`delightful`": ("delightful", None),
    "`delightful`, η = .25": ("delightful", DelightOptions(0.25)),
}
"""Every token weight; with options where the defaults do nothing on three tokens."""


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
    weight = token_weights(
        name, TokenWeightInputs(inputs.mask, advantage, tree.logprob[rows], tree.entropy[rows]), options
    )
    low = (inputs.mask & (weight < 0.5)).reshape(len(members), -1).sum(axis=1)
    tokens = inputs.mask.reshape(len(members), -1).sum(axis=1)
    moments = weighted_moments(linear_gradients(tree, members, advantage * weight), prob, tree.gradient, n)
    return moments, float(prob @ low / (prob @ tokens))
