"""Runs made of random numbers with the shape of real ones: for measuring the store and the pages, never for results.

Rewards rise, entropy falls; lengths are ragged; texts repeat as a vocabulary's do. Where a run is measured, the exact
norms scatter around the proxy, and estimators share a signal and differ in noise.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.estimators import ESTIMATORS, proved
from otb_analysis.statistics import gradient_statistics
from otb_analysis.store import RunWriter, StepTables, gram_rows
from otb_analysis.types import Gram, Label

VOCABULARY = np.array([f" token{i}" for i in range(4_000)], dtype=object)
WIDTH = 48
"""Numbers in a made-up gradient."""


@dataclass(frozen=True)
class Shape:
    """How large a synthetic run is."""

    steps: int = 2_000
    measured: int = 165  # Steps with exact norms, Gram matrix and statistics, spread evenly
    tokens: int = 5_000_000  # Of the whole run, about
    prompts: int = 16  # Of each step
    group_size: int = 8
    estimators: int = 38  # Labels (estimator, energy source) of a Gram matrix
    spelled: bool = False  # Whether a completion is its tokens' texts; else a short one


def write_synthetic_run(root: Path, name: str, shape: Shape, seed: int = 0, *, finish: bool = True) -> RunWriter:
    """Write a run of this shape, and return its writer.

    Raises:
        InputError: There is a run of that name.
        StoreError: The disk refuses.
    """
    rng = np.random.default_rng(seed)
    sample = {"prompts": shape.prompts, "group_size": shape.group_size, "temperature": 1.0}
    config = {"seed": seed, "estimator": "rloo", "sample": sample, "synthetic": True}
    writer = RunWriter.create(root, name, config)
    measured = set(np.linspace(0, shape.steps - 1, shape.measured).astype(int).tolist())
    per_step = max(shape.tokens // shape.steps, shape.prompts * shape.group_size)
    for step in range(shape.steps):
        writer.write_step(step, synthetic_step(rng, step, shape, per_step, step in measured))
    if finish:
        writer.finish()
    return writer


def synthetic_step(rng: np.random.Generator, step: int, shape: Shape, tokens: int, measured: bool) -> StepTables:
    """Return the tables of one step of about so many tokens."""
    n, progress = shape.prompts * shape.group_size, min(step / shape.steps, 1.0)
    group = np.repeat(np.arange(shape.prompts), shape.group_size)
    length = np.maximum(1, rng.multinomial(tokens, rng.dirichlet(np.full(n, 4.0))))
    reward = (rng.random(n) < 0.2 + 0.6 * progress).astype(float)
    rollout = np.repeat(np.arange(n), length)
    place = np.arange(len(rollout)) - np.repeat(np.cumsum(length) - length, length)
    m, entropy = len(rollout), 1.5 - progress
    ids = rng.zipf(1.3, m) % len(VOCABULARY)
    logprob = -rng.exponential(entropy, m).astype(np.float32)
    proxy = (1 - np.exp(logprob)) ** 2 * rng.uniform(0.5, 1.5, m)
    exact = 30 * proxy * rng.lognormal(0, 0.7, m)
    columns: dict[str, Any] = {
        "token_id": ids, "token": VOCABULARY[ids], "logprob": logprob, "mask": np.ones(m, dtype=bool),
        "behavior_logprob": logprob + rng.normal(0, 1e-3, m).astype(np.float32),
        "entropy": rng.exponential(entropy, m), "sum_pi_sq": rng.uniform(0.2, 1, m), "energy_proxy": proxy,
        "hidden_norm_sq": rng.uniform(20, 40, m), "grad_norm_sq": np.ma.array(exact, mask=not measured),
        "measured_by": np.full(m, "exact" if measured else "none", dtype=object),
        "group": group[rollout], "rollout": rollout, "turn": np.zeros(len(rollout), np.int64), "t": place,
        "reward": (place == length[rollout] - 1) * reward[rollout],
        "advantage": (reward - reward.reshape(-1, shape.group_size).mean(axis=1).repeat(shape.group_size))[rollout],
    }  # fmt: skip
    short = VOCABULARY[rng.integers(0, 99, (n, 12))]
    texts = np.split(VOCABULARY[ids], np.cumsum(length)[:-1]) if shape.spelled else short
    rollouts = {
        "group": group, "rollout": np.arange(n), "reward": reward, "length": length, "turns": np.ones(n, np.int64),
        "prompt_id": [f"prompt-{(step * shape.prompts + g) % 997}" for g in group],
        "prompt": [f"What is {g} + {step % 97}?" for g in group],
        "completion": ["".join(text) for text in texts],
        "finish_reason": rng.choice(["stop", "length"], n, p=[0.9, 0.1]).tolist(),
    }  # fmt: skip
    steps = {
        "reward_mean": reward.mean(), "reward_std": reward.std(), "grad_norm": rng.lognormal(-progress, 0.3),
        "entropy_mean": float(np.mean(columns["entropy"])), "length_mean": length.mean(), "n_prompts": shape.prompts,
        "n_rollouts": n, "n_tokens": len(rollout), "n_measured_prompts": shape.prompts * measured,
        "mismatch_mean": rng.normal(0, 1e-4), "seconds_sample": 2.0, "seconds_update": 3.0, "seconds_measure": 9.0,
        "n_zero_variance_groups": int((reward.reshape(-1, shape.group_size).std(axis=1) == 0).sum()),
    }  # fmt: skip
    if not measured:
        return StepTables(columns, rollouts, steps)
    gram = synthetic_gram(rng, shape.prompts, shape.estimators, n)
    rows = [row.as_row() for row in gradient_statistics(gram.inner, gram.labels, n, known=proved(gram.labels, {}))]
    gradients = {name: [row[name] for row in rows] for name in rows[0]}
    return StepTables(columns, rollouts, steps, gradients, gram_rows(step, gram))


def synthetic_gram(rng: np.random.Generator, prompts: int, estimators: int, rollouts: int) -> Gram:
    """Return the Gram matrix of made-up gradients: a shared signal, noise shared in part, scaled by estimator."""
    labels = synthetic_labels(estimators)
    shared, single = rng.normal(size=(prompts, WIDTH)), rng.normal(size=(len(labels), prompts, WIDTH))
    scale = np.linspace(0.5, 1.5, len(labels))[:, None, None]
    gradients = 0.5 / np.sqrt(WIDTH) + scale * (0.8 * shared + 0.6 * single) / np.sqrt(WIDTH)
    return Gram(np.einsum("mpd,nqd->mnpq", gradients, gradients, optimize=True), labels, rollouts)


def synthetic_labels(number: int) -> tuple[Label, ...]:
    """Return this many labels, `rloo` first: those without energies, then the others with each source of them."""
    reading = [name for name, spec in ESTIMATORS.items() if "energy" in spec.needs]
    plain = ["rloo", *(name for name in ESTIMATORS if name not in reading and name != "rloo")]
    labels = [(name, "none") for name in plain]
    sources = ("proxy", "exact", "calibrated", "sketch", "path")
    return tuple([*labels, *((name, source) for source in sources for name in reading)][:number])
