"""The instrumented loop: sample groups → reward → measure → estimate → step → record.

Policy gradient: ascend ĝ = Σ_i Σ_t c_{i,t} ∇_θ log π(y_{i,t}). The chosen estimator gives the advantages A, the
objective turns them into coefficients c; by default c = A/N, one update per batch, and token sums are not divided by
lengths.
Everything recorded at a step describes the policy before that step's first update.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from otb_analysis.config import TrainConfig
from otb_analysis.devices import first_line
from otb_analysis.errors import STOPS, Interrupted, NonFiniteError, StoreError
from otb_analysis.estimators import estimate
from otb_analysis.measurement.summary import summarize
from otb_analysis.measurement.table import rollout_rows, token_rows
from otb_analysis.phases import note, phase
from otb_analysis.processes import Processes
from otb_analysis.store import RunWriter, StepTables, gram_rows, subgroup_rows
from otb_analysis.training.enough import none_answers, none_ends, too_few_prompts
from otb_analysis.training.evaluation import evaluate
from otb_analysis.training.filling import broken_condition, draw_batch
from otb_analysis.training.resume import begin, interruption_sentence
from otb_analysis.training.runtime.checkpoint import write_checkpoint
from otb_analysis.training.runtime.gather import gather_rollouts, shard_rows, shared_norms
from otb_analysis.training.runtime.progress import Bar, silent, step_line, unfailing
from otb_analysis.training.runtime.sharding import asked_for
from otb_analysis.training.runtime.trackers import Trackers
from otb_analysis.training.setup import Trainer, seed_of

ORDER = 1
"""Seed stream for shuffling mini-batches."""


def train(config: TrainConfig, bar: Bar = silent) -> Path:
    """Train a policy, measure its steps, and return the run's directory.

    Raises:
        InputError: The configuration names something that does not exist or cannot work; nothing was written. Or a
            filter of sampling did not fill its batch; complete steps stay readable.
        StoreError: The store cannot be written; complete steps stay readable.
        NonFiniteError: A logit, reward, loss or gradient is not finite; complete steps stay readable.
        ProcessError: Another process of the run stopped; complete steps stay readable.
    """
    processes = Processes.joined(asked_for(), config.device)
    bar = unfailing(bar if processes.first else silent)
    with processes.together():
        trainer = Trainer.from_config(config, processes)
        writer, first = begin(config, trainer)
    if processes.first:
        note(first_line(trainer.machine, trainer.why))
    processes.record = lambda reason: writer.finish("failed", reason)
    names = config.trackers if processes.first else ()
    with (
        _ending_recorded(writer, config),
        closing(Trackers(names, writer.path, first)) as trackers,
        processes.together(),
    ):
        steps = config.optimize.steps
        bar(first, steps, f"{config.run_name}: {first} of {steps} steps")
        for warning in (too_few_prompts(config, trainer.task), broken_condition(config)):
            if processes.first and warning:
                note(warning)
        for step in range(first, steps):
            with _step_named(step):
                tables = train_step(trainer, step)
            tables = replace(tables, steps={**tables.steps, "tracker_gaps": trackers.log(step, tables.steps)})
            with trainer.timed("store"):
                write_step(writer, step, tables, processes)
                keep_checkpoint(trainer, writer.path, step + 1)
            bar(step + 1, steps, step_line(config.run_name, step, steps, tables.steps))
        with phase("saving the model"):
            trainer.save(writer.path / "model")
        processes.barrier()
    processes.end()
    return writer.path


def write_step(writer: RunWriter, step: int, tables: StepTables, processes: Processes) -> None:
    """Write this process's parts of a step, the first process last: its `steps` part makes the step visible.

    Raises:
        StoreError: The disk refuses.
    """
    if not processes.first:
        writer.write_step(step, tables)
    processes.barrier()
    if processes.first:
        writer.write_step(step, tables)


def keep_checkpoint(trainer: Trainer, run_dir: Path, done: int) -> None:
    """Write a checkpoint every `checkpoint.every` steps, and after the last.

    Raises:
        StoreError: The disk refuses.
    """
    settings = trainer.config.checkpoint
    if settings.every and (done % settings.every == 0 or done == trainer.config.optimize.steps):
        state = trainer.state()
        if trainer.processes.first:
            write_checkpoint(run_dir, done, state, settings.keep)


def train_step(trainer: Trainer, step: int) -> StepTables:
    """Take one step and return everything to record about it."""
    config, policy, processes = trainer.config, trainer.policy, trainer.processes
    scalars = evaluate(trainer, step)
    with trainer.timed("sample"):
        torch.manual_seed(seed_of(config.seed, step, *processes.seed))
        local, filtered = draw_batch(trainer, step)
    scalars |= filtered
    with trainer.timed("update", "scoring"):
        forward = policy.forward(local, trainer.one_update, trainer.wanted())
        local_reference = policy.reference_logprob(local)
    with trainer.timed("estimate"):
        rollouts, stats, reference = gather_rollouts(processes, local, forward.stats, local_reference)
        forward = replace(forward, stats=stats)
        table = trainer.with_contrast(rollouts, trainer.table(rollouts, forward, reference), step)
    if not trainer.cut_noted and processes.first and (warning := none_ends(config, step, rollouts)):
        trainer.cut_noted = True
        note(warning)
    if processes.first and (warning := none_answers(trainer.task, step, rollouts)):
        note(warning)
    with trainer.timed("measure"):
        trainer.announce(step, rollouts)
        measurer, groups = trainer.measurer, np.arange(len(local.prompts))
        norms = None
        if trainer.trains_on_exact:
            with phase("exact norms"), trainer.measuring():
                norms = shared_norms(measurer, processes, rollouts, groups)
    with trainer.timed("estimate"):
        inputs = table.inputs(table.proxy if config.estimator.energy == "proxy" else None)
        if norms is not None:
            inputs = table.inputs(norms.whole_norm_sq, norms.rollout_norm_sq)
        trained = estimate(config.estimator.name, replace(inputs, state=trainer.remembered), trainer.options)
        batch = trainer.objective.batch(rollouts, table, trained.advantage, reference)
        batch = replace(batch, seed=seed_of(config.seed, step, ORDER))
    with trainer.timed("measure"), trainer.measuring():
        weights = partial(trainer.objective.first_coefficients, batch, table.stats.logprob)
        measurement = processes.broadcast_from_main(lambda: measurer.measure(step, rollouts, table, norms, weights))
    trainer.remember(trained.state)  # only now: measuring used what this step's advantages were made with
    with trainer.timed("update"):
        scalars |= trainer.update(batch, forward)
        scalars |= trainer.update_critic(rollouts, forward, table)
        del forward  # freeing its graph takes time, which counts for the update
    seconds = trainer.take_seconds()
    trainer.keep_budget(step, seconds)
    scalars |= summarize(rollouts, table, trained, measurement) | seconds
    tokens = token_rows(table, trained, measurement.tokens, trainer.tokenizer)
    by_rollout, first = rollout_rows(rollouts, table, measurement.tokens), processes.first
    gradients = [row.as_row() for row in measurement.statistics] if first else []
    return StepTables(
        tokens=shard_rows(tokens, processes, len(table.mask)),
        rollouts=shard_rows(by_rollout, processes, len(table.mask)),
        steps=scalars,
        gradients={name: [row[name] for row in gradients] for name in gradients[0]} if gradients else None,
        grams=gram_rows(step, measurement.gram) if first and measurement.gram else None,
        subgroups=subgroup_rows(step, measurement.subgroups) if first and measurement.subgroups else None,
    )


@contextmanager
def _ending_recorded(writer: RunWriter, config: TrainConfig) -> Iterator[None]:
    """Write into run.json how the run ended; exceptions pass through."""
    try:
        yield
    except BaseException as error:
        reason = str(error) if isinstance(error, STOPS) else f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, KeyboardInterrupt):
            reason = "interrupted; its complete steps can be read."
        with suppress(StoreError):  # a disk that refuses this too must not hide why the run ended
            writer.finish("failed", reason)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(interruption_sentence(config)) from None
        raise
    writer.finish("complete")


@contextmanager
def _step_named(step: int) -> Iterator[None]:
    """Add the step to the message of a NonFiniteError."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step}: {error}") from error
