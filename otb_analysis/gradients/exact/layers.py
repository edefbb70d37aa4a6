"""How a layer's inputs and the backward signal at its output give its parameters' gradient, one rule per layer type.

Below the last attention the signal δ of one token reaches every earlier position, and a rule turns it into
*coordinates*: numbers that depend linearly on δ and have the gradient's inner products, but are fewer than its entries.
Above it a token signals at its own position only, so its gradient is one outer product, left ⊗ right. A matrix's
gradient is never formed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from otb_analysis.errors import InputError


class UnfitError(InputError):
    """An engine has no rule for something in this model; the sentence says for what, and what to do."""


@dataclass(frozen=True)
class Rule:
    """How one parameter of one layer type is differentiated."""

    # (module, input [1, T, ...]) → what is kept of the inputs of a whole rollout
    prepare: Callable[[nn.Module, Tensor], Tensor]
    # (kept, δ [C, b, ...]) → coordinates [C, ...] of C gradients for a prefix of b ≤ T positions; along the first
    # coordinate axis they are nested in the prefix
    coordinates: Callable[[Tensor, Tensor], Tensor]
    # (module, inputs [K, ...], δ [K, ...]) → (left [K, a], right [K, b]) of K tokens that signal at one position each
    outer: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def rule_for(module: nn.Module, leaf: str) -> Rule | None:
    """Return the rule for the parameter `leaf` of a module, or None if the table has none.

    A subclass counts as its parent only where it computes the same function.
    """
    forward = type(module).forward
    if forward in (nn.Linear.forward, Conv1D.forward):
        return {"weight": MATRIX, "bias": BIAS}.get(leaf)
    scaled = type(module).__name__.endswith("ScaledWordEmbedding") and isinstance(_scale_of(module), Tensor)
    if isinstance(module, nn.Embedding) and (forward is nn.Embedding.forward or scaled):
        return None if leaf != "weight" or module.max_norm or module.scale_grad_by_freq else EMBEDDING
    if forward is nn.LayerNorm.forward or type(module).__name__.endswith("RMSNorm"):
        parameter = getattr(module, leaf)
        return {"weight": SCALE, "bias": BIAS}.get(leaf) if parameter.ndim == 1 else None
    return None


def wide(values: Tensor) -> Tensor:
    """The same values in float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _summed(signal: Tensor) -> Tensor:
    return signal.flatten(1, -2).sum(1)


def _normalised(module: nn.Module, inputs: Tensor) -> Tensor:
    """∂output/∂weight: the layer is affine in its weight, so output at one minus output at zero, with its own casts."""
    parameters = dict(module.named_parameters())
    zero = {name: torch.zeros_like(p) for name, p in parameters.items()}
    one = zero | {"weight": torch.ones_like(parameters["weight"])}
    # In the difference the bias cancels, and the layer's own casts are included.
    with torch.no_grad():
        return wide(functional_call(module, one, (inputs,)) - functional_call(module, zero, (inputs,)))


def _bias_outer(_module: nn.Module, _inputs: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    # Norms of heads share one parameter: their signals add up.
    right = _summed(wide(signal)) if signal.ndim > 2 else wide(signal)
    return torch.ones_like(right[:, :1]), right


def _scale_outer(module: nn.Module, inputs: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    return _bias_outer(module, inputs, _normalised(module, inputs) * signal)


def _scale_coordinates(normalised: Tensor, signal: Tensor) -> Tensor:
    return _summed(normalised[: signal.shape[1]] * wide(signal))


def row_factors(module: nn.Module, ids: Tensor) -> Tensor:
    """What an embedding multiplies each token's row by, as far as it is trained: Gemma's scale; 0 at the padding id."""
    ignored, scale = getattr(module, "padding_idx", None), _scale_of(module)
    trained = torch.ones(ids.shape, device=ids.device) if ignored is None else (ids != ignored).float()
    # The layer multiplies by its scale as rounded to the dtype of its weight.
    return trained if scale is None else trained * scale.to(next(module.parameters()).dtype)


def _scale_of(module: nn.Module) -> Tensor | None:
    return getattr(module, "embed_scale", None)


def _rows(module: nn.Module, ids: Tensor) -> Tensor:
    """Each position's index among the rollout's distinct tokens, and its factor [2, T]; float64 holds both exactly."""
    index = ids[0].unique(return_inverse=True)[1]
    return torch.stack([index.double(), row_factors(module, ids[0]).double()])


def _embedding_coordinates(rows: Tensor, signal: Tensor) -> Tensor:
    """One row for each distinct token of the whole rollout: they are shared by all its prefixes."""
    index, factors = rows[:, : signal.shape[1]]
    # Rows of the whole rollout, also for a prefix: then coordinates of different prefixes add up.
    out = wide(signal).new_zeros(len(signal), int(rows[0].max()) + 1, signal.shape[-1])
    return out.index_add_(1, index.long(), wide(signal) * factors.to(out)[:, None])


def _embedding_outer(module: nn.Module, _ids: Tensor, _signal: Tensor) -> tuple[Tensor, Tensor]:
    raise UnfitError(f'a {type(module).__name__} behind the last attention has no rule; pass engine="reference".')


# R [min(d_in, T), T] of Aᵀ = QR stands for A: for every prefix ‖A_{:b}ᵀδ‖ = ‖R_{:b,:b} δ‖, which is b·d_out numbers
# instead of d_in·d_out.
MATRIX = Rule(
    prepare=lambda _module, inputs: torch.linalg.qr(wide(inputs[0]).T, mode="r").R,
    coordinates=lambda triangle, signal: triangle[: signal.shape[1], : signal.shape[1]] @ wide(signal),
    outer=lambda _module, inputs, signal: (wide(inputs), wide(signal)),
)
BIAS = Rule(
    prepare=lambda _module, inputs: inputs[0],
    coordinates=lambda _kept, signal: _summed(wide(signal)),
    outer=_bias_outer,
)
SCALE = Rule(
    prepare=lambda module, inputs: _normalised(module, inputs)[0], coordinates=_scale_coordinates, outer=_scale_outer
)
HEADED_SCALE = Rule(
    prepare=lambda module, inputs: _normalised(module, inputs)[0].transpose(0, 1),
    coordinates=lambda normalised, signal: _scale_coordinates(normalised, signal.transpose(1, 2)),
    outer=_scale_outer,
)
"""A scale on inputs with heads before positions, [1, heads, T, ...]: Gemma 3's norms of query and key."""
SCALES = (SCALE, HEADED_SCALE)
EMBEDDING = Rule(_rows, _embedding_coordinates, _embedding_outer)
