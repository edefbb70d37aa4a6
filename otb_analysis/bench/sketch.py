"""Count sketches beside the exact Gram matrix, on the demo's warm-started model: do they agree as far as they say?

Group gradients of several estimators are sketched under several seeds. Every batch variance over that of `rloo` is
compared with its value from the exact Gram matrix, in units of the error stated for the sketch. The cost of a row of
weights is that of one more row in the call, over one forward and backward pass of the same rollouts.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

import numpy as np
import torch

from otb_analysis.bench.config import SketchConfig, check_positive
from otb_analysis.bench.publish import Report, flags
from otb_analysis.bench.timing import interleaved, threads, timed
from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.gradients import batch_gradient, gradient_sketch, group_gradient_gram
from otb_analysis.measurement.forward import forward_pass
from otb_analysis.measurement.table import compute_rewards, token_table
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.sampling import sample
from otb_analysis.statistics import gradient_statistics, gram_from_sketch, sketch_noise
from otb_analysis.tasks import make_task
from otb_analysis.training.warm_start import CACHE, warm_started
from otb_analysis.types import Float, Int

ROUNDING = 1e-6
"""Least error of a ratio that is stated: a multiple of rloo has no other."""
ESTIMATORS = ("rloo", "none", "group_mean", "otb", "token_optimal")
HEADERS = (
    "estimator",
    "buckets",
    "variance ÷ rloo",
    "sketched",
    "stated error of its log",
    "found",
    "worst, in stated",
)


@dataclass(frozen=True)
class SketchBatch:
    """A batch of the warm-started model with the advantages of each estimator.

    Attributes:
        model: The policy.
        ids: Token ids [N, L].
        mask: Sampled tokens [N, L].
        real: Real tokens [N, L].
        weights: Advantage over group size [N, M, L].
        group: Prompt of each rollout [N].
    """

    model: torch.nn.Module
    ids: torch.Tensor
    mask: torch.Tensor
    real: torch.Tensor
    weights: Float
    group: Int


@dataclass(frozen=True)
class SketchRow:
    """One estimator and one size of sketch.

    Attributes:
        estimator: Its name.
        dim: Buckets.
        ratio: Batch variance over that of `rloo`, from the exact Gram matrix.
        sketched: The same from the first seed's sketch.
        stated: Stated standard error of its logarithm.
        found: Root mean square distance of its logarithm to the exact one, over seeds.
        worst: Largest such distance, in stated errors.
    """

    estimator: str
    dim: int
    ratio: float
    sketched: float
    stated: float
    found: float
    worst: float


def warm_batch(prompts: int = 16, group_size: int = 8, cache: Path = CACHE) -> SketchBatch:
    """Sample from the demo's warm-started model and estimate advantages.

    Args:
        prompts: P.
        group_size: Rollouts per prompt.
        cache: Where warm-started models are kept.
    """
    config = TrainConfig(sample=SampleConfig(prompts=prompts, group_size=group_size))
    task = make_task(config)
    model, tokenizer = load_policy(warm_started(config, cache=cache))
    torch.manual_seed(0)
    asked = [task.prompt("train", i) for i in range(prompts)]
    rollouts = sample(TransformersGenerator(model, tokenizer), tokenizer, task, asked, config.sample)
    table = token_table(
        rollouts, forward_pass(model, rollouts, config.sample.temperature), compute_rewards(task, rollouts), None
    )
    inputs = table.inputs(table.stats.energy)
    advantage = np.stack([estimate(name, inputs).advantage for name in ESTIMATORS], axis=1) / group_size
    weights = np.zeros((*advantage.shape[:2], rollouts.input_ids.shape[1]))
    n, t = np.nonzero(rollouts.present())
    weights[n, :, rollouts.completion_columns()[n, t]] = advantage[n, :, t]
    ids, mask, real = (torch.as_tensor(x) for x in (rollouts.input_ids, rollouts.mask, rollouts.attention_mask))
    return SketchBatch(model, ids, mask, real.long(), weights, np.asarray(rollouts.group))


def bench_sketch(batch: SketchBatch, dims: tuple[int, ...] = (4096, 65536), seeds: int = 10) -> list[SketchRow]:
    """Compare variance ratios from sketches with the exact ones.

    Args:
        batch: What to sketch.
        dims: Sizes of the sketch.
        seeds: Sketches of each size.
    """
    args = (batch.model, batch.ids, batch.mask, batch.weights, batch.group, batch.real)
    exact = group_gradient_gram(*args)
    truth, rows = _variances(exact, len(batch.group)), []
    for dim in dims:
        grams = [gram_from_sketch(gradient_sketch(*args, dim=dim, seed=seed)) for seed in range(seeds)]
        found = np.array([_variances(gram, len(batch.group)) for gram in grams])
        stated = sketch_noise(exact, dim).log_ratio[:, 0]
        for m, name in enumerate(ESTIMATORS[1:], start=1):
            distance = np.log(found[:, m] / found[:, 0]) - np.log(truth[m] / truth[0])
            ratios = float(truth[m] / truth[0]), float(found[0, m] / found[0, 0])
            rms = float(np.sqrt((distance**2).mean()))
            error = max(float(stated[m]), ROUNDING)
            rows.append(SketchRow(name, dim, *ratios, error, rms, float(np.abs(distance).max() / error)))
    return rows


def row_cost(batch: SketchBatch, repeats: int = 7) -> dict[str, float]:
    """Time of one row of weights over one forward and backward pass of one prompt's rollouts, best of the repetitions.

    Args:
        batch: Its first prompt is timed.
        repeats: Repetitions, in which the candidates take turns.

    Returns:
        Ratios: "one row" for a call with one, hashing included, and "one more row" for what a further one adds.
    """
    own = batch.group == batch.group[0]
    args = batch.model, batch.ids[own], batch.mask[own]
    real, group = batch.real[own], batch.group[own]
    weights = np.random.default_rng(0).normal(size=(len(group), 2, args[1].shape[1]))  # no row of zeros, which is free
    turns = {
        "whole": timed(lambda: batch_gradient(*args, weights[:, 0], real), clock=process_time),
        "one": timed(lambda: gradient_sketch(*args, weights[:, :1], group, real), clock=process_time),
        "two": timed(lambda: gradient_sketch(*args, weights, group, real), clock=process_time),
    }
    least = {name: found.minimum for name, found in interleaved(turns, repeats).items()}
    return {"one row": least["one"] / least["whole"], "one more row": (least["two"] - least["one"]) / least["whole"]}


def run_sketch(config: SketchConfig) -> Report:
    """Run the benchmark and lay out its table.

    Raises:
        InputError: A setting is below 1, or `prompts` below 2, of which there is no variance.
    """
    check_positive(**{name: value for name, value in vars(config).items() if isinstance(value, int)})
    check_positive(dims=min(config.dims, default=0))
    if config.prompts == 1:
        raise InputError("--prompts is 1; pass at least 2, of fewer there is no variance.")
    with threads(1):
        batch = warm_batch(config.prompts)
        return report(config, bench_sketch(batch, config.dims, config.seeds), row_cost(batch, config.repeats))


def report(config: SketchConfig, rows: list[SketchRow], cost: dict[str, float]) -> Report:
    """Lay out the table.

    Args:
        config: What was asked for.
        rows: From `bench_sketch`.
        cost: From `row_cost`.
    """
    settings = {name: value for name, value in vars(config).items() if name != "out"}
    cells = [
        (r.estimator, str(r.dim), *(f"{x:.4f}" for x in (r.ratio, r.sketched, r.stated, r.found)), f"{r.worst:.1f}")
        for r in rows
    ]
    costs = " and ".join(f"{name} takes {value:.2f}" for name, value in cost.items())
    return Report(
        name="sketch",
        command=f"otb bench sketch {flags(settings)}",
        settings=settings,
        title="Batch variances from count sketches beside those of the exact Gram matrix",
        headers=HEADERS,
        cells=cells,
        rows=[asdict(row) for row in rows] + [{"cost": cost}],
        notes=(
            f"{costs} times the processor time of one forward and backward pass of one prompt's rollouts.",
            f"`found`: root mean square over {config.seeds} seeds; `worst`: the largest distance, in stated errors.",
            "Not measured on a GPU.",
        ),
    )


def _variances(gram: Float, n_rollouts: int) -> Float:
    rows = gradient_statistics(gram, [(name, "none") for name in ESTIMATORS], n_rollouts)
    return np.array([np.nan if row.variance is None else row.variance for row in rows])
