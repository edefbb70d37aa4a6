"""The instrumented loop: sample groups → reward → measure → estimate → step → record.

Policy gradient: ascend ĝ = Σ_i Σ_t c_{i,t} ∇_θ log π(y_{i,t}). The chosen estimator gives the advantages A, the
objective turns them into coefficients c; by default c = A/N, one update per batch, and token sums are not divided by
lengths.
Everything recorded at a step describes the policy before that step's first update.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from otb_analysis.config import TrainConfig
from otb_analysis.devices import first_line, products, random_forked
from otb_analysis.errors import InputError, Interrupted, NonFiniteError, StoreError, why_ended
from otb_analysis.estimators import entry_of, estimate
from otb_analysis.measurement.measurer import Measurement, step_columns
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.measurement.worst import worst_tables
from otb_analysis.objectives.registry import options_from_table
from otb_analysis.objectives.shaping import FILTERS, FilterInputs, keep_chance
from otb_analysis.phases import note, phase
from otb_analysis.processes import Processes
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.statistics import cluster_jackknife, passing
from otb_analysis.store import RunWriter, StepTables
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import distinct_prompts, draw_prompts
from otb_analysis.trackers import TABLES_EVERY, Trackers
from otb_analysis.training.check import none_answers, none_ends, too_few_prompts
from otb_analysis.training.runtime import (
    Bar,
    asked_for,
    gather_rollouts,
    shard_rows,
    silent,
    step_line,
    unfailing,
    write_checkpoint,
)
from otb_analysis.training.setup import Trainer, begin, interruption_sentence, seed_of
from otb_analysis.types import Float, Int


def broken_condition(config: TrainConfig) -> str:
    """Return a warning where the filter breaks a condition of an unbiased estimator that trains, or nothing."""
    name, entry = config.estimator.name, FILTERS[config.sample.filter]
    if not entry.effect or not entry_of(name).unbiased:
        return ""
    return (
        f"sample.filter {config.sample.filter!r} breaks a condition of {name}, which is unbiased for i.i.d. rollouts "
        f"only: {entry.effect}; docs/methods/filters.md has the bias of each estimator."
    )


def draw_batch(trainer: Trainer, step: int) -> tuple[Rollouts, dict[str, object]]:
    """Return this process's paid rollouts of a step, and scalars about what the filter saw.

    With a filter it draws until the batch is full. What is kept first stays, so that when drawing ends depends on no
    kept rollout.

    Raises:
        InputError: The filter did not fill the batch in `sample.filter_rounds` draws.
    """
    config = trainer.config.sample
    wanted = np.repeat(np.arange(config.prompts), config.group_size)
    if config.filter == "none":
        prompts = draw_prompts(trainer.task, "train", step * config.prompts, config.prompts)
        return _sampled_and_paid(trainer, prompts, trainer.processes.shard(wanted)), {}
    fresh = FILTERS[config.filter].keeps == "group"
    options = options_from_table(config.filter, FILTERS[config.filter].options, config.filter_options)
    prompts, parts, totals, missing = list[Prompt](), list[Rollouts](), list[float](), wanted
    for turn in range(config.filter_rounds):
        if fresh or not turn:  # a step has so many prompts in store that no two steps share one by its number
            start = (step * (config.filter_rounds if fresh else 1) + turn) * config.prompts
            prompts = draw_prompts(trainer.task, "train", start, config.prompts)
        rollouts = _sampled_and_paid(trainer, prompts, wanted if fresh else missing)
        inputs = FilterInputs(
            total=rollouts.reward.sum(axis=1),
            tokens=rollouts.mask.sum(axis=1).astype(np.float64),
            calls=np.array([len(turns) - 1.0 for turns in rollouts.turns]),
            group=rollouts.group,
        )
        chance = keep_chance(config.filter, inputs, options)
        stays = torch.rand(len(chance), dtype=torch.float64, device="cpu").numpy() < chance
        totals += inputs.total.tolist()
        kept, done = rollouts.take(np.flatnonzero(stays)), len(wanted) - len(missing)
        if fresh:
            numbers, group = np.unique(kept.group, return_inverse=True)
            group = group + done // config.group_size
            kept = replace(kept, group=group, prompts=tuple(prompts[k] for k in numbers))
            kept = kept.take(np.flatnonzero(group < config.prompts))
        parts.append(kept)
        count = sum(len(part.group) for part in parts)
        missing = wanted[count:] if fresh else missing[~stays]
        if not len(missing):
            every = tuple(prompt for part in parts for prompt in part.prompts)[: config.prompts] if fresh else prompts
            whole = Rollouts.concatenate([replace(part, prompts=tuple(every)) for part in parts])
            return whole.take(np.argsort(whole.group, kind="stable")), {
                "filter_rounds": turn + 1,
                "filter_kept_share": len(wanted) / len(totals),
                "filter_reward_mean": float(np.mean(totals)),
            }
    raise InputError(
        f"step {step}: sample.filter {config.filter!r} filled {len(wanted) - len(missing)} of {len(wanted)} rollouts "
        f"in {config.filter_rounds} rounds; it drew {len(totals)} rollouts with rewards from {min(totals):g} to "
        f"{max(totals):g} and a mean of {np.mean(totals):.3g}; raise sample.filter_rounds, change "
        "sample.filter_options, or take prompts that the policy solves sometimes."
    )


def _sampled_and_paid(trainer: Trainer, prompts: list[Prompt], group: Int) -> Rollouts:
    with trainer.policy.sampling():
        rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, trainer.config.sample, group)
    with trainer.timed("estimate"):
        return compute_rewards(trainer.task, rollouts)


EVALUATION = 2**31
"""Seed stream: the same at every evaluation, and different from that of any step."""


def evaluate(trainer: Trainer, step: int) -> dict[str, object]:
    """Return the held-out columns of `steps` where evaluation is due; the random state is not touched.

    The last step is always evaluated, unless evaluation is off.

    Raises:
        InputError, NonFiniteError: The task or a logit fails, as in training.
    """
    settings, last = trainer.config.evaluate, trainer.config.optimize.steps - 1
    if settings.every <= 0 or (step % settings.every and step != last):
        return {}
    with trainer.timed("evaluate"), random_forked(trainer.model.device), trainer.policy.whole_weights():
        torch.manual_seed(seed_of(trainer.config.seed, EVALUATION, *trainer.processes.seed))
        prompts = distinct_prompts(trainer.task, "heldout", settings.prompts)
        if len(prompts) < settings.prompts and step == 0:
            note(
                f"the held-out split of {trainer.task.name} has {len(prompts)} different prompts, so the run is "
                f"evaluated on these and not on {settings.prompts} (evaluate.prompts)."
            )
        group = trainer.processes.shard(np.repeat(np.arange(len(prompts)), settings.samples))
        rewards = np.zeros(0)
        if len(group):  # a process may have no answer to give
            answers = replace(trainer.config.sample, prompts=len(prompts), group_size=settings.samples)
            with trainer.policy.arithmetic():
                rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, answers, group)
            rewards = compute_rewards(trainer.task, rollouts).rewards().sum(axis=1)
        total = np.concatenate(trainer.processes.gather(rewards))
    return heldout_columns(total.reshape(len(prompts), settings.samples), settings.threshold)


def heldout_columns(reward: Float, threshold: float) -> dict[str, object]:
    """Return the columns of `steps` from total rewards of answers [P, n]; a success has at least the threshold."""
    success = passing(reward >= threshold)
    by_prompt = reward.mean(axis=1, keepdims=True)
    # Equal means over all prompts give no interval: a reward has no bounds from which to derive one.
    spread = bool(np.ptp(by_prompt) > 0)
    mean = cluster_jackknife(by_prompt, lambda rows: rows[..., 0], "mean reward", scale="linear") if spread else None
    shares = {"heldout_success": success.average, "heldout_pass_at_k": success.at[success.largest]}
    columns: dict[str, object] = {
        "heldout_reward": float(np.mean(reward)),
        "heldout_samples": reward.shape[1],
        "heldout_pass_k": success.largest,
        **{f"heldout_pass_at_{k}": share.estimate for k, share in success.at.items()},
    }
    for name, interval in ({"heldout_reward": mean} | shares).items():
        columns[f"{name}_low"] = interval.low if interval else None
        columns[f"{name}_high"] = interval.high if interval else None
    return columns | {name: share.estimate for name, share in shares.items()}


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
            try:
                tables = train_step(trainer, step)
            except NonFiniteError as error:
                raise NonFiniteError(f"step {step}: {error}") from error
            gaps = trackers.log(step, tables.steps, trainer.worst)
            tables = replace(tables, steps={**tables.steps, "tracker_gaps": gaps})
            with trainer.timed("store"):
                write_step(writer, step, tables, processes)
                done, settings = step + 1, config.checkpoint
                if settings.every and (done % settings.every == 0 or done == steps):
                    state = trainer.state()
                    if processes.first:
                        write_checkpoint(writer.path, done, state, settings.keep)
                    del state  # a whole copy of weights and optimizer where they are sharded
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
    others = processes.gather([] if processes.first else writer.write_step(step, tables))
    if processes.first:
        writer.write_step(step, tables, [file for files in others for file in files])


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
        table = trainer.table(rollouts, forward, reference, step)
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
            with phase("exact norms"), products(trainer.precision), policy.whole_weights():
                norms = measurer.norms(rollouts, groups)
    with trainer.timed("estimate"):
        inputs = table.inputs(table.proxy if config.estimator.energy == "proxy" else None)
        if norms is not None:
            inputs = table.inputs(norms.whole_norm_sq, norms.rollout_norm_sq)
        trained = estimate(config.estimator.name, replace(inputs, state=trainer.remembered), trainer.options)
        batch = trainer.objective.batch(rollouts, table, trained.advantage, reference)
        batch = replace(batch, seed=seed_of(config.seed, step, ORDER))
    due = measurer.due(step, len(local.prompts))
    with trainer.timed("measure"), products(trainer.precision), policy.whole_weights() if due else nullcontext():
        # c of the whole batch before its first update. With several mini-batches their mean has these coefficients, up
        # to how each normalises its part; the entropy bonus is left out, as its gradient is no sum of scores.
        objective, logprob = trainer.objective, table.stats.logprob
        measurement = measurer.measure(
            step, rollouts, table, norms, lambda: objective.coefficients(objective.with_weights(batch), logprob)[0]
        )
    trainer.remember(trained.state)  # only now: measuring used what this step's advantages were made with
    with trainer.timed("update"):
        scalars |= trainer.update(batch, forward)
        scalars |= trainer.update_critic(rollouts, forward, table)
        del forward  # freeing its graph takes time, which counts for the update
    told = config.trackers and processes.first and step % TABLES_EVERY == 0
    trainer.worst = worst_tables(rollouts, table, trained.advantage, trainer.tokenizer) if told else {}
    seconds = trainer.take_seconds(step)
    if not processes.first:  # what all have of the batch is written once
        measurement = Measurement(measurement.tokens, gaps=measurement.gaps)
    tables = step_columns(step, rollouts, table, trained, measurement, trainer.tokenizer)
    for name in ("tokens", "rollouts"):
        tables[name] = shard_rows(tables[name], processes, len(table.mask))
    return StepTables(**tables | {"steps": scalars | tables["steps"] | seconds})


@contextmanager
def _ending_recorded(writer: RunWriter, config: TrainConfig) -> Iterator[None]:
    """Write into run.json how the run ended; exceptions pass through."""
    try:
        yield
    except BaseException as error:
        with suppress(StoreError):  # a disk that refuses this too must not hide why the run ended
            writer.finish("failed", why_ended(error))
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(interruption_sentence(config)) from None
        raise
    writer.finish("complete")
