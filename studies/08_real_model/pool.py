"""A policy's rollouts on a task: drawn once, then measured token by token, a few prompts at a time."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    CheckpointConfig,
    CriticConfig,
    LoraConfig,
    MeasureConfig,
    OptimizeConfig,
    ReasoningGymConfig,
    SampleConfig,
    TrainConfig,
)
from otb_analysis.errors import InputError
from otb_analysis.gradients import sketch_score_norms
from otb_analysis.measurement.level import by_policy_token
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.training.loop import train
from otb_analysis.training.policy.policy import quiet_peft
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Float
from studies.lib import Cell, Tables, rounded
from studies.lib.cache import keep_arrays, kept_file
from studies.lib.critics import critic_batches, fitted_critic, with_values
from studies.lib.policies import Policy, ScoredRollouts, different_prompts, pretrained, write
from studies.lib.pools import Pool, token_sketches

from .training import FULL as TRAINING
from .training import LORA, SUMS, config_of

TASKS = {
    "letters": ReasoningGymConfig(name=("letter_counting",), config=('{"min_words": 1, "max_words": 2}',)),
    "sums": SUMS,
    "sums-lora": SUMS,
}
"""The tasks by the policy that is measured on them. The last has adapters, trained for some updates with `rloo`."""
CRITIC = CriticConfig(kind="head", updates=24)
"""What `value` and `tvm` centre by: a head on hidden states, fitted to rollouts of further prompts."""
FIRST_PROMPT, FIRST_LESSON = 50_000_000, 70_000_000
DRAWN_FILE = "drawn.pickle"


@dataclass(frozen=True)
class Size:
    """How much is drawn and measured."""

    policies: tuple[str, ...] = tuple(TASKS)
    prompts: int = 64
    rollouts: int = 8
    tokens: int = 24
    block: int = 16  # Prompts of a cell
    buckets: int = 4096
    hybrid: int = 16  # Prompts whose norms are sketched, too
    directions: int = 16
    lessons: int = 4  # Batches of 16 prompts × 4 for the critic
    updates: int = 20  # Before adapters are measured: new ones have B = 0, and so no gradient of A
    shuffles: int = 4


DRAWN = ("prompts", "rollouts", "tokens", "block", "lessons", "updates")
MEASURED = ("buckets", "hybrid", "directions")
"""What the rollouts depend on, and what is measured of them besides."""
FULL = Size()
SMALL = Size(
    policies=("sums", "sums-lora"), prompts=16, tokens=8, block=8, buckets=256, hybrid=16, lessons=1, updates=2
)


def drawn(cell: Cell, size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Tables:
    """Sample the rollouts of a policy, score them, and keep them for the cells that measure them."""
    policy = policy_of(cell.settings, size, start, work, bar)
    sample = SampleConfig(prompts=16, group_size=4, max_new_tokens=size.tokens)
    lessons = critic_batches(policy, FIRST_LESSON, size.lessons, sample, 1000, bar)
    prompts = different_prompts(policy, FIRST_PROMPT, size.prompts)
    written = write(policy, prompts, replace(sample, group_size=size.rollouts), seed=2, at_once=size.block)
    written = with_values(policy, fitted_critic(policy, CRITIC, lessons, bar), written)
    (work / DRAWN_FILE).write_bytes(pickle.dumps(written))
    return {"rollouts": rollout_rows(cell.settings["policy"], written)}


def measured(cell: Cell, size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Tables:
    """Measure a block of prompts: exact norms of tokens and rollouts, sketched norms, and a sketch of every score."""
    policy, written = policy_of(cell.settings, size, start, work, bar), load_rollouts(cell.after[0], work)
    groups = np.arange(size.prompts)[cell.settings["number"] * size.block :][: size.block]
    rows = np.isin(written.rollouts.group, groups)
    norms = GradientMeasurer(policy.model, MeasureConfig(), written.temperature)
    exact, sketched = (np.full(written.table.mask.shape, np.nan) for _ in range(2))
    whole = np.full(len(rows), np.nan)
    for done, group in enumerate(groups):
        one, of = norms.norms(written.rollouts, np.array([group])), written.rollouts.group == group
        exact[of], whole[of] = one.norm_sq[of], one.rollout_norm_sq[of]
        if group < size.hybrid:
            sketched[of] = hybrid(policy, written, int(group), size)[of]
        bar(done + 1, len(groups), f"{cell.name}: exact norms")
    part = written.rollouts.take(np.flatnonzero(rows))
    sketch, node = token_sketches(policy.model, part, written.temperature, size.buckets, bar=bar)
    wide = np.pad(node, ((0, 0), (0, written.table.mask.shape[1] - node.shape[1])))
    keep_arrays(work, exact=exact[rows], hybrid=sketched[rows], whole=whole[rows], sketch=sketch, node=wide)
    tokens = int(written.table.mask[rows].sum())
    return {"measured": [{"cell": cell.name, "tokens": tokens, "distinct_tokens": len(sketch)}]}


def hybrid(policy: Policy, written: ScoredRollouts, group: int, size: Size) -> Float:
    """Return sketched norms [N, T] of a prompt's rollouts, copies once; NaN where the model has no hybrid sketch."""
    first, back = written.distinct()
    mine = np.flatnonzero(written.rollouts.group == group)
    rows = np.intersect1d(first, mine)
    ids, mask, attention = (x[rows] for x in written.batch)
    out = np.full(written.table.mask.shape, np.nan)
    try:
        found = sketch_score_norms(policy.model, ids, mask, attention, directions=size.directions, method="hybrid")
    except InputError:
        return out
    out[rows] = by_policy_token(written.rollouts, found.norm_sq, np.isin(np.arange(len(back)), rows))[rows]
    out[mine] = out[first[back[mine]]]
    return out


@dataclass(frozen=True)
class Measured:
    """All blocks of a policy together; made by `load`."""

    pool: Pool
    hybrid: Float  # Sketched norms [N, T], NaN where not measured


def load(cell: Cell, work: Path) -> Measured:
    """Return what the cells before this one measured, as one pool."""
    draw, *blocks = cell.after
    parts = [np.load(kept_file(block, work)) for block in blocks]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    first = np.cumsum([0, *(len(part["sketch"]) for part in parts)])
    numbered = np.concatenate([part["node"] + k for part, k in zip(parts, first[:-1], strict=True)])
    written = load_rollouts(draw, work)
    joined["node"] = np.where(written.table.mask, numbered, 0)
    hybrid_norms = joined.pop("hybrid")
    return Measured(Pool.of(written, **joined), hybrid_norms)


def load_rollouts(draw: Cell, work: Path) -> ScoredRollouts:
    """Return the rollouts that a cell drew."""
    return pickle.loads(kept_file(draw, work, DRAWN_FILE).read_bytes())


def policy_of(settings: Mapping[str, Any], size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Policy:
    """Return the policy that is measured: a pretrained model, or that with adapters trained for some updates."""
    name = settings["policy"]
    config = start or TrainConfig(model="smollm2", task="reasoning_gym", reasoning_gym=TASKS[name])
    policy = pretrained(config)
    if name.endswith("-lora"):
        from peft import PeftModel

        with quiet_peft():
            PeftModel.from_pretrained(policy.model, str(_adapter(size, start, work, bar)), is_trainable=True)
    policy.model.eval()
    return policy


def _adapter(size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Path:
    """Return the directory of trained adapters, kept beside the cells."""
    short = replace(TRAINING, steps=size.updates)
    start = None if start is None else replace(start, lora=LoraConfig(rank=LORA.rank))
    config = replace(config_of(short, "rloo", 3e-4, 0, start), checkpoint=CheckpointConfig(every=0))
    if size is SMALL:
        sample = SampleConfig(prompts=4, group_size=4, max_new_tokens=size.tokens)
        config = replace(config, sample=sample, optimize=OptimizeConfig(steps=size.updates, learning_rate=1e-3))
    path = work.parent / "adapter"
    if not (path / "model" / "adapter").is_dir():
        train(replace(config, evaluate=replace(config.evaluate, every=0), root=path.parent, run=path.name), bar)
    return path / "model" / "adapter"


def rollout_rows(name: str, written: ScoredRollouts) -> list[dict[str, Any]]:
    """Return what was written, a row per rollout."""
    rollouts, table = written.rollouts, written.table
    return [
        {
            "policy": name,
            "prompt": rollouts.prompts[g].id,
            "answer": rollouts.prompts[g].answer,
            "text": rollouts.turns[n][-1].text,
            "tokens": int(table.mask[n].sum()),
            "reward": float(table.total_reward[n]),
            "entropy": rounded(float(table.stats.entropy[n][table.mask[n]].mean())),
        }
        for n, g in enumerate(rollouts.group)
    ]
