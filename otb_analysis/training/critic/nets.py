"""The two networks that a critic can be: a head on what the policy saw, or a backbone of its own."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from otb_analysis.errors import InputError
from otb_analysis.measurement.forward import ForwardPass, hidden_states
from otb_analysis.rollouts.models import output_layer
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Int


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

    def parts(self, batch: CriticBatch) -> Sequence[Int]:
        """Return one part: the hidden states are there already."""
        return [np.arange(len(batch.forward.mask))]

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
        self.backbone: PreTrainedModel = _without_dropout(deepcopy(backbone)).requires_grad_(True)
        width = next(output_layer(model).parameters()).shape[1]
        self.head = nn.Linear(width, 1, dtype=torch.float32, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.in_bfloat16 = bfloat16
        if checkpointing:
            self.backbone.activation_checkpointing_enable({"use_reentrant": False})
        self.train(checkpointing)  # the library recomputes activations in training mode only

    def parts(self, batch: CriticBatch) -> Sequence[Int]:
        """Return the policy's micro-batches: the policy has about this size."""
        return batch.parts

    def forward(self, batch: CriticBatch, rows: Int) -> Tensor:
        """Return the values of the rows' policy tokens, row after row [tokens]."""
        with torch.autocast(self.head.weight.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            hidden, mask = hidden_states(self.backbone, batch.rollouts.take(rows))
        return self.head(hidden[mask].float())[:, 0]


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Set every dropout rate to 0 in place: of dropout layers, and the numbers that attention and OPT modules keep."""
    for module in model.modules():
        kept = [name for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float)]
        for name in ["p"] if isinstance(module, nn.Dropout) else kept:
            setattr(module, name, 0.0)
    return model
