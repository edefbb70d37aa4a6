"""An activation that carries many tangents through a model's own forward pass: forward mode, all directions at once.

Activations are computed once and shared by all directions; a layer's tangents are one matrix product for all of them.
An operation without a rule here raises with its name, so that no tangent is lost on the way.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as f
from torch import Tensor

from otb_analysis.gradients.dual_attention import Moving, attention_tangent
from otb_analysis.gradients.layers import UnfitError


class Dual(torch.Tensor):
    """An activation [1, ...] of one text with its derivatives along k directions [k, ...] as `tangent`."""

    tangent: Tensor
    rules: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operation and its derivative by its rule."""
        rule = cls.rules.get(func)
        if rule is None:
            name = getattr(func, "__qualname__", getattr(func, "__name__", str(func)))
            raise UnfitError(f'the operation {name} has no rule for many directions at once; pass method="gaussian".')
        with torch._C.DisableTorchFunctionSubclass():
            return rule(func, *args, **(kwargs or {}))


def dual(primal: Tensor, tangent: Tensor) -> Dual:
    """Join an activation and its tangents.

    Raises:
        UnfitError: An operation has moved the first axis, on which the directions lie.
    """
    if tangent.shape[1:] != primal.shape[1:]:
        raise UnfitError(
            f"an activation of shape {tuple(primal.shape)} does not keep its text on the first axis; "
            'pass method="gaussian".'
        )
    made = primal.as_subclass(Dual)
    made.tangent = tangent
    return made


def primal_of(x: Any) -> Any:
    """The activation without its tangents."""
    return x.as_subclass(torch.Tensor) if isinstance(x, Dual) else x


def tangent_of(x: Any) -> Tensor | None:
    """The tangents, or None for what does not move."""
    return x.tangent if isinstance(x, Dual) else None


def _fixed(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*map(primal_of, args), **kwargs)


def _linear(func: Any, x: Dual, *args: Any, **kwargs: Any) -> Any:
    """A linear operation that leaves the first axis alone."""
    out, moved = func(primal_of(x), *args, **kwargs), func(x.tangent, *args, **kwargs)
    if isinstance(out, Tensor):
        return dual(out, moved)
    return tuple(dual(o, m) for o, m in zip(out, moved, strict=True))


def _shaped(func: Any, x: Dual, *shape: Any) -> Dual:
    """View, reshape and expand name the length of the first axis: k times as long for the tangents."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    many = (len(x.tangent) * sizes[0] // len(x), *sizes[1:]) if sizes[0] > 0 else sizes
    return dual(func(primal_of(x), *sizes), func(x.tangent, *many))


def _joined(func: Any, parts: Any, dim: int = 0) -> Dual:
    moving = [tangent_of(p) for p in parts]
    k = next(len(t) for t in moving if t is not None)
    filled = [p.new_zeros(k, *p.shape[1:]) if t is None else t for p, t in zip(parts, moving, strict=True)]
    return dual(func([primal_of(p) for p in parts], dim), func(filled, dim))


def _sum(sign: int) -> Callable[..., Dual]:
    def rule(func: Any, x: Any, y: Any) -> Dual:
        out, a, b = func(primal_of(x), primal_of(y)), tangent_of(x), tangent_of(y)
        if a is not None and b is not None:
            return dual(out, torch.add(a, b, alpha=sign))
        moved = a if b is None else b if sign > 0 else -b
        assert moved is not None
        return dual(out, moved.expand(len(moved), *out.shape[1:]))

    return rule


def _product(func: Any, x: Any, y: Any) -> Dual:
    """Any bilinear operation: elementwise and matrix products."""
    a, b, fixed_x, fixed_y = tangent_of(x), tangent_of(y), primal_of(x), primal_of(y)
    left = None if a is None else func(a, fixed_y)
    right = None if b is None else func(fixed_x, b)
    moved = left if right is None else right if left is None else left.add_(right)
    assert moved is not None
    return dual(func(fixed_x, fixed_y), moved)


def _quotient(func: Any, x: Dual, y: Any) -> Dual:
    if isinstance(y, Dual):
        raise UnfitError('a division by an activation has no rule for many directions; pass method="gaussian".')
    return _linear(func, x, y)


def _elementwise(func: Any, x: Dual, *args: Any, **kwargs: Any) -> Dual:
    """A function of each entry; its slope is taken from autograd on the activation alone."""
    with torch.enable_grad():
        leaf = primal_of(x).detach().requires_grad_()
        out = func(leaf, *args, **kwargs)
        (slope,) = torch.autograd.grad(out.sum(), leaf)
    return dual(out.detach(), x.tangent * slope)


def _matrix(func: Any, x: Dual, weight: Tensor, bias: Tensor | None = None) -> Dual:
    return dual(func(primal_of(x), weight, bias), func(x.tangent, weight))


def _conv1d(func: Any, bias: Tensor, x: Dual, weight: Tensor) -> Dual:
    return dual(func(bias, primal_of(x), weight), x.tangent @ weight)


def _softmax(func: Any, x: Dual, *args: Any, **kwargs: Any) -> Dual:
    """ṗ = p∘(ẋ − p·ẋ)."""
    p = func(primal_of(x), *args, **kwargs)
    dim = args[0] if args else kwargs["dim"]
    moved = x.tangent.to(p.dtype) * p
    return dual(p, moved.addcmul_(moved.sum(dim, keepdim=True), p, value=-1))


def _layer_norm(
    func: Any, x: Dual, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Dual:
    """The derivative of x̂ = (x − mean)/σ is (ẋ − mean ẋ − x̂·mean(x̂∘ẋ))/σ."""
    primal = primal_of(x)
    axes = tuple(range(-len(shape), 0))
    normal = func(primal, shape, None, None, eps)
    rate = (primal.var(axes, correction=0, keepdim=True) + eps).rsqrt()
    moved = x.tangent - x.tangent.mean(axes, keepdim=True)
    moved = moved.addcmul_((normal * x.tangent).mean(axes, keepdim=True), normal, value=-1).mul_(rate)
    return dual(func(primal, shape, weight, bias, eps), moved if weight is None else moved * weight)


def _attention(
    _func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Dual:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    operands = []
    for x in (query, key, value):
        repeats = query.shape[1] // x.shape[1] if enable_gqa else 1
        parts = [None if p is None else p.repeat_interleave(repeats, 1) for p in (primal_of(x), tangent_of(x))]
        operands.append(Moving(parts[0], parts[1]))  # type: ignore[arg-type]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return dual(*attention_tangent(*operands, attn_mask, is_causal, factor))


def _dropout(_func: Any, x: Dual, p: float = 0.5, training: bool = True, inplace: bool = False) -> Dual:
    """Nothing: a model whose dropout is active is refused at the door."""
    return x


def _named(*names: str) -> Iterator[Any]:
    """All the functions that a model may mean by a name."""
    for name in names:
        for home in (torch.Tensor, torch, f):
            if hasattr(home, name):
                yield getattr(home, name)


def _getters(*names: str) -> Iterator[Any]:
    for name in names:
        yield getattr(torch.Tensor, name).__get__


def _table() -> dict[Any, Callable[..., Any]]:
    shape_only = (
        "transpose",
        "permute",
        "swapaxes",
        "contiguous",
        "unsqueeze",
        "squeeze",
        "__getitem__",
        "chunk",
        "split",
    )
    rules: dict[Callable[..., Any], Iterator[Any]] = {
        _linear: _named(*shape_only, "to", "float", "type", "type_as", "neg", "__neg__", "mean", "sum"),
        _fixed: _named("size", "dim", "numel", "is_floating_point", "__len__", "is_contiguous"),
        _shaped: _named("view", "reshape", "expand"),
        _joined: _named("cat", "concat"),
        _sum(1): _named("add", "__add__", "__radd__", "__iadd__", "add_"),
        _sum(-1): _named("sub", "__sub__", "__isub__"),
        _product: _named("mul", "__mul__", "__rmul__", "__imul__", "matmul", "__matmul__", "bmm"),
        _quotient: _named("div", "__truediv__", "__itruediv__"),
        _elementwise: _named(
            "pow", "__pow__", "square", "rsqrt", "sqrt", "exp", "tanh", "sigmoid", "silu", "gelu", "relu", "erf",
            "softplus",
        ),
        _matrix: iter([f.linear]),
        _conv1d: _named("addmm"),
        _softmax: _named("softmax"),
        _layer_norm: _named("layer_norm"),
        _attention: _named("scaled_dot_product_attention"),
        _dropout: iter([f.dropout]),
    }  # fmt: skip
    table = {func: rule for rule, funcs in rules.items() for func in funcs}
    getters = _getters("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_nested")
    return table | dict.fromkeys(getters, _fixed)


Dual.rules.update(_table())
