"""A checkpoint: a policy with AdamW's moments and a critic, its batches, and what gradient every arm makes of one."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from otb_analysis.config import (
    CriticConfig,
    EstimatorConfig,
    GraphPathConfig,
    OptimizeConfig,
    RunningTotalConfig,
    SampleConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.devices import device_of
from otb_analysis.estimators import EstimatorInputs, estimate, with_limit
from otb_analysis.measurement.forward import completion_logprobs
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.critic import Critic, make_critic
from otb_analysis.training.loop import train_step
from otb_analysis.training.runtime import Bar
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Float
from studies.lib import Cell, Tables, rounded
from studies.lib.policies import Policy, critic_batches, fitted_critic, pretrained, with_values, write
from studies.lib.record import kept_file
from studies.lib.seeds import BASE, QUICK_MODEL, QUICK_START, QUICK_TASK, started

LENGTHS = {"chain_sum": 32, "graph_path": 16, "counting": 32, "running_total": 36}
"""Tokens an answer may have."""
TOTALS = RunningTotalConfig(lines_min=3, lines_max=4)
GRAPHS = GraphPathConfig(nodes=6, edges=8)
"""Larger graphs than usual: the usual ones make 90 different held-out problems only."""
BANDS = {"low": (0.18, 0.28), "middle": (0.36, 0.48), "high": (0.60, 0.72)}
"""Success at which the supervised start ends; reinforcement learning goes on from there."""
CRITIC = CriticConfig(kind="model", learning_rate=1e-3)
FIRST_LESSON, FIRST_BATCH = 60_000_000, 80_000_000
"""Indices of the first training prompts that the critic, and the measured updates, see."""
STATE = "state.pt"
EPSILON = 1e-8
"""AdamW's."""
OPTIMIZE = OptimizeConfig(learning_rate=1e-3)
"""AdamW as in the study of group size, whose sweep chose this rate: clipped at a norm of 1."""


@dataclass(frozen=True)
class Training:
    """How a checkpoint is made."""

    prompts: int = 16  # Of an update, in training as in what is measured
    group: int = 4
    updates: int = 100  # With `rloo`, so that AdamW's moments are those of a run
    lessons: int = 8  # Batches of 64 prompts × 8 that the critic is fitted to
    lesson_prompts: int = 64


def config_of(task: str, band: str, training: Training, quick: bool) -> TrainConfig:
    """Return the configuration that trains up to a checkpoint."""
    low, high = BANDS[band]
    sample = SampleConfig(prompts=training.prompts, group_size=training.group, max_new_tokens=LENGTHS[task])
    config = replace(
        BASE, task=task, sample=sample, graph_path=GRAPHS, running_total=TOTALS, optimize=OPTIMIZE,
        estimator=EstimatorConfig(name="rloo"), warm_start=WarmStartConfig(success_low=low, success_high=high),
    )  # fmt: skip
    return replace(config, small_model=QUICK_MODEL, chain_sum=QUICK_TASK, warm_start=QUICK_START) if quick else config


def clip_factor(norm: Any) -> Any:
    """Return what clipping multiplies a gradient of this norm by."""
    return OPTIMIZE.max_grad_norm / np.maximum(norm, OPTIMIZE.max_grad_norm)


@dataclass(frozen=True)
class Checkpoint:
    """What updates start from; made by `load`."""

    policy: Policy
    critic: Critic
    sample: SampleConfig
    base: Tensor  # Parameters as one vector [D]
    moments: Mapping[str, tuple[Tensor, Tensor]]  # AdamW's m and v [D] of `clipped` gradients and of `unclipped` ones
    updates: int  # Steps behind those moments

    @property
    def scale(self) -> Tensor:
        """What AdamW multiplies a gradient by at rate 1: 1/(√v + ε), v corrected for its start at 0 [D]."""
        second = self.moments["clipped"][1] / (1 - OPTIMIZE.betas[1] ** self.updates)
        return 1.0 / (second.sqrt() + EPSILON)

    def adamw_step(self, gradient: Tensor, clipped: bool) -> Tensor:
        """Return the step [D] that AdamW takes next at its usual rate, by ascent along ĝ [D]."""
        first, second = self.moments["clipped" if clipped else "unclipped"]
        if clipped:
            gradient = gradient * clip_factor(float(gradient.norm()))
        a, b = OPTIMIZE.betas
        first, second = a * first + (1 - a) * gradient, b * second + (1 - b) * gradient**2
        first, second = first / (1 - a ** (self.updates + 1)), second / (1 - b ** (self.updates + 1))
        return OPTIMIZE.learning_rate * first / (second.sqrt() + EPSILON)


def flattened(parts: Iterable[Tensor]) -> Tensor:
    """Return tensors shaped as the parameters as one vector [D]."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def trained_checkpoint(cell: Cell, training: Training, quick: bool, work: Path, bar: Bar) -> Tables:
    """Train a policy to its checkpoint and keep it, AdamW's moments and a critic beside the cells."""
    settings = cell.settings
    config = started(config_of(settings["task"], settings["band"], training, quick), work)
    facts = json.loads((Path(config.model) / "warm_start.json").read_text())
    trainer = Trainer.from_config(config)
    unclipped = _unclipped_moments(trainer)
    norms = np.zeros(training.updates)
    for step in range(training.updates):
        scalars: Any = train_step(trainer, step).steps
        norms[step] = scalars["grad_norm"]
        bar(step + 1, training.updates, f"{cell.name}: training")
    state, parameters = trainer.optimizer.optimizer.state, trainer.policy.parameters
    kept = {"clipped": [(state[p]["exp_avg"], state[p]["exp_avg_sq"]) for p in parameters]}
    kept["unclipped"] = [(unclipped[p][0], unclipped[p][1]) for p in parameters]
    # AdamW descends; its first moment is that of −ĝ.
    moments = {name: (-flattened(m for m, _ in both), flattened(v for _, v in both)) for name, both in kept.items()}
    policy = Policy(trainer.model, trainer.tokenizer, trainer.task)
    lesson = replace(config.sample, prompts=training.lesson_prompts, group_size=8)
    lessons = critic_batches(policy, FIRST_LESSON, training.lessons, lesson, 1000, bar)
    critic = fitted_critic(policy, CRITIC, lessons, bar)
    trainer.save(work / "model")
    torch.save({"moments": moments, "critic": critic.state()}, work / STATE)
    scale = (moments["unclipped"][1] / moments["clipped"][1])[moments["clipped"][1] > 0].sqrt()
    row = {"policy": settings["policy"], "task": settings["task"], "parameters": policy.model.num_parameters()}
    row |= {"supervised_steps": facts["steps"], "updates": training.updates, "grad_norm": rounded(norms.mean())}
    row |= {"clipped": float((norms > OPTIMIZE.max_grad_norm).mean())}
    row |= {"unclipped_scale": rounded(float(scale.median())), "scale_spread": rounded(float(scale.log().std()))}
    return {"policies": [row]}


def _unclipped_moments(trainer: Trainer) -> Mapping[Any, list[Tensor]]:
    """Return what will be AdamW's moments of the gradients before clipping; a batch is one backward pass."""
    kept: dict[Any, list[Tensor]] = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in trainer.policy.parameters}

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        for moment, beta, power in zip(kept[parameter], OPTIMIZE.betas, (1, 2), strict=True):
            moment.mul_(beta).add_(parameter.grad**power, alpha=1 - beta)

    for parameter in trainer.policy.parameters:
        parameter.register_post_accumulate_grad_hook(keep)
    return kept


def load(made_by: Cell, training: Training, quick: bool, work: Path) -> Checkpoint:
    """Return what a cell trained."""
    settings, path = made_by.settings, kept_file(made_by, work, STATE)
    config = config_of(settings["task"], settings["band"], training, quick)
    policy = pretrained(replace(config, model=str(path.parent / "model")))
    state = torch.load(path, map_location=device_of(), weights_only=True)
    critic = make_critic(TrainConfig(critic=CRITIC), policy.model, policy.tokenizer)
    assert critic is not None
    critic.load_state(state["critic"])
    base = parameters_to_vector(policy.model.parameters()).detach().clone()
    return Checkpoint(policy, critic, config.sample, base, state["moments"], training.updates)


def settings_of(policy: str, training: Training, quick: bool) -> Mapping[str, Any]:
    """Return all that a checkpoint depends on."""
    task, band = policy.rsplit("-", 1)
    config = config_of(task, band, training, quick)
    return {
        "quick": quick, "policy": policy, "task": task, "band": band, "training": asdict(training),
        "task_settings": asdict(getattr(config, task)), "model": asdict(config.small_model),
        "start": asdict(config.warm_start), "optimize": asdict(OPTIMIZE), "critic": asdict(CRITIC),
        "length": LENGTHS[task],
    }  # fmt: skip


ARMS = ("rloo", "none", "grpo", "otb", "otb_loo", "energy_regression", "blend_otb_regression", "value")
"""What is measured, `rloo` first. `group_mean` is (1 − 1/N)·`rloo`: its gains are those of `rloo` at shorter steps."""
UNBIASED = ("rloo", "none", "otb_loo", "energy_regression", "value")
"""Proved unbiased: their mean is ∇J."""


def batch_gradients(at: Checkpoint, number: int) -> Tensor:
    """Sample the batch of a number, alike for all arms; return every arm's ĝ = (1/N) Σ A·∇log π [A, D], by ascent."""
    prompts = draw_prompts(at.policy.task, "train", FIRST_BATCH + number * at.sample.prompts, at.sample.prompts)
    written = with_values(at.policy, at.critic, write(at.policy, prompts, at.sample, seed=10_000 + number))
    table = written.table
    advantages = arm_advantages(table.inputs(np.where(table.mask, table.stats.energy, 0.0)), table.limit)
    logprob = completion_logprobs(at.policy.model, written.rollouts, written.temperature).logprob
    parameters = list(at.policy.model.parameters())
    weights = [torch.as_tensor(advantages[name] / len(table.mask)).to(logprob) for name in ARMS]
    sums = [(weight * logprob).sum() for weight in weights]
    return torch.stack([flattened(torch.autograd.grad(one, parameters, retain_graph=True)) for one in sums])


def arm_advantages(inputs: EstimatorInputs, limit: int) -> dict[str, Float]:
    """Return the advantages of every arm [N, T]."""
    return {name: estimate(name, inputs, with_limit(name, None, limit)).advantage for name in ARMS}
