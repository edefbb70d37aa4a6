"""Kernels that carry many backward signals and derivatives, put in place of a model's own for one pass.

A fused or compiled kernel has an ordinary backward pass at best. Its plain form computes the same function by
operations that PyTorch can batch and differentiate in both modes. What hides inside of a module (a router's matrix,
those of routed experts, attention sinks) is then applied by a layer of its own, so that hooks see what goes in and
comes out.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

PLAIN_ATTENTION = ("sdpa", "eager")
"""Kernels that take float32 and, by PyTorch's math backend, many signals and derivatives; others are replaced."""
FUSED = "liger_kernel"
"""Package of fused functions, which are replaced: a `forward` by that of its class, and the rotation."""
ABSENT = object()
_PLAIN_NOW: dict[int, dict[str, nn.Module]] = {}  # By identity of the models inside of a block, their layers


@contextmanager
def plain_kernels(model: nn.Module) -> Iterator[None]:
    """Run passes in the block by plain attention, experts and activations, uncompiled and without checkpointing.

    Log-probabilities stay what they are up to rounding, and the model is left as it was found. A block inside of
    another one changes nothing.
    """
    if id(model) in _PLAIN_NOW:
        yield
        return
    with ExitStack() as undo:
        undo.enter_context(layer_by_layer(model))
        undo.enter_context(plain_attention(model))
        undo.enter_context(replaced(_PLAIN_NOW, id(model), layers_of(model)))
        for module in model.modules():
            attributes, kind = vars(module), type(module)
            names = vars(sys.modules[kind.__module__]) if "config" in attributes else {}
            if str(getattr(names.get("apply_rotary_pos_emb"), "__module__", "")).partition(".")[0] == FUSED:
                undo.enter_context(replaced(names, "apply_rotary_pos_emb", _rotated))
            if kind.__name__ == "DoraLinearLayer":
                # Its own way sends a unit matrix through both adapters, as if that were a text.
                def product(lora_A: nn.Linear, lora_B: nn.Linear, adapter_name: str | None = None) -> Tensor:
                    return lora_B.weight @ lora_A.weight

                undo.enter_context(replaced(attributes, "get_lora_weight", product))
            forward = attributes.get("forward")
            if forward is not None and getattr(forward, "func", None) not in _PLAIN.values():
                # Replaced by somebody else, whose own way is kept unless it is fused.
                fused = str(getattr(forward, "__module__", "")).partition(".")[0] == FUSED
                plain = [partial(kind.forward, module)] if fused else []
            elif kind.__name__ == "BloomGelu":  # a function with a backward pass of its own and no derivative forward
                plain = [partial(nn.functional.gelu, approximate="tanh")]
            else:
                inner = (type(layer) for layer in inner_layers(module).values())
                plain = [partial(_PLAIN[layer], module) for layer in inner if layer in _PLAIN]
            if plain:
                undo.enter_context(replaced(attributes, "forward", plain[0]))
        yield


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Attend by a kernel that takes float32 inside the block."""
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    attention = "sdpa" if getattr(inner, "_supports_sdpa", False) else "eager"
    with ExitStack() as undo:
        for module in model.modules():
            config = vars(module).get("config")
            if getattr(config, "_attn_implementation", None) not in (None, *PLAIN_ATTENTION):
                undo.enter_context(replaced(vars(config), "_attn_implementation_internal", attention))
        yield


@contextmanager
def layer_by_layer(model: nn.Module) -> Iterator[None]:
    """Keep every layer's graph and hooks: no layer is run twice, as checkpointing does, and none is compiled."""
    if id(model) in _PLAIN_NOW:
        yield
        return
    with ExitStack() as undo:
        for module in model.modules():
            attributes = vars(module)
            if attributes.get("gradient_checkpointing"):
                undo.enter_context(replaced(attributes, "gradient_checkpointing", False))
            if attributes.get("_compiled_call_impl") is not None:
                undo.enter_context(replaced(attributes, "_compiled_call_impl", None))
            if "_orig_mod" in attributes["_modules"]:
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            if "is_transposed" in attributes and next(module.parameters()).dtype == torch.float64:
                # The grouped products of experts take no float64.
                undo.enter_context(replaced(vars(attributes["config"]), "_experts_implementation_internal", "eager"))
        yield


@contextmanager
def replaced(place: dict[Any, Any], name: object, value: object) -> Iterator[None]:
    """Hold another value under a name inside the block."""
    before = place.get(name, ABSENT)
    place[name] = value
    try:
        yield
    finally:
        if before is ABSENT:
            del place[name]
        else:
            place[name] = before


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of `torch.compile` and of data parallelism, which share its parameters."""
    while True:
        if "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    halves = (x.chunk(2, -1) for x in (q, k))
    return tuple(x * cos + torch.cat([-b, a], -1) * sin for x, (a, b) in zip((q, k), halves, strict=True))


class InnerMatrix(nn.Module):
    """A matrix that its module applies by `linear`: [..., d] → [..., o]."""

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the layer."""
        return nn.functional.linear(inputs, weight, bias)


class InnerVector(nn.Module):
    """A vector that its module reads as a whole: [h] → [1, h]."""

    def forward(self, vector: Tensor) -> Tensor:
        """Run the layer."""
        return vector[None]


@dataclass(frozen=True)
class Routed:
    """What the experts of a layer did in one pass, expert after expert."""

    inputs: Tensor  # The tokens' rows, each once for every expert that takes it [S, d]
    outputs: Tensor  # With their graph [S, o]
    counts: list[int]  # By expert, how many of the rows are its own


class Experts(nn.Module):
    """One matrix of each of E experts, weight [E, o, d]: every token is given to k of them, and each has an output.

    Inputs [..., d + k] are a token's row and the experts that it goes to; outputs are [..., k, o].
    """

    summed = False
    choices = 1  # k, as of the last pass
    last: list[Routed] | None = None  # The last pass, where `routed` asks

    def unpacked(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [..., 1 or k, d], the factor of an expert's bias [..., 1 or k, 1], and the experts [..., k]."""
        if self.summed:
            return inputs[..., :-2], inputs[..., -2:-1], inputs[..., -1].long()
        x, ids = inputs[..., None, : -self.choices], inputs[..., -self.choices :].long()
        return x, torch.ones_like(x[..., :1]), ids

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """Apply to each row the matrix of its expert and add its bias, times a factor; transposed weights [E, d, o]."""
        x, factor, ids = self.unpacked(inputs)
        repeats, flat = ids.shape[-1] // x.shape[-2], ids.flatten()
        order, counts = flat.argsort(stable=True), flat.bincount(minlength=len(weight)).tolist()
        rows = x.flatten(0, -2).to(weight.dtype).index_select(0, order // repeats)
        apply = torch.matmul if transposed else nn.functional.linear
        # Not by index: the backward pass of `unbind` writes each expert's gradient once.
        parts = zip(rows.split(counts), weight.unbind(), strict=True)
        out = torch.cat([apply(part, matrix) for part, matrix in parts if len(part)])
        if self.last is not None:
            self.last[:] = [Routed(rows.detach(), out, counts)]
        out = out.index_select(0, order.argsort()).view(*ids.shape, -1)
        if bias is not None:
            out = out + factor.to(bias.dtype) * bias.index_select(0, flat).view_as(out)
        return out.sum(-2) if self.summed else out


class SummedExperts(Experts):
    """The same where the outputs of a token's experts are added up [..., o]; each has a row of its own.

    Inputs are [..., k, d + 2]: an expert's row, the factor of its bias, and which it is.
    """

    summed = True


_INNER: WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()


def inner_layers(module: nn.Module) -> dict[str, nn.Module]:
    """By parameter name, the layers that apply what hides inside of a module."""
    attributes, kind = vars(module), type(module)
    experts = "is_transposed" in attributes and hasattr(kind, "_apply_gate")  # marked by `use_experts_implementation`
    router = kind.__name__.endswith(("Router", "Gate")) and getattr(module._parameters.get("weight"), "ndim", 0) == 2
    sinks = getattr(module._parameters.get("sinks"), "ndim", 0) == 1
    if not (experts or router or sinks) or kind.forward is nn.Linear.forward:
        return {}
    if module not in _INNER and experts:
        up = "gate_up_proj" if attributes["has_gate"] else "up_proj"
        alone = attributes["has_post_expert_norm"] or attributes["_is_expert_parallel"]
        _INNER[module] = {} if alone else {up: Experts(), "down_proj": SummedExperts()}
    elif module not in _INNER:
        _INNER[module] = {"weight": InnerMatrix()} if router else {"sinks": InnerVector()}
    return _INNER[module]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of a model by name, and by a parameter's name the layer inside of a module that applies it."""
    if id(model) in _PLAIN_NOW:
        return _PLAIN_NOW[id(model)]
    named = dict(model.named_modules())
    inner = {f"{name}.{leaf}": layer for name, m in named.items() for leaf, layer in inner_layers(m).items()}
    return named | inner


@contextmanager
def routed(module: nn.Module) -> Iterator[dict[int, list[Routed]]]:
    """By identity of the parameters that hold experts, what these did in the last pass inside the block."""
    inner = ((getattr(m, leaf), layer) for m in module.modules() for leaf, layer in inner_layers(m).items())
    layers = {id(parameter): layer for parameter, layer in inner if isinstance(layer, Experts)}
    try:
        for layer in layers.values():
            layer.last = []
        yield {key: layer.last for key, layer in layers.items() if layer.last is not None}
    finally:
        for layer in layers.values():
            layer.last = None  # it would keep the graph alive


class Answered(TorchFunctionMode):
    """Inside this context `answer` is called in place of one PyTorch function."""

    def __init__(self, function: object, answer: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._answer = function, answer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one PyTorch function."""
        return (self._answer if func is self._function else func)(*args, **(kwargs or {}))


def _router(module: Any, *args: Any, **kwargs: Any) -> Any:
    with Answered(nn.functional.linear, inner_layers(module)["weight"]):
        return type(module).forward(module, *args, **kwargs)


def _sinks(module: Any, *args: Any, **kwargs: Any) -> Any:
    sinks = module._parameters["sinks"]
    module._parameters["sinks"] = inner_layers(module)["sinks"](sinks)[0]
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters["sinks"] = sinks


def _experts(module: Any, hidden: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """Σ_j score_j · W_down act(W_up x) over the experts j of each token: hidden [T, d], index and scores [T, k]."""
    (up, first), (down, last) = inner_layers(module).items()
    assert isinstance(first, Experts)
    first.choices = index.shape[-1]
    ids = index.to(torch.float32)  # half precision does not hold every index
    into, out = ((getattr(module, n), getattr(module, n + "_bias", None), module.is_transposed) for n in (up, down))
    outputs = first(torch.cat([hidden, ids], -1), *into)
    inside = module._apply_gate(outputs) if module.has_gate else module.act_fn(outputs)
    scores = scores.to(inside.dtype)[..., None]
    # The scores go in, so that one signal per token comes back instead of one per expert.
    return last(torch.cat([inside * scores, scores, ids[..., None]], -1), *out).to(hidden.dtype)


_PLAIN = {Experts: _experts, InnerMatrix: _router, InnerVector: _sinks}
