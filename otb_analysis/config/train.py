"""A whole run: its tasks, the policy it starts from, its rollouts; and a run made of somebody else's rollouts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from otb_analysis.config.measuring import (
    AttributionSchedule,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    LoraConfig,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    Schedule,
)

TrackerNames = Annotated[
    tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...], tyro.conf.arg(aliases=["--report-to"])
]


@dataclass(frozen=True)
class ChainSumConfig:
    """`chain_sum`: add a chain of numbers, one partial sum at a time. The number of terms sets the horizon."""

    terms_min: int = 2  # Fewest terms of a prompt.
    terms_max: int = 4  # Most terms of a prompt.
    largest: int = 19  # Terms are drawn from 1 … largest.


@dataclass(frozen=True)
class CalculatorConfig:
    """`calculator`: solve an expression by calls of a tool, one turn each."""

    operations_min: int = 2  # Fewest operators of a prompt.
    operations_max: int = 3  # Most operators of a prompt.
    operators: str = "+-*"  # Operators of a prompt, some of + - * / ^; the calculator knows them all.
    largest: int = 19  # Numbers are drawn from 1 … largest.
    largest_result: int = 999  # Every result on the way is whole and from 0 to this.
    call_operations: int = 1  # Most operators of one call; 1 leaves their order to the policy.


@dataclass(frozen=True)
class CountingConfig:
    """`counting`: how often a letter occurs in a text."""

    length_min: int = 4  # Shortest text.
    length_max: int = 12  # Longest text.
    letters: int = 4  # Letters the text is made of.
    show: Literal["running", "direct"] = "running"
    """What demonstrations write: the text with a running count, or the number at once."""


@dataclass(frozen=True)
class GraphPathConfig:
    """`graph_path`: any walk from start to goal along the edges of a random graph is right."""

    nodes: int = 5
    edges: int = 7
    distance_min: int = 2  # Fewest edges between start and goal.
    directed: bool = False  # True allows an edge only from its first letter to its second.


@dataclass(frozen=True)
class RunningTotalConfig:
    """`running_total`: one rule applied line by line, so that answers of any length are alike; a line has 7 tokens."""

    lines_min: int = 4  # Fewest lines of an answer.
    lines_max: int = 6  # Most lines of an answer.
    largest: int = 9  # Terms are from 1 … largest.
    branching: bool = False  # True gives two terms, for even and for odd totals, all multiples of 3.
    tool_calls: int = 0  # Replies of a tool between the lines, each with new terms.


@dataclass(frozen=True)
class MathJsonlConfig:
    """`math_jsonl`: prompts and answers from local JSON-lines or Parquet files, graded by math-verify."""

    train: str = ""  # A .jsonl or .parquet file.
    heldout: str = ""  # Another one for the held-out split; by default a share of `train` is held out.
    heldout_share: float = 0.1  # Share of `train` held out when there is no other file; a hash of the prompt decides.
    prompt_column: str = "question"
    answer_column: str = "answer"
    answer_marker: str = "####"  # What stands before the final answer in the answer column, and may in a completion.
    template: str = "{prompt}"  # What the policy is given; {prompt} stands for the prompt column.
    chat: bool = True  # True wraps the prompt by the tokenizer's chat template, where it has one.


@dataclass(frozen=True)
class ReasoningGymConfig:
    """`reasoning_gym`: problems made and scored by the package reasoning-gym, of one of its tasks or of several."""

    name: tuple[str, ...] = ()  # The task, as in letter_counting; several names mix tasks.
    weight: tuple[float, ...] = (1.0,)  # How often each task is drawn, in the order of the names; one number for all.
    config: tuple[str, ...] = ()
    """Settings of each task as a JSON object, in the order of the names: '{"min_words": 1, "max_words": 2}'."""
    shots: int = 2
    """Questions of the training split with right answers that a prompt shows first, as messages of a chat where the
    tokenizer has a chat template."""
    answer_format: Literal["line", "tags", "whole"] = "line"
    """Where a completion has its answer: behind its last "Answer:", between <answer> and </answer>, or all of it."""
    template: str = "{question}"
    """What a question and each example is put into; {instruction} stands for a sentence that asks for the answer's
    form. It is added where no example shows the form."""
    chat: bool = True  # True wraps the prompt by the tokenizer's chat template, where it has one.


@dataclass(frozen=True)
class TaskSections:
    """The sections of a run's configuration that tasks have, each named as its task."""

    chain_sum: ChainSumConfig = field(default_factory=ChainSumConfig)
    calculator: CalculatorConfig = field(default_factory=CalculatorConfig)
    counting: CountingConfig = field(default_factory=CountingConfig)
    graph_path: GraphPathConfig = field(default_factory=GraphPathConfig)
    running_total: RunningTotalConfig = field(default_factory=RunningTotalConfig)
    math_jsonl: MathJsonlConfig = field(default_factory=MathJsonlConfig)
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)


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
    """chain_sum, calculator, counting, graph_path, running_total, math_jsonl or reasoning_gym, or module:attribute for
    your own."""
    seed: int = 0  # Seed of prompts, sampling and initial weights.
    trackers: TrackerNames = ()
    """Where the scalars of every step, and tables of a few tokens and rollouts, go besides the store. TensorBoard's
    files lie in the run's own directory."""


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


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a stored configuration; an empty one where it is missing, or no table, as others write it."""
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


@dataclass(frozen=True)
class RecordedConfig:
    """A run made of recorded rollouts: where it is kept, and how the records are read."""

    run: str = ""  # Name of the run's directory; by default that of the file or directory.
    root: Path = Path("runs")  # Directory that holds the runs.
    if_exists: Literal["error", "replace", "resume"] = "error"
    """What to do when the run's directory already exists: refuse, begin anew, or add the steps it does not have."""
    format: str = "auto"
    """Who wrote the records: plain, trl, verl, art, prime_rl, prime_rl_traces, verifiers, verifiers_results, nemo_rl,
    open_instruct, slime, lm_eval or inspect; auto recognises it."""
    prompts: int = 16  # Prompts (groups) per step, where the records name no step.
    first: int = 0  # Steps that are read, from the first on; 0 reads all.
    group_size: int = 0
    """Rollouts per prompt, where the records name no group: so many rows in a row are one. 0 takes rows with the same
    prompt."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Reward columns of TRL with their weights, as name value pairs; by default every number that TRL did not add, or
    the weights that the recorded advantages ask for."""
    fields: tuple[str, ...] = ()
    """What your file calls the fields of the format plain, as `prompt=question completion=generations reward=correct
    group=id`; lists of completions and rewards in one row are rollouts of one group."""
    strict: bool = False  # True stops at the first record with a fault that would else be counted and left out.


@dataclass(frozen=True)
class ScoreConfig(MachineConfig, RecordedConfig):
    """Measure recorded rollouts under a model: a run with a token table, as if it had been trained here."""

    rollouts: Path = Path()  # File or directory with the rollouts, or a URL such as s3://bucket/rollouts.jsonl.
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
class BlocksConfig:
    """Scoring in blocks, each a step's prompts, by as many processes and machines as there are."""

    parts: str = ""
    """Folder, or a URL such as s3://bucket/scores, that collects a Parquet file of each block. A block that is there is
    not scored again, whoever scored it. By default a folder beside the run, where another option here asks for one."""
    task: int = 0  # Which share of the blocks this process scores, from 0: $SLURM_ARRAY_TASK_ID of an array of tasks.
    tasks: int = 1  # Shares that the blocks are dealt into. With several none makes the run: --finish does, at the end.
    finish: bool = False  # True makes the run of the parts and scores nothing; a missing block is named.
    ray: tuple[str, ...] | None = None
    """Scores the missing blocks on Ray, at an address, or auto for the cluster that runs on this machine. Without one
    that is RAY_ADDRESS, else local: a Ray that ends with the command. All machines must see rollouts, model and parts.
    """
    actors: int = 0  # Processes of Ray that hold a model each; 0 takes one for each GPU, or CPU where there is none.


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
    go: bool = False  # True measures; without it answers that need no model are printed, and nothing is written.
