"""Baselines that come from elsewhere: exact scores of other rollouts, or a critic."""

from otb_analysis.estimators.batch import NOWHERE, Batch, Centre, given
from otb_analysis.estimators.entry import NoOptions


def position_optimal(batch: Batch, options: NoOptions) -> Centre:
    """Centre by the variance-optimal constant of each position.

    B_t* = E[s_t · Σ_k s_k G_k] / E‖s_t‖², passed in as `position_baseline`; off-policy E[ρ_t s_t·g]/E[ρ_t²‖s_t‖²].
    Any other position-dependent B costs exactly Σ_t E‖s_t‖² (B_t − B_t*)² of variance. Unbiased as long as B* comes
    from rollouts other than the ones it is used on. Proved.

    Args:
        batch: The rollouts, with `position_baseline`.
        options: None to set.
    """
    return Centre(given(batch.position_baseline), NOWHERE)


def value(batch: Batch, options: NoOptions) -> Centre:
    """Centre by the critic's value of the prefix.

    B_t = V(h_t), h_t the prefix before y_t; A_t = G_t − V(h_t), which is GAE with γ = λ = 1. Unbiased for any critic
    that has not seen these rollouts. V is not variance-optimal: the best prefix function is E[s_t·g|h]/E[‖s_t‖²|h].
    Public code.

    Args:
        batch: The rollouts, with `value`.
        options: None to set.
    """
    return Centre(given(batch.value), NOWHERE)
