"""Count sketches beside the exact Gram matrix, on the demo's warm-started model: do they agree as far as they say?

Group gradients of several estimators are sketched under several seeds. Every batch variance over that of `rloo` is
compared with its value from the exact Gram matrix, in units of the error stated for the sketch. The cost of a row of
weights is that of one more row in the call, over one forward and backward pass of the same rollouts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.bench.config import SketchConfig
from otb_analysis.bench.publish import NO_GPU, Report, report_of
from otb_analysis.bench.timing import least_seconds, threads
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
COLUMNS = {
    "estimator": "{estimator}",
    "buckets": "{dim}",
    "variance ÷ rloo": "{ratio:.4f}",
    "sketched": "{sketched:.4f}",
    "stated error of its log": "{stated:.4f}",
    "found": "{found:.4f}",
    "worst, in stated": "{worst:.1f}",
}


@dataclass(frozen=True)
class WarmBatch:
    """A batch of the warm-started model.

    Attributes:
        ids: Token ids [N, L].
        mask: Sampled tokens [N, L].
        real: Real tokens [N, L].
        weights: Advantage of each of `ESTIMATORS` over group size [N, M, L].
        proxy: Energy proxy [N, L], zero outside the mask.
        group: Prompt of each rollout [N].
    """

    model: PreTrainedModel
    ids: torch.Tensor
    mask: torch.Tensor
    real: torch.Tensor
    weights: Float
    proxy: Float
    group: Int


def run(config: SketchConfig) -> Report:
    """Compare and time.

    Raises:
        InputError: There is one prompt, of which there is no variance.
    """
    if config.prompts == 1:
        raise InputError("--prompts is 1; pass at least 2, of fewer there is no variance.")
    with threads(1):
        batch = warm_batch(config.prompts)
        rows, cost = bench_sketch(batch, config.dims, config.seeds), row_cost(batch, config.repeats)
    costs = " and ".join(f"{name} takes {value:.2f}" for name, value in cost.items())
    notes = (
        f"{costs} times the processor time of one forward and backward pass of one prompt's rollouts.",
        f"`found`: root mean square over {config.seeds} seeds; `worst`: the largest distance, in stated errors.",
        NO_GPU,
    )
    title = "Batch variances from count sketches beside those of the exact Gram matrix"
    return report_of(config, title, COLUMNS, rows, notes=notes, extra=[{"cost": cost}])


def warm_batch(prompts: int = 16, group_size: int = 8, cache: Path = CACHE) -> WarmBatch:
    """Sample from the demo's warm-started model, kept in `cache`, and estimate advantages."""
    config = TrainConfig(sample=SampleConfig(prompts=prompts, group_size=group_size))
    task = make_task(config)
    model, tokenizer = load_policy(warm_started(config, cache=cache))
    torch.manual_seed(0)
    asked = [task.prompt("train", i) for i in range(prompts)]
    rollouts = sample(TransformersGenerator(model, tokenizer), tokenizer, task, asked, config.sample)
    measured = forward_pass(model, rollouts, config.sample.temperature)
    table = token_table(compute_rewards(task, rollouts), measured, None)
    inputs = table.inputs(measured.stats.energy)
    advantages = np.stack([estimate(name, inputs).advantage for name in ESTIMATORS]) / group_size
    weights, proxy = (rollouts.by_column(x) for x in (advantages, measured.stats.energy[None]))
    return WarmBatch(model, *rollouts.tensors(model.device), weights, proxy[:, 0], np.asarray(rollouts.group))


def bench_sketch(batch: WarmBatch, dims: tuple[int, ...] = (4096, 65536), seeds: int = 10) -> list[dict[str, Any]]:
    """Compare variance ratios to `rloo` from sketches of several sizes and seeds with the exact ones.

    Of each estimator and size: `ratio`, the exact one; `sketched`, that of the first seed; `stated`, the standard error
    stated of its logarithm; `found`, the root mean square error of its logarithm over seeds; `worst`, the largest such
    error, in stated ones.
    """
    args = (batch.model, batch.ids, batch.mask, batch.weights, batch.group, batch.real)
    exact = group_gradient_gram(*args)
    truth, rows = _variances(exact, len(batch.group)), []
    for dim in dims:
        grams = [gram_from_sketch(gradient_sketch(*args, dim=dim, seed=seed)) for seed in range(seeds)]
        sketched = np.array([_variances(gram, len(batch.group)) for gram in grams])
        noise = sketch_noise(exact, dim).log_ratio[:, 0]
        for m, name in enumerate(ESTIMATORS[1:], start=1):
            ratio, ratios = truth[m] / truth[0], sketched[:, m] / sketched[:, 0]
            distance, stated = np.log(ratios) - np.log(ratio), max(float(noise[m]), ROUNDING)
            row = {"estimator": name, "dim": dim, "ratio": float(ratio), "sketched": float(ratios[0]), "stated": stated}
            error, worst = float(np.sqrt((distance**2).mean())), float(np.abs(distance).max() / stated)
            rows.append(row | {"found": error, "worst": worst})
    return rows


def row_cost(batch: WarmBatch, repeats: int = 7) -> dict[str, float]:
    """Return the time of one row of weights, and of one more, over that of one forward and backward pass.

    All are of the first prompt's rollouts; the best repetition counts. "one row" includes the hashing.
    """
    first = batch.group == batch.group[0]
    args, real, group = (batch.model, batch.ids[first], batch.mask[first]), batch.real[first], batch.group[first]
    weights = np.random.default_rng(0).normal(size=(len(group), 2, args[1].shape[1]))  # no row of zeros, which is free
    calls = {
        "whole": lambda: batch_gradient(*args, weights[:, 0], real),
        "one": lambda: gradient_sketch(*args, weights[:, :1], group, real),
        "two": lambda: gradient_sketch(*args, weights, group, real),
    }
    least = least_seconds(calls, repeats)
    return {"one row": least["one"] / least["whole"], "one more row": (least["two"] - least["one"]) / least["whole"]}


def _variances(gram: Float, n_rollouts: int) -> Float:
    rows = gradient_statistics(gram, [(name, "none") for name in ESTIMATORS], n_rollouts)
    return np.array([np.nan if row.variance is None else row.variance for row in rows])
