"""`otb score`: recorded rollouts under a model, at any level of measuring, as a run of the store."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.checks.sampling import SamplingCheck
from otb_analysis.config.audit import ScoreConfig
from otb_analysis.devices import device_of, first_line, machine_facts, products
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.estimators import entry_of, estimate, options_from_dict
from otb_analysis.gradients.batch.scope import select_scope
from otb_analysis.gradients.exact.arithmetic import arithmetic
from otb_analysis.measurement.levels import level_of
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.passes import forward_statistics
from otb_analysis.measurement.summary import summarize
from otb_analysis.measurement.table import TokenTable, rollout_rows, token_rows, token_table
from otb_analysis.phases import note, phase
from otb_analysis.processes import Processes
from otb_analysis.recorded.encoding import Encoder
from otb_analysis.recorded.logprobs import refuse_wrong_logprobs
from otb_analysis.recorded.rows import Tally
from otb_analysis.recorded.runs import (
    GIVEN,
    note_tally,
    record_run,
    refuse_existing,
    remaining_estimators,
    run_path,
    source_of,
    stored_config,
)
from otb_analysis.recorded.steps import RecordedStep
from otb_analysis.rollouts.models import load_policy, output_layer
from otb_analysis.store import StepTables, gram_rows, subgroup_rows
from otb_analysis.types import Float

Policy = tuple[PreTrainedModel, PreTrainedTokenizerBase]
"""A model on its device and its tokenizer."""


def score(config: ScoreConfig, policy: Policy | None = None) -> Path:
    """Measure recorded rollouts under a model, loaded here unless it is given, and return the run's directory.

    Raises:
        InputError: Model, rollouts or a setting cannot work, or a record is refused; the steps before it stay.
        NonFiniteError: A logit is not finite.
        StoreError: The store cannot be read or written.
        ProcessError: Another process of the same launch failed first.
    """
    check(config)
    processes = Processes.joined(sharded=False, device=config.device)
    with processes.together():
        path = _scored(config, processes, policy)
    processes.end()
    return path


def load(config: ScoreConfig, device: torch.device | None = None) -> Policy:
    """Load the model and move it to a device, by default the one that was asked for.

    Raises:
        InputError: It cannot be loaded, or the device is not there.
    """
    device = device or device_of(config.device)
    with phase(f"loading the model {config.model}"):
        model, tokenizer = load_policy(config.model, config.allow_remote_code)
        model.to(device)  # pyright: ignore[reportArgumentType]
    return model, tokenizer


def _scored(config: ScoreConfig, processes: Processes, policy: Policy | None) -> Path:
    source = source_of(config.rollouts, config)
    path = run_path(config.rollouts, config, "scored")
    processes.broadcast_from_main(lambda: refuse_existing(path, config))
    model, tokenizer = policy or load(config, processes.device)
    stored = stored_config(config, source, "otb score", {"sample": {"temperature": config.temperature}})
    encoded = Tally()  # of this process's steps; every process reads all records
    scorer = Scorer(config, model, tokenizer, encoded, stored)
    machine = machine_facts(model.device, scorer.precision)
    note(first_line(machine, scorer.why))
    record_run(path, config, stored, source, scorer.tables, processes, machine)
    note_tally(sum(processes.gather(encoded), Tally()))
    return path


def check(config: ScoreConfig) -> None:
    """Refuse settings that cannot work, before anything is loaded.

    Raises:
        InputError: The first of them, or a device that is not there.
    """
    device_of(config.device)
    if not config.model:
        raise InputError(
            "--model is empty; pass the checkpoint that sampled the rollouts, or use otb import without one."
        )
    if not (config.temperature > 0 and np.isfinite(config.temperature)):
        raise InputError(f"--temperature is {config.temperature}; pass the temperature of the sampler, above 0.")
    name = config.estimator.name
    options_from_dict(name, config.estimator.options)
    if lacking := sorted(set(entry_of(name).needs) - GIVEN):
        raise InputError(
            f"estimator.name is {name!r}, which needs {lacking[0]}; recorded rollouts do not have it, choose another."
        )
    if config.estimator.energy != "proxy":
        raise InputError(
            f"estimator.energy is {config.estimator.energy!r}; recorded rollouts are weighed by the proxy."
        )
    if config.measure.budget:
        raise InputError("measure.budget plans a training run; set --measure.exact.every and the like instead.")
    for level in config.measure.further:
        level_of(level)


class Scorer:
    """A model and its settings, measuring one recorded step after the other."""

    def __init__(
        self,
        config: ScoreConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tally: Tally,
        stored: Mapping[str, Any],
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        select_scope(model, config.measure.scope)  # refuses a scope that holds nothing, before the run begins
        rows = next(output_layer(model).parameters()).shape[0]
        limit = getattr(model.config, "max_position_embeddings", None)
        self.encoder = Encoder(tokenizer, rows, limit, config.text, config.ended, tally)
        self.precision, self.why = arithmetic(model, config.precision, config.measure.scope, config.temperature)
        self.options = options_from_dict(config.estimator.name, config.estimator.options)
        trained = {config.estimator.name: self.options}
        self.measurer = GradientMeasurer(model, config.measure, config.temperature, trained, stored)
        self.sampling = SamplingCheck()
        self.seconds: dict[str, float] = {}

    def tables(self, step: RecordedStep) -> StepTables:
        """Return everything to store of a step.

        Raises:
            InputError: A record is refused.
            NonFiniteError: A logit is not finite.
        """
        self.seconds = {}
        self._refuse_singles(step)
        rollouts = self.encoder.rollouts(step)
        # A second look at the same tokens is no evidence: a direction learned from them agrees with itself.
        observe = None if step.repeated else self.sampling.observe
        with phase("scoring"), self._timed("forward"):
            try:
                forward = forward_statistics(
                    self.model, rollouts, self.config.temperature, self.config.micro_batch, observe
                )
            except NonFiniteError as error:
                raise NonFiniteError(f"step {step.step}: {error}") from error
        table = token_table(rollouts, forward, None)
        refuse_wrong_logprobs(step, table)
        trained = estimate(self.config.estimator.name, table.inputs(table.stats.energy), self.options)
        with self._timed("measure"), products(self.precision):
            weights = trained.advantage / len(step.records)
            measurement = self.measurer.measure(step.step, rollouts, table, None, lambda: weights)
        by_rollout = rollout_rows(rollouts, table, measurement.tokens)
        gradients = [row.as_row() for row in measurement.statistics]
        seconds = {f"seconds_{name}": taken for name, taken in self.seconds.items()}
        return StepTables(
            tokens=token_rows(table, trained, measurement.tokens, self.tokenizer) | _recorded(step, table),
            rollouts=by_rollout | step.provenance,
            steps=summarize(rollouts, table, trained, measurement) | step.logged_norm | seconds,
            gradients={name: [row[name] for row in gradients] for name in gradients[0]} if gradients else None,
            grams=gram_rows(step.step, measurement.gram) if measurement.gram else None,
            subgroups=subgroup_rows(step.step, measurement.subgroups) if measurement.subgroups else None,
            sampling=None if step.repeated else self.sampling.rows(rollouts, table),
        )

    def _refuse_singles(self, step: RecordedStep) -> None:
        """Refuse a step of one rollout per prompt where the estimator compares rollouts of one prompt."""
        if np.bincount(step.group).max() > 1 or entry_of(self.config.estimator.name).takes_single:
            return
        raise InputError(
            f"{step.records[0].place}: step {step.step} has one rollout per prompt, but estimator.name is "
            f"{self.config.estimator.name!r}, which compares rollouts of one prompt; set it to one of "
            f"{', '.join(remaining_estimators())}."
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[name] = perf_counter() - start


def _recorded(step: RecordedStep, table: TokenTable) -> dict[str, object]:
    """Return the trainer's own numbers as further columns `recorded_…`, beside ours; null where not recorded."""
    n, t = np.nonzero(table.present)
    columns: dict[str, object] = {}
    names = dict.fromkeys(name for record in step.records for name in record.columns if name != "behavior_logprob")
    for name in names:
        whole: Float = np.full(table.mask.shape, np.nan)
        for i, record in enumerate(step.records):
            values = record.columns[name]
            whole[i, : len(values)] = values
        values = whole[n, t]
        columns[f"recorded_{name}"] = np.ma.masked_array(values, mask=~table.mask[n, t] | np.isnan(values))
    return columns
