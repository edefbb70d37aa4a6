"""Attention with many tangents at once, in blocks of queries that read only the keys they may see."""

from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES = 64
"""Queries of one block: later keys are skipped, and the block's weights for a few directions stay in cache."""


@dataclass(frozen=True)
class Moving:
    """One operand of attention: its activation [1, H, T, d] and its tangents [k, H, T, d], None where it is fixed."""

    primal: Tensor
    tangent: Tensor | None


def attention_tangent(
    query: Moving, key: Moving, value: Moving, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention and its derivative along k directions.

    o = Pv, P = softmax(S), S = scale·qkᵀ + bias;  ȯ = (P∘Ṡ)v − rowsum(P∘Ṡ)·o + Pv̇, Ṡ = scale·(q̇kᵀ + qk̇ᵀ).

    Args:
        query: Queries.
        key: Keys, with as many heads as the queries.
        value: Values, likewise.
        bias: What is added to the scores, broadcastable to [1, H, T, T], or None.
        causal: Whether each query sees the keys up to its own position only.
        scale: Factor of the scores.

    Returns:
        Output [1, H, T, d] and its tangents [k, H, T, d].
    """
    length = query.primal.shape[-2]
    parts = []
    for start in range(0, length, QUERIES):
        rows = slice(start, min(start + QUERIES, length))
        keys = slice(0, rows.stop if causal else key.primal.shape[-2])
        added = None if bias is None else bias[..., rows if bias.shape[-2] > 1 else slice(None), keys]
        parts.append(_block(_cut(query, rows), _cut(key, keys), _cut(value, keys), added, causal, scale))
    return torch.cat([p[0] for p in parts], -2), torch.cat([p[1] for p in parts], -2)


def _cut(x: Moving, at: slice) -> Moving:
    return Moving(x.primal[..., at, :], None if x.tangent is None else x.tangent[..., at, :])


def _block(
    query: Moving, key: Moving, value: Moving, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = (query.primal @ key.primal.mT).mul_(scale)
    if causal:
        rows, seen = scores.shape[-2:]
        future = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., seen - rows :].masked_fill_(future, -torch.inf)
    if bias is not None:
        scores = scores + bias
    weights = scores.float().softmax(-1).to(scores.dtype) if scores.element_size() < 4 else scores.softmax(-1)
    output = weights @ value.primal
    moved = None if value.tangent is None else weights @ value.tangent
    turned = _scores_tangent(query, key)
    if turned is not None:
        turned *= weights * scale
        through = (turned @ value.primal).addcmul_(turned.sum(-1, keepdim=True), output, value=-1)
        moved = through if moved is None else moved.add_(through)
    return output, torch.zeros_like(output) if moved is None else moved


def _scores_tangent(query: Moving, key: Moving) -> Tensor | None:
    if query.tangent is None or key.tangent is None:
        first = None if query.tangent is None else query.tangent @ key.primal.mT
        return first if key.tangent is None else query.primal @ key.tangent.mT
    # One product over both terms: [q̇, q][k, k̇]ᵀ.
    left = torch.cat([query.tangent, query.primal.expand_as(query.tangent)], -1)
    right = torch.cat([key.primal.expand_as(key.tangent), key.tangent], -1)
    return left @ right.mT
