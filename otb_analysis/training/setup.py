"""The state of a run between steps: policy, critic, optimizer, measurer, time by phase; how a run begins or resumes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.config import TrainConfig, plain_config
from otb_analysis.devices import clock_of, device_of, random_state, set_random_state, words_of
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, NormalEquations, Tallies, entry_of, options_from_dict, with_limit
from otb_analysis.gradients.batch.scope import select_scope
from otb_analysis.gradients.exact.verdicts import arithmetic
from otb_analysis.measurement.forward import ForwardOutputs, ForwardPass, micro_batches
from otb_analysis.measurement.level import contrasts
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import TokenTable, token_ratio, token_table
from otb_analysis.objectives.aggregation import TOKEN_WEIGHTS
from otb_analysis.objectives.ratios import LOG_LIMIT, learning_rate_factor
from otb_analysis.objectives.shaping import FILTERS, SHAPINGS, ShapingInputs
from otb_analysis.phases import EXPECTED, note, phase, plural
from otb_analysis.processes import SINGLE_PROCESS, Processes, widened
from otb_analysis.rollouts.generation import Generator, TransformersGenerator, VllmGenerator
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.store import RunStore, RunWriter
from otb_analysis.tasks import Task, make_task
from otb_analysis.training.budget import Budget, Forecast, seconds_per_position
from otb_analysis.training.check import check, trains_on_exact
from otb_analysis.training.critic import CriticBatch, critic_target, explained_variance, make_critic
from otb_analysis.training.policy import Policy
from otb_analysis.training.runtime import (
    WHOLE,
    Checkpoint,
    checkpoints,
    model_folder,
    read_checkpoint,
    refuse_unsharded_only,
)
from otb_analysis.training.update import Objective, PolicyOptimizer, TokenBatch, update
from otb_analysis.training.warm_start import warm_started
from otb_analysis.types import Float

PHASES = {
    "sample": "sampling",
    "estimate": "rewards and advantages",
    "update": "update",
    "forward": "forward statistics",
    "measure": "measuring",
    "evaluate": "held-out prompts",
    "store": "storing",
}
"""Timed phase, as in the name of its column → its words on the screen."""


class Trainer:
    """The state of one run."""

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        self.processes = processes
        self.config, self.tokenizer, self.task = config, tokenizer, task
        self.trains_on_exact = trains_on_exact(config.estimator)
        if processes.sharded:
            refuse_unsharded_only(config)
        if processes.device is not None:
            model.to(processes.device)  # pyright: ignore[reportArgumentType]
        self.critic = make_critic(config, model, tokenizer, processes)  # before the model gets adapters or is cut up
        self.policy = Policy(model, config, processes)
        self.model = self.policy.model
        objective, self.objective = config.objective, Objective(config.objective)
        # A batch is updated on once and whole, so that one forward pass serves statistics and update
        self.one_update = objective.epochs * objective.minibatches == 1 and objective.entropy_bonus == 0
        self.optimizer = PolicyOptimizer(self.policy.parameters, config.optimize, processes)
        options = options_from_dict(config.estimator.name, config.estimator.options)
        self.options = with_limit(config.estimator.name, options, config.sample.limit)
        self.remembered: NormalEquations | Tallies | None = None  # what the estimator remembers of earlier steps
        self.generator: Generator = (
            VllmGenerator(model, tokenizer, config.sample.vllm_memory)
            if config.sample.engine == "vllm"
            else TransformersGenerator(model, tokenizer)
        )
        select_scope(model, config.measure.scope)  # refuses a scope that holds nothing, before the run begins
        precision = "float32" if processes.sharded else config.precision  # not tried out on shards
        # Of products of matrices, where gradients are measured
        self.precision, self.why = arithmetic(model, precision, config.measure.scope, config.sample.temperature)
        custom = {name: options_from_dict(name, {}) for name in config.measure.subgroups if name not in ESTIMATORS}
        trained = custom | {config.estimator.name: self.options}
        # Smaller groups would be paid or kept differently.
        by_group = "group" in SHAPINGS[config.objective.shaping].needs or FILTERS[config.sample.filter].keeps == "group"
        measured = replace(config, measure=replace(config.measure, subgroups=())) if by_group else config
        stored, temperature = asdict(config), config.sample.temperature
        self.measurer = GradientMeasurer(model, measured.measure, temperature, trained, stored, processes)
        self.worst: dict[str, dict[str, object]] = {}  # Tables for trackers, at the steps that have some
        self.cut_noted = False  # that every answer of some step was cut off
        priced = measured, self.trains_on_exact, processes.size
        self.budget = Budget(*priced) if config.measure.budget else None
        self.forecast = Forecast(*priced)
        self.announced = False  # what measuring will cost
        self.machine = {"device": words_of(self.model.device), "precision": self.precision}  # for run.json
        if self.budget is not None:
            self.measurer.config = self.budget.measure
        self.seconds: dict[str, float] = {}  # since the last record, by phase
        self.clock = clock_of(self.model.device)

    @classmethod
    def from_config(cls, config: TrainConfig, processes: Processes = SINGLE_PROCESS) -> "Trainer":
        """Load or make everything a run needs, on its device; refuse what cannot work before anything is written.

        Raises:
            InputError: Device, task, estimator, options, sizes or model directory do not exist or do not fit, or
                another process has another configuration.
        """
        refuse_disagreement(config, processes)
        levels = config.measure.budget or any(plan.every for plan in config.measure.schedules.values())
        device = processes.device or device_of(config.device, bool(levels) or trains_on_exact(config.estimator))
        check(config, processes.size)
        processes.barrier()  # the first process makes the run's directory, which the others must not find there
        with phase(f"loading the task {config.task}"):
            task = make_task(config)
        path = config.model or processes.broadcast_from_main(lambda: warm_started(config))
        with phase(f"loading the model {path}"):
            model, tokenizer = load_policy(path)
            model.to(device)  # pyright: ignore[reportArgumentType]
        return cls(config, model, tokenizer, task, processes)

    @contextmanager
    def timed(self, name: str, shown: str = "") -> Iterator[None]:
        """Add the time of a block to one of `PHASES`, less that of the phases timed inside it.

        `shown` replaces the phase's usual words on the screen.
        """
        start, before = self.clock(), sum(self.seconds.values())
        try:
            with phase(shown or PHASES[name]):
                yield
        finally:
            inside = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start - inside

    def wanted(self) -> ForwardOutputs:
        """Return what the pass before an update gives: hidden states for a critic, its statistics timed apart."""
        return ForwardOutputs(hidden=self.critic is not None, timed=lambda: self.timed("forward"))

    def take_seconds(self, step: int) -> dict[str, float]:
        """Return the phases timed since the last call, as columns of `steps`, and start again.

        The budget then says what the next step measures; without one, the forecast is corrected.
        """
        seconds, self.seconds = {f"seconds_{phase}": value for phase, value in self.seconds.items()}, {}
        if self.budget is None:
            self.forecast.correct(step)
        else:
            self.budget.record(step, seconds)
            self.measurer.config = self.budget.measure
        return seconds

    def announce(self, step: int, rollouts: Rollouts) -> None:
        """Before a step first measures, say what that will cost; a failure here does not stop the run."""
        plans = self.measurer.config.schedules.values()
        due = self.budget or self.trains_on_exact or any(plan.due(step) for plan in plans)
        if self.announced or not due or not self.processes.first or self.processes.sharded:
            return
        with suppress(Exception):
            with phase("timing one forward and backward pass"):
                policy = self.policy
                each = seconds_per_position(policy.model, rollouts, policy.temperature, policy.arithmetic)
            self.announced = True
            # One update needs the backward pass alone; several take whole passes in every epoch.
            passes = 2 / 3 if self.one_update else self.config.objective.epochs
            EXPECTED["update"] = passes * each * float(rollouts.attention_mask.sum()) / self.processes.size
            usual = sum(self.seconds.values()) - self.seconds.get("evaluate", 0.0) + EXPECTED["update"]
            if self.budget is None:
                self.forecast.announce(step, rollouts, each, usual)
            else:
                forward = self.seconds.get("forward", 0.0)
                self.measurer.config = self.budget.begin(step, rollouts, each, usual - forward, forward)

    def table(self, rollouts: Rollouts, forward: ForwardPass, reference: Float | None, step: int = 0) -> TokenTable:
        """Return the step's token table: what the estimator will see, after shaping, penalties and ratios.

        Where the token weight reads the contrast it is there too; NaN where a step has too few rollouts of a kind.
        """
        value = None
        if self.critic is not None:
            parts = self.processes.gather(self.critic.value(self._critic_batch(rollouts, forward)))
            value = np.concatenate([widened(part, rollouts.width) for part in parts])
        table = token_table(rollouts, forward, value)
        paid = ShapingInputs(table.reward, table.mask, table.group, table.turn)
        shaped = self.objective.shaped(paid, table.stats.logprob, reference)
        ratio = token_ratio(table) if self.objective.off_policy else None
        limit = self.config.sample.limit
        table = replace(table, reward=shaped.reward, keep=shaped.keep, ratio=ratio, limit=limit)
        if "contrast" not in TOKEN_WEIGHTS[self.config.objective.token_weight].needs:
            return table
        plan = self.config.measure.contrast
        try:
            right = table.total_reward >= plan.threshold
            with self.policy.whole_weights():
                contrast = contrasts(self.measurer.model, rollouts, right, plan, step, self.processes)
        except InputError as error:
            note(f"step {step} weighs all tokens alike: {error}")
            contrast = np.full(table.mask.shape, np.nan)
        return replace(table, contrast=contrast)

    def remember(self, state: NormalEquations | Tallies | None) -> None:
        """Keep what the estimator gives its next step; measuring then sees it too."""
        self.remembered = state
        if state is not None:
            name, energy = self.config.estimator.name, self.config.estimator.energy
            self.measurer.states = {(name, energy if entry_of(name).reads_energy else "none"): state}

    def update(self, batch: TokenBatch, forward: ForwardPass) -> dict[str, object]:
        """Take the updates of one batch and return their scalars.

        Raises:
            NonFiniteError: A loss or its gradient is not finite; the updates before it stay.
        """
        if (past := self.policy.past).maxlen:
            past.append([p.detach().clone() for p in self.policy.parameters])
        if self.config.optimize.scale_by_ess:
            difference = forward.stats.logprob - np.nan_to_num(batch.behavior)
            log_ratio = np.where(batch.mask, difference, 0.0).sum(axis=1)  # of each rollout under the two policies
            ratio = np.exp(np.clip(log_ratio, -LOG_LIMIT, LOG_LIMIT))
            batch = replace(batch, rate_factor=learning_rate_factor(ratio))
        scalars = update(self.policy, self.optimizer, self.objective, batch, forward)
        self.optimizer.batch += 1
        return scalars

    def update_critic(self, rollouts: Rollouts, forward: ForwardPass, table: TokenTable) -> dict[str, object]:
        """Fit the critic to the step's targets, after its values were recorded, and say how good those were."""
        if self.critic is None:
            return {}
        target = critic_target(self.config.critic, table.inputs(None))
        rows = self.processes.shard(np.arange(len(target)))
        loss = self.critic.update(self._critic_batch(rollouts, forward), target[rows, : forward.mask.shape[1]])
        return {
            "critic_loss": loss if np.isfinite(loss) else None,
            "critic_explained_variance": explained_variance(table),
        }

    def _critic_batch(self, rollouts: Rollouts, forward: ForwardPass) -> CriticBatch:
        """Return this process's shard of all rollouts with its forward pass over them, for the critic."""
        local = rollouts.take(self.processes.shard(np.arange(len(rollouts.group))))
        parts = micro_batches(self.model, local, self.config.optimize.micro_batch)
        return CriticBatch(local, forward, parts)

    def save(self, path: Path) -> None:
        """Write the policy and its tokenizer so that plain `from_pretrained` loads them; whole or not at all.

        Raises:
            StoreError: The disk refuses.
        """
        parameters: Any = get_model_state_dict(self.model, options=WHOLE) if self.processes.sharded else None
        if not self.processes.first:
            return
        with model_folder(path, "cannot write the trained model to", "every step is stored, free some space.") as draft:
            if (adapter := self.policy.adapter) is None:
                self.model.save_pretrained(draft, state_dict=parameters)
            else:  # for `from_pretrained` with adapters merged, and the adapters themselves beside it
                deepcopy(adapter).merge_and_unload().save_pretrained(draft)  # pyright: ignore[reportCallIssue]
                adapter.save_pretrained(str(draft / "adapter"))
            self.tokenizer.save_pretrained(draft)

    def state(self) -> dict[str, Any]:
        """Return what a later process needs to go on bit for bit: tensors and plain values only."""
        if self.processes.sharded:
            # Parameters and moments on the first process, nothing on the others; all must call it.
            parameters, moments = get_state_dict(self.model, self.optimizer.optimizer, options=WHOLE)
            weights = {"parameters": parameters, "optimizer": moments}
        else:
            parameters = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
            weights = {"parameters": parameters, "optimizer": self.optimizer.optimizer.state_dict()}
        sums = None
        if (kept := self.remembered) is not None:  # as lists: Python's floats keep every bit on any device
            sums = {name: np.asarray(x).tolist() for name, x in vars(kept).items()}
        return {
            **weights,
            "sharded": self.processes.sharded,
            "past": [[t.detach() for t in old] for old in self.policy.past],
            "batch": self.optimizer.batch,
            "critic": None if self.critic is None else self.critic.state(),
            "estimator": sums,
            "random": random_state(self.model.device),
            "budget": None if self.budget is None else self.budget.state(),
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, in place."""
        if self.processes.sharded:
            model, moments = state["parameters"], state["optimizer"]
            set_state_dict(
                self.model, self.optimizer.optimizer, model_state_dict=model, optim_state_dict=moments, options=WHOLE
            )
        else:
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(state["parameters"][name])
            self.optimizer.optimizer.load_state_dict(state["optimizer"])
        self.policy.past.extend([t.to(self.model.device) for t in old] for old in state["past"])
        self.optimizer.batch = state["batch"]
        if self.critic is not None:
            self.critic.load_state(state["critic"])
        if (sums := state.get("estimator")) is not None:
            if "key" in sums:
                width = len(sums["sums"][0]) if sums["sums"] else 0
                self.remember(Tallies(np.array(sums["key"], np.int64), np.reshape(sums["sums"], (-1, width))))
            else:
                arrays = {name: np.array(sums[name], np.float64) for name in ("gram", "moment")}
                self.remember(NormalEquations(tuple(sums["features"]), **arrays))
        set_random_state(self.model.device, state["random"])
        if self.budget is not None and state.get("budget"):
            self.budget.load_state(state["budget"])


def seed_of(*parts: int) -> int:
    """Return a seed for torch that depends on all parts: every step has its own, whatever ran before it."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


PLACE = {"run", "root", "if_exists", "checkpoint", "trackers", "device"}
"""Fields that may differ when a run goes on: they change where it is written, reported and computed, and not what."""


def begin(config: TrainConfig, trainer: Trainer) -> tuple[RunWriter, int]:
    """Return the run's writer and its next step.

    With `if_exists = "resume"`, an existing run goes back to its newest checkpoint, and later steps are removed.
    Without a checkpoint it begins anew at step 0, under the same name.

    Raises:
        InputError: The run exists and must not be touched, or was made with another configuration.
        StoreError: The store or the checkpoint cannot be read or written.
    """
    processes = trainer.processes
    writer, checkpoint = processes.broadcast_from_main(lambda: _create_or_reopen(config, trainer))
    writer.rank, writer.size = processes.rank, processes.size
    if checkpoint is None:
        return writer, 0
    trainer.load_state(read_checkpoint(checkpoint))
    return writer, checkpoint.step


def _create_or_reopen(config: TrainConfig, trainer: Trainer) -> tuple[RunWriter, Checkpoint | None]:
    """Make or reopen the run's directory; return its writer and the checkpoint from which it goes on."""
    path = config.root / config.run_name
    if config.if_exists != "resume" or not path.exists():
        policy = "error" if config.if_exists == "resume" else config.if_exists
        whole, machine = plain_config(config), trainer.machine
        return RunWriter.create(config.root, config.run_name, whole, if_exists=policy, machine=machine), None
    refuse_other_configuration(config)
    made = RunStore(path).info.get("machine")
    if isinstance(made, Mapping) and (before := made.get("device")) != (now := trainer.machine["device"]):
        note(f"The run was begun on {before} and goes on on {now}: as well as there, but not bit for bit.")
    existing = checkpoints(path)
    if not existing:
        return RunWriter.resume(path, 0, trainer.machine), None
    # Refuse a checkpoint that cannot be used before anything is removed.
    state, kinds = read_checkpoint(existing[-1]), ("without FSDP2", "with FSDP2")
    was, launched = kinds[state.get("sharded", False)], kinds[trainer.processes.sharded]
    if was != launched:
        raise InputError(
            f"the checkpoint was written {was} and this run was launched {launched}; resume it as it was begun."
        )
    return RunWriter.resume(path, existing[-1].step, trainer.machine), existing[-1]


def refuse_other_configuration(config: TrainConfig) -> None:
    """Refuse to resume a run with other settings; more steps are allowed where the learning rate is constant.

    Raises:
        InputError: The first field that differs, with both values.
    """
    stored = RunStore(config.root / config.run_name).info.get("config")
    # A setting that came after the run was made had its default there.
    old = dict(_flat(plain_config(TrainConfig()))) | dict(_flat(stored if isinstance(stored, Mapping) else {}))
    for name, value in _flat(plain_config(config)):
        longer = name == "optimize.steps" and config.optimize.schedule == "constant"
        if name.split(".")[0] not in PLACE and not longer and old.get(name) != value:
            raise InputError(
                f"{name} is {value!r} but run {config.run_name!r} was made with {old.get(name)!r}; "
                "pass the run's own configuration to resume it, or another --run."
            )


def refuse_disagreement(config: TrainConfig, processes: Processes) -> None:
    """Refuse to train where processes were started with different settings; each may name a device of its own.

    Raises:
        InputError: The first field that differs, with both values, on every process.
    """
    first, *others = processes.gather(dict(_flat(plain_config(config))))
    for rank, theirs in enumerate(others, start=1):
        for name in first:
            if name != "device" and theirs.get(name) != first[name]:
                raise InputError(
                    f"{name} is {theirs.get(name)!r} on process {rank} and {first[name]!r} on process 0; launch all "
                    "processes with one configuration."
                )


def interruption_sentence(config: TrainConfig) -> str:
    """Return the sentence of a run that was interrupted: what it keeps, and where it would go on."""
    path = config.root / config.run_name
    steps, existing = RunStore(path).complete_steps(), checkpoints(path)
    if not steps:
        return (
            f"stopped before the first step was complete; {path} holds nothing, so begin anew with --if-exists replace."
        )
    count = plural(len(steps), "step")
    if existing:
        more = f"--if-exists resume goes on after step {existing[-1].step - 1}, where its newest checkpoint is"
    else:
        often = f"checkpoint.every is {config.checkpoint.every}"
        more = f"it has no checkpoint yet ({often}), so --if-exists resume begins anew"
    return f"stopped after step {steps[-1]}; {count} can be read in {path}; {more}."


def _flat(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        # what a user names is one value, also when empty
        if isinstance(value, Mapping) and key != "further" and not key.endswith("options"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
