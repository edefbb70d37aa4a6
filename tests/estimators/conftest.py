"""A worked group and random ragged batches for the estimator tests."""

import numpy as np
import pytest

from otb_analysis.estimators import EstimatorInputs


def random_inputs(seed, *, gaps=False, dense=True, dtype=np.float64, sizes=(1, 2, 3, 5, 8), width=7):
    """Ragged groups in shuffled order, some rollouts empty, some energies zero, NaN wherever nobody may look."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(len(sizes)) * 10 + 3, sizes))
    n = len(group)
    mask = np.arange(width) < rng.integers(0, width + 1, n)[:, None]
    if gaps:
        mask &= rng.random(mask.shape) < 0.7
    reward = np.where(mask, rng.normal(size=mask.shape), np.nan)
    if not dense:
        last = mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
        reward = np.where(mask, np.where(last, rng.integers(0, 2, mask.shape), 0.0), np.nan)

    def column(values):
        return np.where(mask, values, np.nan).astype(dtype)

    energy = 10.0 ** rng.uniform(-6, 2, mask.shape) * (rng.random(mask.shape) > 0.2) * (group != 13)[:, None]
    return EstimatorInputs(
        reward=reward.astype(dtype),
        mask=mask,
        group=group,
        energy=column(energy),
        rollout_norm_sq=np.where(mask.any(axis=1), rng.exponential(size=n), np.nan).astype(dtype),
        position_baseline=column(rng.normal(size=mask.shape)),
        value=column(rng.normal(size=mask.shape)),
        ratio=column(rng.uniform(0.5, 1.5, mask.shape)),
        turn=column(np.cumsum(rng.random(mask.shape) < 0.3, axis=1)),
        token_id=column(rng.integers(5, 7, mask.shape)),
        entropy=column(rng.exponential(size=mask.shape)),
    )


@pytest.fixture
def make_inputs():
    return random_inputs


@pytest.fixture
def worked():
    """Four rollouts, lengths 2, 4, 4, 2; the third makes a mistake at its third token."""
    energy = np.array([[0.02, 0.02, 0, 0], [0.5] * 4, [0.02, 0.02, 1.28, 1.28], [0.02, 0.02, 0, 0]])
    reward = np.zeros((4, 4))
    reward[[0, 3], 1] = 1.0
    return EstimatorInputs(
        reward=reward,
        mask=energy > 0,
        group=np.zeros(4, np.int64),
        energy=energy,
        rollout_norm_sq=np.array([0.04, 2, 2.6, 0.04]),
    )
