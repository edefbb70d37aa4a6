"""A model read into the parts that passes by hand work on: tensors in one dtype, and the names they have in scope.

The passes by hand read these parts only, never the model itself.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig

from otb_analysis.gradients.batch.inputs import ScoreBatch
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.manual.support_check import ELSEWHERE, refuse_unsupported


@dataclass(frozen=True)
class Dense:
    """A linear layer y = x Wᵀ + b; `weight_name` and `bias_name` are None where the parameter is not in scope."""

    weight: Tensor
    bias: Tensor | None
    weight_name: str | None
    bias_name: str | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to rows [..., in]."""
        return nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm y = w · x / √(mean x² + ε)."""

    weight: Tensor
    eps: float
    name: str | None


@dataclass(frozen=True)
class Layer:
    """One decoder block; `window` counts the positions that attention sees, None for all of them."""

    before: Norm
    query: Dense
    key: Dense
    value: Dense
    output: Dense
    query_norm: Norm | None
    key_norm: Norm | None
    after: Norm
    gate: Dense
    up: Dense
    down: Dense
    activation: nn.Module
    head_dim: int
    scaling: float
    window: int | None


@dataclass(frozen=True)
class LlamaLayout:
    """A model in the working dtype, float32 or the model's own if that is wider; made for one call, never stored."""

    embedding: Tensor  # Rows of the input embedding [V, d]
    embedding_name: str | None  # Its name in scope
    ignored: int | None  # The token whose embedding row takes no gradient
    layers: tuple[Layer, ...]  # Decoder blocks, first to last
    norm: Norm  # The norm before the output layer
    head: Dense  # The output layer
    rotary: nn.Module  # Module that gives cos and sin, with whatever scaling the model has
    round_softmax: bool  # Whether attention weights are rounded to float32, as eager attention does

    @property
    def tied(self) -> bool:
        """Whether the output layer's weight is the input embedding and both uses are in scope."""
        return self.embedding_name is not None and self.embedding_name == self.head.weight_name

    @property
    def lowest(self) -> int:
        """The first block that signals must reach; the number of blocks if nothing below the last attention counts."""
        last = self.layers[-1]
        below = [_trained(vars(layer).values()) for layer in self.layers[:-1]]
        below.append(_trained((last.before, last.key, last.value, last.key_norm)))
        return 0 if self.embedding_name is not None else next((i for i, any_ in enumerate(below) if any_), len(below))

    @property
    def reaches_below(self) -> bool:
        """Whether any parameter below the last attention is in scope."""
        return self.lowest < len(self.layers)


def _trained(parts: Iterable[object]) -> bool:
    """Whether a parameter of some parts of a block is in scope."""
    fields = ("name", "weight_name", "bias_name")
    return any(getattr(part, field, None) is not None for part in parts for field in fields)


def read(batch: ScoreBatch) -> LlamaLayout:
    """Read a model into its parts; raises `UnfitError` where `refuse_unsupported` does, or a parameter is shared."""
    model: Any = batch.model
    refuse_unsupported(model)
    names = _names(batch)
    dtype = torch.float32
    for parameter in model.parameters():
        # At least float32: in bfloat16 a norm by hand would differ from the reference by percents.
        dtype = torch.promote_types(dtype, parameter.dtype)
    reader = _Reader(names, dtype)
    base, config = model.model, model.config
    layers = tuple(
        reader.layer(layer, _window(config, i)) for i, layer in enumerate(base.layers[: config.num_hidden_layers])
    )
    head = reader.dense(model.lm_head)
    if batch.scope.head is not None:  # the scope's leaves share the layer's storage but are tensors of their own
        head = Dense(head.weight, head.bias, *(n if n in batch.scope.names else None for n in _HEAD_NAMES))
    return LlamaLayout(
        reader.cast(base.embed_tokens.weight),
        names.get(id(base.embed_tokens.weight)),
        base.embed_tokens.padding_idx,
        layers,
        reader.norm(base.norm),
        head,
        base.rotary_emb,
        config._attn_implementation == "eager",
    )


_HEAD_NAMES = ("lm_head.weight", "lm_head.bias")


def _names(batch: ScoreBatch) -> dict[int, str]:
    """Scope name by parameter identity; a parameter that two layers share has no hand-written rule."""
    scope = batch.scope
    names = {id(p): name for name, p in zip(scope.names, scope.parameters, strict=True)}
    model: Any = batch.model
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    uses[id(model.lm_head.weight)] -= int(tied)
    every = (m for _, m in model.named_modules(remove_duplicate=False))
    repeated = Counter(id(m) for m in every if next(m.parameters(False), None) is not None)
    for parameter, name in names.items():
        if uses[parameter] > 1:
            raise UnfitError(
                f"parameter {name} is shared by several layers, which has no hand-written rule; {ELSEWHERE}"
            )
    if any(count > 1 for count in repeated.values()):
        raise UnfitError(f"a decoder layer is used more than once in one forward pass; {ELSEWHERE}")
    return names


class _Reader:
    """Turns modules into parts, with names from the scope and tensors in one dtype."""

    def __init__(self, names: dict[int, str], dtype: torch.dtype) -> None:
        self.names, self.dtype = names, dtype

    def cast(self, parameter: Tensor) -> Tensor:
        return parameter.detach().to(self.dtype)

    def dense(self, module: nn.Linear) -> Dense:
        bias = None if module.bias is None else self.cast(module.bias)
        return Dense(self.cast(module.weight), bias, self.names.get(id(module.weight)), self.names.get(id(module.bias)))

    def norm(self, module: Any) -> Norm:
        return Norm(self.cast(module.weight), module.variance_epsilon, self.names.get(id(module.weight)))

    def layer(self, layer: Any, window: int | None) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = (getattr(attention, n, None) for n in ("q_norm", "k_norm"))
        query_norm, key_norm = (None if m is None else self.norm(m) for m in head_norms)
        return Layer(
            before=self.norm(layer.input_layernorm),
            query=self.dense(attention.q_proj),
            key=self.dense(attention.k_proj),
            value=self.dense(attention.v_proj),
            output=self.dense(attention.o_proj),
            query_norm=query_norm,
            key_norm=key_norm,
            after=self.norm(layer.post_attention_layernorm),
            gate=self.dense(mlp.gate_proj),
            up=self.dense(mlp.up_proj),
            down=self.dense(mlp.down_proj),
            activation=mlp.act_fn,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            window=window,
        )


def _window(config: Any, index: int) -> int | None:
    """Positions that attention of a layer sees: every Mistral layer has the window, Qwen says so layer by layer."""
    if isinstance(config, MistralConfig):
        return config.sliding_window
    if isinstance(config, LlamaConfig):
        return None  # whatever else its configuration says, a Llama model reads no window
    kinds = getattr(config, "layer_types", None)
    return config.sliding_window if kinds and kinds[index] == "sliding_attention" else None
