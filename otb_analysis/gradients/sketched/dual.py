"""An activation that carries many tangents through a model's own forward pass: forward mode, all directions at once.

Activations are computed once and shared by all directions; a layer's tangents are one matrix product for all of them.
An operation without a rule here raises with its name, so that no tangent is lost on the way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as f
from torch import Tensor

from otb_analysis.gradients.exact.attention import AttentionCall, block_scores, query_blocks
from otb_analysis.gradients.exact.layers import UnfitError


@dataclass(frozen=True)
class Moving:
    """One operand of attention: its activation [1, H, T, d] and its tangents [k, H, T, d], None where it is fixed."""

    primal: Tensor
    tangent: Tensor | None


@dataclass(frozen=True)
class Weights:
    """What attention computes without tangents."""

    blocks: tuple[Tensor, ...]  # P by blocks of queries [1, H, b, keys]
    slopes: tuple[Tensor, ...]  # scale·P, likewise
    output: Tensor  # o [1, H, T, d]


def attention_weights(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Weights:
    """O = Pv, P = softmax(scale·qkᵀ + mask), of operands with as many heads each [1, H, T, d]."""
    blocks, outputs = [], []
    for rows in query_blocks(query.shape[-2], query.device):
        scores = block_scores(call, query, key, rows)
        p = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(scores.dtype)
        blocks.append(p)
        outputs.append(p @ value[..., : p.shape[-1], :])
    return Weights(tuple(blocks), tuple(p * call.factor for p in blocks), torch.cat(outputs, -2))


def attention_tangent(query: Moving, key: Moving, value: Moving, weights: Weights) -> Tensor:
    """Derivative of attention along k directions [k, H, T, d].

    ȯ = (P∘Ṡ)v − rowsum(P∘Ṡ)·o + Pv̇,  Ṡ = scale·(q̇kᵀ + qk̇ᵀ).
    """
    k = next(len(x.tangent) for x in (query, key, value) if x.tangent is not None)
    pairs = [(query.tangent, key.primal.expand(k, -1, -1, -1)), (query.primal.expand(k, -1, -1, -1), key.tangent)]
    # Side by side, the two terms of Ṡ are one product; a fixed operand leaves one of them.
    kept = [(left, right) for left, right in pairs if left is not None and right is not None]
    left, right = (torch.cat(side, -1) for side in zip(*kept, strict=True)) if kept else (None, None)
    moved, start = weights.output.new_zeros(k, *weights.output.shape[1:]), 0
    for p, slope in zip(weights.blocks, weights.slopes, strict=True):
        rows, keys = slice(start, start := start + p.shape[-2]), slice(0, p.shape[-1])
        if left is not None and right is not None:
            turned = (left[..., rows, :] @ right[..., keys, :].mT).mul_(slope)
            through = turned @ value.primal[..., keys, :]
            moved[..., rows, :] = through.addcmul_(turned.sum(-1, keepdim=True), weights.output[..., rows, :], value=-1)
        if value.tangent is not None:
            # One product per head for all directions.
            columns = value.tangent[..., keys, :].permute(1, 2, 0, 3).flatten(2)
            moved[..., rows, :] += (p[0] @ columns).unflatten(-1, (k, -1)).permute(2, 0, 1, 3)
    return moved


@dataclass
class Tape:
    """Activations of one text in the order in which they are needed: the first pass makes them, later ones replay."""

    values: list[Any] = field(default_factory=list)
    next: int = 0

    @contextmanager
    def playing(self) -> Iterator[None]:
        """One pass through the model, always over the same text."""
        self.next, before = 0, Dual.tape
        Dual.tape = self
        try:
            yield
        finally:
            Dual.tape = before


class Dual(torch.Tensor):
    """An activation [1, ...] of one text with its derivatives along k directions [k, ...] as `tangent`."""

    _moved: Tensor
    _rate: Tensor | None
    rules: ClassVar[dict[Any, Callable[..., Any]]] = {}
    tape: ClassVar[Tape | None] = None

    @property
    def tangent(self) -> Tensor:
        """Derivatives along k directions [k, ...]; a slope put off by an elementwise function is applied now."""
        if self._rate is not None:
            self._moved, self._rate = self._moved * self._rate, None
        return self._moved

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operation and its derivative by its rule."""
        rule = cls.rules.get(func)
        if rule is None:
            name = getattr(func, "__qualname__", getattr(func, "__name__", str(func)))
            raise UnfitError(f'the operation {name} has no rule for many directions at once; pass method="gaussian".')
        # Inside a rule every operation is a plain one, else each would look for a rule again.
        with torch._C.DisableTorchFunctionSubclass():
            return rule(func, *args, **(kwargs or {}))


def dual(primal: Tensor, tangent: Tensor, rate: Tensor | None = None) -> Dual:
    """Join an activation [1, ...] and its tangents [k, ...]; raises where the directions' axis was moved.

    The tangents are still to be multiplied by `rate` [1, ...], so that a gate's product is one pass, not two.
    """
    if tangent.shape[1:] != primal.shape[1:]:
        raise UnfitError(
            f"an activation of shape {tuple(primal.shape)} does not keep its text on the first axis; "
            'pass method="gaussian".'
        )
    # A view in another class: the activation is not copied.
    made = primal.as_subclass(Dual)
    made._moved, made._rate = tangent, rate
    return made


def primal_of(x: Any) -> Any:
    """The activation without its tangents."""
    return x.as_subclass(torch.Tensor) if isinstance(x, Dual) else x


def tangent_of(x: Any) -> Tensor | None:
    """The tangents, or None for what does not move."""
    return x.tangent if isinstance(x, Dual) else None


def once(compute: Callable[[], Any]) -> Any:
    """A value that does not depend on the directions: made in the first pass of a tape, replayed in later ones."""
    tape = Dual.tape
    if tape is None:
        return compute()
    if tape.next == len(tape.values):
        tape.values.append(compute())
    tape.next += 1
    return tape.values[tape.next - 1]


def _fixed(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*map(primal_of, args), **kwargs)


def _linear(func: Any, x: Dual, *args: Any, **kwargs: Any) -> Any:
    """A linear operation that leaves the first axis alone."""
    out, moved = func(primal_of(x), *args, **kwargs), func(x.tangent, *args, **kwargs)
    if isinstance(out, Tensor):
        return dual(out, moved)
    return tuple(dual(o, m) for o, m in zip(out, moved, strict=True))


def _item(func: Any, x: Dual, index: Any) -> Dual:
    first = index[0] if isinstance(index, tuple) else index
    if first is not Ellipsis and not (isinstance(first, slice) and first == slice(None)):
        raise UnfitError('an index into the first axis has no rule for many directions; pass method="gaussian".')
    return _linear(func, x, index)


def _shaped(func: Any, x: Dual, *shape: Any) -> Dual:
    """View, reshape and expand name the length of the first axis: k times as long for the tangents."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    # A first size of −1 is left to PyTorch.
    many = (len(x.tangent) * sizes[0] // len(x), *sizes[1:]) if sizes[0] > 0 else sizes
    return dual(func(primal_of(x), *sizes), func(x.tangent, *many))


def _joined(func: Any, parts: Any, dim: int = 0) -> Dual:
    moving = [tangent_of(p) for p in parts]
    k = next(len(t) for t in moving if t is not None)
    filled = [p.new_zeros(k, *p.shape[1:]) if t is None else t for p, t in zip(parts, moving, strict=True)]
    return dual(once(lambda: func([primal_of(p) for p in parts], dim)), func(filled, dim))


def _sum(sign: int, _func: Any, x: Any, y: Any) -> Dual:
    # Never in place, since the activations are kept for the next pass.
    out = once(lambda: torch.add(primal_of(x), primal_of(y), alpha=sign))
    a, b = tangent_of(x), tangent_of(y)
    if a is not None and b is not None:
        return dual(out, torch.add(a, b, alpha=sign))
    moved = a if b is None else b if sign > 0 else -b
    assert moved is not None
    return dual(out, moved.expand(len(moved), *out.shape[1:]))


def _bilinear(func: Any, x: Any, y: Any) -> Dual:
    a, b, fixed_x, fixed_y = tangent_of(x), tangent_of(y), primal_of(x), primal_of(y)
    left = None if a is None else func(a, fixed_y)
    right = None if b is None else func(fixed_x, b)
    # In place: `left` was made here, and nothing else holds it.
    moved = left if right is None else right if left is None else left.add_(right)
    assert moved is not None
    return dual(once(lambda: func(fixed_x, fixed_y)), moved)


def _product(_func: Any, x: Any, y: Any) -> Dual:
    if isinstance(x, Dual) and isinstance(y, Dual):
        a, b = primal_of(x), primal_of(y)
        rate = once(lambda: b if x._rate is None else x._rate * b)
        # Gate · up: the slope put off by the activation is folded in here, so that its tangents are read once.
        moved = (x._moved * rate).addcmul_(a, y.tangent)
        return dual(once(lambda: a * b), moved)
    return _bilinear(torch.mul, x, y)


def _quotient(func: Any, x: Dual, y: Any) -> Dual:
    if isinstance(y, Dual):
        raise UnfitError('a division by an activation has no rule for many directions; pass method="gaussian".')
    return _linear(func, x, y)


def _elementwise(func: Any, x: Dual, *args: Any, **kwargs: Any) -> Dual:
    """A function of each entry; its slope is taken from autograd on the activation alone."""

    def slope() -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = primal_of(x).detach().requires_grad_()
            out = func(leaf, *args, **kwargs)
            return out.detach(), torch.autograd.grad(out.sum(), leaf)[0]

    out, rate = once(slope)
    return dual(out, x.tangent, rate)


def _matrix(func: Any, x: Dual, weight: Tensor, bias: Tensor | None = None) -> Dual:
    return dual(once(lambda: func(primal_of(x), weight, bias)), func(x.tangent, weight))


def _conv1d(func: Any, bias: Tensor, x: Dual, weight: Tensor) -> Dual:
    return dual(once(lambda: func(bias, primal_of(x), weight)), x.tangent @ weight)


def _softmax(func: Any, x: Dual, *args: Any, **kwargs: Any) -> Dual:
    """ṗ = p∘(ẋ − p·ẋ)."""
    p = once(lambda: func(primal_of(x), *args, **kwargs))
    dim = args[0] if args else kwargs["dim"]
    moved = x.tangent.to(p.dtype) * p
    return dual(p, moved.addcmul_(moved.sum(dim, keepdim=True), p, value=-1))


def _layer_norm(
    func: Any, x: Dual, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Dual:
    """The derivative of x̂ = (x − mean)/σ is (ẋ − mean ẋ − x̂·mean(x̂∘ẋ))/σ."""
    axes = tuple(range(-len(shape), 0))

    def parts() -> tuple[Tensor, Tensor, Tensor]:
        primal = primal_of(x)
        rate = (primal.var(axes, correction=0, keepdim=True) + eps).rsqrt()
        return func(primal, shape, weight, bias, eps), func(primal, shape, None, None, eps), rate

    out, normal, rate = once(parts)
    moved = x.tangent - x.tangent.mean(axes, keepdim=True)
    moved = moved.addcmul_((normal * x.tangent).mean(axes, keepdim=True), normal, value=-1)
    return dual(out, moved.mul_(rate if weight is None else rate * weight))


def _attention(_func: Any, *args: Any, **kwargs: Any) -> Dual:
    call, operands = AttentionCall(*args, **kwargs), list[Moving]()
    for x in (call.query, call.key, call.value):
        primal, tangent = primal_of(x), tangent_of(x)
        if call.enable_gqa and (times := call.query.shape[1] // x.shape[1]) > 1:  # for the query heads that share them
            primal = primal.repeat_interleave(times, 1)
            tangent = None if tangent is None else tangent.repeat_interleave(times, 1)
        operands.append(Moving(primal, tangent))
    q, k, v = operands
    weights = once(lambda: attention_weights(call, q.primal, k.primal, v.primal))
    return dual(weights.output, attention_tangent(q, k, v, weights))


def _dropout(_func: Any, x: Dual, p: float = 0.5, training: bool = True, inplace: bool = False) -> Dual:
    """Nothing: a model whose dropout is active is refused at the door."""
    return x


LAYOUT = "transpose", "permute", "swapaxes", "contiguous", "unsqueeze", "squeeze", "chunk", "split", "to", "float"
FIXED = "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_nested"
RULES: dict[Callable[..., Any], tuple[str, ...]] = {
    _linear: (*LAYOUT, "type", "type_as", "neg", "__neg__", "mean", "sum"),
    _item: ("__getitem__",),
    _fixed: ("size", "dim", "numel", "is_floating_point", "__len__", "is_contiguous"),
    _shaped: ("view", "reshape", "expand"),
    _joined: ("cat", "concat"),
    partial(_sum, 1): ("add", "__add__", "__radd__", "__iadd__", "add_"),
    partial(_sum, -1): ("sub", "__sub__", "__isub__"),
    _product: ("mul", "__mul__", "__rmul__", "__imul__"),
    _bilinear: ("matmul", "__matmul__", "bmm"),
    _quotient: ("div", "__truediv__", "__itruediv__"),
    _elementwise: (
        "pow", "__pow__", "square", "rsqrt", "sqrt", "exp", "tanh", "sigmoid", "silu", "gelu", "relu", "erf",
        "softplus",
    ),
    _matrix: ("linear",),
    _conv1d: ("addmm",),
    _softmax: ("softmax",),
    _layer_norm: ("layer_norm",),
    _attention: ("scaled_dot_product_attention",),
    _dropout: ("dropout",),
}  # fmt: skip
"""Each rule, and the names of the functions that it differentiates: a model may mean any of those so called."""
HOMES = torch.Tensor, torch, f
Dual.rules.update(
    {getattr(home, n): rule for rule, names in RULES.items() for n in names for home in HOMES if hasattr(home, n)}
)
Dual.rules.update({getattr(torch.Tensor, name).__get__: _fixed for name in FIXED})
