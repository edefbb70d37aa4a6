"""How a layer's output moves along directions of its own parameters, one rule per parameter, added in place.

A direction D = u vᵀ of a matrix moves the output by (v·x)u, one of a bias by D itself, one of a norm's scale by the
normalised input times D, and one of an embedding by u[id]·v.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otb_analysis.gradients.exact.layers import BIAS, EMBEDDING, HEADED_SCALE, MATRIX, SCALE, Rule, row_factors, wide
from otb_analysis.gradients.exact.plan import ParameterUse

Signs = dict[str, tuple[Tensor, ...]]
"""By parameter one vector of signs per axis for k directions, ([k, n_0], [k, n_1], …)."""
Sides = tuple[Tensor, Tensor]
"""Signs of k directions on a layer's input side and on its output side, [k, a] and [k, b]."""


@dataclass(frozen=True)
class Norm:
    """What a normalisation does to one text."""

    normal: Tensor  # The normalised input x̂ before scale and bias [1, T, ...]
    # ẏ = gain∘(ẋ − x̂·mean(x̂∘ẋ)) [1, T, ...], for an RMSNorm; None leaves the derivative to the operations
    gain: Tensor | None


def sides(use: ParameterUse, signs: Signs, module: nn.Module) -> Sides:
    """Signs of a use's parameter in the order of its gradient's outer product."""
    axes = signs[use.parameter]
    if len(axes) == 1:
        return torch.ones_like(axes[0][:, :1]), axes[0]
    transposed = use.rule is MATRIX and not isinstance(module, nn.Linear)  # Conv1D keeps [in, out]
    return (axes[0], axes[1]) if transposed else (axes[1], axes[0])


@torch.no_grad()
def norm_of(module: nn.Module, inputs: Tensor) -> Norm:
    """What a layer with a scale makes of a text's inputs [1, T, ...], in the inputs' own layout.

    With x̂ = x·r and y = w∘x̂ the gain is w∘r, r = x̂·x/x·x; whether the layer is of this kind is tried out.
    """
    x, normal = wide(inputs), SCALE.prepare(module, inputs)[None]
    rate = (normal * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    weight = wide(module.get_parameter("weight"))
    simple = torch.allclose(x * rate, normal, rtol=1e-2, atol=1e-4)
    plain = torch.allclose(wide(module(inputs)), weight * normal, rtol=1e-2, atol=1e-4)
    return Norm(normal.to(inputs), (weight * rate).to(inputs) if simple and plain else None)


def rms_tangent(norm: Norm, tangent: Tensor) -> Tensor:
    """Tangents [k, T, ...] behind an RMSNorm."""
    along = (tangent * norm.normal).mean(-1, keepdim=True)
    assert norm.gain is not None
    return torch.addcmul(tangent, along, norm.normal, value=-1).mul_(norm.gain)


def _matrix(total: Tensor, _module: nn.Module, inputs: Tensor, along: Sides) -> None:
    inner, outer = along
    total.addcmul_((inner.to(inputs) @ inputs[0].T)[:, :, None], outer.to(inputs)[:, None, :])


def _scale(total: Tensor, _module: nn.Module, normal: Tensor, along: Sides) -> None:
    total.addcmul_(normal, _last(along[1], total))


def _embedding(total: Tensor, module: nn.Module, ids: Tensor, along: Sides) -> None:
    inner, outer = (side.to(total) for side in along)
    rows = outer[:, ids[0]] * row_factors(module, ids[0]).to(outer)
    total.addcmul_(rows[:, :, None], inner[:, None, :])


def embedding_tangent(module: nn.Module, ids: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Tangents [k, T, d] of an embedding whose rows of a text's distinct tokens move by `rows` [k, U, d]."""
    index = ids[0].unique(return_inverse=True)[1]
    return rows[:, index].to(like) * row_factors(module, ids[0]).to(like)[:, None]


def _last(signs: Tensor, like: Tensor) -> Tensor:
    return signs.to(like).reshape(len(signs), *[1] * (like.ndim - 2), -1)


TANGENT_RULES: dict[Rule, Callable[[Tensor, nn.Module, Tensor, Sides], object]] = {
    MATRIX: _matrix,
    BIAS: lambda total, _module, _inputs, along: total.add_(_last(along[1], total)),
    SCALE: _scale,
    HEADED_SCALE: _scale,
    EMBEDDING: _embedding,
}
"""By a parameter's rule: (tangents [k, T, ...] to add to, module, input [1, T, ...] or x̂ for a scale, signs)."""
