"""Time of every estimator on one large batch, beside a direct torch loop and beside one pass over the inputs.

All candidates take turns in every repetition, so that a busy machine slows them alike; the best repetition counts.

`none`, which has no formula, already takes .4 of the torch loop: the time goes into three fresh outputs and the checks
of mask, rewards and energies.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import torch

from benchmarks.config import EstimatorsConfig
from benchmarks.publish import Report, report_of
from benchmarks.timing import least_seconds, threads
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, estimate, with_limit

LOOP = "torch loop of otb"
PASS = "multiply and sum"
COLUMNS = {
    "estimator": "{name}",
    "seconds": "{seconds:.3f}",
    "÷ torch loop of otb": "{to_loop:.2f}",
    "÷ multiply and sum": "{to_pass:.1f}",
}


def run(config: EstimatorsConfig) -> Report:
    """Time every estimator, then a loop over groups and one multiply-and-sum pass over rewards and energies."""
    inputs = bench_inputs(config.rows, config.tokens, config.group_size)
    reward, energy = inputs.reward, np.asarray(inputs.energy)
    off_policy = replace(inputs, ratio=np.ones(inputs.mask.shape))  # on-policy the others would only multiply by 1
    given = {name: off_policy if "ratio" in entry.needs else inputs for name, entry in ESTIMATORS.items()}
    candidates: dict[str, Callable[[], object]] = {
        name: partial(estimate, name, x, with_limit(name, None, config.tokens)) for name, x in given.items()
    }
    candidates |= {LOOP: lambda: torch_loop(inputs), PASS: lambda: np.vdot(reward, energy)}
    with threads(1):
        best = least_seconds(candidates, config.repeats, perf_counter)
    rows = [{"name": n, "seconds": x, "to_loop": x / best[LOOP], "to_pass": x / best[PASS]} for n, x in best.items()]
    return report_of(config, "One call on one thread, best of the repetitions", COLUMNS, rows, notes=())


def bench_inputs(rows: int, tokens: int, group_size: int) -> EstimatorInputs:
    """Return ragged rollouts of up to four turns, a quarter to all of the length, with a reward at the end."""
    rng = np.random.default_rng(0)
    length = rng.integers(max(tokens // 4, 1), tokens + 1, rows)
    mask = np.arange(tokens) < length[:, None]
    reward = np.zeros((rows, tokens))
    reward[np.arange(rows), length - 1] = rng.random(rows) < 0.5
    energy = rng.exponential(size=(rows, tokens))
    return EstimatorInputs(
        reward=reward, mask=mask, group=np.arange(rows) // group_size, energy=energy,
        rollout_norm_sq=energy.sum(axis=1), position_baseline=np.full((rows, tokens), 0.5),
        value=np.full((rows, tokens), 0.5), turn=np.broadcast_to(np.arange(tokens) * 4 // tokens, (rows, tokens)),
        token_id=rng.integers(0, 1000, (rows, tokens)), entropy=rng.exponential(size=(rows, tokens)),
    )  # fmt: skip


def torch_loop(inputs: EstimatorInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute baseline, advantage and fallback [N, T] of `otb` the direct way: group after group, in float64."""
    reward, energy = torch.as_tensor(inputs.reward), torch.as_tensor(inputs.energy)
    mask, group = torch.as_tensor(inputs.mask), torch.as_tensor(inputs.group)
    baseline, advantage = torch.zeros_like(reward), torch.zeros_like(reward)
    fallback = torch.zeros_like(mask)
    for label in torch.unique(group):
        rows = torch.nonzero(group == label).squeeze(1)
        alive = mask[rows].to(reward.dtype)
        returns = (reward[rows] * alive).flip(1).cumsum(1).flip(1) * alive
        weight = (energy[rows] * alive).cumsum(1) * alive
        total, count = weight.sum(0), alive.sum(0)
        plain = returns.sum(0) / count.clamp_min(1)
        mean = torch.where(total > 0, (weight * returns).sum(0) / total, plain)
        mean = torch.where(count == 1, 0.0, mean)
        baseline[rows] = mean * alive
        advantage[rows] = (returns - mean) * alive
        fallback[rows] = ((count == 1) | (total == 0)) & mask[rows]
    return baseline, advantage, fallback
