"""Gradients of the two matrices that are as large as the vocabulary, in slices of its entries.

Of the output layer z = W h + b, with π = softmax(z/τ), row v of Σ_k w_k ∇_W log π(y_k) is Σ_k w_k (1[v = y_k] − π_kv)
h_k/τ; of the input embedding it is the sum of the signals at the positions that read v. A tied matrix has both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups.blocks import Anatomy

SLICE_BYTES = 1 << 27
"""What the gradients of one slice may occupy, all rows together."""
LOGITS = 32
"""Bytes that an entry takes at each sampled token: its logit in float64, and what becomes of it."""
CHECKED = 4
"""Sampled tokens whose log-probabilities must follow from the output layer's inputs."""


@dataclass
class Ends:
    """What a prompt's gradients of the vocabulary's matrices follow from.

    Attributes:
        rows: Rows of weights [r, K].
        targets: The sampled tokens [K].
        hidden: Inputs of the output layer [K, d], None where its weight is not in scope.
        ids: Token ids that the embedding read, flat.
        embedded: Signals at the embedding's output [r, |ids|, d].
        lse: log Σ_v exp(z_v/τ) of each sampled token [K], float64.
    """

    rows: Tensor
    targets: Tensor
    hidden: Tensor | None
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    embedded: Tensor = field(default_factory=lambda: torch.zeros(0))
    lse: Tensor = field(default_factory=lambda: torch.zeros(0))

    def check(self, head: nn.Linear | None, logprob: Tensor, temperature: float) -> None:
        """Refuse a model that scales or caps the output layer's logits.

        Raises:
            UnfitError: Log-probabilities do not follow from the output layer alone.
        """
        if head is None or self.hidden is None:
            return
        with torch.no_grad():
            z = head(self.hidden[:CHECKED]).float() / temperature
        found = z.log_softmax(-1).gather(-1, self.targets[:CHECKED, None])[:, 0]
        coarse = self.hidden.dtype.itemsize < 4
        if not torch.allclose(found, logprob[:CHECKED].float(), rtol=0, atol=0.2 if coarse else 1e-3):
            raise UnfitError("its logits are not what its output layer returns")

    def read(self, ids: Tensor, signals: Tensor, embedding: nn.Embedding | None) -> None:
        """Note the signals [r, *ids, d] at the embedding's output; a padding entry has no gradient."""
        self.ids = ids.flatten()
        self.embedded = signals.reshape(len(signals), len(self.ids), signals.shape[-1])
        if embedding is not None and embedding.padding_idx is not None:
            self.embedded[:, self.ids == embedding.padding_idx] = 0


def vocabulary_gradients(anatomy: Anatomy, ends: Sequence[Ends], temperature: float) -> Iterator[tuple[str, Tensor]]:
    """Gradients [R, n] of the vocabulary's matrices in scope, a slice at a time.

    Args:
        anatomy: The model.
        ends: What each prompt's follow from.
        temperature: τ.
    """
    embedding, head = anatomy.embedding, anatomy.head
    tied = embedding is not None and head is not None and anatomy.ends[0] == anatomy.ends[1]
    if head is not None:
        _normalise(head, ends, temperature)
        for entries in _slices(torch.arange(len(head.weight), device=head.weight.device), head.weight, ends):
            found = _zeros(head.weight, ends, entries)
            _add_of_output(found, head, ends, entries, temperature)
            if tied:
                _add_of_input(found, ends, entries)
            yield anatomy.ends[1] or "", found.flatten(1)
    if embedding is not None and not tied:
        read = torch.cat([own.ids for own in ends]).unique() if ends else torch.zeros(0, dtype=torch.long)
        for entries in _slices(read, embedding.weight, ends):
            found = _zeros(embedding.weight, ends, entries)
            _add_of_input(found, ends, entries)
            yield anatomy.ends[0] or "", found.flatten(1)


def _zeros(weight: Tensor, ends: Sequence[Ends], entries: Tensor) -> Tensor:
    """Room for the gradients of all rows on some entries [R, |entries|, d]: the largest array, so formed in place."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    return weight.new_zeros(sum(len(own.rows) for own in ends), len(entries), weight.shape[1], dtype=kind)


def _slices(entries: Tensor, weight: Tensor, ends: Sequence[Ends]) -> Iterator[Tensor]:
    rows = sum(len(own.rows) for own in ends)
    gradients = max(4, weight.element_size()) * weight.shape[1] * max(rows, 1)
    each = max(gradients, LOGITS * max((len(own.targets) for own in ends), default=1))
    return iter(entries.split(max(1, SLICE_BYTES // each)))


@torch.no_grad()
def _normalise(head: nn.Linear, ends: Sequence[Ends], temperature: float) -> None:
    """Take the logits' normalisers in float64, as the slices take the logits: 1 − π_y must survive π_y → 1."""
    for own in ends:
        own.lse = own.targets.new_full((len(own.targets),), -torch.inf, dtype=torch.float64)
    for entries in _slices(torch.arange(len(head.weight), device=head.weight.device), head.weight, ends):
        for own in ends:
            part = torch.logsumexp(_logits(head, own, entries) / temperature, dim=-1)
            own.lse = torch.logaddexp(own.lse, part)


def _logits(head: nn.Linear, own: Ends, entries: Tensor) -> Tensor:
    """Logits of some entries of the vocabulary [K, |entries|], float64."""
    assert own.hidden is not None
    bias = 0.0 if head.bias is None else head.bias[entries].double()
    return own.hidden.double() @ head.weight[entries].double().T + bias


@torch.no_grad()
def _add_of_output(found: Tensor, head: nn.Linear, ends: Sequence[Ends], entries: Tensor, temperature: float) -> None:
    """Add Σ_k w_k δ_k ⊗ h_k of every row on some entries to [R, |entries|, d]."""
    start = 0
    for own in ends:
        assert own.hidden is not None
        delta = -(_logits(head, own, entries) / temperature - own.lse[:, None]).exp()
        drawn = own.targets[:, None] == entries
        delta = ((delta + drawn) / temperature).to(found.dtype)
        hidden = own.hidden.to(found.dtype)
        for row in own.rows.to(found.dtype):
            found[start].addmm_((delta * row[:, None]).T, hidden)
            start += 1


def _add_of_input(found: Tensor, ends: Sequence[Ends], entries: Tensor) -> None:
    """Add the sums of the signals at the positions that read some entries to [R, |entries|, d]."""
    start = 0
    for own in ends:
        at = torch.searchsorted(entries, own.ids).clamp(max=len(entries) - 1)  # entries increase
        here = entries[at] == own.ids
        rows = found[start : start + len(own.rows)]
        rows.index_add_(1, at[here], own.embedded[:, here].to(found.dtype))
        start += len(own.rows)
