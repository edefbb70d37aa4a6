"""Energy-weighted baselines that change from token to token: the optimal token baseline and its relatives.

All average the return-to-go over the rollouts of the group alive at the same policy position; they differ in the
weight. See `weighting.position_average` for the fallbacks they share. Forms without rollout i are unbiased, except with
tail `zero`.
"""

import numpy as np

from otb_analysis.energies import decayed_energy
from otb_analysis.estimators.batch import BaselineResult, Batch
from otb_analysis.estimators.spec import DecayOptions, NoOptions, TailOptions
from otb_analysis.estimators.weighting import position_average, weighted_mean, without_self


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
