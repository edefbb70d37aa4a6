"""Energy-weighted baselines that are one number per rollout."""

from otb_analysis.estimators.batch import Batch, Centre, given
from otb_analysis.estimators.entry import NoOptions
from otb_analysis.estimators.weighting import rollout_average


def classic_optimal(batch: Batch, options: NoOptions) -> Centre:
    """Centre by the return weighted with the exact squared norm of each rollout's score.

    B = Σ_j ‖S_j‖² R_j / Σ_j ‖S_j‖², S_j = Σ_t s_{j,t}: the sample form of the classic optimal scalar
    E[R‖S‖²]/E‖S‖² for one terminal reward. Proved.

    Args:
        batch: The rollouts, with `rollout_norm_sq`.
        options: None to set.
    """
    return rollout_average(batch, given(batch.rollout_norm_sq))


def classic_optimal_loo(batch: Batch, options: NoOptions) -> Centre:
    """Centre by the norm-weighted return of the other rollouts.

    B_i = Σ_{j≠i} ‖S_j‖² R_j / Σ_{j≠i} ‖S_j‖². Unbiased.

    Args:
        batch: The rollouts, with `rollout_norm_sq`.
        options: None to set.
    """
    return rollout_average(batch, given(batch.rollout_norm_sq), leave_one_out=True)


def sequence_optimal(batch: Batch, options: NoOptions) -> Centre:
    """Centre by the return weighted with the energy each rollout realized.

    B = Σ_j W_{j,T} R_j / Σ_j W_{j,T}, W_T = Σ_t ρ_t² w_t. Since E[s_t·s_k] = 0 for t ≠ k, E‖S‖² = E W_T: the cheap
    form of `classic_optimal`. Constant token energy gives `opo`. Proved.

    Args:
        batch: The rollouts, with `energy`.
        options: None to set.
    """
    return rollout_average(batch, batch.final)


def sequence_optimal_loo(batch: Batch, options: NoOptions) -> Centre:
    """Centre by the energy-weighted return of the other rollouts.

    B_i = Σ_{j≠i} W_{j,T} R_j / Σ_{j≠i} W_{j,T}. Unbiased.

    Args:
        batch: The rollouts, with `energy`.
        options: None to set.
    """
    return rollout_average(batch, batch.final, leave_one_out=True)
