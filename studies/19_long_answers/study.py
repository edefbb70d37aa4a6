"""Pretrained models that write more than a hundred tokens: does what study 17 finds on small models hold there?

SmolLM2-135M-Instruct is taught to write two kinds of answers out, until about half of its sampled answers are right.
Then rollouts are drawn, and the gradients of their groups are formed as in study 17, over all its parameters. Gemma 3
270M came later, on one of the tasks.

The question and the settings were committed before anything was measured; a first look at how fast a model is taught
came before.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from otb_analysis.config import SampleConfig, TrainConfig, WarmStartConfig, plain_config
from otb_analysis.rollouts.models import load_policy, small_model, small_tokenizer
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables
from studies.lib.long_answers import Amount, compared, norms, planned, pooled, teach
from studies.lib.policies import Policy
from studies.lib.record import kept_pickle
from studies.lib.seeds import QUICK_MODEL

from .tasks import WrittenOut

TASKS = {"letters": (5, 5), "sums": (15, 16)}
"""Words and terms of a question: answers of 110 to 130 tokens."""
RATE = 2e-4
"""AdamW's rate of teaching, for all parameters."""


@dataclass(frozen=True)
class Size(Amount):
    """How much is taught and measured; a cell measures a block."""

    model: str = "smollm2"
    tokens: int = 160  # Longest answer
    teach: WarmStartConfig = field(
        default_factory=lambda: WarmStartConfig(
            success_low=0.35, success_high=0.65, batch=8, learning_rate=RATE, max_steps=200, check_every=5,
            check_prompts=48,
        )
    )  # fmt: skip


FULL = Size(blocks=3, rollouts=8, sizes=(4,), buckets=4096, norm_prompts=12, positions=4, update=16)
SMALL = replace(
    FULL, model="", tokens=24, blocks=1, rollouts=4, sizes=(2,), buckets=256, norm_prompts=8, positions=2,
    teach=WarmStartConfig(success_low=0.02, success_high=1.0, batch=32, max_steps=2000, check_prompts=64),
)  # fmt: skip
SMALL_TASKS = {"sums": (2, 2)}
GEMMA = replace(FULL, model="gemma3-270m", blocks=2, norm_prompts=6)
GEMMA_TASKS = {"sums-gemma": TASKS["sums"]}
"""A task's name, and behind the dash that of the model where it is not SmolLM2."""


def cells(tasks: Mapping[str, tuple[int, int]], size: Size) -> list[Cell]:
    """Return the cells of every task."""
    made = list[Cell]()
    for name, ends in tasks.items():
        known = {"task": name, "ends": list(ends), "quick": size is SMALL, "config": plain_config(config_of(size))}
        known |= {"model": size.model} if size is GEMMA else {}
        made += planned(name, known, {"size": asdict(size)}, [{"block": k} for k in range(size.blocks)])
    return made


def config_of(size: Size) -> TrainConfig:
    """Return the limits of sampling and the supervised start."""
    sample = SampleConfig(max_new_tokens=size.tokens, group_size=size.rollouts, prompts=size.update)
    return TrainConfig(warm_start=size.teach, sample=sample, small_model=QUICK_MODEL)


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Teach the model, measure it, or compare."""
    size, key = SMALL if cell.settings["quick"] else FULL, {"task": cell.settings["task"]}
    size = GEMMA if cell.settings.get("model") else size
    kind, config = cell.name.partition("-")[0], config_of(size)
    if kind == "compare":
        return compared(key, cell.after[1:], size, work)
    task = WrittenOut(cell.settings["task"].partition("-")[0], *cell.settings["ends"])
    if size.model:
        model, tokenizer = load_policy(size.model)
    else:
        tokenizer = small_tokenizer("characters", task.alphabet)
        model = small_model(config.small_model, tokenizer, 0)
    policy = Policy(model.eval(), tokenizer, task)
    if kind == "teach":
        adamw = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.98), weight_decay=0.0)
        return teach(key, policy, config, work, [adamw] if size.model else None)
    model.load_state_dict(kept_pickle(cell.after[0], work))
    if kind == "norms":
        return norms(key, policy, config.sample, size)
    return pooled(key, policy, [cell.settings["block"]], config.sample, size, work, bar)


STUDY = Study(
    title="A real model, long answers",
    question="On a pretrained model of 135 M parameters whose answers have more than a hundred tokens, what do `otb` "
    "and the other baselines take off the variance of `rloo`, and does the proxy hold?",
    cells=cells(TASKS, FULL),
    later=cells(GEMMA_TASKS, GEMMA),
    threads=2,
    quick=cells(SMALL_TASKS, SMALL),
    measure=measure,
)
