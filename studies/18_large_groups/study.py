"""Many rollouts of one prompt: how noise falls with the size of the group, as MaxRL (arXiv 2602.02710) draws it.

All four estimators give every token of a rollout the same advantage, so one sketch per distinct rollout is enough.
Question, prompts, sizes and columns were settled before a number was seen; one commit has both, so the history does not
show it.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import ReasoningGymConfig, SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.gradients import gradient_sketch
from otb_analysis.statistics import group_gradients, log_ratio_t, partitions, pool_gram
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Float, Label
from studies.lib import Cell, Study, Tables, interval_columns, rounded
from studies.lib.policies import Policy, different_prompts, draw, pretrained
from studies.lib.record import keep_arrays, keep_pickle, kept_file, kept_pickle
from studies.lib.seeds import BASE, QUICK_START, QUICK_TASK, started

NAMES = ("rloo", "maxrl", "grpo", "none")
LABELS: tuple[Label, ...] = tuple((name, "none") for name in NAMES)
LOOK = 16
KINDS = {"hard": (2, 5), "easy": (7, 14)}
"""Right ones of a first look at `LOOK` rollouts, which are not used again; other prompts are left out."""
FIRST_LOOK = 90_000_000
LETTERS = ReasoningGymConfig(name=("letter_counting",), config=('{"min_words": 1, "max_words": 2}',))
"""The task `letters` of study 08."""


@dataclass(frozen=True)
class Size:
    """How much is drawn, and into what groups it is cut."""

    policy: str = "letters"
    looked: int = 64  # Prompts of the first look
    each: int = 16  # Prompts of a kind
    block: int = 4
    rollouts: int = 128
    tokens: int = 24
    buckets: int = 4096
    sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    shuffles: int = 8


FULL = Size()
SMALL = Size("sums", looked=64, each=1, block=2, rollouts=16, tokens=8, buckets=256, sizes=(4, 8), shuffles=2)


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return the first look, the blocks of prompts, and what they say."""
    settings = {"quick": quick, "policy": size.policy, "task": asdict(LETTERS), "many": asdict(size), "kinds": KINDS}
    look = Cell("many-look", settings)
    count = -(-len(KINDS) * size.each // size.block)
    blocks = [Cell(f"many-{k}", {**settings, "number": k}, after=(look,)) for k in range(count)]
    return [look, *blocks, Cell("many-compare", {**settings, "estimators": list(NAMES)}, after=(look, *blocks))]


def looked(policy: Policy, size: Size, work: Path) -> Tables:
    """Choose prompts by a few rollouts of each: the first ones of every kind."""
    prompts = different_prompts(policy, FIRST_LOOK, size.looked)
    sample = SampleConfig(prompts=len(prompts), group_size=LOOK, max_new_tokens=size.tokens)
    right = draw(policy, prompts, sample, seed=3, at_once=8).reward.sum(axis=1).reshape(-1, LOOK).sum(axis=1)
    by_kind = [[p for p, k in zip(prompts, right, strict=True) if low <= k <= high] for low, high in KINDS.values()]
    if min(map(len, by_kind)) < size.each:
        raise InputError(f"{[len(some) for some in by_kind]} prompts are of each kind but {size.each} are wanted.")
    keep_pickle(work, [prompt for some in by_kind for prompt in some[: size.each]])
    return {"many_look": [{"looked": len(prompts), **{k: len(some) for k, some in zip(KINDS, by_kind, strict=True)}}]}


def measured(cell: Cell, policy: Policy, size: Size, work: Path, bar: Bar) -> Tables:
    """Draw the rollouts of a block of prompts, and sketch the score of every distinct one."""
    first, rows, kept = cell.settings["number"] * size.block, list[dict[str, Any]](), list[Any]()
    sample = SampleConfig(prompts=1, group_size=size.rollouts, max_new_tokens=size.tokens)
    different_prompts(policy, FIRST_LOOK, size.looked)  # Tasks judge answers to prompts that they have made
    for k, prompt in enumerate(kept_pickle(cell.after[0], work)[first : first + size.block], first):
        written = draw(policy, [prompt], sample, seed=1000 + k)
        distinct, node = np.unique(written.input_ids, axis=0, return_index=True, return_inverse=True)[1:]
        ids, mask, attention = written.tensors(policy.model.device, distinct)
        each = np.arange(len(distinct))
        sketch = gradient_sketch(policy.model, ids, mask, mask[:, None].double(), each, attention, dim=size.buckets)
        kept.append((sketch[node.ravel(), 0], written.reward.sum(axis=1)))
        facts = {"kind": list(KINDS)[k // size.each], "prompt": prompt.id, "success": float(kept[-1][1].mean())}
        rows.append(facts | {"distinct": len(distinct), "tokens": rounded(float(written.mask.sum(axis=1).mean()))})
        bar(k - first + 1, size.block, "rollouts of one prompt")
    sketches, rewards = zip(*kept, strict=True)
    keep_arrays(work, sketch=np.concatenate(sketches), reward=np.concatenate(rewards))
    return {"many_prompts": rows}


def compared(cell: Cell, size: Size, work: Path) -> Tables:
    """Return how trace of the covariance, squared mean and their ratio go with the size of the group."""
    parts = [np.load(kept_file(block, work)) for block in cell.after[1:]]
    sketch, reward = (np.concatenate([part[name] for part in parts]) for name in ("sketch", "reward"))
    by_size = {n: noise_and_mean(sketch, reward, size, n) for n in size.sizes}
    rows = list[dict[str, Any]]()
    for at, kind in enumerate(KINDS):
        prompts = slice(at * size.each, (at + 1) * size.each)
        for n, (noise, mean) in by_size.items():
            least, start = size.sizes[0], by_size[size.sizes[0]][0]
            for m, name in enumerate(NAMES):
                v, s, base, length = (x[prompts] for x in (noise[m], mean[m], noise[0], mean[0]))
                ratios = {
                    "sf": (v, s), "fall": (n * v, least * start[m, prompts]), "over": (v, base), "length": (s, length),
                    "sf_over": (v * length, s * base),
                }  # fmt: skip
                row: dict[str, Any] = {"kind": kind, "size": n, "estimator": name}
                for of, pair in ratios.items():
                    row |= interval_columns(of, log_ratio_t(*pair))
                rows.append(row)
    return {"many_groups": rows}


def noise_and_mean(sketch: Float, reward: Float, size: Size, n: int) -> tuple[Float, Float]:
    """Return tr Cov ĝ and ‖E ĝ‖² of every estimator and prompt [M, P], from disjoint groups, over several cuts."""
    by_cut = list[tuple[Float, Float]]()
    for cut in partitions(np.arange(len(reward)) // size.rollouts, n, size.shuffles, seed=n):
        inputs = EstimatorInputs(reward[:, None], np.ones((len(reward), 1), bool), cut.group)
        weights = np.stack([estimate(name, inputs).advantage[:, 0] for name in NAMES])
        pool = pool_gram([group_gradients(sketch, weights, cut)], [cut], LABELS)
        by_cut.append((np.stack([pool.group_variance(label) for label in LABELS]), np.einsum("mmp->mp", pool.apart)))
    noise, mean = np.mean(by_cut, axis=0)
    return noise, mean


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Choose prompts, measure a block of them, or compare."""
    quick, config = cell.settings["quick"], TrainConfig(model="smollm2", task="reasoning_gym", reasoning_gym=LETTERS)
    size = SMALL if quick else FULL
    if cell.name == "many-compare":
        return compared(cell, size, work)
    if quick:
        config = started(replace(BASE, chain_sum=QUICK_TASK, warm_start=QUICK_START), work)
    policy = pretrained(config)
    return measured(cell, policy, size, work, bar) if "number" in cell.settings else looked(policy, size, work)


STUDY = Study(
    title="Large groups",
    question="In groups of N rollouts of one prompt, how do the noise of `maxrl` and its noise at equal progress fall "
    "with N beside 1/N, and does it cost more noise than `rloo`?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
