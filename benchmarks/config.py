"""The settings of every benchmark. The command line reads this file, so it imports nothing heavy."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from otb_analysis.errors import InputError

TOKENS = {"S": (32, 128, 512), "M": (32, 128), "L": (128, 512, 1024), "R": (32, 128)}
"""Sampled tokens per rollout by size of the model."""
BATCHES = {"S": ((8, 128), (4, 512)), "M": ((8, 128),), "L": ((8, 128),), "R": ((8, 32),)}
"""Rollouts and sampled tokens of each in the batches that are attributed whole, by size of the model."""


@dataclass(frozen=True)
class BenchConfig:
    """The setting that every benchmark has."""

    out: Path | None = None  # Directory for the table as Markdown and JSON.


@dataclass(frozen=True)
class ModelBenchConfig(BenchConfig):
    """The settings of benchmarks of models."""

    device: str = "auto"  # Where models run: auto, which is the accelerator where there is one, cpu, cuda or cuda:N.


@dataclass(frozen=True)
class EstimatorsConfig(BenchConfig):
    """Time every estimator on a large ragged batch, on one thread, beside a torch loop and one pass over the inputs."""

    rows: int = 1024  # Rollouts.
    tokens: int = 4096  # Padded length.
    group_size: int = 8  # Rollouts per group.
    repeats: int = 5  # Repetitions, taking turns; the best counts.


@dataclass(frozen=True)
class RegressionConfig(BenchConfig):
    """Compute which features of `energy_regression` pay on random policies, and how many prompts it takes."""

    policies: int = 120  # Random policies, each a prompt.
    prompts: tuple[int, ...] = (8, 16, 32, 64)  # Prompts of a batch.
    batches: int = 2000  # Batches drawn for each number of prompts.


@dataclass(frozen=True)
class LogitsConfig(BenchConfig):
    """Time `logit_stats` beside a plain log-softmax and gather, and beside TRL's fused head."""

    vocabularies: tuple[int, ...] = (32_000, 152_000)  # Vocabulary sizes V.
    rows: int = 512  # Rows R: tokens of all rollouts together.
    width: int = 896  # Features d of a hidden state.
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """What logits, hidden states and output matrix are held in."""
    threads: tuple[int, ...] = (1, 2)  # Threads, one part of the table each.
    repeats: int = 7  # Repetitions, taking turns; the best counts, the median is shown.
    device: str = "auto"  # Where to run: auto, cpu, cuda or cuda:N.
    trl_python: Path | None = None  # An interpreter with torch and trl >= 1.15, for the rows of TRL's fused head.


@dataclass(frozen=True)
class EngineConfig(BenchConfig):
    """Time every score-gradient engine beside a plain loop of one autograd.grad per token over one kept graph."""

    sizes: tuple[Literal["S", "M", "L", "R"], ...] = ("S", "M")
    """Models: S 4 layers d128 vocabulary 512, M 8 layers d512 vocabulary 8192, L 12 layers d768 vocabulary 32768, R
    SmolLM2-135M, once fetched, in the rows that matter for it."""
    tokens: tuple[int, ...] = ()
    """Sampled tokens T for every size; by default 32, 128, 512 for S, 32, 128 for M and R and 128, 512, 1024 for L."""
    repeats: int = 15  # Repetitions at most, taking turns; the best counts, the median is shown.
    seconds: float = 45.0
    """Time limit of a size and T: no repetition starts after it, or after twice of it for the first three. What takes
    more than half of it in its first turn is not repeated, except for the plain loop."""
    device: str = "auto"  # Where to run: auto, cpu, cuda or cuda:N.
    dtype: Literal["float32", "bfloat16"] = "float32"  # Dtype of the weights.
    threads: int = 1  # Threads.
    memory: bool = True  # Also measure the peak memory of each row, in a process of its own.
    opacus_python: Path | None = None  # An interpreter with torch, transformers and opacus, for the rows of Opacus.

    def places(self) -> dict[str, list[tuple[int, int]]]:
        """Return N and T of the table by size: single texts, then batches, unless T was asked for."""
        if self.tokens:
            return {size: [(1, t) for t in self.tokens] for size in self.sizes}
        return {size: [*((1, t) for t in TOKENS[size]), *BATCHES[size]] for size in self.sizes}


@dataclass(frozen=True)
class LengthsConfig(BenchConfig):
    """Measure the peak memory of exact norms as a text grows, beside one forward and backward pass."""

    tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)  # Lengths T.
    size: Literal["S", "M", "L"] = "S"  # Model, as in `otb bench engine`.


@dataclass(frozen=True)
class GramConfig(ModelBenchConfig):
    """What one measured step costs, in forward and backward passes of its rollouts."""

    model: str = "demo"  # Checkpoint directory, GGUF file, `demo`, or `smollm2` once fetched.
    prompts: int = 16  # Prompts of the step.
    group_size: int = 8  # Rollouts per prompt.
    max_new_tokens: int = 64  # Length budget of a rollout.
    threads: int = 1  # Threads.
    repeats: int = 3  # Repetitions, taking turns; the least processor time counts.
    rows: bool = True  # Also measure the Gram matrix by one backward pass per row.


@dataclass(frozen=True)
class LongConfig(ModelBenchConfig):
    """What measuring costs as answers grow, in forward and backward passes of the same rollouts."""

    model: str = "S"  # S (0.85 million parameters), M (29 million), L (110 million), Q (510 million), or R: smollm2.
    tokens: tuple[int, ...] = (24, 64, 256, 1024)  # Tokens of an answer.
    precision: Literal["float32", "tf32"] = "float32"  # How products of float32 matrices are formed, also in training.
    norms: int = 1024  # Longest answer whose tokens' norms are all measured.
    further: tuple[str, ...] = ("sketch", "attribution")  # Levels that are timed, too.
    further_to: int = 256  # Longest answer for which they are.
    prompts: int = 2  # Prompts of the step.
    group_size: int = 8  # Rollouts per prompt.
    threads: int = 1  # Threads.
    repeats: int = 2  # Repetitions, taking turns; the least processor time counts.


@dataclass(frozen=True)
class ProcessesConfig(BenchConfig):
    """Time a measured step by one process and by several that share its prompts out, with whole and sharded weights."""

    model: str = "M"  # S (0.85 million parameters), M (29 million), L (110 million), or R: smollm2, once fetched.
    levels: tuple[str, ...] = ("exact", "gram")  # Each by itself: also sampled, sketch, attribution, contrast.
    processes: tuple[int, ...] = (1, 2)  # Numbers of processes, a thread each; the first is 1.
    tokens: int = 32  # Tokens of an answer.
    prompts: int = 32  # Prompts of the step.
    group_size: int = 4  # Rollouts per prompt.
    repeats: int = 2  # Repetitions, taking turns; the least time by the clock counts.


@dataclass(frozen=True)
class ScoreBenchConfig(BenchConfig):
    """Time `otb score` by one process, by several that share its blocks out, and by actors of Ray where it is there."""

    rollouts: int = 10_000  # Recorded rollouts, in groups of 8.
    processes: int = 2  # Processes, or actors of Ray, a thread each.
    repeats: int = 2  # Repetitions, taking turns; the least time by the clock counts.
    few: bool = False  # Only exact norms, of 2 of a step's 16 prompts: 10,000 rollouts in minutes.


@dataclass(frozen=True)
class ScaleConfig(BenchConfig):
    """Costs of a measured step of a large model on many GPUs, from formulas; nothing is run."""

    layers: int = 32  # Blocks.
    width: int = 4096  # Of the model.
    inner: int = 11_008  # Width inside a feed-forward layer.
    heads: int = 32  # Of a block's attention.
    vocabulary: int = 32_000  # Entries.
    prompts: int = 128  # Prompts of the step.
    group_size: int = 8  # Rollouts per prompt.
    prompt_tokens: int = 512  # Tokens of a prompt.
    tokens: int = 8192  # Tokens of an answer.
    rows: int = 12  # Rank of all estimators' weights on a prompt, as it is for 8 rollouts.
    drawn: int = 32  # Tokens that are drawn of a prompt.
    directions: int = 32  # Of sketched norms.
    steps: int = 16  # Steps by which each of four copies is fitted for contrasts.
    batch: int = 16  # Rollouts of such a step.
    memory: int = 80  # Of a GPU, in 10⁹ bytes.
    rows_alone: int = 9  # Rank of the weights on a rollout by itself.
    processes: int = 64  # GPUs.
    teraflops: int = 40  # Operations per second that a GPU reaches, in 10¹², in float32 with TF32 products.
    gigabytes: int = 50  # Sent by a GPU in a second, in 10⁹ bytes.


@dataclass(frozen=True)
class StoreConfig(BenchConfig):
    """Time appending to a run and reading it, DuckDB beside pandas, on synthetic runs of full size."""

    runs: int = 1  # Runs of this size.
    steps: int = 2_000  # Steps of a run.
    measured: int = 165  # Steps with exact norms and a Gram matrix.
    tokens: int = 5_000_000  # Tokens of a run.
    prompts: int = 16  # Prompts of a step.
    group_size: int = 8  # Rollouts per prompt.
    estimators: int = 38  # Estimators of a Gram matrix, each energy source counted.
    append: int = 100_000  # Tokens of the step that is appended.
    pandas: bool = True  # Also compute the variance in pandas, which holds all rows.
    repeats: int = 3  # Repetitions, taking turns; the least time counts.
    root: Path | None = None  # Directory that keeps the runs; a temporary one unless named.


@dataclass(frozen=True)
class DashboardBenchConfig(BenchConfig):
    """Time every page of the dashboard in Chromium: its first chart, a changed control, the server's memory."""

    steps: int = 2_000  # Steps of a large run.
    measured: tuple[int, ...] = (165, 700)  # Large runs, by their steps with exact norms and a Gram matrix.
    tokens: int = 5_000_000  # Tokens of each.
    runs: int = 24  # Smaller runs beside each other.
    many_steps: int = 200  # Steps of each of them.
    many_measured: int = 17  # Its measured steps.
    many_tokens: int = 200_000  # Its tokens.
    long: int = 8_192  # Tokens of each answer, about, of a run of 4 steps of 64 rollouts; 0 leaves it out.
    followed: tuple[int, ...] = (200, 2_000)  # Steps of a run that then grows while its pages follow it.
    compacted: bool = False  # Compact the runs first, as `otb compact` does.
    pages: tuple[str, ...] = ()  # Only these pages, such as `run tokens`; by default all.
    port: int = 8599  # Port of the server.
    root: Path | None = None  # Directory that keeps the runs, and has them from an earlier call; else a temporary one.


@dataclass(frozen=True)
class DemoSeedsConfig(ModelBenchConfig):
    """What the demo concludes from several seeds and with several numbers of threads."""

    seeds: int = 5  # Seeds, from 0.
    threads: tuple[int, ...] = (1, 2)  # Threads of each of a demo's two runs.
    root: Path = Path("runs/demos")  # Directory for the demos' runs; complete ones are read and not run again.


@dataclass(frozen=True)
class AlarmsConfig(BenchConfig):
    """False alarms of every detector on synthetic calm series, and how soon it sees a change at a known step."""

    series: int = 1000  # Calm series of each of the lengths 50, 100, 200 and 500.
    changed: int = 200  # Runs with each known change.
    seed: int = 0  # Seed of both.


@dataclass(frozen=True)
class SamplingCheckConfig(ModelBenchConfig):
    """How often the sampling check finds planted faults and names them, and its false alarms, on the demo's policy."""

    tokens: int = 20_000  # Tokens of an audit, at least.
    repeats: int = 20  # Audits of each fault.
    clean: int = 200  # Audits without a fault.
    updates: int = 50  # Steps of training between the checkpoint that sampled and the one that scores.


@dataclass(frozen=True)
class AuditBenchConfig(ModelBenchConfig):
    """Time and memory of whole audits: 1,024 rollouts of the demo's policy, 64 of SmolLM2 with up to 48 tokens each."""

    models: tuple[Literal["demo", "smollm2"], ...] = ("demo", "smollm2")  # Whose rollouts; smollm2 once fetched.
    gram: tuple[Literal["auto", "exact", "sketch"], ...] = ("auto",)
    """An audit with each of these as `--measure.gram`; ratios of variances are compared with those of the first."""
    threads: int = 2  # Threads.
    quick: bool = False  # A few rollouts of each model: does it run at all?


@dataclass(frozen=True)
class RecordedBenchConfig(BenchConfig):
    """Processor time and memory of reading recorded rollouts without a model, beside another clone's code."""

    audited: int = 1_000  # Rollouts of `otb audit`.
    audited_tokens: int = 200  # Tokens of each, in the mean.
    imported: int = 20_000  # Rollouts of `otb import`.
    tokens: int = 500  # Tokens of each, in the mean.
    repeats: int = 3  # Repetitions, taking turns; the least processor time counts.
    clone: Path | None = None  # Another clone of this repository, such as one before a change.


@dataclass(frozen=True)
class TrainBenchConfig(ModelBenchConfig):
    """Time sampling and update of a training step beside TRL's GRPOTrainer, and what every measurement adds to it."""

    models: tuple[Literal["small", "M", "R"], ...] = ("small", "M")
    """Models: small is the demo's at its settings, M has 8 layers, d512, vocabulary 8192, and few long rollouts, R is
    SmolLM2-135M, once fetched."""
    repeats: int = 7  # Steps of each, taking turns, after one that warms up, three at most of M and R; the best counts.
    threads: int = 1  # Threads.
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts the processor's time on each process: for a machine that has other work to do."""
    trl_python: Path | None = None  # An interpreter with torch, transformers and trl >= 1.15, for the rows of TRL.
    quick: bool = False
    """A few seconds at a few tokens of the small model, without memory: does it run at all?"""


@dataclass(frozen=True)
class MonitorBenchConfig(TrainBenchConfig):
    """What OTBMonitor adds to a step of TRL's GRPOTrainer that it watches, inside that step; needs --trl-python."""

    models: tuple[Literal["small", "M", "R"], ...] = ("small", "R")  # As for otb bench train.
    by_default: bool = False  # Let it keep to its share of time, and take means over a training from its first step on.


BENCHMARKS: dict[str, type[BenchConfig]] = {
    "estimators": EstimatorsConfig,
    "regression": RegressionConfig,
    "logits": LogitsConfig,
    "engine": EngineConfig,
    "lengths": LengthsConfig,
    "demo-seeds": DemoSeedsConfig,
    "gram": GramConfig,
    "long": LongConfig,
    "processes": ProcessesConfig,
    "score": ScoreBenchConfig,
    "scale": ScaleConfig,
    "alarms": AlarmsConfig,
    "sampling-check": SamplingCheckConfig,
    "audit": AuditBenchConfig,
    "recorded": RecordedBenchConfig,
    "monitor": MonitorBenchConfig,  # before its base class, since a configuration names its benchmark
    "train": TrainBenchConfig,
    "store": StoreConfig,
    "dashboard": DashboardBenchConfig,
}
"""`otb bench NAME`; the module of the same name has `run(config)`, which returns a report."""


def check_positive(config: BenchConfig) -> None:
    """Refuse counts below 1, and empty lists of counts unless they are the default.

    Raises:
        InputError: A setting is below 1; the sentence names its option.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        several = value if isinstance(value, tuple) else (value,)
        counts = [x for x in several or (0,) if isinstance(x, int) and not isinstance(x, bool)]
        if value != field.default and field.name != "seed" and min(counts, default=1) < 1:
            raise InputError(f"--{field.name.replace('_', '-')} is {min(counts)}; pass at least 1.")
