"""Baselines that come from elsewhere: exact scores of other rollouts, or a critic."""

import numpy as np

from otb_analysis.energies import decayed_energy
from otb_analysis.estimators.batch import NOWHERE, BaselineResult, Batch, provided
from otb_analysis.estimators.spec import NoOptions, ValueOptions
from otb_analysis.types import Float


def position_optimal(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the variance-optimal constant of each position.

    B_t* = E[s_t · Σ_k s_k G_k] / E‖s_t‖², passed in as `position_baseline`; off-policy E[ρ_t s_t·g]/E[ρ_t²‖s_t‖²].
    Any other position-dependent B costs exactly Σ_t E‖s_t‖² (B_t − B_t*)² of variance. Unbiased as long as B* comes
    from rollouts other than the ones it is used on. Proved.
    """
    return BaselineResult(provided(batch.position_baseline), NOWHERE)


def value(batch: Batch, options: ValueOptions) -> BaselineResult:
    """Centre by the critic's value of the prefix, or advance by generalized advantage estimation.

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V(h_{t+1}) − V(h_t), V = 0 after the end; B_t = G_t − A_t. The defaults
    γ = λ = 1 give B_t = V(h_t), unbiased for any critic that has not seen these rollouts; with λ < 1 the critic's
    error is bias, and γ < 1 has another target. V is not variance-optimal: the best prefix function is
    E[s_t·g|h]/E[‖s_t‖²|h]. Public code.
    """
    v = provided(batch.value)
    if options.discount == options.decay == 1.0:
        return BaselineResult(v, NOWHERE)
    reward = batch.returns - _next(batch.returns)
    surprise = reward + options.discount * _next(v) - v
    backwards = decayed_energy(surprise[:, ::-1], options.discount * options.decay)
    return BaselineResult(batch.returns - backwards[:, ::-1], NOWHERE)


def tvm(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by a critic fitted to the share of correct rollouts through each prefix.

    B_t = V(h_t), as `value`; what differs is the critic's target, `prefix_values` of earlier groups. Fitted on these
    very rollouts, the empirical share gives A = 0 wherever a prefix is unique. Abstract of TVM, arXiv 2407.12863.
    """
    return BaselineResult(provided(batch.value), NOWHERE)


def _next(x: Float) -> Float:
    """The value one position later, 0 after the last [N, T]."""
    return np.concatenate([x[:, 1:], np.zeros((len(x), 1))], axis=1)[:, : x.shape[1]]
