"""Three small runs: one like a demo's, one whose tokens another sampler drew, one of too few prompts."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from otb_analysis.config import EstimatorConfig, MeasureConfig, SampleConfig, TrainConfig
from otb_analysis.statistics import gradient_statistics
from otb_analysis.store import RunWriter, StepTables, gram_rows
from otb_analysis.training.resume import plain_config
from otb_analysis.types import Gram

LABELS = (
    ("rloo", "none"), ("otb", "proxy"), ("none", "none"), ("energy_regression", "proxy"), ("sequence_optimal", "proxy"),
    ("grpo", "none"), ("trloo", "none"), ("group_mean", "none"), ("energy_regression", "exact"),
)  # fmt: skip
LENGTH = {"otb": 0.85, "sequence_optimal": 0.8, "grpo": 1.7, "group_mean": 0.75}
NOISE = {"otb": 0.62, "none": 0.9, "energy_regression": 0.75, "sequence_optimal": 0.75, "grpo": 1.9, "group_mean": 0.75}
SIZE = 4
SOURCE = {"made_by": "otb audit", "path": "rollouts.jsonl", "format": "plain", "about": "plain records"}


def planted_gram(random, n_prompts, first):
    """Group gradients with a shared direction and mostly shared noise, of known lengths."""
    noise, own = random.normal(size=(n_prompts, 30)), random.normal(size=(len(LABELS), n_prompts, 30))
    truth = 1.5 * np.eye(30)[0]
    made = []
    for row, (name, source) in enumerate(LABELS):
        spread = NOISE.get(name, 1.0) * (noise + 0.15 * own[row] * (name in NOISE) * (name != "group_mean"))
        made.append(LENGTH.get(name, 1.0) * truth + (spread if source != "exact" else 1.02 * spread))
    g = np.stack(made)
    prompt = tuple(f"p{first + k}" for k in range(n_prompts))
    return Gram(np.einsum("mpd,nqd->mnpq", g, g), LABELS, n_prompts * SIZE, prompt, np.arange(n_prompts))


def sampling_rows():
    """The sampling check of 128 rollouts drawn at temperature 1 and audited as .5: a step of a real audit."""
    frame = pd.read_csv(Path(__file__).with_name("sampling.csv"))
    return {name: np.ma.array(frame[name], mask=frame[name].isna()) for name in frame}


def write(root, name, config, *, prompts=16, steps=6, alarm=False):
    writer = RunWriter.create(root, name, config)
    random = np.random.default_rng(3)
    for step in range(steps):
        gram = planted_gram(random, prompts, step * prompts)
        rows = [found.as_row() for found in gradient_statistics(gram.inner, gram.labels, gram.n_rollouts)]
        n = prompts * SIZE
        rewards = random.integers(0, 2, n).astype(float)
        rollouts = {
            "group": np.repeat(np.arange(prompts), SIZE), "rollout": np.arange(n), "reward": rewards,
            "prompt_id": np.repeat(gram.prompt, SIZE), "prompt": ["1+1="] * n, "completion": ["2"] * n,
            "length": [3] * n, "finish_reason": ["stop"] * n,
        }  # fmt: skip
        scalars = {
            "reward_mean": rewards.mean(), "grad_norm": 1.0, "clipped": False, "n_prompts": prompts, "n_rollouts": n,
            "n_tokens": 3 * n, "n_zero_variance_groups": 0, "n_truncated": 0, "n_measured_prompts": prompts,
            "heldout_reward": 0.5, "heldout_reward_low": 0.4, "heldout_reward_high": 0.6, "n_updates": 1,
        }  # fmt: skip
        gradients = {column: [row[column] for row in rows] for column in rows[0]}
        sampling = sampling_rows() if alarm else None
        writer.write_step(
            step,
            StepTables(
                rollouts=rollouts, steps=scalars, gradients=gradients, grams=gram_rows(step, gram), sampling=sampling
            ),
        )
    writer.finish()
    return root / name


@pytest.fixture(scope="session")
def three_runs(tmp_path_factory):
    """The runs by name: demo, alarm, few."""
    root = tmp_path_factory.mktemp("doors")
    trained = TrainConfig(
        model="demo", estimator=EstimatorConfig(name="otb"), sample=SampleConfig(prompts=16, group_size=SIZE),
        measure=MeasureConfig(),
    )  # fmt: skip
    config = plain_config(trained)
    recorded = {name: config[name] for name in ("estimator", "model", "task")} | {
        "source": SOURCE,
        "plain_sampling": True,
    }
    return {
        "demo": write(root, "demo", config),
        "alarm": write(root, "alarm", recorded | {"rollouts": "rollouts.jsonl"}, alarm=True),
        "few": write(root, "few", config, prompts=5, steps=2),
    }
