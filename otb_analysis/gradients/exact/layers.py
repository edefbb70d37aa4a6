"""How a layer's inputs and the backward signal at its output give its parameters' gradient, one rule per layer type.

Below the last attention the signal δ of one token reaches every earlier position, and a rule turns it into
*coordinates*: numbers that depend linearly on δ and have the gradient's inner products, but are fewer than its entries.
Above it a token signals at its own position only, so its gradient is one outer product, left ⊗ right. A matrix's
gradient is never formed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from transformers.pytorch_utils import Conv1D

from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.kernels import Experts, InnerMatrix, InnerVector, SummedExperts


class UnfitError(InputError):
    """An engine has no rule for something in this model; the sentence says for what, and what to do."""


@dataclass(frozen=True)
class Rule:
    """How one parameter of one layer type is differentiated."""

    # (module, input [1, T, ...]) → what is kept of the inputs of a whole rollout
    prepare: Callable[[nn.Module, Tensor], Any]
    # (kept, δ [C, b, ...]) → coordinates [C, ...] of C gradients for a prefix of b ≤ T positions; along the first
    # coordinate axis they are nested in the prefix
    coordinates: Callable[[Any, Tensor], Tensor]
    # (module, inputs [K, ...], δ [K, ...]) → (left [K, a], right [K, b]) of K tokens that signal at one position each
    outer: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def rule_for(module: nn.Module, leaf: str) -> Rule | None:
    """Return the rule for the parameter `leaf` of a module, or None if the table has none.

    A subclass counts as its parent only where it computes the same function.
    """
    forward, name = type(module).forward, type(module).__name__
    if isinstance(module, Experts | InnerVector):
        return INNER_VECTOR if isinstance(module, InnerVector) else {"weight": EXPERTS, "bias": EXPERTS_BIAS}[leaf]
    if forward in (nn.Linear.forward, Conv1D.forward, InnerMatrix.forward) or name == "FalconLinear":
        return {"weight": MATRIX, "bias": BIAS}.get(leaf)
    scaled = name.endswith("ScaledWordEmbedding") and isinstance(getattr(module, "embed_scale", None), Tensor | float)
    if isinstance(module, nn.Embedding) and (forward is nn.Embedding.forward or scaled):
        return None if leaf != "weight" or module.max_norm or module.scale_grad_by_freq else EMBEDDING
    if name.endswith("LearnedPositionalEmbedding"):
        return POSITIONS
    if name == "DoraLinearLayer":
        return MAGNITUDE
    if forward is nn.LayerNorm.forward or name.endswith(("RMSNorm", "LayerNorm", "LayerNorm1P")):
        return {(1, "weight"): SCALE, (1, "bias"): BIAS, (2, "weight"): SCALE_BY_HEAD}.get(
            (getattr(module, leaf).ndim, leaf)
        )
    return None


def wide(values: Tensor) -> Tensor:
    """The same values in float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
    right = wide(signal).flatten(1, -2).sum(1) if signal.ndim > 2 else wide(signal)
    return torch.ones_like(right[:, :1]), right


def _scale_coordinates(normalised: Tensor, signal: Tensor) -> Tensor:
    return (normalised[: signal.shape[1]] * wide(signal)).flatten(1, -2).sum(1)


def pull_back(source: Tensor, targets: list[Tensor], seeds: Tensor) -> tuple[Tensor, ...]:
    """Backward signals at `targets` for many seeds at `source`: seeds [C, *source] → one [C, *target] per target.

    Raises:
        UnfitError: An operation of the model has no rule for many signals at once.
    """
    one = partial(torch.autograd.grad, source, targets, retain_graph=True, materialize_grads=True)
    # Not `is_grads_batched`, which is an older vmap whose results are wrong where a hook looks at them.
    try:
        return vmap(one)(seeds)
    except torch.OutOfMemoryError:  # a RuntimeError too, but no fault of the model's
        raise
    except RuntimeError as error:  # how torch says that an operation cannot be batched
        why = str(error).split(". ")[0].splitlines()[0]
        raise UnfitError(
            f'the model has an operation without a batched backward pass ({why}); pass engine="reference".'
        ) from error


def row_factors(module: nn.Module, ids: Tensor) -> Tensor:
    """What an embedding multiplies each token's row by, as far as it is trained: Gemma's scale; 0 at the padding id."""
    ignored, scale = getattr(module, "padding_idx", None), getattr(module, "embed_scale", None)
    trained = torch.ones(ids.shape, device=ids.device) if ignored is None else (ids != ignored).float()
    # The layer multiplies by its scale as rounded to the dtype of its weight.
    return trained if scale is None else trained * torch.as_tensor(scale).to(next(module.parameters()).dtype)


def _embedding_coordinates(rows: Tensor, signal: Tensor) -> Tensor:
    """One row for each distinct token of the whole rollout: they are shared by all its prefixes."""
    index, factors = rows[:, : signal.shape[1]]
    # Rows of the whole rollout, also for a prefix: then coordinates of different prefixes add up.
    out = wide(signal).new_zeros(len(signal), int(rows[0].max()) + 1, signal.shape[-1])
    return out.index_add_(1, index.long(), wide(signal) * factors.to(out)[:, None])


def _no_outer(module: nn.Module, _inputs: Tensor, _signal: Tensor) -> tuple[Tensor, Tensor]:
    raise UnfitError(f'a {type(module).__name__} behind the last attention has no rule; pass engine="reference".')


def _expert_rule(bias: bool) -> Rule:
    """Of each expert's matrix the gradient is Aᵀδ over the tokens given to it; a bias is a weight on an input of 1."""

    def prepare(module: Any, inputs: Tensor) -> tuple[int, list[tuple[Tensor, ...]], Tensor]:
        x, factor, ids = module.unpacked(inputs[0])
        x = wide(factor if bias else x)
        rows, flat, choices = x.flatten(0, 1), ids.flatten(), ids.shape[-1]
        slots = [(flat == expert).nonzero()[:, 0] for expert in flat.unique()]
        triangles = [torch.linalg.qr(rows[at // (choices // x.shape[1])].T, mode="r").R for at in slots]
        # A coordinate lies where the token does that brought it, so that those of a prefix come first.
        places = torch.cat([at[: len(r)] for at, r in zip(slots, triangles, strict=True)]).sort().values
        at_signal = [at // choices if isinstance(module, SummedExperts) else at for at in slots]
        kept = zip(slots, at_signal, triangles, (torch.searchsorted(places, at) for at in slots), strict=True)
        return choices, list(kept), places

    def coordinates(kept: tuple[int, list[tuple[Tensor, ...]], Tensor], signal: Tensor) -> Tensor:
        choices, experts, places = kept
        end, flat = signal.shape[1] * choices, wide(signal).flatten(1, -2)
        out = flat.new_zeros(len(flat), int((places < end).sum()), flat.shape[-1])
        for slots, at, triangle, place in experts:
            if seen := int((slots < end).sum()):
                rows = min(seen, len(triangle))
                out[:, place[:rows]] = triangle[:rows, :seen] @ flat[:, at[:seen]]
        return out

    def outer(module: Any, inputs: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        x, factor, ids = module.unpacked(inputs)
        x = wide(factor if bias else x)
        index = ids.unique(return_inverse=True)[1]
        summed = isinstance(module, SummedExperts)
        # What differs between a token's experts stands at the place of each: its inputs, or its signals.
        differing = x if summed else wide(signal)
        spread = differing.new_zeros(len(differing), int(index.max()) + 1, differing.shape[-1])
        spread = spread.scatter(1, index[..., None].expand_as(differing), differing).flatten(1)
        return (spread, wide(signal)) if summed else (x[:, 0], spread)

    return Rule(prepare, coordinates, outer)


# R [min(d_in, T), T] of Aᵀ = QR stands for A: for every prefix ‖A_{:b}ᵀδ‖ = ‖R_{:b,:b} δ‖, which is b·d_out numbers
# instead of d_in·d_out.
MATRIX = Rule(
    prepare=lambda _module, inputs: torch.linalg.qr(wide(inputs[0]).T, mode="r").R,
    coordinates=lambda triangle, signal: triangle[: signal.shape[1], : signal.shape[1]] @ wide(signal),
    outer=lambda _module, inputs, signal: (wide(inputs), wide(signal)),
)
BIAS = Rule(
    prepare=lambda _module, inputs: inputs[0],
    coordinates=lambda _kept, signal: wide(signal).flatten(1, -2).sum(1),
    outer=_bias_outer,
)
SCALE = Rule(
    prepare=lambda module, inputs: _normalised(module, inputs)[0],
    coordinates=_scale_coordinates,
    outer=lambda module, inputs, signal: _bias_outer(module, inputs, _normalised(module, inputs) * signal),
)
HEADED_SCALE = replace(
    SCALE,
    prepare=lambda module, inputs: _normalised(module, inputs)[0].transpose(0, 1),
    coordinates=lambda normalised, signal: _scale_coordinates(normalised, signal.transpose(1, 2)),
)
"""A scale on inputs with heads before positions, [1, heads, T, ...]: Gemma 3's norms of query and key."""
SCALES = (SCALE, HEADED_SCALE)
HEADED_MATRIX = replace(
    MATRIX,
    prepare=lambda module, inputs: MATRIX.prepare(module, inputs[:, 0]),
    coordinates=lambda triangle, signal: MATRIX.coordinates(triangle, signal[:, 0]),
)
"""A matrix on inputs with the axis of a single head before positions, [1, 1, T, d]: DeepSeek's compressed keys."""
SCALE_BY_HEAD = Rule(
    prepare=lambda module, inputs: _normalised(module, inputs)[0].flatten(-2),
    coordinates=lambda normalised, signal: _scale_coordinates(normalised, signal.flatten(-2)),
    outer=lambda module, inputs, signal: _bias_outer(
        module, inputs, (_normalised(module, inputs) * signal).flatten(-2)
    ),
)
"""A scale that differs between heads [h, d], on inputs [1, T, h, d]: Cohere's norms of query and key."""
MAGNITUDE = Rule(
    prepare=lambda _module, slope: slope[0],
    coordinates=_scale_coordinates,
    outer=lambda module, slope, signal: _bias_outer(module, slope, wide(slope) * signal),
)
"""DoRA's lengths of a matrix' rows; what stands for the layer's inputs is ∂output/∂length, see `plan.traced`."""
EMBEDDING = Rule(
    # Each position's index among the rollout's distinct tokens, and its factor [2, T]; float64 holds both exactly.
    prepare=lambda module, ids: torch.stack(
        [ids[0].unique(return_inverse=True)[1].double(), row_factors(module, ids[0]).double()]
    ),
    coordinates=_embedding_coordinates,
    outer=_no_outer,
)
POSITIONS = Rule(lambda _module, _inputs: None, lambda _kept, signal: wide(signal), _no_outer)
"""A table with a row for each position: a signal is the row's gradient."""
INNER_VECTOR = replace(POSITIONS, coordinates=lambda _kept, signal: wide(signal)[:, None])
"""A short vector, whose gradient is formed: attention sinks."""
EXPERTS, EXPERTS_BIAS = _expert_rule(bias=False), _expert_rule(bias=True)
"""Matrices of routed experts, and their biases."""
BELOW_ONLY = (EMBEDDING, POSITIONS, INNER_VECTOR, HEADED_SCALE, HEADED_MATRIX)
"""Rules without an outer product, and one with its positions on another axis."""
