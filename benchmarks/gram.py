"""What one measured step costs, in forward and backward passes of its rollouts: norms, Gram matrix, smaller groups.

The Gram matrix of all estimators is measured three ways: from the gradients of each prompt's basis rows, block by
block, as the library does it; from one backward pass per row; and from count sketches of the basis' gradients, which
any model allows. Rewards are drawn by lot, so that every model has something to compare.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.config import GramConfig
from benchmarks.peer_side import peak
from benchmarks.publish import Report, notes_of, report_of, settings_of
from benchmarks.timing import group_forward, group_passes, least_seconds, sampled_step, threads
from otb_analysis.config import SampleConfig
from otb_analysis.devices import device_of
from otb_analysis.gradients import group_gradient_gram, sketched_group_gram
from otb_analysis.measurement.level import shares
from otb_analysis.measurement.measurer import every_advantage
from otb_analysis.measurement.table import TokenTable
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Float

DIM = 1 << 20
"""Buckets of a sketch: an inner product is off by √(2/DIM), .14 % of ‖g‖‖g'‖."""
PASS, FORWARD, BASIS, ROWS, SKETCH = (
    "forward and backward pass",
    "forward passes of the Gram matrix",
    "Gram matrix, of a basis",
    "Gram matrix, a pass per row",
    "Gram matrix, sketches of a basis",
)
COLUMNS = {
    "what": "{what}", "seconds": "{seconds:.2f}", "× fwd+bwd": "{passes:.1f}", "memory ÷ parameters": "{memory:.2f}",
}  # fmt: skip


def run(config: GramConfig) -> Report:
    """Time everything that one step can measure on the rollouts of a model.

    Raises:
        InputError: The model cannot be loaded.
    """
    with threads(config.threads):
        sample = SampleConfig(config.prompts, config.group_size, config.max_new_tokens)
        trainer, rollouts = sampled_step(sample, config.model)
        # Rewards by lot, 0 or 1 at the last token
        last = np.arange(rollouts.mask.shape[1]) == rollouts.attention_mask.sum(axis=1, keepdims=True) - 1
        lot = np.random.default_rng(0).integers(2, size=(len(last), 1))
        rollouts = replace(rollouts, reward=(last * lot).astype(float))
        table = trainer.table(rollouts, trainer.policy.forward(rollouts, False, trainer.wanted()), None)
        norms = trainer.measurer.norms(rollouts, np.arange(config.prompts))
        advantages = every_advantage(table, norms, np.ones(len(rollouts.group), bool))
        weights = rollouts.by_column(np.stack(list(advantages.values())) / config.group_size)
        calls = _calls(config, trainer, rollouts, table, weights)
        least = least_seconds(calls, config.repeats)
        peaks = {name: peak(calls[name], str(device_of())) for name in (PASS, BASIS)}
    size = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    held = {name: None if (most := peaks.get(name)) is None else most / size for name in least}
    rows = [{"what": n, "seconds": s, "passes": s / least[PASS], "memory": held[n]} for n, s in least.items()]
    model = Path(config.model).name
    public = replace(config, model=model if model == config.model else "PATH")  # a path belongs to a machine
    flat = weights.transpose(1, 0, 2).reshape(weights.shape[1], -1)
    counts = f"{rollouts.mask.sum():,} tokens, {len(flat)} rows, {len(np.unique(flat, axis=0))} different"
    title = f"One measured step of {model}: {config.prompts} prompts × {config.group_size} rollouts, {counts}"
    names = {"name": f"gram_{model}", "settings": settings_of(config) | {"model": model}}
    return report_of(public, title, COLUMNS, rows, notes=notes_of(config, dim=DIM), **names)


def _calls(
    config: GramConfig, trainer: Trainer, rollouts: Rollouts, table: TokenTable, weights: Float
) -> dict[str, Callable[[], object]]:
    measure, model, groups = trainer.measurer, trainer.model, np.arange(config.prompts)
    ids, mask, real = rollouts.tensors(model.device)
    norms, gram = measure.norms(rollouts, groups), (model, ids, mask, weights, rollouts.group, real)
    calls: dict[str, Callable[[], object]] = {
        PASS: group_passes(model, rollouts),
        FORWARD: group_forward(model, rollouts),
        "exact norms": lambda: measure.norms(rollouts, groups),
        BASIS: partial(group_gradient_gram, *gram),
        "smaller groups": lambda: measure.subgroups(rollouts, table, norms, groups),
        "attribution": lambda: shares(measure.policy, rollouts, table.mask / len(rollouts.group), split=True),
        SKETCH: partial(sketched_group_gram, *gram, dim=DIM),
    }
    return calls | ({ROWS: partial(group_gradient_gram, *gram, engine="reference")} if config.rows else {})
