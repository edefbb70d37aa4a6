"""Typed configuration of runs: every field of `otb train`, on the command line and in TOML alike, and of `otb demo`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ChainSumConfig:
    """`chain_sum`: add a chain of numbers, one partial sum at a time. The number of terms sets the horizon."""

    terms_min: int = 2
    """Fewest terms of a prompt."""
    terms_max: int = 4
    """Most terms of a prompt."""
    largest: int = 19
    """Terms are drawn from 1 … largest."""


@dataclass(frozen=True)
class CalculatorConfig:
    """`calculator`: solve an expression by calls of a tool, one turn each."""

    operations_min: int = 2
    """Fewest operators of a prompt."""
    operations_max: int = 3
    """Most operators of a prompt."""
    operators: str = "+-*"
    """Operators of a prompt, some of + - * / ^; the calculator knows them all."""
    largest: int = 19
    """Numbers are drawn from 1 … largest."""
    largest_result: int = 999
    """Every result on the way is whole and from 0 to this."""
    call_operations: int = 1
    """Most operators of one call; 1 leaves their order to the policy."""


@dataclass(frozen=True)
class CountingConfig:
    """`counting`: how often a letter occurs in a text."""

    length_min: int = 4
    """Shortest text."""
    length_max: int = 12
    """Longest text."""
    letters: int = 4
    """Letters the text is made of."""
    show: Literal["running", "direct"] = "running"
    """What demonstrations write: the text with a running count, or the number at once."""


@dataclass(frozen=True)
class GraphPathConfig:
    """`graph_path`: any walk from start to goal along the edges of a random graph is right."""

    nodes: int = 5
    edges: int = 7
    distance_min: int = 2
    """Fewest edges between start and goal."""
    directed: bool = False
    """True allows an edge only from its first letter to its second."""


@dataclass(frozen=True)
class MathJsonlConfig:
    """`math_jsonl`: prompts and answers from local JSON-lines or Parquet files, graded by math-verify."""

    train: str = ""
    """A .jsonl or .parquet file."""
    heldout: str = ""
    """Another one for the held-out split; by default a share of `train` is held out."""
    heldout_share: float = 0.1
    """Share of `train` held out when there is no other file; a hash of the prompt decides."""
    prompt_column: str = "question"
    answer_column: str = "answer"
    answer_marker: str = "####"
    """What stands before the final answer in the answer column, and may in a completion."""
    template: str = "{prompt}"
    """What the policy is given; {prompt} stands for the prompt column."""
    chat: bool = True
    """True wraps the prompt by the tokenizer's chat template, where it has one."""


@dataclass(frozen=True)
class SmallModelConfig:
    """The model made in code when no checkpoint is given: a Qwen3-type decoder over single characters."""

    layers: int = 3
    width: int = 128
    """Hidden size; a multiple of 2 · heads."""
    heads: int = 4
    key_value_heads: int = 2
    feed_forward: int = 320
    """Inner size of the gated feed-forward block."""
    tied: bool = True
    """True shares the input embedding with the output matrix."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised start on demonstrations, stopped by measured success, cached by this configuration."""

    success_low: float = 0.35
    """Stop as soon as this share of sampled answers is right …"""
    success_high: float = 0.60
    """… and step back if it overshot this one."""
    batch: int = 16
    """Demonstrations per step."""
    learning_rate: float = 3e-3
    """Of AdamW, which trains embeddings and norms; the matrices between them are trained by Muon."""
    max_steps: int = 4000
    check_every: int = 25
    """Steps between two measurements of success, once the loss has fallen."""
    check_prompts: int = 192
    """Prompts per measurement; one sampled answer each."""


@dataclass(frozen=True)
class SampleConfig:
    """How rollouts are drawn: plain sampling, temperature only."""

    prompts: int = 16
    """Prompts (groups) per step."""
    group_size: int = 8
    """Rollouts per prompt."""
    max_new_tokens: int = 64
    """Length budget of one policy turn, the end token included."""
    max_turns: int = 8
    """Policy turns after which an episode of a multi-turn task is cut."""
    temperature: float = 1.0
    engine: Literal["transformers", "vllm"] = "transformers"
    """Who samples; vllm needs the extra of that name and a GPU."""
    vllm_memory: float = 0.3
    """Share of the GPU's memory that vLLM may take."""


@dataclass(frozen=True)
class EstimatorConfig:
    """Which estimator forms the advantages."""

    name: str = "otb"
    """A name in ESTIMATORS."""
    energy: Literal["proxy", "exact"] = "proxy"
    """Energies it weights by: the forward-only proxy, or exact norms, which measures every rollout at every step."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of that estimator, as name value pairs: `tail group`."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a batch of rollouts is optimised for: ĝ = Σ coefficient·∇log π, with every part of the catalogue.

    The defaults are the plain on-policy policy gradient: one update per batch, token sums, mean over rollouts.
    """

    ratio: str = "none"
    """Importance weighting against the policy that sampled: none, or a name in RATIOS."""
    ratio_options: dict[str, str] = field(default_factory=dict)
    """Options of that ratio, as name value pairs."""
    aggregation: str = "sequence_sum"
    """How tokens are weighed against each other: a name in AGGREGATIONS."""
    aggregation_options: dict[str, str] = field(default_factory=dict)
    """Options of that aggregation, as name value pairs."""
    shaping: str = "none"
    """How rewards are reshaped before the estimator sees them: none, or a name in SHAPINGS."""
    shaping_options: dict[str, str] = field(default_factory=dict)
    """Options of that shaping, as name value pairs."""
    epochs: int = 1
    """Passes over each batch."""
    minibatches: int = 1
    """Parts of whole groups that a batch is cut into; each takes one optimizer step per epoch."""
    staleness: int = 0
    """Rollouts are sampled from the policy of this many batches ago."""
    kl_coefficient: float = 0.0
    """Weight β of the divergence from the policy as it was at the start; 0 keeps no copy of it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Per-token estimator of KL(π‖π_ref): log ratio, half its square, or π_ref/π − 1 + log ratio."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss (k2 and k3: k1 has no gradient in expectation), or a penalty on each token's reward."""
    entropy_bonus: float = 0.0
    """Weight of the mean token entropy, which is added to the objective."""


@dataclass(frozen=True)
class OptimizeConfig:
    """The update: AdamW."""

    steps: int = 60
    """Batches of rollouts."""
    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up: it stays, or falls to 0 at the last step."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Clipping threshold for ‖ḡ‖; 0 turns clipping off."""
    scale_by_ess: bool = False
    """Multiply the learning rate by √(ESS/N), the effective sample size of the sequence ratios (OPOB)."""
    micro_batch: int = 0
    """Rollouts per forward pass; 0 takes what fits into 16,384 positions and 1 GiB of logits."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of sampling and training passes; weights and optimizer stay float32, measurements too."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, and less memory."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters through PEFT: only they are trained, and the scores are over them alone."""

    rank: int = 0
    """Rank r; 0 trains all weights."""
    alpha: float = 16.0
    """Scale: the adapter adds (alpha/r)·B·A."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get one; by default every linear layer but the output."""


@dataclass(frozen=True)
class CriticConfig:
    """A value network beside the policy; it observes, and trains only estimators that read its values.

    γ and λ of its target stand here, those of the advantages in `estimator.options`; with `value` as the estimator that
    trains, both must mean the same value: γ is 1 for the targets return and tvm, λ is free for return and 1 for tvm,
    and gae has both alike on both sides.
    """

    enabled: bool = True
    kind: Literal["head", "model"] = "head"
    """A two-layer head on the policy's detached hidden states, or a language model of its own with a scalar output."""
    path: str = ""
    """Local checkpoint directory that a model starts from; by default the policy's own starting weights."""
    target: Literal["return", "gae", "tvm"] = "return"
    """Fitted to return-to-go, to λ-returns of GAE(γ, λ), or to the mean reward of the group's rollouts that share the
    prefix (TVM)."""
    discount: float = 1.0
    """γ of the target gae."""
    decay: float = 0.95
    """λ of the target gae."""
    width: int = 128
    """Hidden units of a head."""
    learning_rate: float = 0.0
    """Of its own AdamW, constant; 0 takes 0.001 for a head and optimize.learning_rate for a model."""
    updates: int = 4
    """Gradient steps on each batch, after its values were recorded."""
    gradient_checkpointing: bool = False
    """Recompute a model's activations in the backward pass: slower, and less memory."""


@dataclass(frozen=True)
class Schedule:
    """When a level of measurement runs, and on how many whole groups."""

    every: int = 0
    """Steps between two measurements, counted from step 0; 0 turns the level off."""
    prompts: int = 0
    """Groups measured; 0 means all of the step's groups."""

    def due(self, step: int) -> bool:
        """Return True when the level runs at this step."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class SampledSchedule(Schedule):
    """When exact norms of randomly drawn tokens are measured, of how many, and how they are drawn."""

    share: float = 0.1
    """Share of the policy tokens that is measured."""
    by: Literal["above_cut", "proxy", "uniform"] = "above_cut"
    """Tokens are drawn in proportion to the norm above the last attention, to the proxy, or all alike."""


@dataclass(frozen=True)
class SketchSchedule(Schedule):
    """When norms of whole groups are estimated from projections on random directions, and how precisely."""

    directions: int = 32
    """Directions K; the cost grows with K, the standard error falls as 1/√K."""
    method: Literal["hybrid", "rank_one", "gaussian"] = "hybrid"
    """Exact above the last attention and sketched below, all sketched, or all by one pass a direction (any model)."""


@dataclass(frozen=True)
class AttributionSchedule:
    """When every token's share of ‖ḡ‖² is measured."""

    every: int = 0
    """Steps between two measurements, counted from step 0; 0 turns the level off."""
    split: bool = True
    """Also split each share into signal (along the other prompts' gradients) and noise (along its own prompt's)."""

    def due(self, step: int) -> bool:
        """Return True when the level runs at this step."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class MeasureConfig:
    """Levels of measurement beyond `forward`, which always runs."""

    exact: Schedule = Schedule(every=20, prompts=2)
    """Exact norm of every token's score, and the Gram matrix of group gradients under every estimator."""
    sampled: SampledSchedule = SampledSchedule()
    """Exact norms of drawn tokens of the other groups, their totals with standard errors, and a calibrated proxy, which
    estimators weigh by in the Gram matrix of the same step."""
    sketch: SketchSchedule = SketchSchedule()
    """Estimated norms, with standard errors, of every token of groups that no other level measured at that step."""
    attribution: AttributionSchedule = AttributionSchedule()
    """Signed share of every token in ‖ḡ‖² of the estimator that trains."""
    engine: Literal["auto", "reference", "generic", "fast"] = "auto"
    """Which gradient engine measures."""
    scope: str = "all"
    """Parameters whose gradient is measured: all, lm_head, or a regular expression over parameter names."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Success on held-out prompts."""

    every: int = 20
    """Steps between evaluations; the last step is always evaluated; 0 turns it off."""
    prompts: int = 128
    """Held-out prompts, the same at every evaluation."""
    samples: int = 1
    """Answers sampled to each: avg@samples, and pass@k for k = 1, 2, 4, … up to it, with intervals over prompts."""
    threshold: float = 0.5
    """An answer is a success when its total reward is at least this."""


@dataclass(frozen=True)
class CheckpointConfig:
    """All that a stopped run needs to go on bit for bit: weights, optimizer, critic, random state, position."""

    every: int = 50
    """Steps between two checkpoints; the last step has one too; 0 writes none."""
    keep: int = 1
    """How many of the newest stay on the disk."""


@dataclass(frozen=True)
class TrainConfig:
    """One instrumented training run."""

    run: str = ""
    """Name of the run's directory; by default TASK-ESTIMATOR-sSEED."""
    root: Path = Path("runs")
    """Directory that holds the runs."""
    if_exists: Literal["error", "replace", "resume"] = "error"
    """What to do when the run's directory already exists: refuse, begin anew, or go on from its newest checkpoint."""
    model: str = ""
    """Local Hugging Face checkpoint directory; by default the small model below, made and warm-started in code."""
    task: str = "chain_sum"
    """A name in TASKS, or module:attribute for your own."""
    seed: int = 0
    """Seed of prompts, sampling and initial weights."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where the scalars of every step go besides the store; TensorBoard's files lie in the run's own directory."""
    chain_sum: ChainSumConfig = field(default_factory=ChainSumConfig)
    calculator: CalculatorConfig = field(default_factory=CalculatorConfig)
    counting: CountingConfig = field(default_factory=CountingConfig)
    graph_path: GraphPathConfig = field(default_factory=GraphPathConfig)
    math_jsonl: MathJsonlConfig = field(default_factory=MathJsonlConfig)
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
        return self.run or f"{self.task.replace(':', '.')}-{self.estimator.name}-s{self.seed}"


@dataclass(frozen=True)
class DemoConfig:
    """Train a small model twice with every measurement, print the comparison, serve the dashboard."""

    root: Path = Path("runs")
    """Directory that holds the runs."""
    seed: int = 0
    """Seed of the prompts, the sampling and the model, the same for both runs."""
    serve: bool = True
    """Serve the dashboard afterwards."""
    port: int = 8501
    """Port of the dashboard, on loopback."""
