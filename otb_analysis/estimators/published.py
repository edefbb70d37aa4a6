"""Baselines of other published methods: centred elsewhere than at a mean, rescaled, or from a critic, a tree or turns.

The tree is the one that the rollouts of a group form: rollouts that share a prefix share its value. Prefixes are made
of policy tokens; a tool's answers in between are assumed to follow from them.
"""

from dataclasses import replace

import numpy as np

from otb_analysis.arrays import Groups, unsqueeze
from otb_analysis.energies import decayed_energy
from otb_analysis.errors import InputError
from otb_analysis.estimators.group import ROUNDING, group_mean, group_scale
from otb_analysis.estimators.spec import (
    NOWHERE,
    BaselineResult,
    Batch,
    NoOptions,
    QuantileOptions,
    ValueOptions,
    check_shapes,
    prepare,
)
from otb_analysis.types import EstimatorInputs, Float, Int

WHITENING_EPSILON = 1e-8  # Added to the variance by the published code


def maxrl(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean and divide by it.

    A_t = (G_t − r̄)/r̄, r̄ = mean_j R_j; A = 0 where r̄ = 0 (`fallback`). With rewards 0 or 1, N rollouts and success rate
    p its expectation is Σ_{k<N} (1 − p)^{k−1} ∇p, the gradient of −Σ_{k<N} (1 − p)^k/k, which is log p as N grows: rare
    successes count more. Public code; the expectation is proved.
    """
    groups = batch.groups
    n = np.maximum(groups.sum(batch.present), 1)
    mean, size = groups.sum(batch.total) / n, np.sqrt(groups.sum(batch.total**2) / n)
    nothing = batch.is_singleton | groups.spread(np.abs(mean) <= ROUNDING * size)
    scale = np.divide(1.0, groups.spread(mean), out=np.zeros(len(nothing)), where=~nothing)
    return replace(group_mean(batch, options), fallback=nothing[:, None], scale=scale[:, None])


def mc_grpo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the median total return of the group, whose median rollout is one more than counts.

    A = (R − median_j R_j)·N/(N − 1) for an odd N: the median rollout has A = 0, and the mean is over the other N − 1.
    An even N has no median rollout: the middle of two, and no factor. Known from the abstract; that nothing is divided
    by a spread, and the even N, are our choice.
    """
    n = batch.groups.sum(batch.present).astype(np.int64)
    median = (_ordered(batch, (n - 1) // 2) + _ordered(batch, n // 2)) / 2
    factor = np.where((n % 2 == 1) & (n > 1), n / np.maximum(n - 1, 1), 1.0)
    baseline = np.where(batch.is_singleton, 0.0, batch.groups.spread(median))
    return BaselineResult(baseline[:, None], batch.is_singleton[:, None], scale=batch.groups.spread(factor)[:, None])


def qae(batch: Batch, options: QuantileOptions) -> BaselineResult:
    """Centre by a quantile of the total returns of the group.

    B = the least R_j that a share q of the group does not exceed. With rewards 0 or 1 it is 0 where at most 1 − q of
    the group succeeds, so that only successes move anything, and 1 elsewhere, so that only failures do. Known from the
    abstract; q = 0.4 and that nothing is divided by a spread are our choice.
    """
    n = batch.groups.sum(batch.present)
    # q·n is rounded: 0.7 · 10 would be the eighth
    rank = np.ceil(options.quantile * n - ROUNDING * n).astype(np.int64) - 1
    quantile = _ordered(batch, np.maximum(rank, 0))
    baseline = np.where(batch.is_singleton, 0.0, batch.groups.spread(quantile))
    return BaselineResult(baseline[:, None], batch.is_singleton[:, None])


def gpg(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean and multiply by the batch's rollouts over those that were paid.

    A = α·(G − mean_j R_j), α = N/max(#{R_j ≠ 0}, 1) over the whole batch. Public code.
    """
    factor = batch.present.sum() / max(np.count_nonzero(batch.total), 1)
    return replace(group_mean(batch, options), scale=np.full((1, 1), factor))


def reinforce_plus_plus_baseline(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean, then whiten over all tokens of the batch.

    With x_i = R_i − mean_j R_j and L_i tokens, A = (G − mean_j R_j − μ)/√(σ² + 1e-8), μ = Σ L_i x_i/Σ L_i and σ² the
    variance of x over tokens, ddof 1. No spread, as with equal returns everywhere, gives A = 0 (`fallback`). A rollout
    alone in its group has mean 0 (`fallback`). Public code, for terminal rewards.
    """
    centre = np.where(batch.is_singleton, 0.0, group_mean(batch, options).baseline[:, 0])
    length = batch.length.astype(np.float64)
    tokens, x = length.sum(), batch.present * (batch.total - centre)
    shift = (length * x).sum() / max(tokens, 1)
    variance = (length * (x - shift) ** 2).sum() / max(tokens - 1, 1)
    flat = np.sqrt(variance) <= ROUNDING * np.sqrt((length * batch.total**2).sum() / max(tokens, 1))
    scale = 0.0 if flat else 1 / np.sqrt(variance + WHITENING_EPSILON)
    return BaselineResult((centre + shift)[:, None], (batch.is_singleton | flat)[:, None], scale=np.full((1, 1), scale))


def _ordered(batch: Batch, rank: Int) -> Float:
    """Return the total return of each group with so many below it, 0 where there is none [P]."""
    groups, count = batch.groups, batch.groups.count
    order = np.lexsort((batch.total, batch.present == 0, groups.index))  # those without tokens come last
    starts = np.cumsum(count) - count
    place = np.minimum(starts + np.minimum(rank, np.maximum(count - 1, 0)), max(len(order) - 1, 0))
    return batch.total[order[place]] if len(order) else np.zeros(len(count))


def position_optimal(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the variance-optimal constant of each position.

    B_t* = E[s_t · Σ_k s_k G_k] / E‖s_t‖², passed in as `position_baseline`; off-policy E[ρ_t s_t·g]/E[ρ_t²‖s_t‖²].
    Any other position-dependent B costs exactly Σ_t E‖s_t‖² (B_t − B_t*)² of variance. Unbiased as long as B* comes
    from rollouts other than the ones it is used on. Proved.
    """
    return BaselineResult(batch.position_baseline, NOWHERE)


def value(batch: Batch, options: ValueOptions) -> BaselineResult:
    """Centre by the critic's value of the prefix, or advance by generalized advantage estimation.

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V(h_{t+1}) − V(h_t), V = 0 after the end; B_t = G_t − A_t. The defaults
    γ = λ = 1 give B_t = V(h_t), unbiased for any critic that has not seen these rollouts; with λ < 1 the critic's
    error is bias, and γ < 1 has another target. V is not variance-optimal: the best prefix function is
    E[s_t·g|h]/E[‖s_t‖²|h]. Public code.
    """
    v = batch.value
    if options.discount == options.decay == 1.0:
        return BaselineResult(v, NOWHERE)
    # One position later, 0 after the last
    later, next_v = (np.pad(x[:, 1:], ((0, 0), (0, int(x.shape[1] > 0)))) for x in (batch.returns, v))
    surprise = batch.returns - later + options.discount * next_v - v
    backwards = decayed_energy(surprise[:, ::-1], options.discount * options.decay)
    return BaselineResult(batch.returns - backwards[:, ::-1], NOWHERE)


def tvm(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by a critic fitted to the share of correct rollouts through each prefix.

    B_t = V(h_t), as `value`; what differs is the critic's target, `prefix_values` of earlier groups. Fitted on these
    very rollouts, the empirical share gives A = 0 wherever a prefix is unique. Abstract of TVM, arXiv 2407.12863.
    """
    return BaselineResult(batch.value, NOWHERE)


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
    batch, _ = prepare(inputs, np.arange(len(mask)), Groups.from_labels(inputs.group), ("token_id",))
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
    names, token = np.unique(batch.token_id, return_inverse=True)
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


def trloo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the mean return of the same turn in the other rollouts of the prompt.

    B_{i,k} = mean_{j≠i} G_{j,k} over rollouts with a turn k, G_{j,k} the return-to-go at the turn's first policy token;
    A = G − B at every token of the turn. A turn that no other rollout has keeps A = G (`fallback`). One turn and one
    terminal reward give `rloo`. Unbiased: whether a rollout has turn k is known before the turn. Public code.
    """
    row, _ = np.nonzero(batch.mask)
    _, turn = np.unique(batch.turn[batch.mask], return_inverse=True)
    n_turns = turn.max(initial=0) + 1
    # rollout_turn numbers every (rollout, turn) pair that has a token; `back` leads from tokens to these pairs
    rollout_turn, first, back = np.unique(row * n_turns + turn, return_index=True, return_inverse=True)
    at_start = batch.returns[batch.mask][first]
    peers = Groups.from_labels(batch.groups.index[rollout_turn // n_turns] * n_turns + rollout_turn % n_turns)
    count = peers.spread(peers.count)
    mean = (peers.spread(peers.sum(at_start)) - at_start) / np.maximum(count - 1, 1)
    alone = count < 2
    baseline, fallback = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape, bool)
    baseline[batch.mask], fallback[batch.mask] = np.where(alone, 0.0, mean)[back], alone[back]
    return BaselineResult(baseline, fallback)
