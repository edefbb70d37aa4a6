"""The critic, which only estimators that use `value` read: what it is fitted to, its two networks, and the fit.

It shares no gradients with the policy.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.arrays import masked, returns_to_go
from otb_analysis.config import CriticConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import ValueOptions, estimate, prefix_values
from otb_analysis.measurement.forward import ForwardPass, hidden_states
from otb_analysis.measurement.table import TokenTable
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import load_policy, output_layer
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import EstimatorInputs, Float, Int

ROUNDING = 1e-12
"""Returns that differ by less than this share of the largest count as equal."""


def critic_target(config: CriticConfig, inputs: EstimatorInputs) -> Float:
    """Return the regression target y_t of V(h_t) under `critic.target`.

    `return`: y_t = G_t. `gae`: the λ-return y_t = r_t + γ[(1−λ) V(h_{t+1}) + λ y_{t+1}] with the recorded values and
    V = 0 after the end, which is V(h_t) plus generalized advantage estimation; γ = λ = 1 give G_t, λ = 0 one-step
    temporal differences. `tvm`: the mean total reward of the group's rollouts that start with h_t, the share of correct
    ones where rewards are 0 or 1 (arXiv 2407.12863). Code, code, abstract. Targets [N, T] are in units of reward, zero
    outside the mask; `gae` reads `inputs.value`, `tvm` reads `inputs.token_id`.
    """
    if config.target == "return":
        return returns_to_go(inputs.reward, inputs.mask)
    if config.target == "tvm":
        return prefix_values(inputs)
    options = ValueOptions(discount=config.discount, decay=config.decay)
    return estimate("value", inputs, options).advantage + masked(np.asarray(inputs.value), inputs.mask)


def explained_variance(table: TokenTable) -> float | None:
    """Return 1 − Var(G_t − V(h_t))/Var(G_t) over policy tokens: 1 is a perfect critic, 0 a constant, below 0 worse.

    G is always the plain return-to-go, so that critics with different targets can be compared. None without values,
    without policy tokens, where G does not vary, or where a value is not finite.
    """
    if table.value is None or not table.mask.any():
        return None
    to_go = returns_to_go(table.reward, table.mask)[table.mask]
    if np.ptp(to_go) <= ROUNDING * np.abs(to_go).max() or not np.isfinite(table.value[table.mask]).all():
        return None
    return float(1.0 - np.var(to_go - table.value[table.mask]) / np.var(to_go))


@dataclass(frozen=True)
class CriticBatch:
    """One step as a critic sees it."""

    rollouts: Rollouts
    forward: ForwardPass  # The policy's pass over them, with its detached hidden states and the mask [N, T]
    parts: Sequence[Int]  # The rollouts, cut into micro-batches for a language model


class HeadNet(nn.Module):
    """V(h_t) from two layers on the policy's detached final hidden state that predicts y_t; h_t precedes y_t."""

    def __init__(self, hidden_size: int, width: int, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the CPU's alone: layers are made there
            self.layers = nn.Sequential(
                nn.LayerNorm(hidden_size), nn.Linear(hidden_size, width), nn.SiLU(), nn.Linear(width, 1)
            )

    def forward(self, batch: CriticBatch, rows: Int) -> Tensor:
        """Return the values of the rows' policy tokens, row after row [tokens]."""
        index = torch.as_tensor(rows, device=batch.forward.mask.device)
        hidden = batch.forward.hidden[index][batch.forward.mask[index]]
        return self.layers(hidden.float())[:, 0]


class BackboneNet(nn.Module):
    """V(h_t) from a language model's layers without its output layer, and one linear function of their last state.

    Every weight is trained. The linear function starts at zero, so the first values are 0. Dropout is off in both
    modes, so that recorded and fitted values come from the same function and no random number is drawn.
    """

    def __init__(self, model: PreTrainedModel, bfloat16: bool, checkpointing: bool):
        super().__init__()
        backbone = getattr(model, "base_model", model)
        if backbone is model:
            raise InputError(
                f"critic.kind is 'model' but {type(model).__name__} has no layers apart from its output layer; "
                "set critic.kind to 'head'."
            )
        self.backbone: PreTrainedModel = deepcopy(backbone).requires_grad_(True)
        for module in self.backbone.modules():  # dropout layers, and the rates that attention and OPT modules keep
            rates = [name for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float)]
            for name in ["p"] if isinstance(module, nn.Dropout) else rates:
                setattr(module, name, 0.0)
        width = next(output_layer(model).parameters()).shape[1]
        self.head = nn.Linear(width, 1, dtype=torch.float32, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.in_bfloat16 = bfloat16
        if checkpointing:
            self.backbone.activation_checkpointing_enable({"use_reentrant": False})
        self.train(checkpointing)  # the library recomputes activations in training mode only

    def forward(self, batch: CriticBatch, rows: Int) -> Tensor:
        """Return the values of the rows' policy tokens, row after row [tokens]."""
        with torch.autocast(self.head.weight.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            hidden, mask = hidden_states(self.backbone, batch.rollouts.take(rows))
        return self.head(hidden[mask].float())[:, 0]


HEAD_RATE = 1e-3
"""Learning rate of a head where none is set."""


class Critic:
    """V(h_t), fitted by least squares; h_t precedes y_t. Each process holds the whole net and takes the same steps.

    A step records the values from before that step's update, so on-policy the critic has not seen the rollout.
    """

    def __init__(
        self, net: HeadNet | BackboneNet, learning_rate: float, updates: int, processes: Processes = SINGLE_PROCESS
    ):
        self.net, self.updates, self.processes = net, updates, processes
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, weight_decay=0.0)

    def _parts(self, batch: CriticBatch) -> Sequence[Int]:
        """Return micro-batches for a language model, which has about the policy's size; a head reads what is there."""
        return batch.parts if isinstance(self.net, BackboneNet) else [np.arange(len(batch.forward.mask))]

    @torch.no_grad()
    def value(self, batch: CriticBatch) -> Float:
        """Return V(h_t) [N, T] in units of reward, zero outside the mask."""
        out = np.zeros(tuple(batch.forward.mask.shape))
        mask = batch.forward.mask.cpu().numpy()
        for rows in self._parts(batch):
            inside = np.zeros_like(mask)
            inside[rows] = mask[rows]
            out[inside] = self.net(batch, rows).cpu().double().numpy()
        return out

    def update(self, batch: CriticBatch, target: Float) -> float:
        """Take gradient steps on the mean of (V(h_t) − y_t)² over all processes' policy tokens; return its first value.

        It is NaN without policy tokens; where it is not finite no step is taken. `batch` and `target` [N, T] are this
        process's.
        """
        goal = torch.as_tensor(target, dtype=torch.float32, device=batch.forward.mask.device)
        first = float("nan")
        count = sum(self.processes.gather(int(batch.forward.mask.sum())))
        if not count:
            return first
        for i in range(self.updates):
            total = 0.0  # this process's part of the loss
            for rows in self._parts(batch):
                index = torch.as_tensor(rows, device=goal.device)
                inside = batch.forward.mask[index]
                if bool(inside.any()):
                    part = (self.net(batch, rows) - goal[index][inside]).square().sum() / count
                    part.backward()
                    total += float(part.detach())
            loss = sum(self.processes.gather(total))
            self.processes.sum_gradients(self.net.parameters())
            first = loss if i == 0 else first
            if np.isfinite(loss):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return first

    def state(self) -> dict[str, Any]:
        """Return weights and optimizer, for a checkpoint."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def make_critic(
    config: TrainConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processes: Processes = SINGLE_PROCESS,
) -> Critic | None:
    """Make a run's critic; None where it has none.

    `model` is the policy as it starts, before it gets adapters. A critic with a backbone copies its weights, unless
    `critic.path` names others.

    Raises:
        InputError: `critic.path` holds no language model, or one with other tokens.
    """
    critic = config.critic
    if not critic.enabled:
        return None
    if critic.kind == "head":
        width = next(output_layer(model).parameters()).shape[1]
        head = HeadNet(width, critic.width, config.seed).to(model.device)
        return Critic(head, critic.learning_rate or HEAD_RATE, critic.updates, processes)
    start = model
    if critic.path:
        start, other = load_policy(critic.path)
        if other.get_vocab() != tokenizer.get_vocab():
            raise InputError(
                f"critic.path is {critic.path!r}, whose tokenizer has other tokens than the policy's; "
                "pass a model with the policy's tokenizer, or leave critic.path empty."
            )
        start.to(model.device)  # pyright: ignore[reportArgumentType]
    net = BackboneNet(start, config.optimize.precision == "bfloat16", critic.gradient_checkpointing)
    return Critic(net, critic.learning_rate or config.optimize.learning_rate, critic.updates, processes)
