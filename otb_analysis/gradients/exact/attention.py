"""Attention whose backward pass takes many signals at once, in tiles, and skips the keys that nobody reads.

Of PyTorch's attention kernels only the plain one lets many signals through, and it then holds several arrays
[signals, heads, positions, positions]. Here the model's own kernel runs forward; backward the probabilities are
computed again for one tile of queries at a time, all signals of the tile go through the four products while they are
in cache, and keys behind a causal mask or outside a sliding window, whose probability is zero, take no part.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from otb_analysis.devices import GRAPH, working_set
from otb_analysis.gradients.batch.forward import Functional, layout_of, sampled_logprobs, scatter
from otb_analysis.gradients.batch.inputs import Rollout, microbatches
from otb_analysis.gradients.batch.kernels import Answered
from otb_analysis.gradients.exact.layers import UnfitError, wide
from otb_analysis.types import Float

TILED_FROM = 128
"""Queries from which the tiles pay: on fewer the plain kernel's backward pass is as fast (twice as slow on 512)."""
TILE_BYTES = 1 << 21
"""What the signals of one tile of queries may occupy at their keys: as much as a core's own cache, on a CPU."""

QUERIES = 64
"""Queries of one block in forward mode: later keys are skipped, and the block's scores stay in cache."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`; the fields are its parameters."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


def query_blocks(length: int, device: torch.device, size: int | None = None) -> Iterator[slice]:
    """Ranges of at most `size` queries, by default `QUERIES`, or `GRAPH` times as many on an accelerator."""
    size = size or working_set(device, QUERIES, GRAPH)
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def block_scores(call: AttentionCall, query: Tensor, key: Tensor, rows: slice) -> Tensor:
    """Scores [..., b, keys] of some queries with the keys that they may see, −∞ where a query does not see a key.

    `query` and `key` are those of the call without derivatives, as many heads of each.
    """
    keys = slice(0, rows.stop if call.is_causal else key.shape[-2])
    scores = (query[..., rows, :] @ key[..., keys, :].mT).mul_(call.factor)
    if call.is_causal:
        # Only the square on the diagonal needs a mask.
        size = rows.stop - rows.start  # keys before the block are seen by all of its queries
        future = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., rows.start :].masked_fill_(future, -torch.inf)
    if call.attn_mask is not None:
        mask = call.attn_mask[..., rows if call.attn_mask.shape[-2] > 1 else slice(None), keys]
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def replaced_attention(attend: Callable[[AttentionCall], Tensor | None]) -> Answered:
    """Inside this context `attend` answers `scaled_dot_product_attention`, or PyTorch's plain form where it is None."""
    original = nn.functional.scaled_dot_product_attention

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        output = attend(AttentionCall(*args, **kwargs))
        if output is not None:
            return output
        with sdpa_kernel(SDPBackend.MATH):
            return original(*args, **kwargs)

    return Answered(original, answer)


def many_signals(queries: int) -> AbstractContextManager[object]:
    """Inside this context attention's backward pass takes many signals at once; the tiled one runs where it pays.

    Calls that `_attend` does not follow (short ones, dropout, a mask that is trained) run in PyTorch's plain form.
    """
    # On few positions watching every call of PyTorch costs more than the attention itself.
    return replaced_attention(_attend) if queries >= TILED_FROM else sdpa_kernel(SDPBackend.MATH)


Reads = tuple[Tensor | None, bool, float]
"""Which query reads which key: an additive mask [h or 1, n, m], whether attention is causal, and the scale."""


def _attend(call: AttentionCall) -> Tensor | None:
    """The attention of some rollouts, or None where this module has no rule."""
    shape, mask = call.query.shape, call.attn_mask
    trained = mask is not None and mask.requires_grad
    if call.dropout_p or trained or len(shape) != 4 or shape[2] < TILED_FROM:
        return None
    operands = call.query, call.key, call.value
    return cast(Tensor, _Attention.apply(*operands, mask, call.is_causal, call.factor, call.enable_gqa))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, mask, causal, scale, grouped):
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        query, key, value, mask, *ctx.options, _ = inputs
        ctx.save_for_backward(query, key, value, mask)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Any, ...]:
        # A function of its own again: under vmap its `vmap` rule gets all signals in one tensor.
        return *_Backward.apply(*signals, *ctx.saved_tensors, *ctx.options), None, None, None, None


class _Backward(torch.autograd.Function):
    """The backward pass as a function of its own, so that `vmap` hands over all signals in one tensor."""

    @staticmethod
    def forward(signal, *others):
        return tuple(x[0] for x in _Backward.vmap(None, (0,), signal[None], *others)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        # Signals [C, N, h, n, e] at the output → [C, N, ...] at query, key and value.
        signal, query, key, value, mask, causal, scale = args
        signals, rollouts = signal.movedim(in_dims[0], 0), []
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)
        if mask is not None:  # of any shape that fits the scores; as [N or 1, h or 1, n, m]
            mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            mask = mask.expand(*mask.shape[:2], signals.shape[-2], key.shape[-2])
        # One rollout at a time: masks differ, and tiles stay small.
        for row in range(signals.shape[1]):
            read = (None if mask is None else mask[row if len(mask) > 1 else 0], causal, scale)
            rollouts.append(_pull_back(signals[:, row], (query[row], key[row], value[row]), read))
        # Signals stay the first axis, as vmap expects.
        return tuple(torch.stack(parts, dim=1) for parts in zip(*rollouts, strict=True)), (0, 0, 0)


def _pull_back(signals: Tensor, inputs: tuple[Tensor, Tensor, Tensor], read: Reads) -> tuple[Tensor, Tensor, Tensor]:
    """Signals [C, h, n, e] at the output → signals [C, h or g, n or m, d or e] at query, key and value.

    δv = Pᵀδ, δs = P ∘ (δvᵀ − Σ P ∘ δvᵀ) and δq = δs k, δk = δsᵀ q, tile by tile of queries.
    """
    # The h query heads that read one of the g key heads are rows of one matrix, and signals are the last axis but one,
    # so that no product copies. Half precision is widened: a signal is the sum of many small terms.
    query, key, value = (wide(x) for x in inputs)
    scale = read[2]
    heads, (count, _, n, width) = len(key), signals.shape
    group = len(query) // heads
    rows = wide(signals).unflatten(1, (heads, group)).permute(1, 2, 3, 0, 4)
    queries = query.unflatten(0, (heads, group))
    # Each query belongs to one tile, so its signal is written once; keys and values collect from all tiles.
    at_query = rows.new_empty(heads, group, n, count, query.shape[-1])
    at_key = rows.new_zeros(heads, key.shape[-1], count, key.shape[1])
    at_value = rows.new_zeros(heads, key.shape[1], count * width)
    # All query heads, signals and keys of one query.
    query_bytes = len(query) * count * key.shape[1] * rows.element_size()
    for tile in query_blocks(n, query.device, max(1, working_set(query.device, TILE_BYTES) // max(query_bytes, 1))):
        q = queries[:, :, tile].flatten(1, 2)
        seen, p = _probabilities(queries[:, :, tile], key, read, tile)
        signal = rows[:, :, tile].reshape(heads, -1, width)
        # δv: P does not depend on the signal, so all signals are columns of one product.
        # Not `view`: of a tile of one query, read by one head, `reshape` above made no copy.
        at_value[:, seen] += p.mT @ signal.reshape(heads, len(q[0]), -1)
        score = (signal @ value[:, seen].mT).view(heads, len(q[0]), count, -1).mul_(p[:, :, None])
        # δs = P ∘ (δvᵀ − row sum), the derivative of the softmax, in place.
        score -= p[:, :, None] * score.sum(-1, keepdim=True)
        score *= scale
        at_tile = score.flatten(1, 2) @ key[:, seen]
        at_query[:, :, tile] = at_tile.view(heads, group, -1, count, query.shape[-1])
        at_key[..., seen] += (q.mT @ score.flatten(2)).view(heads, -1, count, score.shape[-1])
    return (
        at_query.permute(3, 0, 1, 2, 4).flatten(1, 2).to(inputs[0].dtype),
        at_key.permute(2, 0, 3, 1).to(inputs[1].dtype),
        at_value.view(heads, -1, count, width).permute(2, 0, 1, 3).to(inputs[2].dtype),
    )


def _probabilities(queries: Tensor, key: Tensor, read: Reads, tile: slice) -> tuple[slice, Tensor]:
    """The keys that some query of a tile [heads, group, b, d] reads, and P [heads, group · b, keys]."""
    mask, causal, scale = read
    stop = tile.stop if causal else key.shape[1]
    scores = queries.flatten(1, 2) @ key[:, :stop].mT * scale
    scores = scores.view(*queries.shape[:3], stop)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(tile.start + 1)
        scores.masked_fill_(ahead, -torch.inf)
    if mask is None:
        return slice(0, stop), scores.softmax(-1).flatten(1, 2)
    mask = mask[:, tile, :stop]
    scores += mask.unflatten(0, queries.shape[:2]) if len(mask) > 1 else mask[0]
    blind = scores.amax(-1, keepdim=True) == -torch.inf  # a query before the first token reads nothing
    # The softmax of nothing but −∞ is NaN.
    p = scores.softmax(-1).masked_fill(blind, 0).flatten(1, 2)
    # Keys outside of a sliding window or of the rollout have probability 0 for the whole tile: they are left out.
    used = p.any(0).any(0).nonzero()
    seen = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
    return seen, p[..., seen].contiguous()


@torch.no_grad()  # around forward mode this only drops the reverse graph
def derivative(
    function: Callable[[Sequence[Tensor]], Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    """Derivative of a function of several tensors along one direction, by forward mode; zeros where nothing moves it.

    d/dε f(x + εẋ) at ε = 0, x = `primals` and ẋ = `tangents`, exact up to rounding; one pass, no graph.

    Raises:
        UnfitError: An operation has no such derivative.
    """
    with fwd.dual_level(), replaced_attention(_attend_moving), warnings.catch_warnings():
        # PyTorch scripts formulas of its own when forward mode first runs, and warns of that.
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
        duals = [fwd.make_dual(x.detach(), t.to(x)) for x, t in zip(primals, tangents, strict=True)]
        try:
            value, moved = fwd.unpack_dual(function(duals))
        except torch.OutOfMemoryError:  # a RuntimeError too, but no fault of the model's
            raise
        except RuntimeError as error:
            why = str(error).split(". ")[0].splitlines()[0]
            raise UnfitError(
                f'the model has an operation without a forward-mode derivative ({why}); pass engine="reference", or '
                'for an attribution method="difference".'
            ) from error
        return torch.zeros_like(value) if moved is None else moved.clone()


def _attend_moving(call: AttentionCall) -> Tensor | None:
    """Attention with a forward-mode derivative: o = Pv and ȯ = (P∘Ṡ)v − rowsum(P∘Ṡ)∘o + Pv̇, Ṡ = scale·(q̇kᵀ + qk̇ᵀ).

    None for active dropout and for a mask that itself moves: PyTorch's plain form, which runs then, has a derivative.
    """
    mask = None if call.attn_mask is None else fwd.unpack_dual(call.attn_mask)
    if call.dropout_p or call.query.ndim != 4 or (mask is not None and mask.tangent is not None):
        return None
    call = replace(call, attn_mask=None if mask is None else mask.primal)
    repeats = call.query.shape[1] // call.key.shape[1] if call.enable_gqa else 1
    operands, blocks = list[tuple[Tensor, ...]](), list[tuple[Tensor, Tensor]]()
    for x, times in ((call.query, 1), (call.key, repeats), (call.value, repeats)):
        primal, tangent = fwd.unpack_dual(x)
        pair = primal, torch.zeros_like(primal) if tangent is None else tangent
        # Keys and values are repeated for the heads that share them.
        operands.append(pair if times == 1 else tuple(part.repeat_interleave(times, 1) for part in pair))
    (q, q_dot), (k, k_dot), (v, v_dot) = operands
    for rows in query_blocks(q.shape[2], q.device):
        p = block_scores(call, q, k, rows).softmax(-1)
        keys = slice(0, p.shape[-1])
        # Side by side, the two terms of Ṡ, and those of ȯ, are one product each.
        left, right = (
            torch.cat([q_dot[:, :, rows], q[:, :, rows]], -1),
            torch.cat([k[:, :, keys], k_dot[:, :, keys]], -1),
        )
        turned = (left @ right.mT).mul_(p).mul_(call.factor)
        out = p @ v[:, :, keys]
        moved = torch.cat([turned, p], -1) @ torch.cat([v[:, :, keys], v_dot[:, :, keys]], -2)
        blocks.append((out, moved.addcmul_(turned.sum(-1, keepdim=True), out, value=-1)))
    primal, tangent = (torch.cat(part, dim=2) for part in zip(*blocks, strict=True))
    return fwd.make_dual(primal, tangent)


def forward_slopes(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Float:
    """s·direction of every sampled token [N, L] by one forward-mode pass; zero elsewhere."""
    value = np.zeros(function.batch.shape)
    for micro in microbatches(rollouts):
        run = partial(sampled_logprobs, layout=layout_of(function.batch, micro))
        logprobs = partial(function.logprobs, rollouts=micro, forward=run)
        scatter(value, micro, derivative(logprobs, function.parameters, direction))
    return value
