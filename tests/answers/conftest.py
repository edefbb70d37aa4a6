"""Measured steps whose law is known, and runs that answer from what they are given instead of from a folder."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.statistics import REFERENCE
from otb_analysis.types import Gram

LABELS = (REFERENCE, ("sequence_optimal_loo", "proxy"), ("otb_loo", "exact"), ("none", "none"), ("otb", "proxy"))
MEETS = {
    "estimator": {"name": "rloo", "options": {}}, "task": "sums", "model": "m",
    "objective": {
        "staleness": 0, "epochs": 1, "minibatches": 1, "ratio": "none", "shaping": "none",
    },
    "sample": {"engine": "transformers", "prompts": 16, "group_size": 8},
    "optimize": {"precision": "float32", "steps": 61},
}  # fmt: skip
"""The configuration of a run of which step lengths are proved."""


@pytest.fixture(scope="session")
def gram():
    """One step: group gradients of a mean of some length, with noises of the given sizes, mostly shared."""

    def make(sizes, n_prompts=64, seed=0, length=3.0, own=0.2, labels=LABELS, group=4):
        rng = np.random.default_rng(seed)
        truth, shared = length * np.eye(12)[0], rng.normal(size=(n_prompts, 12))
        parts = [s * (shared + own * (k > 0) * rng.normal(size=shared.shape)) for k, s in enumerate(sizes)]
        g = truth + np.stack(parts)
        inner = np.einsum("mpd,nqd->mnpq", g, g)
        return Gram(inner, labels[: len(sizes)], group * n_prompts, tuple(f"{seed}-{p}" for p in range(n_prompts)))

    return make


@pytest.fixture(scope="session")
def run_of():
    """A run that answers from Gram matrices, rewards by step, and a sampling check's sentence."""

    def make(grams=(), name="a", alarm="", reward=None, **config):
        config = MEETS | config
        info = {"config": config}
        read = {"subgroup_grams": dict, "complete_steps": lambda: [0]}
        run = RunAnswers(SimpleNamespace(path=Path("/runs") / name, info=info, standing=("complete", ""), **read))
        steps = {"step": np.arange(40), "reward_mean": np.full(40, 0.5) if reward is None else reward}
        measured = dict(enumerate(grams))
        run.__dict__ |= {"grams": measured, "alarm": alarm, "steps": pd.DataFrame(steps)}
        run.__dict__["rewards"] = pd.DataFrame({"step": [0, 0], "group": 0, "reward": [0.0, 1.0], "prompt_id": "p"})
        return run

    return make
