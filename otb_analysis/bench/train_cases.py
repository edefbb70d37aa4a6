"""What `otb bench train` runs: two models at fixed settings, and our trainer one step at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from otb_analysis.config import (
    CheckpointConfig,
    CriticConfig,
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    TrainConfig,
)
from otb_analysis.rollouts.models import character_tokenizer, load_policy, small_model
from otb_analysis.store import StepTables
from otb_analysis.tasks import make_task
from otb_analysis.training.loop import train_step
from otb_analysis.training.setup import Trainer
from otb_analysis.training.warm_start import warm_started

PHASES = ("sampling", "update", "sampling + update", "rewards, statistics, advantages", "whole step")
LEARNING_RATE = 1e-6
"""So small that the policy, and with it the length of what it writes, stays what it was."""
QUICK = SampleConfig(prompts=3, group_size=4, max_new_tokens=8)
BUDGETS = {"small": SampleConfig(), "M": SampleConfig(prompts=4, group_size=4, max_new_tokens=128)}
"""What is drawn at each step, by model: the demo's settings, and a few long rollouts."""
LARGE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One step: its sampled tokens, and seconds of its phases.

    Attributes:
        update: Forward pass, loss, backward pass and optimizer.
        statistics: Those of the level `forward`.
        measured: All other levels.
        outside: What belongs to no phase: rows and scalars of the record.
    """

    sample: float
    update: float
    whole: float
    tokens: int
    statistics: float = 0.0
    measured: float = 0.0
    outside: float = 0.0

    def rate(self, phase: str) -> float:
        """Return the tokens per second of a phase of `PHASES`."""
        both = self.sample + self.update
        seconds = (self.sample, self.update, both, self.whole - both, self.whole)
        return self.tokens / seconds[PHASES.index(phase)]


def plain_config(model: str, folder: Path) -> TrainConfig:
    """Return the run of a model in a folder of runs, nothing measured beyond the level `forward`."""
    return TrainConfig(
        run=model,
        root=folder / "runs",
        sample=BUDGETS[model],
        optimize=OptimizeConfig(learning_rate=LEARNING_RATE),
        critic=CriticConfig(enabled=False),
        measure=MeasureConfig(exact=Schedule()),
        evaluate=EvaluateConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )


def bench_config(model: str, folder: Path, quick: bool = False) -> TrainConfig:
    """Return the run that is timed, with its model on disk in a folder.

    `small` is the demo's warm-started model, `M` at its initial weights; `quick` takes initial weights and few tokens.
    """
    config = plain_config(model, folder)
    if quick:
        config = replace(config, sample=QUICK)
    if model == "small" and not quick:
        return replace(config, model=str(warm_started(config)))
    tokenizer, path = character_tokenizer(make_task(config).alphabet), folder / model
    shape = Qwen3Config(**LARGE, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = small_model(config.small_model, tokenizer) if quick else Qwen3ForCausalLM(shape)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return replace(config, model=str(path))


def levels() -> dict[str, Any]:
    """Return every level that can be scheduled, due at each step, those that choose groups on two of them."""
    default = MeasureConfig()
    values = {field.name: getattr(default, field.name) for field in fields(default)}
    scheduled = {name: replace(value, every=1) for name, value in values.items() if hasattr(value, "every")}
    return {
        name: replace(value, prompts=2) if isinstance(value, Schedule) else value for name, value in scheduled.items()
    }


def measured_tokens(tables: StepTables, level: str) -> int:
    """Return of how many tokens a step holds what a level measures."""
    assert tables.tokens is not None
    values = tables.tokens["attribution" if level == "attribution" else "grad_norm_sq"]
    return int(np.ma.count(np.ma.masked_invalid(np.ma.asarray(values))))


class Steps:
    """Our trainer, one step per turn; the last step's tables are kept for the store."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = perf_counter):
        model, tokenizer = load_policy(config.model)
        self.trainer = Trainer(config, model, tokenizer, make_task(config))
        self.trainer.clock = self.clock = clock
        self.step = 0

    def turn(self) -> Turn:
        """Take one step."""
        start = self.clock()
        self.tables = train_step(self.trainer, self.step)
        seconds = self.clock() - start
        self.step += 1
        scalars: Mapping[str, Any] = self.tables.steps
        phases = ("sample", "update", "forward", "estimate", "measure")
        spent = {phase: float(scalars[f"seconds_{phase}"]) for phase in phases}
        outside, tokens = seconds - sum(spent.values()), int(scalars["n_tokens"])
        return Turn(spent["sample"], spent["update"], seconds, tokens, spent["forward"], spent["measure"], outside)
