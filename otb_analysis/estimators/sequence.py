"""Energy-weighted baselines that are one number per rollout."""

import numpy as np

from otb_analysis.estimators.batch import BaselineResult, Batch, provided
from otb_analysis.estimators.spec import NoOptions
from otb_analysis.estimators.weighting import rollout_average, without_self


def classic_optimal(batch: Batch, options: NoOptions, *, leave_one_out: bool = False) -> BaselineResult:
    """Centre by the return weighted with the exact squared norm of each rollout's score.

    B = Σ_j ‖S_j‖² R_j / Σ_j ‖S_j‖², S_j = Σ_t s_{j,t}: the sample form of the classic optimal scalar
    E[R‖S‖²]/E‖S‖² for one terminal reward. Proved.
    """
    return rollout_average(batch, provided(batch.rollout_norm_sq), leave_one_out=leave_one_out)


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
    `importance.learning_rate_factor`. Public code of VCPO, arXiv 2602.17616.
    """
    with np.errstate(divide="ignore"):  # a ratio of 0 makes the rollout weigh nothing
        log = np.where(batch.mask, np.log(np.where(batch.mask, provided(batch.ratio), 1.0)), 0.0).sum(axis=1)
    top = np.full(len(batch.groups.labels), -np.inf)
    np.maximum.at(top, batch.groups.index, np.where(batch.present > 0, log, -np.inf))
    top = batch.groups.spread(np.where(np.isfinite(top), top, 0.0))  # only ratios of weights matter: none overflows
    return rollout_average(batch, np.exp(2 * (log - top)) * provided(batch.rollout_norm_sq))
