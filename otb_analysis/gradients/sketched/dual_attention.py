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


@dataclass(frozen=True)
class Weights:
    """What attention computes without tangents.

    Attributes:
        blocks: P by blocks of queries [1, H, b, keys].
        slopes: scale·P, likewise.
        output: o [1, H, T, d].
    """

    blocks: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]
    output: Tensor


def attention_weights(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Weights:
    """O = Pv, P = softmax(scale·qkᵀ + bias).

    Args:
        query: Queries [1, H, T, d].
        key: Keys, with as many heads as the queries.
        value: Values, likewise.
        bias: What is added to the scores, broadcastable to [1, H, T, T], or None.
        causal: Whether each query sees the keys up to its own position only.
        scale: Factor of the scores.
    """
    length, blocks, outputs = query.shape[-2], [], []
    for start in range(0, length, QUERIES):
        rows = slice(start, min(start + QUERIES, length))
        keys = slice(0, rows.stop if causal else key.shape[-2])
        scores = (query[..., rows, :] @ key[..., keys, :].mT).mul_(scale)
        if causal:
            future = torch.ones(rows.stop - start, rows.stop - start, dtype=torch.bool, device=scores.device).triu(1)
            scores[..., start:].masked_fill_(future, -torch.inf)
        if bias is not None:
            scores = scores + bias[..., rows if bias.shape[-2] > 1 else slice(None), keys]
        blocks.append(scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(scores.dtype))
        outputs.append(blocks[-1] @ value[..., keys, :])
    return Weights(tuple(blocks), tuple(b * scale for b in blocks), torch.cat(outputs, -2))


def attention_tangent(query: Moving, key: Moving, value: Moving, weights: Weights) -> Tensor:
    """Derivative of attention along k directions [k, H, T, d].

    ȯ = (P∘Ṡ)v − rowsum(P∘Ṡ)·o + Pv̇,  Ṡ = scale·(q̇kᵀ + qk̇ᵀ).

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        weights: P and o.
    """
    k = next(len(x.tangent) for x in (query, key, value) if x.tangent is not None)
    output = weights.output
    moved = output.new_zeros(k, *output.shape[1:])
    if query.tangent is not None or key.tangent is not None:
        _through_scores(moved, _paired(query, key, k), value.primal, weights)
    if value.tangent is not None:
        _through_values(moved, value.tangent, weights)
    return moved


def _paired(query: Moving, key: Moving, k: int) -> tuple[Tensor, Tensor]:
    """[q̇, q] and [k, k̇], whose one product is Ṡ/scale; a fixed operand leaves one term."""
    left, right = [], []
    if query.tangent is not None:
        left.append(query.tangent)
        right.append(key.primal.expand(k, *key.primal.shape[1:]))
    if key.tangent is not None:
        left.append(query.primal.expand(k, *query.primal.shape[1:]))
        right.append(key.tangent)
    return torch.cat(left, -1), torch.cat(right, -1)


def _through_scores(moved: Tensor, pair: tuple[Tensor, Tensor], value: Tensor, weights: Weights) -> None:
    """Write the part of the tangents that moves the weights; a column of ones gives rowsum(P∘Ṡ) with the product."""
    left, right = pair
    ones = value.new_ones(*value.shape[:-1], 1)
    summed = torch.cat([value, ones], -1).expand(len(moved), *value.shape[1:-1], -1).contiguous()
    start = 0
    for block in weights.slopes:
        rows, keys = slice(start, start := start + block.shape[-2]), slice(0, block.shape[-1])
        turned = (left[..., rows, :] @ right[..., keys, :].mT).mul_(block)
        through = turned @ summed[..., keys, :]
        torch.addcmul(
            through[..., :-1], through[..., -1:], weights.output[..., rows, :], value=-1, out=moved[..., rows, :]
        )


def _through_values(moved: Tensor, tangent: Tensor, weights: Weights) -> None:
    """Add Pv̇, one product per head for all directions."""
    k, heads, length, width = tangent.shape
    columns = tangent.permute(1, 2, 0, 3).reshape(heads, length, k * width)
    start = 0
    for block in weights.blocks:
        rows = slice(start, start := start + block.shape[-2])
        found = block[0] @ columns[:, : block.shape[-1]]
        moved[..., rows, :] += found.unflatten(-1, (k, width)).permute(2, 0, 1, 3)
