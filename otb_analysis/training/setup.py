"""The state of a run between steps: policy, critic, optimizer, gradient measurer, and time spent by phase."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.config import TrainConfig
from otb_analysis.devices import device_of, machine_facts, products, random_state, set_random_state
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, NormalEquations, options_from_dict, with_limit
from otb_analysis.gradients.batch.scope import select_scope
from otb_analysis.gradients.exact.arithmetic import arithmetic
from otb_analysis.measurement.contrast import contrasts, right_of
from otb_analysis.measurement.forward import ForwardOutputs, ForwardPass
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import TokenTable, token_ratio, token_table
from otb_analysis.objectives.filters import FILTERS
from otb_analysis.objectives.importance import learning_rate_factor
from otb_analysis.objectives.shaping import SHAPINGS, ShapingInputs
from otb_analysis.objectives.token_weights import TOKEN_WEIGHTS
from otb_analysis.phases import EXPECTED, note, phase
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.generation import Generator, TransformersGenerator
from otb_analysis.rollouts.generation_vllm import VllmGenerator
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.tasks import Task, make_task
from otb_analysis.training.budget import Budget, Forecast, seconds_per_position
from otb_analysis.training.check import check, trains_on_exact
from otb_analysis.training.critic.critic import make_critic
from otb_analysis.training.critic.nets import CriticBatch
from otb_analysis.training.critic.targets import critic_target, explained_variance
from otb_analysis.training.policy.objective import Objective, TokenBatch
from otb_analysis.training.policy.optimizer import PolicyOptimizer
from otb_analysis.training.policy.policy import Policy
from otb_analysis.training.policy.update import update
from otb_analysis.training.runtime.checkpoint import model_folder
from otb_analysis.training.runtime.sharding import (
    load_whole_state,
    refuse_unsharded_only,
    whole_parameters,
    whole_state,
)
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
            refuse_unsharded_only(config, self.trains_on_exact)
        if processes.device is not None:
            model.to(processes.device)  # pyright: ignore[reportArgumentType]
        self.critic = make_critic(config, model, tokenizer, processes)  # before the model gets adapters or is cut up
        self.policy = Policy(model, config, processes)
        self.model = self.policy.model
        self.objective = Objective(config.objective)
        self.optimizer = PolicyOptimizer(self.policy.parameters, config.optimize, processes)
        options = options_from_dict(config.estimator.name, config.estimator.options)
        self.options = with_limit(config.estimator.name, options, config.sample.limit)
        self.remembered: NormalEquations | None = None  # what the estimator remembers of earlier steps
        self.generator: Generator = (
            VllmGenerator(model, tokenizer, config.sample.vllm_memory)
            if config.sample.engine == "vllm"
            else TransformersGenerator(model, tokenizer)
        )
        select_scope(model, config.measure.scope)  # refuses a scope that holds nothing, before the run begins
        precision = "float32" if processes.sharded else config.precision  # sharded weights are not measured
        self.precision, self.why = arithmetic(model, precision, config.measure.scope, config.sample.temperature)
        custom = {name: options_from_dict(name, {}) for name in config.measure.subgroups if name not in ESTIMATORS}
        trained = custom | {config.estimator.name: self.options}
        # Smaller groups would be paid or kept differently.
        by_group = "group" in SHAPINGS[config.objective.shaping].needs or FILTERS[config.sample.filter].keeps == "group"
        measured = replace(config, measure=replace(config.measure, subgroups=())) if by_group else config
        self.measurer = GradientMeasurer(model, measured.measure, config.sample.temperature, trained, asdict(config))
        self.cut_noted = False  # that every answer of some step was cut off
        self.budget = Budget(measured, self.trains_on_exact) if config.measure.budget else None
        self.forecast = Forecast(measured, self.trains_on_exact)
        self.announced = False  # what measuring will cost
        if self.budget is not None:
            self.measurer.config = self.budget.measure
        self.seconds: dict[str, float] = {}  # since the last record, by phase
        self.clock: Callable[[], float] = perf_counter

    @classmethod
    def from_config(cls, config: TrainConfig, processes: Processes = SINGLE_PROCESS) -> "Trainer":
        """Load or make everything a run needs, on its device; refuse what cannot work before anything is written.

        Raises:
            InputError: Device, task, estimator, options, sizes or model directory do not exist or do not fit.
        """
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

    @property
    def machine(self) -> dict[str, object]:
        """Where the model runs and how it is measured, for run.json."""
        return machine_facts(self.model.device, self.precision)

    def measuring(self) -> AbstractContextManager[None]:
        """Return the context in which gradients are measured: products of matrices as the run asked for."""
        return products(self.precision)

    def wanted(self) -> ForwardOutputs:
        """Return what the pass before an update gives: hidden states for a critic, its statistics timed apart."""
        return ForwardOutputs(hidden=self.critic is not None, timed=lambda: self.timed("forward"))

    def take_seconds(self) -> dict[str, float]:
        """Return the phases timed since the last call, as columns of `steps`, and start again."""
        taken, self.seconds = self.seconds, {}
        return {f"seconds_{phase}": value for phase, value in taken.items()}

    def announce(self, step: int, rollouts: Rollouts) -> None:
        """Before a step first measures, say what that will cost; a failure here does not stop the run."""
        plans = self.measurer.config.schedules.values()
        due = self.budget or self.trains_on_exact or any(plan.due(step) for plan in plans)
        if self.announced or not due or not self.processes.first or self.processes.sharded:
            return
        with suppress(Exception):
            with phase("timing one forward and backward pass"):
                each = seconds_per_position(self.policy, rollouts)
            self.announced = True
            # One update needs the backward pass alone; several take whole passes in every epoch.
            passes = 2 / 3 if self.one_update else self.config.objective.epochs
            EXPECTED["update"] = passes * each * float(rollouts.attention_mask.sum())
            usual = sum(self.seconds.values()) - self.seconds.get("evaluate", 0.0) + EXPECTED["update"]
            if self.budget is None:
                self.forecast.announce(step, rollouts, each, usual)
            else:
                forward = self.seconds.get("forward", 0.0)
                self.measurer.config = self.budget.begin(step, rollouts, each, usual - forward, forward)

    def keep_budget(self, step: int, seconds: Mapping[str, float]) -> None:
        """Tell the budget what a step took and measure what it pays for at the next, or correct the forecast."""
        if self.budget is None:
            self.forecast.correct(step)
        else:
            self.budget.record(step, seconds)
            self.measurer.config = self.budget.measure

    @property
    def one_update(self) -> bool:
        """True when a batch is updated on once and whole, so that one forward pass serves statistics and update."""
        objective = self.config.objective
        return objective.epochs * objective.minibatches == 1 and objective.entropy_bonus == 0

    def table(self, rollouts: Rollouts, forward: ForwardPass, reference: Float | None) -> TokenTable:
        """Return the step's token table: what the estimator will see, after shaping, penalties and ratios."""
        value = None
        if self.critic is not None:
            local_value = self.critic.value(self._critic_batch(rollouts, forward))
            value = self.processes.rows(local_value, rollouts.width)
        table = token_table(rollouts, forward, value)
        penalty = self.objective.penalty(table.stats.logprob, reference, table.mask)
        shaped = self.objective.shaped(ShapingInputs(table.reward, table.mask, table.group, table.turn), penalty)
        ratio = token_ratio(table) if self.objective.off_policy else None
        limit = self.config.sample.limit
        return replace(table, reward=shaped.reward, keep=shaped.keep, ratio=ratio, limit=limit)

    def with_contrast(self, rollouts: Rollouts, table: TokenTable, step: int) -> TokenTable:
        """Return the table with the contrast that the token weight reads; NaN where a step has too few of a kind."""
        if "contrast" not in TOKEN_WEIGHTS[self.config.objective.token_weight].needs:
            return table
        plan = self.config.measure.contrast
        try:
            found = contrasts(self.measurer.model, rollouts, right_of(table.total_reward, plan), plan, step)
        except InputError as error:
            note(f"step {step} weighs all tokens alike: {error}")
            found = np.full(table.mask.shape, np.nan)
        return replace(table, contrast=found)

    def remember(self, state: NormalEquations | None) -> None:
        """Keep what the estimator gives its next step; measuring then sees it too."""
        self.remembered = state
        if state is not None:
            self.measurer.states = {(self.config.estimator.name, self.config.estimator.energy): state}

    def update(self, batch: TokenBatch, forward: ForwardPass) -> dict[str, object]:
        """Take the updates of one batch and return their scalars.

        Raises:
            NonFiniteError: A loss or its gradient is not finite; the updates before it stay.
        """
        self.policy.past.remember()
        if self.config.optimize.scale_by_ess:
            batch = replace(batch, rate_factor=learning_rate_factor(batch.sequence_ratio(forward.stats.logprob)))
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
        return CriticBatch(local, forward, self.policy.micro_batches(local))

    def save(self, path: Path) -> None:
        """Write the policy and its tokenizer so that plain `from_pretrained` loads them; whole or not at all.

        Raises:
            StoreError: The disk refuses.
        """
        parameters = whole_parameters(self.model) if self.processes.sharded else None
        if not self.processes.first:
            return
        with model_folder(path, "cannot write the trained model to", "every step is stored, free some space.") as draft:
            self.policy.save(draft, parameters)
            self.tokenizer.save_pretrained(draft)

    def state(self) -> dict[str, Any]:
        """Return what a later process needs to go on bit for bit: tensors and plain values only."""
        if self.processes.sharded:
            weights = whole_state(self.model, self.optimizer.optimizer)
        else:
            parameters = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
            weights = {"parameters": parameters, "optimizer": self.optimizer.optimizer.state_dict()}
        return {
            **weights,
            "sharded": self.processes.sharded,
            "past": [[t.detach() for t in old] for old in self.policy.past.kept],
            "batch": self.optimizer.batch,
            "critic": None if self.critic is None else self.critic.state(),
            "estimator": None if self.remembered is None else _plain_sums(self.remembered),
            "random": random_state(self.model.device),
            "budget": None if self.budget is None else self.budget.state(),
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, in place."""
        if self.processes.sharded:
            load_whole_state(self.model, self.optimizer.optimizer, state)
        else:
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(state["parameters"][name])
            self.optimizer.optimizer.load_state_dict(state["optimizer"])
        self.policy.past.kept.extend([t.to(self.model.device) for t in old] for old in state["past"])
        self.optimizer.batch = state["batch"]
        if self.critic is not None:
            self.critic.load_state(state["critic"])
        if (sums := state.get("estimator")) is not None:
            arrays = {name: np.array(sums[name], np.float64) for name in ("gram", "moment")}
            self.remember(NormalEquations(tuple(sums["features"]), **arrays))
        set_random_state(self.model.device, state["random"])
        if self.budget is not None and state.get("budget"):
            self.budget.load_state(state["budget"])


def _plain_sums(sums: NormalEquations) -> dict[str, list]:
    """Return them as lists: Python's floats keep every bit on any device."""
    return {"features": list(sums.features), "gram": sums.gram.tolist(), "moment": sums.moment.tolist()}


def seed_of(*parts: int) -> int:
    """Return a seed for torch that depends on all parts: every step has its own, whatever ran before it."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
