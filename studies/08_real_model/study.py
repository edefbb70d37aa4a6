"""A pretrained model on tasks that it half knows: do the verdicts of small models made in code hold there?

Cells draw a policy's rollouts, measure them a few prompts at a time, and compare. Others train.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    CriticConfig,
    LoraConfig,
    OptimizeConfig,
    ReasoningGymConfig,
    SampleConfig,
    TrainConfig,
)
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.gradients import sketch_score_norms
from otb_analysis.measurement.level import by_policy_token
from otb_analysis.training.loop import train
from otb_analysis.training.policy import quiet_peft
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Float
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.policies import (
    Policy,
    ScoredRollouts,
    critic_batches,
    different_prompts,
    fitted_critic,
    pretrained,
    with_values,
    write,
)
from studies.lib.pools import load_pool, measured_tokens
from studies.lib.record import keep_arrays, keep_pickle, kept_pickle
from studies.lib.seeds import BASE, QUICK_MODEL, QUICK_START, QUICK_TASK, started

from . import training
from .compare import AGAINST, BATCHES, CALIBRATION_SHARE, GROUP, RIDGES, SETS, SIZES, UPDATES, comparison, regressions
from .training import FULL as TRAINED
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


DRAWN_WITH = ("prompts", "rollouts", "tokens", "block", "lessons", "updates")
MEASURED_WITH = ("buckets", "hybrid", "directions")
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
    keep_pickle(work, written)
    rollouts, table = written.rollouts, written.table
    rows = list[dict[str, Any]]()
    for n, prompt in enumerate(rollouts.prompts[g] for g in rollouts.group):
        facts = {"text": rollouts.turns[n][-1].text, "tokens": int(table.mask[n].sum())}
        facts |= {"reward": float(table.total_reward[n])}
        facts |= {"entropy": rounded(float(table.stats.entropy[n][table.mask[n]].mean()))}
        rows.append({"policy": cell.settings["policy"], "prompt": prompt.id, "answer": prompt.answer} | facts)
    return {"rollouts": rows}


def measured(cell: Cell, size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Tables:
    """Measure a block of prompts: exact norms of tokens and rollouts, sketched norms, and a sketch of every score."""
    policy, written = policy_of(cell.settings, size, start, work, bar), kept_pickle(cell.after[0], work)
    groups = np.arange(size.prompts)[cell.settings["number"] * size.block :][: size.block]
    rows, sketched = np.isin(written.rollouts.group, groups), np.full(written.table.mask.shape, np.nan)
    for group in groups[groups < size.hybrid]:
        of = written.rollouts.group == group
        sketched[of] = hybrid(policy, written, int(group), size)[of]
    arrays = measured_tokens(policy, written, groups, size.buckets, bar=bar)
    keep_arrays(work, hybrid=sketched[rows], **arrays)
    facts = {"tokens": int(written.table.mask[rows].sum()), "distinct_tokens": len(arrays["sketch"])}
    return {"measured": [{"cell": cell.name} | facts]}


def hybrid(policy: Policy, written: ScoredRollouts, group: int, size: Size) -> Float:
    """Return sketched norms [N, T] of a prompt's rollouts, copies once; NaN where the model has no hybrid sketch."""
    (first, back), mine = written.distinct(), np.flatnonzero(written.rollouts.group == group)
    rows, out = np.intersect1d(first, mine), np.full(written.table.mask.shape, np.nan)
    ids, mask, attention = (x[rows] for x in written.batch)
    try:
        norms = sketch_score_norms(policy.model, ids, mask, attention, directions=size.directions, method="hybrid")
    except InputError:
        return out
    out[rows] = by_policy_token(written.rollouts, norms.norm_sq, np.isin(np.arange(len(back)), rows))[rows]
    out[mine] = out[first[back[mine]]]
    return out


def policy_of(settings: Mapping[str, Any], size: Size, start: TrainConfig | None, work: Path, bar: Bar) -> Policy:
    """Return the policy that is measured: a pretrained model, or that with adapters trained for some updates."""
    name = settings["policy"]
    config = start or TrainConfig(model="smollm2", task="reasoning_gym", reasoning_gym=TASKS[name])
    policy = pretrained(config)
    if name.endswith("-lora"):
        from peft import PeftModel

        path = work.parent / "adapter"  # kept beside the cells
        if not (path / "model" / "adapter").is_dir():
            lora = None if start is None else replace(start, lora=LoraConfig(rank=LORA.rank))
            config = config_of(replace(TRAINED, steps=size.updates, precision="bfloat16"), "rloo", 3e-4, 0, lora)
            if size is SMALL:
                sample = SampleConfig(prompts=4, group_size=4, max_new_tokens=size.tokens)
                config = replace(config, sample=sample, optimize=OptimizeConfig(steps=size.updates, learning_rate=1e-3))
            train(replace(config, evaluate=replace(config.evaluate, every=0), root=path.parent, run=path.name), bar)
        with quiet_peft():
            PeftModel.from_pretrained(policy.model, str(path / "model" / "adapter"), is_trainable=True)
    policy.model.eval()
    return policy


RANK, LORA_UPDATES = LORA.rank, FULL.updates
"""For the page."""


def cells(size: Size, learning: training.Size, quick: bool) -> list[Cell]:
    """Return the pools of each policy, and the training."""
    made, common = list[Cell](), {"quick": quick}
    drawn_with, measured_with = ({name: getattr(size, name) for name in names} for names in (DRAWN_WITH, MEASURED_WITH))
    compared = {"shuffles": size.shuffles, "sizes": list(SIZES), "updates": list(UPDATES), "share": CALIBRATION_SHARE}
    compared |= {"against": AGAINST, "estimators": sorted(ESTIMATORS)}  # those that a pool cannot have leave no row
    tried = {"group": GROUP, "batches": BATCHES, "ridges": RIDGES, "features": SETS, "shuffles": size.shuffles}
    for name in size.policies:
        facts = {**common, "policy": name, "task": asdict(TASKS[name]), "critic": asdict(CRITIC), **drawn_with}
        draw = Cell(f"draw-{name}", facts)
        known, count = facts | measured_with, -(-size.prompts // size.block)
        blocks = [Cell(f"measure-{name}-{k}", known | {"number": k}, after=(draw,)) for k in range(count)]
        made += [draw, *blocks, Cell(f"compare-{name}", known | compared, after=(draw, *blocks))]
        made.append(Cell(f"regression-{name}", known | tried, after=(draw, *blocks)))
    return made + training.cells(learning, common)


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Draw, measure or compare the rollouts of a policy, or train an arm."""
    quick = cell.settings["quick"]
    small = replace(BASE, small_model=QUICK_MODEL, chain_sum=QUICK_TASK, warm_start=QUICK_START)
    start = started(small, work) if quick else None
    if "arm" in cell.settings:
        return training.measure(cell, training.SMALL if quick else training.FULL, start, work, bar)
    size = SMALL if quick else FULL
    if cell.name.startswith("draw"):
        return drawn(cell, size, start, work, bar)
    if cell.name.startswith("measure"):
        return measured(cell, size, start, work, bar)
    draw, *blocks = cell.after
    pool, beside = load_pool(kept_pickle(draw, work), blocks, work)
    return (comparison if cell.name.startswith("compare") else regressions)(cell, pool, beside["hybrid"])


STUDY = Study(
    title="A real model",
    question="On a pretrained model of 135 M parameters and real tasks, do the proxy and the baselines behave as they "
    "do on the small models of the other studies?",
    cells=cells(FULL, training.FULL, quick=False),
    quick=cells(SMALL, training.SMALL, quick=True),
    measure=measure,
)
