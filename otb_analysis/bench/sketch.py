"""Count sketches beside the exact Gram matrix, on the demo's warm-started model: do they agree as far as they say?

    python -m otb_analysis.bench.sketch docs/results

Group gradients of several estimators are sketched under several seeds. Every batch variance over that of `rloo` is
compared with its value from the exact Gram matrix, in units of the error stated for the sketch. The cost of a row of
weights is that of one more row in the call, over one forward and backward pass of the same rollouts.
"""

import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.errors import StoreError
from otb_analysis.estimators import estimate
from otb_analysis.generation import TransformersGenerator
from otb_analysis.gradients import batch_gradient, gradient_sketch, group_gradient_gram
from otb_analysis.models import load_policy
from otb_analysis.sampling import sample
from otb_analysis.statistics import gradient_statistics, gram_from_sketch, sketch_noise
from otb_analysis.tasks import make_task
from otb_analysis.training.forward import forward_pass
from otb_analysis.training.table import pay, token_table
from otb_analysis.training.warm_start import CACHE, warm_started
from otb_analysis.types import Float, Int

ESTIMATORS = ("rloo", "none", "group_mean", "otb", "token_optimal")
COMMAND = "python -m otb_analysis.bench.sketch docs/results"
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
    table = token_table(rollouts, forward_pass(model, rollouts, config.sample.temperature), pay(task, rollouts), None)
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
            rms, worst = float(np.sqrt((distance**2).mean())), float(np.abs(distance).max() / stated[m])
            rows.append(SketchRow(name, dim, *ratios, float(stated[m]), rms, worst))
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
    ids, mask, real, group = batch.ids[own], batch.mask[own], batch.real[own], batch.group[own]
    weights = np.random.default_rng(0).normal(size=(len(group), 2, ids.shape[1]))  # no row of zeros, which is free

    def seconds(rows: int | None) -> float:
        start = perf_counter()
        if rows is None:
            batch_gradient(batch.model, ids, mask, weights[:, 0], real)
        else:
            gradient_sketch(batch.model, ids, mask, weights[:, :rows], group, real)
        return perf_counter() - start

    whole, one, two = np.min([[seconds(rows) for rows in (None, 1, 2)] for _ in range(repeats)], axis=0)
    return {"one row": float(one / whole), "one more row": float((two - one) / whole)}


def publish_sketch(folder: Path, rows: list[SketchRow], cost: dict[str, float]) -> None:
    """Write sketch.md and sketch.json: the numbers and the command that made them.

    Raises:
        StoreError: The folder cannot be written.
    """
    facts = {"command": COMMAND, "torch": torch.__version__, "processor": platform.machine(), "cost": cost}
    lines = [f"# `{COMMAND}`", "", *(f"{k}: {v:.2f} forward and backward passes" for k, v in cost.items()), ""]
    lines += ["| " + " | ".join(HEADERS) + " |", "|" + "---|" * len(HEADERS)]
    for r in rows:
        cells = (r.estimator, r.dim, f"{r.ratio:.4f}", f"{r.sketched:.4f}", f"{r.stated:.4f}", f"{r.found:.4f}")
        lines.append("| " + " | ".join(map(str, (*cells, f"{r.worst:.1f}"))) + " |")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sketch.json").write_text(json.dumps(facts | {"rows": [asdict(r) for r in rows]}, indent=2) + "\n")
        (folder / "sketch.md").write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise StoreError(f"cannot write the benchmark to {folder} ({error.strerror}); pass another folder.") from error


def _variances(gram: Float, n_rollouts: int) -> Float:
    rows = gradient_statistics(gram, [(name, "none") for name in ESTIMATORS], n_rollouts)
    return np.array([np.nan if row.variance is None else row.variance for row in rows])


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = warm_batch()
    publish_sketch(Path(sys.argv[1]), bench_sketch(found), row_cost(found))
