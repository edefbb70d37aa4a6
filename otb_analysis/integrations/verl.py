"""Our estimators by name in verl: `VERL_USE_EXTERNAL_MODULES=otb_analysis.integrations.verl` registers them.

`algorithm.adv_estimator=otb_analysis/rloo` then picks one, `+algorithm.otb_analysis.tail=group` sets an option.
Names that weigh by energy need Σπ², which `integrations.verl_trainer` delivers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est  # pyright: ignore[reportMissingImports]

from otb_analysis.arrays import at_policy_tokens, returns_to_go
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, estimate, options_from_dict
from otb_analysis.types import Bool, EstimatorInputs, Float, Int

PREFIX = "otb_analysis/"
REGISTERED = tuple(name for name, entry in ESTIMATORS.items() if set(entry.needs) <= {"energy", "turn"})
"""Estimators that need no more than verl passes: rewards, mask and prompts; turns follow from the mask."""
_ENERGY: ContextVar[Float | None] = ContextVar("energy", default=None)


def proxy_energy(logprob: Float, sum_pi_sq: Float) -> Float:
    """Return the proxy energy ‖e_y − π‖² = (1 − π_y)² + (Σπ² − π_y²) from what verl computes, in float64.

    1 − 2π_y + Σπ², as verl writes it, cancels on peaked tokens and can be negative; neither term does here.
    """
    logprob = np.asarray(logprob, np.float64)
    return np.expm1(logprob) ** 2 + np.maximum(np.asarray(sum_pi_sq, np.float64) - np.exp(2 * logprob), 0.0)


@contextmanager
def delivered_energy(energy: Float) -> Iterator[None]:
    """Give the estimators called inside the block the energy of every response token [N, T]."""
    token = _ENERGY.set(energy)
    try:
        yield
    finally:
        _ENERGY.reset(token)


def advantages(
    name: str,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    index: np.ndarray | None = None,
    reward_baselines: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns-to-go [N, T] of the estimator `name`, as verl calls it.

    `index` names each rollout's prompt. ReMax's greedy rewards, `reward_baselines`, are not read: ours do without.
    Synthetic padding rows have an empty mask and take no part.

    Raises:
        InputError: There is no index, an option does not exist, or energies are needed and were not delivered.
    """
    if index is None:
        raise InputError(f"{PREFIX}{name} got no index, so no rollout has a prompt; keep uid in the batch.")
    entry = ESTIMATORS[name]
    energy = _ENERGY.get() if entry.reads_energy else None
    if entry.reads_energy and energy is None:
        raise InputError(
            f"{PREFIX}{name} weighs tokens by their energy, but verl passes no Σπ²; set "
            "trainer.v1.trainer_mode=otb_sync and add otb_analysis.integrations.verl_trainer to "
            "VERL_USE_EXTERNAL_MODULES."
        )
    mask = response_mask.detach().cpu().numpy().astype(bool)
    reward = at_policy_tokens(token_level_rewards.detach().double().cpu().numpy(), mask)
    group = np.unique(np.asarray(index).astype(str), return_inverse=True)[1]
    inputs = EstimatorInputs(reward, mask, group, energy=energy, turn=turns(mask))
    options = config.get("otb_analysis", None) if config is not None else None  # verl's `algorithm` section
    result = estimate(name, inputs, options_from_dict(name, dict(options or {})))
    returns = returns_to_go(reward, mask)
    advantage, returns = (torch.from_numpy(x).to(token_level_rewards) for x in (result.advantage, returns))
    return advantage, returns


def turns(mask: Bool) -> Int:
    """Return the turn of each token, counting the policy's stretches from 0 [N, T]."""
    starts = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    return np.maximum(np.cumsum(starts, axis=1) - 1, 0)


for _name in REGISTERED:
    register_adv_est(f"{PREFIX}{_name}")(partial(advantages, _name))
