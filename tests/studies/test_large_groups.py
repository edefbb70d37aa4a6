"""18_large_groups: what its page derives of large groups, from exact sums over a policy of two answers."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from otb_analysis.estimators import EstimatorInputs, estimate
from studies.lib import select
from studies.lib.record import read_tables

TABLES = read_tables(Path(__file__).parent.parent.parent / "studies" / "18_large_groups" / "results")
LIMITS = {"maxrl": lambda p: 3 - 1 / p, "grpo": lambda p: -0.75 * (1 - 2 * p) ** 2 / (p * (1 - p))}


def noise_at_equal_progress(name: str, p: float, n: int) -> float:
    """Var ĝ/(E ĝ)² of a group of n, of the policy that is right with probability p, by its parameter p."""
    right = np.arange(n + 1)
    advantage = np.zeros((2, n + 1))  # of a wrong and of a right one, by how many are right
    for k in right:
        reward = (np.arange(n) < k).astype(float)[:, None]
        found = estimate(name, EstimatorInputs(reward, np.ones((n, 1), bool), np.zeros(n, np.int64))).advantage[:, 0]
        advantage[:, k] = found[-1], found[0]
    # The score of a right answer is 1/p, of a wrong one −1/(1 − p).
    mean = (right * advantage[1] / p - (n - right) * advantage[0] / (1 - p)) / n
    chance = binom.pmf(right, n, p)
    return float(chance @ mean**2 / (chance @ mean) ** 2 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.25, 0.45, 0.8])
@pytest.mark.parametrize("name", ["maxrl", "grpo"])
def test_noise_at_equal_progress_differs_from_rloo_by_the_limit_that_the_page_names(name, p):
    small, large = (
        n * (noise_at_equal_progress(name, p, n) - noise_at_equal_progress("rloo", p, n)) for n in (500, 2000)
    )
    assert large == pytest.approx(LIMITS[name](p), rel=0.05, abs=0.02)
    assert abs(large - LIMITS[name](p)) < abs(small - LIMITS[name](p)) + 1e-3


@pytest.mark.parametrize("kind", ["hard", "easy"])
@pytest.mark.parametrize("name", ["maxrl", "grpo"])
def test_the_measured_sign_is_the_derived_one(kind, name):
    success = [row["success"] for row in select(TABLES["many_prompts"], kind=kind)]
    limit = np.mean([LIMITS[name](p) for p in success])
    (row,) = select(TABLES["many_groups"], kind=kind, estimator=name, size=64)
    assert np.sign(row["sf_over"] - 1) == np.sign(limit)


def test_the_mean_of_maxrl_is_as_long_as_its_target_says():
    for kind in ("hard", "easy"):
        success = np.array([row["success"] for row in select(TABLES["many_prompts"], kind=kind)])
        for size in (4, 16, 64):
            (row,) = select(TABLES["many_groups"], kind=kind, estimator="maxrl", size=size)
            wanted = np.exp(np.mean(2 * np.log((1 - (1 - success) ** (size - 1)) / success)))
            assert row["length"] == pytest.approx(wanted, rel=0.05)
