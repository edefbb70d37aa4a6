"""What a critic is fitted to, and how much of the returns its values explain."""

import numpy as np

from otb_analysis.arrays import masked, returns_to_go
from otb_analysis.config import CriticConfig
from otb_analysis.estimators import ValueOptions, estimate, prefix_values
from otb_analysis.measurement.table import TokenTable
from otb_analysis.types import EstimatorInputs, Float

ROUNDING = 1e-12
"""Returns that differ by less than this share of the largest count as equal."""


def critic_target(config: CriticConfig, inputs: EstimatorInputs) -> Float:
    """Return the regression target y_t of V(h_t) under `critic.target`.

    `return`: y_t = G_t. `gae`: the λ-return y_t = r_t + γ[(1−λ) V(h_{t+1}) + λ y_{t+1}] with the recorded values and
    V = 0 after the end, which is V(h_t) plus generalized advantage estimation; γ = λ = 1 give G_t, λ = 0 one-step
    temporal differences. `tvm`: the mean total reward of the group's rollouts that start with h_t, the share of correct
    ones where rewards are 0 or 1 (arXiv 2407.12863). Code, code, abstract. Targets [N, T] are in units of reward, zero
    outside the mask; `gae` reads `inputs.value`, `tvm` reads `inputs.token_id`.
    """
    if config.target == "return":
        return returns_to_go(inputs.reward, inputs.mask)
    if config.target == "tvm":
        return prefix_values(inputs)
    options = ValueOptions(discount=config.discount, decay=config.decay)
    return estimate("value", inputs, options).advantage + masked(np.asarray(inputs.value), inputs.mask)


def explained_variance(table: TokenTable) -> float | None:
    """Return 1 − Var(G_t − V(h_t))/Var(G_t) over policy tokens: 1 is a perfect critic, 0 a constant, below 0 worse.

    G is always the plain return-to-go, so that critics with different targets can be compared. None without values,
    without policy tokens, where G does not vary, or where a value is not finite.
    """
    if table.value is None or not table.mask.any():
        return None
    to_go = returns_to_go(table.reward, table.mask)[table.mask]
    if np.ptp(to_go) <= ROUNDING * np.abs(to_go).max() or not np.isfinite(table.value[table.mask]).all():
        return None
    return float(1.0 - np.var(to_go - table.value[table.mask]) / np.var(to_go))
