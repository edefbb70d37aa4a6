"""Baselines from the tree that the rollouts of a group form: rollouts that share a prefix share its value.

Prefixes are made of policy tokens; a tool's answers in between are assumed to follow from them.
"""

import numpy as np

from otb_analysis.arrays import Groups, unsqueeze
from otb_analysis.errors import InputError
from otb_analysis.estimators.batch import BaselineResult, Batch, check_shapes, prepare, provided
from otb_analysis.estimators.means import group_scale
from otb_analysis.estimators.spec import NoOptions
from otb_analysis.types import EstimatorInputs, Float


def prefix_values(inputs: EstimatorInputs) -> Float:
    """Return the share of correct rollouts through the prefix before each token [N, T]; zero outside the mask.

    V(h_t) = mean_j R_j over the rollouts of the group that start with h_t, oneself included: with rewards 0 or 1 the
    target of token-level value models (TVM, arXiv 2407.12863). Fit a critic, `EstimatorInputs.value`, to it; used as a
    baseline itself it leaves A = 0 wherever a prefix is unique. Abstract.

    Raises:
        InputError: There are no token ids, or a shape or value does not fit.
    """
    if inputs.token_id is None:
        raise InputError("prefix_values needs token_id, which is None; pass it in EstimatorInputs.")
    check_shapes(inputs, ("token_id",))
    mask = np.asarray(inputs.mask)
    batch, _ = prepare(inputs, np.arange(len(mask)), Groups.of(inputs.group), ("token_id",))
    total, count = prefix_sums(batch)
    return unsqueeze(total[:, :-1] / np.maximum(count[:, :-1], 1), mask)


def tempo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean, add the change of the prefix's value, and divide by the standard deviation.

    A_t = [G_t − mean_j R_j + V(h_{t+1}) − V(h_t)] / std_j R_j, ddof 0, V(h) the mean return of the group's rollouts
    that start with h. Where nothing branches the change is zero: GRPO with ddof 0. With the true V the change has the
    mean ∇J too, so the sum aims at up to 2∇J before the division. Scaling is a guess; arXiv 2509.18314.
    """
    total, count = prefix_sums(batch)
    values = total / np.maximum(count, 1)
    flat, scale = group_scale(batch, ddof=0, epsilon=0.0)
    baseline = values[:, :1] + values[:, :-1] - values[:, 1:]
    return BaselineResult(np.where(batch.is_singleton[:, None], 0.0, baseline), flat[:, None], scale[:, None])


def tempo_loo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the mean return of the other rollouts that share the prefix.

    B_{i,t} = mean_{j≠i} R_j over rollouts that start with h_{i,t}; where no other does (`fallback`), over those that
    share the longest prefix anyone shares with it. It depends on h_t and on other rollouts, so it is unbiased, which
    V(h_{t+1}) of `tempo` is not. Where nothing is shared but the prompt it is `rloo`. Proved.
    """
    total, count = prefix_sums(batch)
    shared = count[:, :-1] > 1
    others = (total - batch.total[:, None]) / np.maximum(count - 1, 1)
    deepest = np.maximum(shared.sum(axis=1, keepdims=True) - 1, 0)
    column = np.minimum(np.arange(shared.shape[1]), deepest)
    baseline = np.where(batch.is_singleton[:, None], 0.0, np.take_along_axis(others, column, axis=1))
    return BaselineResult(baseline, ~shared)


def prefix_sums(batch: Batch) -> tuple[Float, Float]:
    """Return, for every prefix of every rollout, what the rollouts of its group that start with it were paid.

    One pass over positions that stops where no two rollouts share a prefix any more.

    Returns:
        Σ_j R_j over rollouts with the same first k tokens, oneself included, in column k [N, T + 1], and how many they
        are [N, T + 1], which never grows along a row.
    """
    n, t = batch.mask.shape
    total = np.repeat(batch.total[:, None], t + 1, axis=1)
    count = np.concatenate([batch.present[:, None], batch.alive], axis=1)
    names, token = np.unique(provided(batch.token_id), return_inverse=True)
    token = token.reshape(n, t)
    rows = np.flatnonzero(batch.present)
    node = batch.groups.index[rows]
    for k in range(t + 1):
        if k:
            longer = batch.mask[rows, k - 1]
            rows = rows[longer]
            node = node[longer] * len(names) + token[rows, k - 1]
        _, node, size = np.unique(node, return_inverse=True, return_counts=True)
        total[rows, k] = np.bincount(node, batch.total[rows], minlength=len(size))[node]
        count[rows, k] = size[node]
        if (size == 1).all():
            break
    return total, count
