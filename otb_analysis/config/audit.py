"""Somebody else's rollouts: where they are, how to read them, and what is measured of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from otb_analysis.config.learning import EstimatorConfig
from otb_analysis.config.measuring import AttributionSchedule, MeasureConfig, Schedule
from otb_analysis.config.train import MachineConfig


@dataclass(frozen=True)
class RecordedConfig:
    """A run made of recorded rollouts: where it is kept, and how the records are read."""

    run: str = ""  # Name of the run's directory; by default that of the file or directory.
    root: Path = Path("runs")  # Directory that holds the runs.
    if_exists: Literal["error", "replace", "resume"] = "error"
    """What to do when the run's directory already exists: refuse, begin anew, or add the steps it does not have."""
    format: str = "auto"
    """Who wrote the records: plain, trl, verl, art, prime_rl, prime_rl_traces, verifiers, nemo_rl or slime; auto
    recognises it."""
    prompts: int = 16  # Prompts (groups) per step, where the records name no step.
    group_size: int = 0
    """Rollouts per prompt, where the records name no group: so many rows in a row are one. 0 takes rows with the same
    prompt."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Reward columns of TRL with their weights, as name value pairs; by default every number that TRL did not add."""


@dataclass(frozen=True)
class ScoreConfig(MachineConfig, RecordedConfig):
    """Measure recorded rollouts under a model: a run with a token table, as if it had been trained here."""

    rollouts: Path = Path()  # File or directory with the rollouts.
    model: str = ""  # Checkpoint that sampled them: a directory, a GGUF file or a name, as in `otb train --model`.
    text: Literal["auto", "plain", "chat"] = "auto"
    """How a prompt without token ids becomes tokens. plain: as it stands. chat: as the user's message in the model's
    chat template. auto: texts that lost their special tokens (TRL, verl) are put back into the template, and refused
    where that does not give the same text; all others are plain."""
    ended: Literal["recorded", "all"] = "recorded"
    """Which completions without token ids ended with the end token: those with finish_reason stop, or all."""
    temperature: float = 1.0  # Temperature at which the rollouts were sampled.
    plain_sampling: bool = False
    """You state that every rollout was drawn from this model at this temperature: no top-p, top-k or penalty, no
    prompt or rollout left out by its outcome. Then the step length c of unbiased estimators is known."""
    estimator: EstimatorConfig = field(default_factory=lambda: EstimatorConfig(name="grpo"))
    measure: MeasureConfig = field(default_factory=lambda: MeasureConfig(exact=Schedule(every=0, prompts=8)))
    micro_batch: int = 0  # Rollouts per forward pass; 0 takes what fits into memory.
    allow_remote_code: bool = False  # True lets Python files in the model's directory run. Read them first.


@dataclass(frozen=True)
class ImportConfig(RecordedConfig):
    """A run of recorded rollouts without a model: rewards, lengths, and the per-token numbers that were recorded."""

    tokenizer: str = ""
    """Directory of the tokenizer that made the token ids; with it, pages show each token's text."""


@dataclass(frozen=True)
class AuditConfig(ScoreConfig):
    """Which estimator, which group size, which tokens: one report on recorded rollouts."""

    measure: MeasureConfig = field(
        default_factory=lambda: MeasureConfig(
            exact=Schedule(every=1), attribution=AttributionSchedule(every=1), subgroups=("otb", "none")
        )
    )
    norms: Literal["auto", "whole", "drawn", "none"] = "auto"
    """Whose norms are measured beside every estimator's gradient: those of all tokens (whole), of a few drawn ones
    (drawn) or none. auto: whole, unless that takes twice as long as the gradients, as with answers of more than about a
    hundred tokens. Schedules that you set yourself win."""
    aggregation: str = ""
    """How the trainer's loss weighs tokens, as in `objective.aggregation`: sequence_sum, token_mean, sequence_mean,
    constant or dapo. With it the sum of loss weights and the logged gradient norm are checked; by default that of the
    run, where it is one of otb train or of OTBGRPOTrainer."""
    accumulate: int = 0
    """Rollouts of one of the trainer's micro-batches, whose losses it averages. 0 takes what the run says, or shows
    what micro-batches of one rollout would do."""
    go: bool = False  # True measures; without it the cost is printed and nothing is written.
