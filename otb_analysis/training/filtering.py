"""The trainer's batch under a filter: drawn, paid and filled; what could not be filled is noted."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.estimators import registered
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.phases import note
from otb_analysis.rollouts.filters import EXTRA, dynamic, profiled
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.setup import Trainer, seed_of
from otb_analysis.types import Int

FILTER = 2
"""Seed stream for what a filter keeps."""


def filtered(trainer: Trainer, step: int, prompts: Sequence[Prompt]) -> tuple[Rollouts, dict[str, float]]:
    """Return a step's rollouts after its filter, and its columns of `steps`."""
    config, task = trainer.config.sample, trainer.task
    if not step and (warning := broken_condition(trainer.config.estimator.name, config.filter)):
        note(warning)

    def draw(asked: Sequence[Prompt], group: Int) -> Rollouts:
        return compute_rewards(task, sample(trainer.generator, trainer.tokenizer, task, asked, config, group))

    def more(turn: int) -> list[Prompt]:
        start = EXTRA + (step * config.filter_rounds + turn) * config.prompts
        return draw_prompts(task, "train", start, config.prompts)

    if config.filter == "dynamic":
        found = dynamic(config, prompts, more, draw)
    else:
        rng = np.random.default_rng(seed_of(trainer.config.seed, step, FILTER))
        found = profiled(config, prompts, rng, draw)
    if found.failed:
        note(
            f"step {step}: the filter {config.filter} did not fill the batch in {config.filter_rounds} rounds and saw "
            f"{found.seen}; {found.failed} of {len(prompts)} groups hold what it refuses; raise --sample.filter-rounds."
        )
    return found.rollouts, {"n_drawn": float(found.drawn), "n_unfilled": float(found.failed)}


def broken_condition(estimator: str, kind: str) -> str:
    """Return that a filter breaks the estimator's condition, and what to read; empty where it has none."""
    entry = registered(estimator)
    if entry is None or not (entry.unbiased or entry.shrinks_by):
        return ""
    return (
        f"{estimator} is unbiased (up to a factor) for rollouts drawn independently from the policy, and the filter "
        f"{kind} does not leave them so; docs/methods/filters.md says what its mean is then."
    )
