"""Gradients of the two matrices that are as large as the vocabulary, in slices of its entries.

Of the output layer z = W h + b, with π = softmax(z/τ), row v of Σ_k w_k ∇_W log π(y_k) is Σ_k w_k (1[v = y_k] − π_kv)
h_k/τ; of the input embedding it is the sum of the signals at the positions that read v. A tied matrix has both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups.blocks import BlockStructure

SLICE_BYTES = 1 << 27
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

    def read(self, ids: Sequence[Tensor], signals: Sequence[Tensor], embedding: nn.Embedding) -> None:
        """Note what each pass read [n, ℓ], and the signals there [r, n, ℓ, d]; a padding entry has no gradient."""
        self.ids = torch.cat([x.flatten() for x in ids])
        self.embedded = torch.cat([x.flatten(1, -2) for x in signals], 1)
        if embedding.padding_idx is not None:
            self.embedded[:, self.ids == embedding.padding_idx] = 0


def vocabulary_gradients(
    structure: BlockStructure, ends: Sequence[Ends], temperature: float
) -> Iterator[tuple[str, Tensor]]:
    """Gradients [R, n] of the vocabulary's matrices in scope, a slice at a time."""
    embedding, head = structure.embedding, structure.head
    tied = embedding is not None and head is not None and structure.ends[0] == structure.ends[1]
    if head is not None:
        every = torch.arange(len(head.weight), device=head.weight.device)
        # Normalisers in float64, as the slices take the logits: 1 − π_y must survive π_y → 1. Slice by slice, since all
        # logits in float64 would be [K, V] for every prompt.
        for end in ends:
            end.lse = end.targets.new_full((len(end.targets),), -torch.inf, dtype=torch.float64)
        for entries in _slices(every, head.weight, ends):
            for end in ends:
                end.lse = torch.logaddexp(end.lse, (_logits(head, end, entries) / temperature).logsumexp(-1))
        for entries in _slices(every, head.weight, ends):
            gradients = _zeros(head.weight, ends, entries)
            _add_of_output(gradients, head, ends, entries, temperature)
            if tied:
                _add_of_input(gradients, ends, entries)
            yield structure.ends[1] or "", gradients.flatten(1)
    if embedding is not None and not tied:
        for entries in _slices(torch.cat([end.ids for end in ends]).unique(), embedding.weight, ends):
            gradients = _zeros(embedding.weight, ends, entries)
            _add_of_input(gradients, ends, entries)
            yield structure.ends[0] or "", gradients.flatten(1)


def _zeros(weight: Tensor, ends: Sequence[Ends], entries: Tensor) -> Tensor:
    """Room for the gradients of all rows on some entries [R, |entries|, d]: the largest array, so formed in place."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    return weight.new_zeros(sum(len(end.rows) for end in ends), len(entries), weight.shape[1], dtype=kind)


def _slices(entries: Tensor, weight: Tensor, ends: Sequence[Ends]) -> Iterator[Tensor]:
    rows = sum(len(end.rows) for end in ends)
    row_bytes = max(4, weight.element_size()) * weight.shape[1] * max(rows, 1)
    each = max(row_bytes, LOGITS * max((len(end.targets) for end in ends), default=1))
    return iter(entries.split(max(1, SLICE_BYTES // each)))


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


def _add_of_input(gradients: Tensor, ends: Sequence[Ends], entries: Tensor) -> None:
    """Add the sums of the signals at the positions that read some entries to [R, |entries|, d]."""
    start = 0
    for end in ends:
        at = torch.searchsorted(entries, end.ids).clamp(max=len(entries) - 1)  # entries increase
        here = entries[at] == end.ids
        rows = gradients[start : start + len(end.rows)]
        # A token that is read more than once gets the sum of its signals.
        rows.index_add_(1, at[here], end.embedded[:, here].to(gradients.dtype))
        start += len(end.rows)
