"""A small run, written once per test: two prompts, ragged rollouts, a few tokens."""

import numpy as np
import pytest

from otb_analysis.store import RunWriter, StepTables

GROUP = np.array([0, 0, 1, 1])
LENGTH = np.array([3, 1, 2, 4])


def make_tables(step: int, **steps: object) -> StepTables:
    rollout = np.repeat(np.arange(4), LENGTH)
    t = np.concatenate([np.arange(n) for n in LENGTH])
    n = len(t)
    rng = np.random.default_rng(step)
    tokens = {
        "group": GROUP[rollout],
        "rollout": rollout,
        "turn": np.zeros(n, dtype=np.int64),
        "t": t,
        "token_id": rng.integers(0, 17, n),
        "token": [f"<{i}>" for i in range(n)],
        "logprob": -rng.exponential(size=n),
        "energy_proxy": rng.uniform(0, 2, n),
        "grad_norm_sq": np.ma.array(rng.exponential(size=n), mask=GROUP[rollout] == 1),
        "measured_by": ["exact" if g == 0 else "none" for g in GROUP[rollout]],
        "reward": (t == LENGTH[rollout] - 1) * rng.normal(size=n),
        "mask": np.ones(n, dtype=bool),
    }
    rollouts = {"group": GROUP, "rollout": np.arange(4), "reward": [0.0, 1.0, 1.0, 0.0], "length": LENGTH}
    return StepTables(tokens=tokens, rollouts=rollouts, steps={"reward_mean": 0.5, "n_tokens": n} | steps)


@pytest.fixture
def tables():
    return make_tables


@pytest.fixture
def writer(tmp_path):
    return RunWriter.create(tmp_path, "demo", {"seed": 3, "task": {"name": "chain_sum", "terms": [2, 3]}})


@pytest.fixture
def runs(tmp_path, tables):
    """Two runs of five steps; prompts 0 and 1 have names of their own in the first run."""
    paths = []
    for seed in range(2):
        writer = RunWriter.create(tmp_path / "runs", f"run-{seed}", {})
        for step in range(5):
            one = tables(10 * seed + step)
            names = {} if seed else {"prompt_id": ["b", "b", "a", "a"]}
            tool = one.tokens | {"mask": np.arange(10) != 4}
            writer.write_step(step, StepTables(tool, one.rollouts | names, one.steps))
        writer.finish()
        paths.append(writer.path)
    return paths
