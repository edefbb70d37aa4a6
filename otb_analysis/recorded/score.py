"""`otb score`: recorded rollouts under a model, at any level of measuring, as a run of the store."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.checks.sampling import SamplingCheck
from otb_analysis.config.train import ScoreConfig
from otb_analysis.devices import device_of, first_line, products, words_of
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.estimators import entry_of, estimate, options_from_dict
from otb_analysis.gradients.batch.scope import select_scope
from otb_analysis.gradients.exact.verdicts import arithmetic
from otb_analysis.measurement.forward import forward_statistics
from otb_analysis.measurement.level import level_of
from otb_analysis.measurement.measurer import GradientMeasurer, step_columns
from otb_analysis.measurement.table import TokenTable, token_table
from otb_analysis.phases import note, phase
from otb_analysis.recorded.encoding import Encoder
from otb_analysis.recorded.records import LOGPROBS, Tally
from otb_analysis.recorded.runs import (
    RecordedStep,
    check_settings,
    note_tally,
    record_run,
    refuse_existing,
    remaining_estimators,
    run_path,
    source_of,
    stored_config,
)
from otb_analysis.rollouts.models import load_policy, output_layer
from otb_analysis.store import StepTables
from otb_analysis.types import Float

Policy = tuple[PreTrainedModel, PreTrainedTokenizerBase]
"""A model on its device and its tokenizer."""
LEAST_TOKENS = 8
"""Policy tokens in which a fault can be seen: of one rollout, or of all of a step together."""
APART, FACTOR = 0.1, 5.0
"""A list is wrong where it is on average so far from the model's, in nats, and so many times nearer otherwise read."""
PLACEHOLDER = -1.0
"""A recorded 0 means certainty; a token that the model gives less than e⁻¹ was not certain to any policy like it."""
BEFORE, BEHIND = "fit the tokens one place before their own", "fit the tokens one place behind their own"
REMEDY = {
    BEFORE: "move the list, entry t is of completion token t",
    BEHIND: "move the list, entry t is of completion token t",
    "are logarithms to base 10": "multiply them by 2.302585",
    "are logarithms to base 2": "multiply them by 0.693147",
}
"""What a list may be instead, and what to do about it."""
Pair = tuple[Float, Float]
"""Recorded and scored log-probabilities of a rollout's policy tokens, in nats [T]."""


def score(config: ScoreConfig, policy: Policy | None = None) -> Path:
    """Measure recorded rollouts under a model, loaded here unless it is given, and return the run's directory.

    Raises:
        InputError: Model, rollouts or a setting cannot work, or a record is refused; the steps before it stay.
        NonFiniteError: A logit is not finite.
        StoreError: The store cannot be read or written.
    """
    check(config)
    source = source_of(config.rollouts, config)
    path = run_path(config.rollouts, config, "scored")
    refuse_existing(path, config)
    model, tokenizer = policy or load(config)
    stored = stored_config(config, source, "otb score", {"sample": {"temperature": config.temperature}})
    scorer = Scorer(config, model, tokenizer, Tally(), stored)
    note(first_line(scorer.machine, scorer.why))
    record_run(path, config, stored, source, scorer.tables, lambda: scorer.machine)
    note_tally(scorer.encoder.tally)
    return path


def load(config: ScoreConfig) -> Policy:
    """Load the model and move it to the device that was asked for.

    Raises:
        InputError: It cannot be loaded, or the device is not there.
    """
    device = device_of(config.device)
    with phase(f"loading the model {config.model}"):
        model, tokenizer = load_policy(config.model, config.allow_remote_code)
        model.to(device)  # pyright: ignore[reportArgumentType]
    return model, tokenizer


def check(config: ScoreConfig) -> None:
    """Refuse settings that cannot work, before anything is loaded.

    Raises:
        InputError: The first of them, or a device that is not there.
    """
    device_of(config.device)
    check_settings(config)
    for level in config.measure.further:
        level_of(level)


def check_groups(name: str, step: RecordedStep) -> None:
    """Refuse rollouts of which every prompt has one, where the estimator compares those of one prompt.

    Raises:
        InputError: That is so.
    """
    if np.bincount(step.group).max() == 1 and not entry_of(name).takes_single:
        whose = "the default of " * (name == ScoreConfig().estimator.name)
        raise InputError(
            f"{step.records[0].place}: step {step.step} has one rollout per prompt, but {whose}--estimator.name, "
            f"{name!r}, compares rollouts of one prompt. Sample several answers to each prompt, or name what trained: "
            f"set it to one of {', '.join(remaining_estimators())}."
        )


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
        self.machine = {"device": words_of(model.device), "precision": self.precision}

    def forget(self) -> None:
        """Carry nothing over from the steps before: of which kind they were must not matter."""
        self.encoder.tally, self.sampling = Tally(), SamplingCheck()

    def tables(self, step: RecordedStep) -> StepTables:
        """Return everything to store of a step.

        Raises:
            InputError: A record is refused.
            NonFiniteError: A logit is not finite.
        """
        name, seconds = self.config.estimator.name, dict[str, float]()
        check_groups(name, step)
        rollouts, start = self.encoder.rollouts(step), perf_counter()
        # A second look at the same tokens is no evidence: a direction learned from them agrees with itself.
        observe = None if step.repeated else self.sampling.observe
        with phase("scoring"):
            try:
                forward = forward_statistics(
                    self.model, rollouts, self.config.temperature, self.config.micro_batch, observe
                )
            except NonFiniteError as error:
                raise NonFiniteError(f"step {step.step}: {error}") from error
        seconds["seconds_forward"] = perf_counter() - start
        # A rollout without policy tokens has no token at which its reward could stand.
        paid = np.array([record.reward for record in step.records])
        table = replace(token_table(rollouts, forward, None), total_reward=paid)
        refuse_wrong_logprobs(step, table)
        trained, start = estimate(name, table.inputs(table.stats.energy), self.options), perf_counter()
        with products(self.precision):
            weights = trained.advantage / len(step.records)
            measurement = self.measurer.measure(step.step, rollouts, table, None, lambda: weights)
        seconds["seconds_measure"] = perf_counter() - start
        tables = step_columns(step.step, rollouts, table, trained, measurement, self.tokenizer)
        n, t = np.nonzero(table.present)
        # Beside ours the trainer's own numbers; null where not recorded.
        for column in dict.fromkeys(x for one in step.records for x in one.columns if x != "behavior_logprob"):
            whole: Float = np.full(table.mask.shape, np.nan)
            for i, record in enumerate(step.records):
                whole[i, : len(record.columns[column])] = record.columns[column]
            values = whole[n, t]
            known = table.mask[n, t] & ~np.isnan(values)
            tables["tokens"][f"recorded_{column}"] = np.ma.masked_array(values, mask=~known)
        tables["rollouts"] |= step.provenance
        tables["steps"] |= step.logged_norm | seconds
        return StepTables(**tables, sampling=None if step.repeated else self.sampling.rows(rollouts, table))


def refuse_wrong_logprobs(step: RecordedStep, table: TokenTable) -> None:
    """Refuse recorded log-probabilities, the sampler's or the trainer's, that belong to other tokens or are none.

    Small differences between recorded and scored are not errors: they are the run's mismatch, and stored.

    Raises:
        InputError: A list is off by one, of another base, or holds placeholders; the sentence names the record.
    """
    for name in LOGPROBS:
        pairs = list[Pair]()
        for n, record in enumerate(step.records):
            sampled, values = np.flatnonzero(table.mask[n]), record.columns.get(name)
            if values is None or not len(sampled) or len(values) <= sampled[-1]:
                continue
            recorded, scored = values[sampled], table.stats.logprob[n, sampled]
            for t in sampled[(recorded == 0) & (scored < PLACEHOLDER)][:1]:
                raise InputError(
                    f"{record.place}: the log-probability of completion token {t} was recorded as 0, but the model "
                    f"gives {table.stats.logprob[n, t]:.2f}; 0 is a placeholder: mask the token, or leave the list out."
                )
            pairs.append((recorded, scored))
            if fault := fault_of(pairs[-1:]):
                raise InputError(f"{record.place}: its log-probabilities {fault}; {REMEDY[fault]}.")
        if fault := fault_of(pairs):
            raise InputError(
                f"{step.records[0].place} and those of its step: their log-probabilities {fault}; {REMEDY[fault]}."
            )


def fault_of(pairs: Sequence[Pair]) -> str:
    """Return what lists of log-probabilities are instead, a key of `REMEDY`; empty where nothing explains them better.

    Entry t + 1 of a shifted list is that of token t, or entry t − 1 is.
    """
    if sum(len(recorded) for recorded, _ in pairs) < LEAST_TOKENS:
        return ""
    read = {
        "": [recorded - scored for recorded, scored in pairs],
        BEFORE: [recorded[1:] - scored[:-1] for recorded, scored in pairs],
        BEHIND: [recorded[:-1] - scored[1:] for recorded, scored in pairs],
        "are logarithms to base 10": [recorded * np.log(10) - scored for recorded, scored in pairs],
        "are logarithms to base 2": [recorded * np.log(2) - scored for recorded, scored in pairs],
    }
    errors = {name: np.abs(np.concatenate(parts)) for name, parts in read.items()}
    errors = {name: error[~np.isnan(error)] for name, error in errors.items()}  # NaN was not recorded
    apart = {name: float(error.mean()) for name, error in errors.items() if len(error) >= LEAST_TOKENS // 2}
    if "" not in apart:
        return ""
    best = min(apart, key=lambda name: apart[name])
    return best if apart[""] > APART and apart[best] * FACTOR < apart[""] else ""
