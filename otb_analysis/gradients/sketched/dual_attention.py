"""Attention with many tangents at once, in blocks of queries that read only the keys they may see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from otb_analysis.gradients.exact.attention import AttentionCall, block_scores, query_blocks


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
    # A row sum as one more column of the product: no second pass over [k, H, b, keys].
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
        product = block[0] @ columns[:, : block.shape[-1]]
        moved[..., rows, :] += product.unflatten(-1, (k, width)).permute(2, 0, 1, 3)
