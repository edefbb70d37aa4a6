"""Run each prompt once: its rollouts continue from its keys and values, which keep their graph.

log π(y_t | x, y_{<t}) and its gradient are those of a pass over prompt and completion. A group of G rollouts runs its
prompt once instead of G times, and the last token of a rollout, which predicts nothing, is not run.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from otb_analysis.rollouts.decoding import unsupported_reason
from otb_analysis.rollouts.models import chosen_states
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Int

MASKED = ("sdpa", "eager")
"""Attention that takes any mask: prompts of unequal length stand, padded, before their completions."""


@dataclass(frozen=True)
class PrefixCache:
    """The different prompts of a batch as a model read them; made by `read_prompts`, read by scoring passes."""

    keys: tuple[Tensor, ...]  # Of each layer [P, heads, S, d'], S the length of the longest prompt
    values: tuple[Tensor, ...]  # The same
    real: Tensor  # 1 at tokens, 0 at padding [P, S]
    hidden: Tensor  # Final hidden state behind each prompt [P, d], with its graph
    of: Tensor  # Each rollout's prompt [n]

    def take(self, rows: Int) -> "PrefixCache":
        """Return what some of the rollouts go on from."""
        return replace(self, of=self.of[torch.as_tensor(rows, device=self.of.device)])

    def inputs(self, ids: Tensor, present: Tensor) -> dict[str, Any]:
        """Return a model's inputs for completions [n, T]; `present` is false at padding."""
        before = self.real[self.of]
        steps = torch.arange(ids.shape[1], device=ids.device)
        layers = zip(self.keys, self.values, strict=True)
        return {
            "input_ids": ids,
            "attention_mask": torch.cat([before, present.long()], dim=1),
            "position_ids": before.sum(1, keepdim=True) + steps,
            "past_key_values": Cache(layers=[_Continued(k[self.of], v[self.of]) for k, v in layers]),
            "use_cache": True,
        }


class _Continued(DynamicLayer):
    """Keys and values of prompts, put in front of those of their completions; nothing is kept."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values [n, heads, S + T, d']."""
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def supports_prefix_cache(model: PreTrainedModel) -> bool:
    """Return whether completions of a model can be scored behind prompts that were read before.

    Its cache must keep every key and value, its inputs be prepared as most models' are, its attention take any mask.
    """
    return getattr(model.config, "_attn_implementation", None) in MASKED and unsupported_reason(model) is None


def read_prompts(model: PreTrainedModel, rollouts: Rollouts) -> PrefixCache | None:
    """Read every different prompt of a batch once.

    None where nothing would be saved: rollouts have no prompt in common, or none has a second token.
    """
    texts = [
        tuple(row[:length].tolist()) for row, length in zip(rollouts.input_ids, rollouts.prompt_length, strict=True)
    ]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    if len(number) == len(texts) or rollouts.completion_length.max() < 2:
        return None
    real = np.zeros((len(number), max(map(len, number))), dtype=np.int64)
    ids = np.zeros_like(real)
    for i, text in enumerate(number):
        ids[i, : len(text)], real[i, : len(text)] = text, 1
    layers = [DynamicLayer() for _ in DynamicCache(config=model.config).layers]
    seen, mask = torch.as_tensor(ids, device=model.device), torch.as_tensor(real, device=model.device)
    last = mask.sum(1) - 1
    with chosen_states(
        model, lambda hidden: hidden[torch.arange(len(last), device=hidden.device), last], logits=False
    ) as states:
        model(input_ids=seen, attention_mask=mask, past_key_values=Cache(layers=[*layers]), use_cache=True)
    return PrefixCache(
        keys=tuple(layer.keys for layer in layers if layer.keys is not None),
        values=tuple(layer.values for layer in layers if layer.values is not None),
        real=mask,
        hidden=states[0],
        of=torch.as_tensor([number[text] for text in texts], device=model.device),
    )
