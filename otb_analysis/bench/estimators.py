"""Time of every estimator on one large batch, beside a direct torch loop and beside one pass over the inputs.

All candidates take turns in every repetition, so that a busy machine slows them alike; the best repetition counts.

Where `otb` spends its time at [1024, 4096], of about 75 ms where the torch loop takes 88: 19 ms write three fresh
outputs (72 MB, page faults included, which the loop pays too), 10 ms are the running sum (`np.cumsum` waits for each
addition, 2.2 ns an entry; torch's takes .6), about 15 ms read and check mask, rewards and energies, the rest are group
sums and spreading them back. `none`, which has no formula at all, already takes .42 of the loop, so that half the
loop's time would leave a tenth of it for the formula. Blocks of 2^15 to 2^17 entries differ by less than a tenth.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch

from otb_analysis.bench.config import EstimatorsConfig, check_positive
from otb_analysis.bench.publish import Report, flags
from otb_analysis.bench.timing import interleaved, threads, timed
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, estimate

LOOP = "torch loop of otb"
PASS = "multiply and sum"


@dataclass(frozen=True)
class BenchRow:
    """One line of the table.

    Attributes:
        name: Estimator, or one of the two yardsticks.
        seconds: Best time of one call.
        to_loop: The same relative to a per-group torch loop of `otb` in float64 on one thread.
        to_pass: The same relative to one multiply-and-sum pass over rewards and energies.
    """

    name: str
    seconds: float
    to_loop: float
    to_pass: float


def run_estimators(config: EstimatorsConfig) -> Report:
    """Time every estimator and return the report.

    Raises:
        InputError: A size is not positive.
    """
    sizes = {name: value for name, value in vars(config).items() if name != "out"}
    check_positive(**sizes)
    rows = bench_estimators(config.rows, config.tokens, config.group_size, config.repeats)
    return Report(
        name="estimators",
        command=f"otb bench estimators {flags(sizes)}",
        settings=sizes,
        title="One call on one thread, best of the repetitions",
        headers=("estimator", "seconds", "÷ torch loop of otb", "÷ multiply and sum"),
        cells=[(r.name, f"{r.seconds:.3f}", f"{r.to_loop:.2f}", f"{r.to_pass:.1f}") for r in rows],
        rows=[asdict(row) for row in rows],
    )


def bench_estimators(rows: int = 1024, tokens: int = 4096, group_size: int = 8, repeats: int = 5) -> list[BenchRow]:
    """Time every estimator whose inputs can be made up.

    Args:
        rows: N rollouts.
        tokens: T.
        group_size: Rollouts per group.
        repeats: Repetitions, of which the best counts.

    Returns:
        One row per estimator, in catalogue order, then the two yardsticks.
    """
    inputs = bench_inputs(rows, tokens, group_size)
    off_policy = replace(inputs, ratio=np.ones(inputs.mask.shape))  # on-policy the others would only multiply by 1
    reward, energy = inputs.reward, np.asarray(inputs.energy)
    candidates: dict[str, Callable[[], object]] = {
        name: partial(estimate, name, off_policy if "ratio" in entry.needs else inputs)
        for name, entry in ESTIMATORS.items()
    }
    candidates[LOOP] = lambda: torch_loop(inputs)
    candidates[PASS] = lambda: np.vdot(reward, energy)
    with threads(1):
        found = interleaved({name: timed(run) for name, run in candidates.items()}, repeats)
    best = {name: timing.minimum for name, timing in found.items()}
    return [BenchRow(name, x, x / best[LOOP], x / best[PASS]) for name, x in best.items()]


def bench_inputs(rows: int, tokens: int, group_size: int) -> EstimatorInputs:
    """Return ragged rollouts of up to four turns with terminal rewards, a quarter to the whole of the length.

    Args:
        rows: N rollouts.
        tokens: T.
        group_size: Rollouts per group.
    """
    rng = np.random.default_rng(0)
    length = rng.integers(max(tokens // 4, 1), tokens + 1, rows)
    mask = np.arange(tokens) < length[:, None]
    reward = np.zeros((rows, tokens))
    reward[np.arange(rows), length - 1] = rng.random(rows) < 0.5
    energy = rng.exponential(size=(rows, tokens))
    return EstimatorInputs(
        reward=reward,
        mask=mask,
        group=np.arange(rows) // group_size,
        energy=energy,
        rollout_norm_sq=energy.sum(axis=1),
        position_baseline=np.full((rows, tokens), 0.5),
        value=np.full((rows, tokens), 0.5),
        turn=np.broadcast_to(np.arange(tokens) * 4 // tokens, (rows, tokens)),
        token_id=rng.integers(0, 1000, (rows, tokens)),
    )


def torch_loop(inputs: EstimatorInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `otb` the direct way: one group after another, in float64.

    Args:
        inputs: Rewards, mask, groups and energies.

    Returns:
        Baseline, advantage and fallback [N, T], as `estimate("otb", inputs)` gives them.
    """
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
