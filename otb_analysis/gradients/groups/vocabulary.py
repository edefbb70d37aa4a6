"""Gradients of the two matrices that are as large as the vocabulary, in slices of its entries.

Of the output layer z = W h + b, with π = softmax(z/τ), row v of Σ_k w_k ∇_W log π(y_k) is Σ_k w_k (1[v = y_k] − π_kv)
h_k/τ; of the input embedding it is the sum of the signals at the positions that read v. A tied matrix has both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import Layout, model_logits, policy_logits
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.scope import layer_input
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups.blocks import BlockStructure
from otb_analysis.types import Int

ENTRY_BYTES = 1 << 27
"""What the gradients of one slice may occupy, all rows together."""
LOGITS = 32
"""Bytes that an entry takes at each sampled token: its logit in float64, and what becomes of it."""
CHECKED = 4
"""Sampled tokens whose log-probabilities must follow from the output layer's inputs."""


def agree(logits: Tensor, targets: Tensor, logprob: Tensor, temperature: float) -> bool:
    """Tell whether log-probabilities [K] follow from the logits of the first few tokens [k, V], up to rounding."""
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets[: len(logits), None])[:, 0]
    return torch.allclose(expected, logprob[: len(logits)].to(expected), rtol=0, atol=1e-3)


@dataclass
class Ends:
    """What a prompt's gradients of the vocabulary's matrices follow from."""

    rows: Tensor  # Rows of weights [r, K]
    targets: Tensor  # The sampled tokens [K]
    hidden: Tensor | None  # Inputs of the output layer [K, d], None where its weight is not in scope
    # Token ids that the embedding read, flat
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    embedded: Tensor = field(default_factory=lambda: torch.zeros(0))  # Signals at the embedding's output [r, |ids|, d]
    lse: Tensor = field(default_factory=lambda: torch.zeros(0))  # log Σ_v exp(z_v/τ) of each sampled token [K], float64

    def check(self, head: nn.Linear | None, logprob: Tensor, temperature: float) -> None:
        """Raise where a model scales or caps the output layer's logits, so that the closed form would be wrong."""
        if head is None or self.hidden is None:
            return
        with torch.no_grad():
            z = head(self.hidden[:CHECKED])
        if not agree(z, self.targets, logprob, temperature):
            raise UnfitError("its logits are not what its output layer returns")


@dataclass(frozen=True)
class Extent:
    """What gradients are cut into slices by; of several processes together, so that all have the same slices."""

    rows: int  # Gradients that a slice has to hold together
    tokens: int  # Most sampled tokens of a prompt
    ids: Int  # Entries of the embedding that were read, each once, in order

    @classmethod
    def joined(cls, parts: "Sequence[Extent]") -> "Extent":
        """The extent of several processes' prompts, each of which forms the gradients of its own."""
        ids = np.unique(np.concatenate([part.ids for part in parts]))
        return cls(max(part.rows for part in parts), max(part.tokens for part in parts), ids)


def vocabulary_gradients(
    structure: BlockStructure, ends: Sequence[Ends], temperature: float, extent: Extent
) -> Iterator[tuple[str, Tensor]]:
    """Gradients [r, n] of the vocabulary's matrices in scope by these prompts' rows, a slice at a time.

    A slice is valid until the next one is asked for.
    """
    embedding, head = structure.embedding, structure.head
    tied = embedding is not None and head is not None and structure.ends[0] == structure.ends[1]
    count = sum(len(end.rows) for end in ends)
    for layer, name in ((head, structure.ends[1]), (None if tied else embedding, structure.ends[0])):
        if layer is None:
            continue
        weight, entries = layer.weight, torch.arange(len(layer.weight), device=layer.weight.device)
        if layer is embedding:
            entries = torch.from_numpy(extent.ids).to(weight.device)
        each = max(max(4, weight.element_size()) * weight.shape[1] * max(extent.rows, 1), LOGITS * extent.tokens)
        slices = entries.split(max(1, ENTRY_BYTES // each))
        # Normalisers in float64, as the slices take the logits: 1 − π_y must survive π_y → 1. Slice by slice, since all
        # logits in float64 would be [K, V] for every prompt.
        if isinstance(layer, nn.Linear):
            for end in ends:
                end.lse = end.targets.new_full((len(end.targets),), -torch.inf, dtype=torch.float64)
                for some in slices:
                    end.lse = torch.logaddexp(end.lse, (_logits(layer, end, some) / temperature).logsumexp(-1))
        # The largest array [R, |some|, d], so formed in place, in memory that is taken once: fresh pages cost time.
        kind = torch.promote_types(weight.dtype, torch.float32)
        memory = weight.new_empty(count, len(slices[0]), weight.shape[1], dtype=kind)
        for some in slices:
            shape = count, len(some), weight.shape[1]
            gradients = memory.flatten()[: math.prod(shape)].zero_().view(shape)
            if isinstance(layer, nn.Linear):
                _add_of_output(gradients, layer, ends, some, temperature)
            start = 0
            for end in ends if tied or layer is embedding else ():
                at = torch.searchsorted(some, end.ids).clamp(max=len(some) - 1)  # entries increase
                here, rows = some[at] == end.ids, slice(start, start := start + len(end.rows))
                # A token that is read more than once gets the sum of its signals.
                gradients[rows].index_add_(1, at[here], end.embedded[:, here].to(kind))
            yield name or "", gradients.flatten(1)


def _logits(head: nn.Linear, end: Ends, entries: Tensor) -> Tensor:
    """Logits of some entries of the vocabulary [K, |entries|], float64."""
    assert end.hidden is not None
    bias = None if head.bias is None else head.bias.detach()[entries].double()
    return nn.functional.linear(end.hidden.double(), head.weight.detach()[entries].double(), bias)


@torch.no_grad()
def _add_of_output(
    gradients: Tensor, head: nn.Linear, ends: Sequence[Ends], entries: Tensor, temperature: float
) -> None:
    """Add Σ_k w_k δ_k ⊗ h_k of every row on some entries to [R, |entries|, d]."""
    start = 0
    for end in ends:
        assert end.hidden is not None
        delta = -(_logits(head, end, entries) / temperature - end.lse[:, None]).exp()
        drawn = end.targets[:, None] == entries
        # Float64 until here: 1 − π_y of a sure token is far below the rounding of float32.
        delta = ((delta + drawn) / temperature).to(gradients.dtype)
        hidden = end.hidden.to(gradients.dtype)
        for row in end.rows.to(gradients.dtype):
            # Row after row: all rows at once would need [R, K, entries].
            gradients[start].addmm_((delta * row[:, None]).T, hidden)
            start += 1


SLICE_BYTES, LOGIT_BYTES = 1 << 28, 16
"""What a slice of the tokens may occupy, and what a logit does: in float32, and what becomes of it on the way back."""


@dataclass(frozen=True)
class Predictions:
    """Sampled tokens of a pass, and where the signals of rows of weights begin."""

    logprob: Tensor  # log π(y_k) in nats [K]
    output: Tensor  # With its graph [K, ...]: the output layer's input, or log π itself
    slope: Tensor | None  # ∂log π(y_k)/∂output_k [K, ...]; None where it is 1


def predictions(
    batch: ScoreBatch, rollouts: tuple[Rollout, ...], layout: Layout, head: nn.Linear
) -> Predictions | None:
    """Run some rollouts forward, the output layer in slices; None where the model does more to its logits.

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary.
        UnfitError: The output layer does not run once on every position.
    """
    inputs, outputs = list[Tensor](), list[Tensor]()

    def few(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        inputs.append(hidden := layer_input(args, kwargs))
        return (layout.pick(hidden)[None, :CHECKED],), {}

    note = head.register_forward_hook(lambda *call: outputs.append(call[-1]))
    with head.register_forward_pre_hook(few, with_kwargs=True), note:
        logits = model_logits(batch.model, layout)
    if len(inputs) != 1 or inputs[0].ndim != 3:
        raise UnfitError("its output layer does not run once on every position")
    hidden = layout.pick(inputs[0])
    targets = torch.cat([r.ids[r.targets] for r in rollouts])
    slope, logprob = torch.empty_like(hidden), list[Tensor]()
    size = max(1, SLICE_BYTES // (LOGIT_BYTES * len(head.weight)))
    for start in range(0, len(targets), size):
        leaf = hidden[start : start + size].detach().requires_grad_()
        with torch.enable_grad():
            z = policy_logits(head(leaf), rollouts, batch.temperature, first=start)
            values = z.log_softmax(-1).gather(-1, targets[start : start + size, None])[:, 0]
        (slope[start : start + size],) = torch.autograd.grad(values.sum(), leaf)
        logprob.append(values.detach())
    logprobs = torch.cat(logprob)
    # A cap hardly changes small logits, but their slopes: what the layer returned must be what the model returns.
    untouched = logits.data_ptr() == outputs[0].data_ptr() and logits.shape == outputs[0].shape
    if not untouched or not agree(logits[0], targets, logprobs, batch.temperature):
        return None
    return Predictions(logprobs, hidden, slope)
