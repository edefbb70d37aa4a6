"""A whole run: the policy it starts from, its rollouts, and everything the other files describe."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from otb_analysis.config.learning import CriticConfig, EstimatorConfig, LoraConfig, ObjectiveConfig, OptimizeConfig
from otb_analysis.config.measuring import EvaluateConfig, MeasureConfig
from otb_analysis.config.tasks import TaskSections


@dataclass(frozen=True)
class SmallModelConfig:
    """The model made in code when no checkpoint is given: a Qwen3-type decoder over single characters."""

    layers: int = 3
    width: int = 128  # Hidden size; a multiple of 2 · heads.
    heads: int = 4
    key_value_heads: int = 2
    feed_forward: int = 320  # Inner size of the gated feed-forward block.
    tied: bool = True  # True shares the input embedding with the output matrix.


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised start: training on demonstrations until enough sampled answers are right; made once, then reused."""

    success_low: float = 0.35  # Stop when at least this share of sampled answers is right.
    success_high: float = 0.60
    """When more than this share is right, go back to the check before and train in smaller steps."""
    batch: int = 16  # Demonstrations per step.
    learning_rate: float = 3e-3
    """Learning rate of AdamW, for embeddings and norms. Muon trains the other matrices, at 5 times this rate."""
    max_steps: int = 4000
    check_every: int = 25  # Steps between two measurements of success, once the loss has fallen.
    check_prompts: int = 192  # Prompts per measurement; one sampled answer each.


@dataclass(frozen=True)
class SampleConfig:
    """How rollouts are drawn: plain sampling, temperature only."""

    prompts: int = 16  # Prompts (groups) per step.
    group_size: int = 8  # Rollouts per prompt.
    max_new_tokens: int = 64  # Length budget of one policy turn, the end token included.
    max_turns: int = 8  # Policy turns after which an episode of a multi-turn task is cut.
    temperature: float = 1.0
    soft: int = 0
    """How many of an answer's first positions hold soft tokens: the model then reads pE + σ·N(0, I), a noisy mixture of
    all embeddings, where it would read the token it drew. The rest of the answer is discrete, and only that is paid."""
    soft_noise: float = 0.3  # Their σ, in root-mean-square entries of the table of embeddings when they are drawn.
    filter: str = "none"
    """Which rollouts stay in the batch, which is filled up with others: none; dynamic, groups whose rewards differ; or
    prs, which rejects lazy right answers. docs/methods/filters.md says what that does to each estimator's mean."""
    filter_options: dict[str, str] = field(default_factory=dict)
    """Options of that filter, as name value pairs. budget, call, correct, low, high: of prs."""
    filter_rounds: int = 8  # Draws per step after which a filter that has not filled its batch stops the run.
    engine: Literal["transformers", "vllm"] = "transformers"
    """Who samples; vllm needs the extra of that name and a GPU."""
    vllm_memory: float = 0.3  # Share of the GPU's memory that vLLM may take.

    @property
    def limit(self) -> int:
        """Most policy tokens that a rollout can have."""
        return self.max_new_tokens * self.max_turns


@dataclass(frozen=True)
class DeviceConfig:
    """Where models run."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps. auto is the accelerator where there is one; mps cannot measure."""


@dataclass(frozen=True)
class MachineConfig(DeviceConfig):
    """Where a model runs, and in which arithmetic it is measured."""

    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Products of matrices while gradients are measured; sums are in float32 or better. tf32 and bfloat16 are faster
    where a device has them, and used where norms of a probe then agree with float32; the run says which it was."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: everything a stopped run needs to continue bit for bit."""

    every: int = 50  # Steps between two checkpoints. The last step is always one. 0 writes none.
    keep: int = 1  # How many checkpoints are kept, the newest ones.


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept, and what it starts from."""

    run: str = ""  # Name of the run's directory; by default TASK-ESTIMATOR-sSEED.
    root: Path = Path("runs")  # Directory that holds the runs.
    if_exists: Literal["error", "replace", "resume"] = "error"
    """What to do when the run's directory already exists: refuse, begin anew, or go on from its newest checkpoint."""
    model: str = ""
    """Local Hugging Face checkpoint directory, a GGUF file, `demo`, the policy that the demo starts from, or `smollm2`,
    once `otb model fetch smollm2` brought it. By default the small model below is made and warm-started in code."""
    task: str = "chain_sum"
    """chain_sum, calculator, counting, graph_path, math_jsonl or reasoning_gym, or module:attribute for your own."""
    seed: int = 0  # Seed of prompts, sampling and initial weights.
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where the scalars of every step go besides the store; TensorBoard's files lie in the run's own directory."""


# Fields come in the order of the bases from right to left: run … trackers, the device, the tasks' sections, and then
# these. Stored configurations and the help have that order.
@dataclass(frozen=True)
class TrainConfig(TaskSections, MachineConfig, RunConfig):
    """One instrumented training run."""

    tokenizer: Literal["characters", "triads"] = "characters"
    """Tokens of the small model made in code: single characters, or numbers in triads with a magnitude suffix."""
    small_model: SmallModelConfig = field(default_factory=SmallModelConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimize: OptimizeConfig = field(default_factory=OptimizeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def run_name(self) -> str:
        """Directory name of the run."""
        return self.run or f"{self.task}-{self.estimator.name}-s{self.seed}".replace(":", ".")


@dataclass(frozen=True)
class DemoConfig(DeviceConfig):
    """Train a small model twice with every measurement, print the comparison, serve the dashboard."""

    root: Path = Path("runs")  # Directory that holds the runs.
    seed: int = 0  # Seed of the prompts and the sampling, the same for both runs.
    threads: int = 1  # Threads of each of the two runs.
    serve: bool = True  # Serve the dashboard afterwards.
    port: int = 8501  # Port of the dashboard, on loopback.


def plain_config(config: Any) -> dict[str, Any]:
    """Return a configuration as nested plain values, as JSON reads run.json back: paths are text, tuples lists."""
    return json.loads(json.dumps(asdict(config), default=str))
