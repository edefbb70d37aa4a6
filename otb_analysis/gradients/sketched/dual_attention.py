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
    pairs = [(query.tangent, key.primal.expand(k, -1, -1, -1)), (query.primal.expand(k, -1, -1, -1), key.tangent)]
    # Side by side, the two terms of Ṡ are one product; a fixed operand leaves one of them.
    kept = [(left, right) for left, right in pairs if left is not None and right is not None]
    left, right = (torch.cat(side, -1) for side in zip(*kept, strict=True)) if kept else (None, None)
    moved, start = weights.output.new_zeros(k, *weights.output.shape[1:]), 0
    for p, slope in zip(weights.blocks, weights.slopes, strict=True):
        rows, keys = slice(start, start := start + p.shape[-2]), slice(0, p.shape[-1])
        if left is not None and right is not None:
            turned = (left[..., rows, :] @ right[..., keys, :].mT).mul_(slope)
            through = turned @ value.primal[..., keys, :]
            moved[..., rows, :] = through.addcmul_(turned.sum(-1, keepdim=True), weights.output[..., rows, :], value=-1)
        if value.tangent is not None:
            # One product per head for all directions.
            columns = value.tangent[..., keys, :].permute(1, 2, 0, 3).flatten(2)
            moved[..., rows, :] += (p[0] @ columns).unflatten(-1, (k, -1)).permute(2, 0, 1, 3)
    return moved
