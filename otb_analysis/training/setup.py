"""Everything a run holds on to between steps: policy, critic, optimizer, instrument, and where the time went."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.arrays import returns_to_go
from otb_analysis.config import TrainConfig
from otb_analysis.errors import InputError, NonFiniteError, StoreError
from otb_analysis.estimators import entry_of, options_from_dict
from otb_analysis.generation import Generator, TransformersGenerator
from otb_analysis.generation_vllm import VllmGenerator
from otb_analysis.gradients import ENGINES
from otb_analysis.gradients.scope import select_scope
from otb_analysis.models import load_policy, output_layer
from otb_analysis.store.layout import check_run_name
from otb_analysis.tasks import Task, make_task
from otb_analysis.training.critic import Critic
from otb_analysis.training.forward import ForwardPass
from otb_analysis.training.measure import Instrument
from otb_analysis.training.progress import Bar, silent
from otb_analysis.training.table import TokenTable
from otb_analysis.training.warm_start import warm_started

TRAINABLE_NEEDS = {"energy", "rollout_norm_sq", "value"}
"""Inputs the loop can provide at every step."""

POSITIVE = (
    *(
        f"sample.{name}"
        for name in ("prompts", "group_size", "max_new_tokens", "max_turns", "temperature", "vllm_memory")
    ),
    *(f"optimize.{name}" for name in ("steps", "learning_rate")),
    *(f"critic.{name}" for name in ("width", "learning_rate", "updates")),
    *(f"warm_start.{name}" for name in ("batch", "learning_rate", "max_steps", "check_every", "check_prompts")),
    *("evaluate.prompts", "measure.sampled.share"),
)
NOT_NEGATIVE = (
    *("seed", "optimize.max_grad_norm", "optimize.weight_decay"),
    *("measure.exact.every", "measure.exact.prompts", "evaluate.every"),
    *("measure.sampled.every", "measure.sampled.prompts", "measure.attribution.every"),
)


class Trainer:
    """The state of one run.

    Attributes:
        config: The run's configuration.
        model: The policy, in evaluation mode throughout: dropout would make scored and sampled policies differ.
        trains_on_exact: True when the training estimator reads exact norms, so that every rollout is measured.
        seconds: Time spent since the last record, by phase.
    """

    def __init__(self, config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task):
        entry = entry_of(config.estimator.name)
        self.config, self.model, self.tokenizer, self.task = config, model, tokenizer, task
        self.options = options_from_dict(config.estimator.name, config.estimator.options)
        self.trains_on_exact = "rollout_norm_sq" in entry.needs or (
            "energy" in entry.needs and config.estimator.energy == "exact"
        )
        self.generator = _generator(config, model, tokenizer)
        select_scope(model, config.measure.scope)  # refuses a scope that holds nothing, before the run begins
        trained = {config.estimator.name: self.options}
        self.instrument = Instrument(model, config.measure, config.sample.temperature, trained)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.optimize.learning_rate, weight_decay=config.optimize.weight_decay
        )
        width = next(output_layer(model).parameters()).shape[1]
        self.critic = Critic(width, config.critic, config.seed).to(model.device) if config.critic.enabled else None
        self.seconds: dict[str, float] = {}

    @classmethod
    def from_config(cls, config: TrainConfig, bar: Bar = silent) -> "Trainer":
        """Load or make everything a run needs; refuse what cannot work before anything is written.

        Raises:
            InputError: Task, estimator, options, sizes or model directory do not exist or do not fit.
        """
        check(config)
        task = make_task(config)
        model, tokenizer = load_policy(config.model or warm_started(config, bar))
        return cls(config, model, tokenizer, task)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - start

    def take_seconds(self) -> dict[str, float]:
        """Return the phases timed since the last call, as columns of `steps`, and start again."""
        taken, self.seconds = self.seconds, {}
        return {f"seconds_{phase}": value for phase, value in taken.items()}

    def update(self, loss: torch.Tensor) -> dict[str, object]:
        """Take one optimizer step down the loss and return its scalars.

        Raises:
            NonFiniteError: The loss or its gradient is not finite; nothing was changed.
        """
        settings = self.config.optimize
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm or float("inf"))
        scalars = {"loss": float(loss.detach()), "grad_norm": float(norm), "learning_rate": settings.learning_rate}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(scalars[name]):
                raise NonFiniteError(f"{name} is {scalars[name]}; lower optimize.learning_rate.")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**scalars, "clipped": 0 < settings.max_grad_norm < scalars["grad_norm"]}

    def update_critic(self, forward: ForwardPass, table: TokenTable) -> dict[str, object]:
        """Fit the critic to the step's returns, after its values were recorded."""
        if self.critic is None:
            return {}
        target = torch.as_tensor(returns_to_go(table.rewards.by_token, table.mask), device=self.model.device)
        loss = self.critic.update(forward.hidden, target, forward.mask)
        return {"critic_loss": loss if np.isfinite(loss) else None}

    def save(self, path: Path) -> None:
        """Write the policy and its tokenizer so that plain `from_pretrained` loads them; whole or not at all.

        Raises:
            StoreError: The disk refuses.
        """
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.model.save_pretrained(draft)
            self.tokenizer.save_pretrained(draft)
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise StoreError(
                f"cannot write the trained model to {path} ({reason}); every step is stored, free some space."
            ) from error


def _generator(config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Generator:
    if config.sample.engine == "vllm":
        return VllmGenerator(model, tokenizer, config.sample.vllm_memory)
    return TransformersGenerator(model, tokenizer)


def check(config: TrainConfig) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        InputError: The first thing found, with its remedy.
    """
    path = config.root / check_run_name(config.run_name)
    if config.if_exists == "error" and path.exists():  # said before minutes are spent on a warm start
        raise InputError(
            f"run {config.run_name!r} already exists in {config.root}; pass another --run or --if-exists replace."
        )
    entry = entry_of(config.estimator.name)
    options_from_dict(config.estimator.name, config.estimator.options)
    unmet = [need for need in entry.needs if need not in TRAINABLE_NEEDS]
    if unmet:
        raise InputError(
            f"estimator.name is {config.estimator.name!r}, which needs {unmet[0]}; training cannot provide it, "
            "choose another."
        )
    if "value" in entry.needs and not config.critic.enabled:
        raise InputError(f"estimator.name is {config.estimator.name!r}, which needs a critic; set critic.enabled.")
    if config.measure.engine not in (*ENGINES, "auto"):
        raise InputError(
            f"measure.engine is {config.measure.engine!r}; this version has {', '.join(ENGINES)}, or pass auto."
        )
    for name in POSITIVE:
        _check_number(config, name, positive=True)
    for name in NOT_NEGATIVE:
        _check_number(config, name, positive=False)
    if config.measure.sampled.share > 1:
        raise InputError(f"measure.sampled.share is {config.measure.sampled.share}; choose a share of at most 1.")
    start = config.warm_start
    if not 0 <= start.success_low < start.success_high <= 1:
        raise InputError(
            f"warm_start.success_low is {start.success_low} and success_high is {start.success_high}; "
            "choose 0 ≤ success_low < success_high ≤ 1."
        )


def _check_number(config: TrainConfig, name: str, positive: bool) -> None:
    number = attrgetter(name)(config)
    if not (number > 0 if positive else number >= 0) or number == float("inf"):
        raise InputError(f"{name} is {number}; choose a finite number {'above' if positive else 'of at least'} 0.")


def seed_of(*parts: int) -> int:
    """Return a seed for torch that depends on all parts: every step has its own, whatever ran before it."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
