"""A model read into parts, and one forward pass of a rollout by hand that keeps what the way back multiplies by.

The passes by hand read these parts only, never the model itself: tensors in one dtype, and the names they have in
scope. Rows are positions. The last block goes on from attention only at the positions that predict a sampled token.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_module
from transformers import LlamaConfig, MistralConfig
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.exact.attention import query_blocks
from otb_analysis.gradients.exact.layers import UnfitError

FAMILIES: dict[type[nn.Module], tuple[Any, str]] = {
    modeling_llama.LlamaForCausalLM: (modeling_llama, "Llama"),
    modeling_mistral.MistralForCausalLM: (modeling_mistral, "Mistral"),
    modeling_qwen2.Qwen2ForCausalLM: (modeling_qwen2, "Qwen2"),
    modeling_qwen3.Qwen3ForCausalLM: (modeling_qwen3, "Qwen3"),
}
SLOTS: dict[str, str | type[nn.Module]] = {
    "model": "Model",
    "layers": nn.ModuleList,
    "rotary_emb": "RotaryEmbedding",
    "embed_tokens": nn.Embedding,
    "self_attn": "Attention",
    "mlp": "MLP",
    **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"), "RMSNorm"),
    **dict.fromkeys((f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")), nn.Linear),
    "lm_head": nn.Linear,
}
"""By the last part of a module's name, its kind: a type, or what the family's own type is called behind its prefix."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HEAD_NORMS = ("q_norm", "k_norm")
ELSEWHERE = 'pass engine="generic" or engine="auto".'


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module was made of: FSDP2 puts one of its own in front of it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def refuse_unsupported(model: nn.Module) -> None:
    """Raise where a model is of no supported family, or something about one of its modules is out of the ordinary."""
    if (family := class_of(model)) not in FAMILIES:
        known = ", ".join(kind.__name__ for kind in FAMILIES)
        raise UnfitError(f"a {family.__name__} has no hand-written backward pass ({known} have); {ELSEWHERE}")
    source, prefix = FAMILIES[family]
    for name, module in model.named_modules():
        slot = name.rpartition(".")[2]
        kind = "DecoderLayer" if slot.isdigit() else SLOTS.get(slot)
        expected = getattr(source, prefix + kind) if isinstance(kind, str) else kind
        if name and class_of(module) is not expected and slot != "act_fn":
            raise UnfitError(f"{name} is a {type(module).__name__}, which the engine does not follow; {ELSEWHERE}")
        # Hooks, and methods replaced on the instance, through which the model's own pass may differ.
        hooks = [vars(module).get(h) or getattr(torch_module, "_global" + h, None) for h in HOOKS]
        if any(hooks):
            raise UnfitError(
                f"{name or 'the model'} has a hook, which a hand-written pass would not run; remove it or {ELSEWHERE}"
            )
        if "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnfitError(f"the forward method of {name or 'the model'} was replaced; restore it or {ELSEWHERE}")
        if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq):
            raise UnfitError(f"{name} rescales its rows or their gradients; {ELSEWHERE}")
    kernel = getattr(model.config, "_attn_implementation", None)
    if kernel not in ("eager", "sdpa"):
        raise UnfitError(
            f'the model\'s attention is {kernel!r}; call model.set_attn_implementation("sdpa") or {ELSEWHERE}'
        )
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        raise UnfitError(f"autocast is on, under which layers run in other dtypes; leave its block or {ELSEWHERE}")


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
    def lowest(self) -> int:
        """The first block that signals must reach; the number of blocks if nothing below the last attention counts."""
        if self.embedding_name is not None:
            return 0
        last = self.layers[-1]
        parts = [vars(layer).values() for layer in self.layers[:-1]] + [
            (last.before, last.key, last.value, last.key_norm)
        ]
        fields = ("name", "weight_name", "bias_name")
        trained = (any(getattr(p, f, None) is not None for p in block for f in fields) for block in parts)
        return next((i for i, inside in enumerate(trained) if inside), len(parts))


def read(batch: ScoreBatch) -> LlamaLayout:
    """Read a model into its parts; raises `UnfitError` where `refuse_unsupported` does, or a parameter is shared."""
    model: Any = batch.model
    refuse_unsupported(model)
    base, config, scope = model.model, model.config, batch.scope
    names = {id(p): name for name, p in zip(scope.names, scope.parameters, strict=True)}
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    uses[id(model.lm_head.weight)] -= int(model.lm_head.weight is base.embed_tokens.weight)
    if shared := [name for parameter, name in names.items() if uses[parameter] > 1]:
        raise UnfitError(
            f"parameter {shared[0]} is shared by several layers, which has no hand-written rule; {ELSEWHERE}"
        )
    every = (m for _, m in model.named_modules(remove_duplicate=False))
    repeated = Counter(id(m) for m in every if next(m.parameters(False), None) is not None)
    if any(count > 1 for count in repeated.values()):
        raise UnfitError(f"a decoder layer is used more than once in one forward pass; {ELSEWHERE}")
    # At least float32: in bfloat16 a norm by hand would differ from the reference by percents.
    dtype = reduce(torch.promote_types, (p.dtype for p in model.parameters()), torch.float32)

    def dense(module: nn.Linear) -> Dense:
        bias = None if module.bias is None else module.bias.detach().to(dtype)
        weight = module.weight.detach().to(dtype)
        return Dense(weight, bias, names.get(id(module.weight)), names.get(id(module.bias)))

    def norm(module: Any) -> Norm:
        return Norm(module.weight.detach().to(dtype), module.variance_epsilon, names.get(id(module.weight)))

    layers = []
    for index, layer in enumerate(base.layers[: config.num_hidden_layers]):
        at, mlp = layer.self_attn, layer.mlp
        kinds = getattr(config, "layer_types", None)
        # Every Mistral layer has the window, Qwen says so layer by layer; a Llama model reads none, whatever its
        # configuration says.
        sliding = kinds and kinds[index] == "sliding_attention" and not isinstance(config, LlamaConfig)
        query_norm, key_norm = (None if m is None else norm(m) for m in (getattr(at, n, None) for n in HEAD_NORMS))
        layers.append(
            Layer(
                before=norm(layer.input_layernorm),
                query=dense(at.q_proj),
                key=dense(at.k_proj),
                value=dense(at.v_proj),
                output=dense(at.o_proj),
                query_norm=query_norm,
                key_norm=key_norm,
                after=norm(layer.post_attention_layernorm),
                gate=dense(mlp.gate_proj),
                up=dense(mlp.up_proj),
                down=dense(mlp.down_proj),
                activation=mlp.act_fn,
                head_dim=at.head_dim,
                scaling=at.scaling,
                window=config.sliding_window if sliding or isinstance(config, MistralConfig) else None,
            )
        )
    head = dense(model.lm_head)
    if scope.head is not None:  # the scope's leaves share the layer's storage but are tensors of their own
        leaves = (name if name in scope.names else None for name in ("lm_head.weight", "lm_head.bias"))
        head = Dense(head.weight, head.bias, *leaves)
    table = base.embed_tokens
    return LlamaLayout(
        embedding=table.weight.detach().to(dtype),
        embedding_name=names.get(id(table.weight)),
        ignored=table.padding_idx,
        layers=tuple(layers),
        norm=norm(base.norm),
        head=head,
        rotary=base.rotary_emb,
        round_softmax=config._attn_implementation == "eager",
    )


SLICE_BYTES, KEPT_BYTES = 1 << 23, 1 << 19
"""What the attention weights of one slice of queries may occupy, and of a slice that is the whole, to be kept."""


class Rows:
    """Records whose every tensor has positions on its first axis."""

    def take(self, index: Tensor | slice) -> Self:
        """The same record on some positions; a slice makes views."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class NormPass(Rows):
    """What an RMSNorm leaves behind: x̂ = r·x and w·r [n, ..., d], r / d [n, ..., 1], with r = 1 / √(mean x² + ε)."""

    unit: Tensor
    gain: Tensor
    share: Tensor


@dataclass(frozen=True)
class FeedForward(Rows):
    """A feed-forward part: its input [n, d], ∂act/∂(gate, up) [n, 2, f] and act = f(gate)·up [n, f]."""

    inputs: Tensor
    slopes: Tensor
    act: Tensor


@dataclass(frozen=True)
class Attention:
    """Attention of one block: heads first, keys and values repeated for grouped queries, queries scaled.

    `inputs` [n, d] went into query, key and value; `mixed` [n, H·h] went into the output layer; `query_pass` and
    `key_pass` [n, H, h] are there where the model normalises heads. Its weights [H, n, n] are kept of a short
    rollout only; those of a longer one are formed anew for some queries at a time.
    """

    inputs: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mixed: Tensor
    query_pass: NormPass | None
    key_pass: NormPass | None
    position: Tensor
    scaling: float
    window: int | None
    rounded: bool
    kept: Tensor | None = None  # All weights, of a short rollout

    def weights(self, at: Tensor | slice, stop: int) -> Tensor:
        """Softmax weights [H, r, stop] of the queries `at` some positions, which see no key from `stop` on."""
        if self.kept is not None:
            return self.kept[:, at, :stop]
        scores = torch.bmm(self.query[:, at], self.key[:, :stop].transpose(1, 2))
        queries, keys = self.position[at, None], self.position[:stop]
        hidden = keys > queries
        if self.window is not None:
            hidden |= keys <= queries - self.window
        # As eager attention rounds, so that log-probabilities match the model's own.
        dtype = torch.float32 if self.rounded else None
        return scores.masked_fill_(hidden, -torch.inf).softmax(-1, dtype=dtype).to(scores.dtype)

    def slices(self, count: int) -> Iterator[slice]:
        """Ranges of `count` queries whose weights are formed together."""
        heads, length, _ = self.query.shape
        return query_blocks(
            count, self.query.device, max(1, SLICE_BYTES // (heads * length * self.query.element_size()))
        )


@dataclass(frozen=True)
class BlockPass:
    """One block's activations, bottom to top."""

    before: NormPass
    attention: Attention
    after: NormPass
    feed: FeedForward


@dataclass(frozen=True)
class Turns:
    """cos and sin of the rotary embedding [T, h], read backwards, and the positions [T]."""

    cos: Tensor
    sin: Tensor
    position: Tensor

    def cos_sin(self, index: Tensor | slice, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        """Those of some positions, times the scaling of attention scores, which queries carry [n, 1, 1, h]."""
        cos, sin = self.cos[index, None, None], self.sin[index, None, None]
        return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


@dataclass(frozen=True)
class Activations:
    """A whole forward pass."""

    blocks: tuple[BlockPass, ...]  # By layer; `after` and `feed` of the last one have one row per sampled token
    final: NormPass  # The last norm at the sampled tokens
    hidden: Tensor  # Its output [K, d]
    turns: Turns  # The rotary embedding


def run(layout: LlamaLayout, rollout: Rollout) -> Activations:
    """Run a rollout up to the position that predicts its last sampled token."""
    at = rollout.targets - 1
    x = layout.embedding[rollout.ids[: rollout.length]]
    position = torch.arange(len(x), device=x.device)
    cos, sin = layout.rotary(x[None], position[None])
    turns = Turns(cos[0], sin[0], position)
    blocks: list[BlockPass] = []
    for layer in layout.layers:
        before, normed = _norm(layer.before, x)
        attention = _attend(layer, normed, turns, layout.round_softmax)
        x = x + layer.output(attention.mixed)
        # Behind the last attention only these positions matter; the widest layers run on K rows instead of T.
        if layer is layout.layers[-1]:
            x = x[at]
        after, normed = _norm(layer.after, x)
        gate, up = layer.gate(normed), layer.up(normed)
        with torch.enable_grad():  # the slope of any activation, entry by entry
            leaf = gate.requires_grad_()
            opened = layer.activation(leaf)
            slope = torch.autograd.grad(opened.sum(), leaf)[0]
        opened = opened.detach()
        feed = FeedForward(normed, torch.stack([slope * up, opened], 1), opened * up)
        x = x + layer.down(feed.act)
        blocks.append(BlockPass(before, attention, after, feed))
    final, hidden = _norm(layout.norm, x)
    return Activations(tuple(blocks), final, hidden, turns)


def _norm(norm: Norm, x: Tensor) -> tuple[NormPass, Tensor]:
    """Normalise in float32, as the models do whatever their dtype."""
    single = x.to(torch.float32)
    rate = torch.rsqrt(single.square().mean(-1, keepdim=True) + norm.eps)
    unit = (single * rate).to(x.dtype)
    return NormPass(unit, norm.weight * rate, (rate / x.shape[-1]).to(x.dtype)), norm.weight * unit


def _attend(layer: Layer, x: Tensor, turns: Turns, round_softmax: bool) -> Attention:
    query, key, value = (
        dense(x).unflatten(-1, (-1, layer.head_dim)) for dense in (layer.query, layer.key, layer.value)
    )
    query_pass = key_pass = None
    if layer.query_norm is not None and layer.key_norm is not None:
        (query_pass, query), (key_pass, key) = _norm(layer.query_norm, query), _norm(layer.key_norm, key)
    groups, half = query.shape[1] // key.shape[1], layer.head_dim // 2
    # Turned by their position.
    query, key = (
        x * turns.cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * turns.sin[:, None]
        for x in (query, key)
    )
    # Scaled here once, on [T, H, h], instead of on the [H, T, T] scores.
    query = query.mul_(layer.scaling).transpose(0, 1).contiguous()
    key = key.transpose(0, 1).repeat_interleave(groups, 0)
    value = value.transpose(0, 1).repeat_interleave(groups, 0)
    made = Attention(
        x, query, key, value, x, query_pass, key_pass, turns.position, layer.scaling, layer.window, round_softmax
    )
    if len(query) * len(x) ** 2 * x.element_size() <= KEPT_BYTES:
        made = replace(made, kept=made.weights(slice(0, len(x)), len(x)))
    parts = [torch.bmm(made.weights(rows, rows.stop), value[:, : rows.stop]) for rows in made.slices(len(x))]
    return replace(made, mixed=torch.cat(parts, 1).transpose(0, 1).flatten(1))
