"""What one measured step costs, in forward and backward passes of its rollouts: norms, Gram matrix, smaller groups.

The Gram matrix of all estimators is measured three ways: from the gradients of each prompt's basis rows, block by
block, as the library does it; from one backward pass per row; and from count sketches of the basis' gradients, which
any model allows. Rewards are drawn by lot, so that every model has something to compare.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np
import torch

from otb_analysis.bench.config import GramConfig, check_positive
from otb_analysis.bench.memory import peak_extra_bytes
from otb_analysis.bench.publish import Report
from otb_analysis.bench.timing import interleaved, threads, timed
from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.gradients import gradient_sketch, group_gradient_gram
from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Batch, prepare
from otb_analysis.gradients.groups.group_gram import basis_weights
from otb_analysis.measurement.advantages import every_advantage
from otb_analysis.measurement.table import TokenTable, compute_rewards
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Float

DIM = 1 << 20
"""Buckets of a sketch: an inner product is off by √(2/DIM), .14 % of ‖g‖‖g'‖."""
PASS, BASIS, ROWS, SKETCH = (
    "forward and backward pass",
    "Gram matrix, of a basis",
    "Gram matrix, a pass per row",
    "Gram matrix, sketches of a basis",
)


@dataclass(frozen=True)
class GramRow:
    """One line of the table.

    Attributes:
        what: What is measured.
        seconds: Least processor seconds.
        passes: The same over those of one forward and backward pass.
        memory: Peak extra memory over the parameters' own, or None.
    """

    what: str
    seconds: float
    passes: float
    memory: float | None


@dataclass(frozen=True)
class _Step:
    """A batch, how it is measured, and rows of weights of all estimators [N, M, L]."""

    trainer: Trainer
    rollouts: Rollouts
    table: TokenTable
    weights: Float


def run_gram(config: GramConfig) -> Report:
    """Run the benchmark and lay out its table.

    Raises:
        InputError: A setting is below 1, or the model cannot be loaded.
    """
    check_positive(prompts=config.prompts, repeats=config.repeats, threads=config.threads)
    with threads(config.threads):
        step = _step(config)
        calls = _calls(step, config)
        flat = step.weights.transpose(1, 0, 2).reshape(step.weights.shape[1], -1)
        found = interleaved({name: timed(run, clock=process_time) for name, run in calls.items()}, config.repeats)
        size = sum(p.numel() * p.element_size() for p in step.trainer.model.parameters())
        peaks = {name: peak_extra_bytes(calls[name]) for name in (PASS, BASIS)}
    unit = found[PASS].minimum
    rows = [
        GramRow(name, t.minimum, t.minimum / unit, None if (peak := peaks.get(name)) is None else peak / size)
        for name, t in found.items()
    ]
    return report(
        config, rows, f"{step.rollouts.mask.sum():,} tokens, {len(flat)} rows, {len(np.unique(flat, axis=0))} different"
    )


def report(config: GramConfig, rows: list[GramRow], what: str) -> Report:
    """Lay out the table.

    Args:
        config: What was asked for.
        rows: Its lines.
        what: What was measured, in a clause.
    """
    settings = {"prompts": config.prompts, "group-size": config.group_size, "max-new-tokens": config.max_new_tokens}
    settings |= {"threads": config.threads, "repeats": config.repeats}
    name = Path(config.model).name
    options = "".join(f" --{key} {value}" for key, value in settings.items())
    return Report(
        name=f"gram_{name}",
        command=f"otb bench gram --model {config.model if config.model == name else 'PATH'}{options}"
        + ("" if config.rows else " --no-rows"),
        settings={"model": name, **settings},
        title=f"One measured step of {name}: {config.prompts} prompts × {config.group_size} rollouts, {what}",
        headers=("what", "seconds", "× fwd+bwd", "memory ÷ parameters"),
        cells=[
            (r.what, f"{r.seconds:.2f}", f"{r.passes:.1f}", "–" if r.memory is None else f"{r.memory:.2f}")
            for r in rows
        ],
        rows=[asdict(row) for row in rows],
        notes=(
            "Processor seconds, the least of all repetitions, in which the candidates take turns.",
            f"A sketch has {DIM:,} buckets: products are off by .14 % of ‖g‖‖g'‖. Those of a basis are exact.",
            "Not measured on a GPU.",
        ),
    )


def _step(config: GramConfig) -> _Step:
    sampled = SampleConfig(config.prompts, config.group_size, config.max_new_tokens)
    trainer = Trainer.from_config(TrainConfig(model=config.model, sample=sampled))
    prompts = draw_prompts(trainer.task, "train", 0, config.prompts)
    torch.manual_seed(0)
    with trainer.policy.sampling():
        group = np.repeat(np.arange(config.prompts), config.group_size)
        rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, sampled, group)
    paid = compute_rewards(trainer.task, rollouts)
    last = np.arange(rollouts.width) == rollouts.completion_length[:, None] - 1
    paid = replace(paid, by_token=last * np.random.default_rng(0).integers(2, size=(len(group), 1)).astype(float))
    table = trainer.table(rollouts, trainer.policy.forward(rollouts, False, trainer.wanted()), paid, None)
    every = np.ones(len(group), bool)
    norms = trainer.instrument.norms(rollouts, np.arange(config.prompts))
    advantages = np.stack(list(every_advantage(table, norms, every).values())) / config.group_size
    return _Step(trainer, rollouts, table, rollouts.by_column(advantages))


def _calls(step: _Step, config: GramConfig) -> dict[str, Callable[[], object]]:
    measure, rollouts, table = step.trainer.instrument, step.rollouts, step.table
    model, groups, every = step.trainer.model, np.arange(config.prompts), np.ones(len(rollouts.group), bool)
    ids, mask, real = rollouts.tensors(model.device)
    problem, norms = prepare(model, Batch(ids, mask, real), "all", 1.0), measure.norms(rollouts, groups)
    basis = basis_weights(problem, step.weights, rollouts.group)

    def passes() -> None:
        for group in groups:
            values = sampled_logprobs(problem, tuple(r for r in problem.rollouts if rollouts.group[r.row] == group))
            torch.autograd.grad(values.sum(), problem.scope.parameters)

    def gram(engine: str) -> Callable[[], object]:
        return lambda: group_gradient_gram(model, ids, mask, step.weights, rollouts.group, real, engine=engine)

    calls: dict[str, Callable[[], object]] = {
        PASS: passes,
        "exact norms": lambda: measure.norms(rollouts, groups),
        BASIS: gram("auto"),
        "smaller groups": lambda: measure.subgroups(rollouts, table, norms, groups),
        "attribution": lambda: measure.shares(rollouts, table.mask / len(every)),
        SKETCH: lambda: gradient_sketch(model, ids, mask, basis, rollouts.group, real, dim=DIM),
    }
    return calls | ({ROWS: gram("reference")} if config.rows else {})
