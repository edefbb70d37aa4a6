"""What `otb bench train` runs: two models at fixed settings, and our trainer one step at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

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
from otb_analysis.config.measuring import StepSchedule
from otb_analysis.rollouts.models import SHIPPED, character_tokenizer
from otb_analysis.rollouts.named_models import fetched
from otb_analysis.tasks import make_task
from otb_analysis.training.loop import train_step
from otb_analysis.training.setup import Trainer

PHASES = ("sampling", "update", "sampling + update", "rewards, statistics, advantages", "whole step")
LEARNING_RATE = 1e-6
"""So small that the policy, and with it the length of what it writes, stays what it was."""
QUICK = SampleConfig(prompts=3, group_size=4, max_new_tokens=8)
BUDGETS = {"small": SampleConfig(), "M": SampleConfig(prompts=4, group_size=4, max_new_tokens=128)}
BUDGETS["R"] = SampleConfig(prompts=4, group_size=4, max_new_tokens=32)
"""What is drawn at each step, by model: the demo's settings, a few long rollouts, a few short ones."""
LARGE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One step: seconds of its phases, and its sampled tokens."""

    sample: float
    update: float  # Forward pass, loss, backward pass and optimizer
    whole: float
    tokens: int
    statistics: float = 0.0  # Those of the level `forward`
    measured: float = 0.0  # All other levels
    outside: float = 0.0  # What belongs to no phase: rows and scalars of the record

    def rate(self, phase: str) -> float:
        """Return the tokens per second of a phase of `PHASES`."""
        both = self.sample + self.update
        seconds = (self.sample, self.update, both, self.whole - both, self.whole)
        return self.tokens / seconds[PHASES.index(phase)]


def bench_config(model: str, folder: Path, quick: bool = False) -> TrainConfig:
    """Return the run that is timed, nothing measured beyond the level `forward`; it and its model are kept in a folder.

    `small` is the demo's model, `M` at its initial weights, `R` a pretrained one; `quick` draws few tokens.

    Raises:
        InputError: The pretrained model was not fetched.
    """
    places = {"small": SHIPPED["demo"], "M": folder / model}
    config = TrainConfig(
        run=model,
        root=folder / "runs",
        if_exists="replace",
        model=str(places[model] if model in places else fetched("smollm2")),
        sample=QUICK if quick else BUDGETS[model],
        optimize=OptimizeConfig(learning_rate=LEARNING_RATE),
        critic=CriticConfig(enabled=False),
        measure=MeasureConfig(exact=Schedule()),
        evaluate=EvaluateConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    if model == "M":
        shape = Qwen3Config(**LARGE, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            Qwen3ForCausalLM(shape).save_pretrained(config.model)
        character_tokenizer(make_task(config).alphabet).save_pretrained(config.model)
    return config


def levels() -> dict[str, StepSchedule]:
    """Return every level that can be scheduled, due at each step, those that choose groups on two of them."""
    return {
        name: replace(level, every=1, prompts=2) if isinstance(level, Schedule) else replace(level, every=1)
        for name, level in MeasureConfig().schedules.items()
    }


class Steps:
    """Our trainer, one step per turn; the last step's tables are kept for the store."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = perf_counter):
        self.trainer = Trainer.from_config(config)
        self.trainer.clock = self.clock = clock
        self.step = 0

    def turn(self) -> Turn:
        """Take one step."""
        start = self.clock()
        self.tables = train_step(self.trainer, self.step)
        whole = self.clock() - start
        self.step += 1
        scalars: Any = self.tables.steps
        phases = ("sample", "update", "forward", "estimate", "measure")
        sample, update, forward, estimate, measure = (float(scalars[f"seconds_{phase}"]) for phase in phases)
        outside = whole - sample - update - forward - estimate - measure
        return Turn(sample, update, whole, int(scalars["n_tokens"]), forward, measure, outside)
