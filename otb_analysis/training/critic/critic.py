"""The critic. It shares no gradients with the policy; only estimators that use `value` depend on it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.config import TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import load_policy, output_layer
from otb_analysis.training.critic.nets import BackboneNet, CriticBatch, HeadNet
from otb_analysis.types import Float

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

    @torch.no_grad()
    def value(self, batch: CriticBatch) -> Float:
        """Return V(h_t) [N, T] in units of reward, zero outside the mask."""
        out = np.zeros(tuple(batch.forward.mask.shape))
        mask = batch.forward.mask.cpu().numpy()
        for rows in self.net.parts(batch):
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
            loss = sum(self.processes.gather(self._accumulate(batch, goal, count)))
            self.processes.sum_gradients(self.net.parameters())
            first = loss if i == 0 else first
            if np.isfinite(loss):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return first

    def _accumulate(self, batch: CriticBatch, goal: Tensor, count: int) -> float:
        """Add the gradient of this process's part of the loss to `.grad`; return it. `count`: all policy tokens."""
        total = 0.0
        for rows in self.net.parts(batch):
            index = torch.as_tensor(rows, device=goal.device)
            inside = batch.forward.mask[index]
            if bool(inside.any()):
                loss = (self.net(batch, rows) - goal[index][inside]).square().sum() / count
                loss.backward()
                total += float(loss.detach())
        return total

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
