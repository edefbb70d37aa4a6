"""Baselines from the rollout's own group: weighted means of returns, one per rollout or one per position.

Those that change from token to token average the return-to-go over the rollouts of the group alive at the same policy
position and differ in the weight; `position_average` has the fallbacks they share. Forms without rollout i are
unbiased, except with tail `zero`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.energies import decayed_energy
from otb_analysis.estimators.spec import (
    NOWHERE,
    BaselineResult,
    Batch,
    DecayOptions,
    LengthOptions,
    NoOptions,
    Tail,
    TailOptions,
)
from otb_analysis.types import Bool, Float

DOMINANT = 0.75
"""Above this share of a group's weight, which at most one rollout has, `total − weight` would cancel."""


def weighted_mean(
    x: Float, weight: Float, counted: Float, groups: Groups, *, leave_one_out: bool
) -> tuple[Float, Bool]:
    """Return the group's weighted mean at every rollout, the plain one of what counts where all weights are zero.

    Σ_j ω_j x_j / Σ_j ω_j over the group, j ≠ i when `leave_one_out`. Nothing is added to the denominator.
    x, ω ≥ 0 and `counted`, 1 or 0, are [N] or [N, T]; ω = 0 takes an entry out.

    Returns:
        The mean, and where the plain one stands in for it because all weights are zero.
    """
    mean, weightless = _means(x, weight, groups, leave_one_out)
    taken = counted > 0 if leave_one_out else groups.sum(counted) > 0
    if (weightless & taken).any():
        mean = np.where(weightless, _means(x, counted, groups, leave_one_out)[0], mean)
    return (mean, weightless) if leave_one_out else (groups.spread(mean), groups.spread(weightless))


def _means(x: Float, weight: Float, groups: Groups, leave_one_out: bool) -> tuple[Float, Bool]:
    """Mean and where all weights are zero: one row per rollout if each leaves itself out, else one row per group."""
    moment = weight * x
    total, whole = groups.sum(weight), groups.sum(moment)
    if leave_one_out:
        total, whole = groups.spread(total), groups.spread(whole)
        # `whole − x` loses its digits where x is nearly the whole. So a rollout that dominates its group gets a sum of
        # the others alone; only few positions need that second sum.
        dominant = (weight > DOMINANT * total).reshape(len(x), -1)
        columns = dominant.any(axis=0)
        dominant = dominant[:, columns]
        others = []
        for all_of_them, part in ((total, weight), (whole, moment)):
            rest = (all_of_them - part).reshape(len(x), -1)
            small = np.where(dominant, 0.0, part.reshape(len(x), -1)[:, columns])
            rest[:, columns] = np.where(dominant, groups.spread(groups.sum(small)), rest[:, columns])
            others.append(rest.reshape(x.shape))
        total, whole = others
    weightless = total == 0
    return np.where(weightless, 0.0, whole / np.where(weightless, 1.0, total)), weightless


def without_self(formula: Callable[..., BaselineResult], summary: str) -> Callable[..., BaselineResult]:
    """Return a formula with its sums over j ≠ i: the baseline of rollout i has not seen it, so it is unbiased.

    `summary` is its line in the catalogue.
    """
    loo = partial(formula, leave_one_out=True)
    loo.__doc__ = summary
    return loo


def rollout_average(batch: Batch, weight: Float, *, leave_one_out: bool = False) -> BaselineResult:
    """Return the baseline that is one weighted mean of total returns per rollout.

    B_i = Σ_j ω_j R_j / Σ_j ω_j; zero total weight gives the plain mean of the same rollouts, a group of one B = 0.
    ω [N] is zero for rollouts without tokens.
    """
    mean, weightless = weighted_mean(batch.total, weight, batch.present, batch.groups, leave_one_out=leave_one_out)
    return BaselineResult(np.where(batch.is_singleton, 0.0, mean)[:, None], (weightless | batch.is_singleton)[:, None])


def position_average(batch: Batch, weight: Float, tail: Tail, *, leave_one_out: bool = False) -> BaselineResult:
    """Return the baseline that is a weighted mean over the rollouts alive at the same policy position.

    B_{i,t} = Σ_j ω_{j,t} G_{j,t} / Σ_j ω_{j,t} over j alive at t; zero total weight gives the plain mean of the same
    rollouts, a group of one B = 0, and where no other rollout is alive the tail policy decides.
    """
    alive, groups, returns = batch.alive, batch.groups, batch.returns
    mean, weightless = weighted_mean(returns, weight * alive, alive, groups, leave_one_out=leave_one_out)
    lone = groups.spread(groups.sum(alive) == 1)
    last: Float | float = 0.0
    if tail != "own_return":  # a group of one keeps B = 0
        finished, _ = weighted_mean(batch.total, batch.final, batch.present, groups, leave_one_out=True)
        last = np.where(batch.is_singleton[:, None], 0.0, returns if tail == "zero" else finished[:, None])
    return BaselineResult(np.where(lone, last, mean), weightless | lone)


GRPO_EPSILON = 1e-6  # Added to the standard deviation by the published code

ROUNDING = 1e-12
"""A standard deviation below this share of the returns' size is rounding: equal totals summed in another order."""


def none(batch: Batch, options: NoOptions) -> BaselineResult:
    """Return the return-to-go itself.

    B = 0, A_t = G_t. Unbiased; the yardstick a baseline has to beat.
    """
    return BaselineResult(np.zeros((1, 1)), NOWHERE)


def batch_mean(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the mean total return of the whole batch.

    B = (1/N) Σ_j R_j over all rollouts of all prompts. Public code; the group mean when the batch is one group.
    """
    n = len(batch.mask)
    one_group = replace(batch, groups=Groups(np.zeros(n, np.int64), np.zeros(1, np.int64)))
    return group_mean(one_group, options, leave_one_out=leave_one_out)


batch_mean_loo = without_self(batch_mean, "Centre by the mean total return of all other rollouts in the batch.")


def group_mean(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the mean total return of the rollout's own group.

    B_i = (1/N) Σ_j R_j. Its expectation is (1 − 1/N)·∇J: shorter by 1/N, direction intact. Public code.
    """
    return rollout_average(batch, batch.present, leave_one_out=leave_one_out)


rloo = without_self(group_mean, "Centre by the mean total return of the *other* rollouts of the group.")
"""B_i = Σ_{j≠i} R_j / (N − 1); with one terminal reward A = N/(N−1)·(R − mean). Public code."""


def opo(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the length-weighted mean total return of the group.

    B = Σ_j L_j R_j / Σ_j L_j, L in policy tokens. Equal lengths give the group mean, and constant token energy turns
    `sequence_optimal` into it. Public code.
    """
    return rollout_average(batch, batch.length.astype(np.float64), leave_one_out=leave_one_out)


opo_loo = without_self(opo, "Centre by the length-weighted mean total return of the other rollouts.")


def length_power(batch: Batch, options: LengthOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the mean total return of the group, weighted with a power of lengths.

    B = Σ_j L_j^α R_j / Σ_j L_j^α: `group_mean` for α = 0, `opo` for α = 1. The energy of a rollout grows more slowly
    than its length where later tokens are surer. An exponent on `opo`, as in the α-weighted baseline of
    faabian.github.io/blog/alpha.html; that page was seen without its formulas, and no public code was.
    """
    weight = batch.present * np.maximum(batch.length, 1.0) ** options.exponent
    return rollout_average(batch, weight, leave_one_out=leave_one_out)


length_power_loo = without_self(
    length_power, "Centre by the mean return of the others, weighted with a power of lengths."
)


def grpo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the group mean and divide by the group's standard deviation.

    A_t = (G_t − mean_j R_j) / (std_j R_j + 1e-6), ddof 1. A group of one, or of equal total returns, has no scale:
    A = 0 there. Public code, for terminal rewards; with per-token rewards mean and std stay those of total returns.
    """
    flat, scale = group_scale(batch, ddof=1, epsilon=GRPO_EPSILON)
    return replace(group_mean(batch, options), fallback=flat[:, None], scale=scale[:, None])


def group_scale(batch: Batch, *, ddof: int, epsilon: float) -> tuple[Bool, Float]:
    """Return one over the standard deviation of the group's total returns.

    Returns:
        Where there is no scale, a group of one or of equal returns up to rounding [N], and the scale, 0 there [N].
    """
    groups, present = batch.groups, batch.present
    n = groups.sum(present)
    centre = groups.spread(groups.sum(batch.total) / np.maximum(n, 1))
    std = np.sqrt(groups.sum(present * (batch.total - centre) ** 2) / np.maximum(n - ddof, 1))
    size = np.sqrt(groups.sum(batch.total**2) / np.maximum(n, 1))
    flat = batch.is_singleton | groups.spread(std <= ROUNDING * size)
    return flat, np.divide(1.0, groups.spread(std) + epsilon, out=np.zeros(len(flat)), where=~flat)


def classic_optimal(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the return weighted with the exact squared norm of each rollout's score.

    B = Σ_j ‖S_j‖² R_j / Σ_j ‖S_j‖², S_j = Σ_t s_{j,t}: the sample form of the classic optimal scalar
    E[R‖S‖²]/E‖S‖² for one terminal reward. Proved.
    """
    return rollout_average(batch, batch.rollout_norm_sq, leave_one_out=leave_one_out)


classic_optimal_loo = without_self(classic_optimal, "Centre by the norm-weighted return of the other rollouts.")


def sequence_optimal(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the return weighted with the energy each rollout realized.

    B = Σ_j W_{j,T} R_j / Σ_j W_{j,T}, W_T = Σ_t ρ_t² w_t. Since E[s_t·s_k] = 0 for t ≠ k, E‖S‖² = E W_T: the cheap
    form of `classic_optimal`. Constant token energy gives `opo`. Proved.
    """
    return rollout_average(batch, batch.final, leave_one_out=leave_one_out)


sequence_optimal_loo = without_self(sequence_optimal, "Centre by the energy-weighted return of the other rollouts.")


def opob(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the return weighted with the squared importance-weighted norm of each rollout's score.

    B = Σ_j ρ_j² ‖S_j‖² R_j / Σ_j ρ_j² ‖S_j‖², ρ_j = Π_t ρ_{j,t}: the optimal scalar for gradients weighted with the
    sequence ratio. On-policy it is `classic_optimal`. Its learning rate is scaled by
    `objectives.ratios.learning_rate_factor`. Public code of VCPO, arXiv 2602.17616.
    """
    with np.errstate(divide="ignore"):  # a ratio of 0 makes the rollout weigh nothing
        log = np.where(batch.mask, np.log(np.where(batch.mask, batch.ratio, 1.0)), 0.0).sum(axis=1)
    top = np.full(len(batch.groups.labels), -np.inf)
    np.maximum.at(top, batch.groups.index, np.where(batch.present > 0, log, -np.inf))
    top = batch.groups.spread(np.where(np.isfinite(top), top, 0.0))  # only ratios of weights matter: none overflows
    return rollout_average(batch, np.exp(2 * (log - top)) * batch.rollout_norm_sq)


def otb(batch: Batch, options: TailOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the optimal token baseline: the return weighted with realized energy, position by position.

    B_t = Σ_j W_{j,t} G_{j,t} / Σ_j W_{j,t} over rollouts alive at t, W_t = Σ_{k≤t} ρ_k² w_k.

    Constant energy gives the position-wise group mean. The published form wherever two rollouts are alive, without an
    epsilon in the denominator. Self-inclusive, so A = (1 − ω_i)(G − B_{−i}) with ω_i = W_i/ΣW: high-energy rollouts
    are shrunk, which biases it. Public code; arXiv 2602.07078.
    """
    return position_average(batch, batch.realized, options.tail, leave_one_out=leave_one_out)


otb_loo = without_self(otb, "Centre by the optimal token baseline of the other rollouts.")
"""B_{i,t} = Σ_{j≠i} W_{j,t} G_{j,t} / Σ_{j≠i} W_{j,t}: the other's return where two rollouts are alive. Proved."""


def otb_turn(batch: Batch, options: TailOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the optimal token baseline with t counting policy tokens across turns.

    The formula of `otb` after tool tokens are squeezed out; without gaps it is `otb`. Public code.
    """
    return otb(batch, options, leave_one_out=leave_one_out)


otb_turn_loo = without_self(otb_turn, "Centre by the multi-turn optimal token baseline of the other rollouts.")


def otb_carry(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the optimal token baseline in which finished rollouts keep counting.

    B_t = Σ_j W_{j,t∧L_j} X_{j,t} / Σ_j W_{j,t∧L_j} over *all* rollouts of the group, X = G_t while alive and the total
    return R after the end. Equal lengths give `otb`. With finished rollouts carried along, E‖S_t‖² = E W_t. Proved.
    """
    carried = np.where(batch.mask, batch.returns, batch.total[:, None])
    counted = np.broadcast_to(batch.present[:, None], batch.mask.shape)
    mean, weightless = weighted_mean(carried, batch.realized, counted, batch.groups, leave_one_out=leave_one_out)
    alone = batch.is_singleton[:, None]
    return BaselineResult(np.where(alone, 0.0, mean), weightless | alone)


otb_carry_loo = without_self(otb_carry, "Centre by the carried optimal token baseline of the other rollouts.")


def token_optimal(batch: Batch, options: TailOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the return weighted with the token's own energy.

    B_t = Σ_j w_{j,t} G_{j,t} / Σ_j w_{j,t} over rollouts alive at t, w replaced by ρ_t² w_t off-policy. The sample form
    of the variance-optimal B_t* when tokens share no parameters. Proved.
    """
    return position_average(batch, batch.weight, options.tail, leave_one_out=leave_one_out)


token_optimal_loo = without_self(
    token_optimal, "Centre by the instantaneous-energy-weighted return of the other rollouts."
)


def energy_ema(batch: Batch, options: DecayOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the return weighted with exponentially forgotten energy.

    Weight W_t = λ W_{t−1} + ρ_t² w_t = Σ_{k≤t} λ^{t−k} ρ_k² w_k: λ = 0 is `token_optimal`, λ = 1 is `otb`. Proved at
    both ends.
    """
    weight = decayed_energy(batch.weight, options.decay)
    return position_average(batch, weight, options.tail, leave_one_out=leave_one_out)


energy_ema_loo = without_self(energy_ema, "Centre by the forgotten-energy-weighted return of the other rollouts.")
