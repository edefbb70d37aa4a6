"""A policy's rollouts: drawn once, then measured token by token.

Two pools: `wide`, many prompts with few rollouts each, which sharpens ‖∇J‖², and `deep`, few prompts with many, for
large groups and for the variance of single prompts. No pilot chooses the prompts of the wide one: it only marks those
that it answers both ways. The deep one has marked prompts only.

Measured on 192 prompts × 16 before: exact norms and sketches take 74 s of processor time on `chain_sum` and 42 s on
`graph_path`. So 1,536 prompts take about 10 minutes and all 630 of `graph_path` about 3: three policies, both pools
and the comparison stay inside 90 minutes, and no prompts had to be given up.
"""

import pickle
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import CriticConfig, SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.statistics import weight_statistics
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Bool
from studies.lib import Cell, Tables, rounded
from studies.lib.cache import keep_arrays, kept_file
from studies.lib.critics import critic_batches, fitted_critic, with_values
from studies.lib.policies import ScoredRollouts, different_prompts, fresh_policy, taught, write
from studies.lib.pools import Pool, measure_pool

KINDS = ("wide", "deep")
LENGTHS = {"chain_sum": 32, "graph_path": 16}
"""Tokens an answer may have."""
CRITIC = CriticConfig(kind="model", learning_rate=1e-3)
LESSON = SampleConfig(prompts=64, group_size=8)
"""Rollouts of a batch that the critic of `value` is fitted to."""
FIRST_PROMPT, FIRST_LESSON = 40_000_000, 60_000_000
DRAWN = "drawn.pickle"


@dataclass(frozen=True)
class Size:
    """How much is drawn and measured."""

    prompts: int = 1536  # Different prompts of the wide pool; graph_path has 630, and all of them are taken
    rollouts: int = 16
    deep_prompts: int = 192
    deep_rollouts: int = 128
    pilot: int = 16
    lessons: int = 24
    buckets: int = 2048


FULL = Size()
SMALL = Size(prompts=24, rollouts=8, deep_prompts=16, deep_rollouts=8, pilot=8, lessons=2, buckets=256)
CONSTANTS: dict[str, Any] = {"critic": asdict(CRITIC), "lesson": asdict(LESSON), "lengths": LENGTHS}


@dataclass(frozen=True)
class Drawn:
    """Everything that a policy wrote."""

    weights: dict[str, Any]  # The policy's parameters
    pools: dict[str, ScoredRollouts]
    mixed: Bool  # Whether the pilot answered a prompt of the wide pool both ways [P]


def drawn(cell: Cell, size: Size, config: TrainConfig, work: Path, bar: Bar) -> Tables:
    """Teach a policy and let it write: for its critic, the pilot, and both pools."""
    policy, length = taught(config), LENGTHS[config.task]
    prompts = different_prompts(policy, FIRST_PROMPT, size.prompts)
    sample = SampleConfig(prompts=len(prompts), group_size=size.pilot, max_new_tokens=length)
    pilot = write(policy, prompts, sample, seed=1, at_once=192).table.total_reward.reshape(len(prompts), -1)
    mixed = np.ptp(pilot, axis=1) > 0
    few = [prompt for prompt, both in zip(prompts, mixed, strict=True) if both][: size.deep_prompts]
    if len(few) < size.deep_prompts:
        raise InputError(f"{len(few)} prompts are answered both ways but {size.deep_prompts} are wanted.")
    lesson = replace(LESSON, max_new_tokens=length)
    critic = fitted_critic(policy, CRITIC, critic_batches(policy, FIRST_LESSON, size.lessons, lesson, 1000, bar), bar)
    pools = {
        "wide": write(policy, prompts, replace(sample, group_size=size.rollouts), seed=2, at_once=192),
        "deep": write(policy, few, replace(sample, group_size=size.deep_rollouts), seed=3, at_once=32),
    }
    pools = {name: with_values(policy, critic, written) for name, written in pools.items()}
    (work / DRAWN).write_bytes(pickle.dumps((dict(policy.model.state_dict()), pools, mixed)))
    return {"drawn": [{"policy": cell.settings["policy"], "prompts": len(prompts), "mixed": float(mixed.mean())}]}


def measured(cell: Cell, size: Size, config: TrainConfig, work: Path, bar: Bar) -> Tables:
    """Measure every token of one pool: exact norms of tokens and rollouts, and a sketch of its score."""
    draw, kind = load_drawn(cell.after[0], work), cell.name.partition("-")[0]
    policy = fresh_policy(config)
    policy.model.load_state_dict(draw.weights)
    pool = measure_pool(policy, draw.pools[kind], size.buckets, bar=bar)
    keep_arrays(work, **pool.arrays)
    policy_name = {"policy": cell.settings["policy"]}
    mixed = draw.mixed if kind == "wide" else np.ones(size.deep_prompts, bool)
    facts = policy_name | {"pool": kind, "parameters": policy.model.num_parameters()} | pool.facts()
    return {"policies": [facts], "prompts": [policy_name | r | {"pool": kind} for r in prompt_facts(pool, mixed)]}


def prompt_facts(pool: Pool, mixed: Bool) -> list[dict[str, Any]]:
    """Return success, corr(W_T, R) and length spread of every prompt, and whether the pilot answered it both ways."""
    inputs, paid = pool.inputs, pool.written.table.total_reward
    assert inputs.energy is not None
    correlation = weight_statistics(inputs.energy, inputs.mask, paid, inputs.group).total_reward_corr
    length, rows = inputs.mask.sum(axis=1), []
    for p, both in enumerate(mixed):
        mine = inputs.group == p
        row = {"prompt": p, "mixed": bool(both), "success": float(paid[mine].mean())}
        row |= {"corr": rounded(correlation[p], 3), "length": rounded(length[mine].mean(), 3)}
        rows.append(row | {"spread": rounded(length[mine].std() / length[mine].mean(), 3)})
    return rows


def load_drawn(draw: Cell, work: Path) -> Drawn:
    """Return what a policy wrote."""
    return Drawn(*pickle.loads(kept_file(draw, work, DRAWN).read_bytes()))


def load_pool(cell: Cell, work: Path) -> Pool:
    """Return a measured pool."""
    written = load_drawn(cell.after[0], work).pools[cell.name.partition("-")[0]]
    return Pool.of(written, **np.load(kept_file(cell, work)))
