"""The backward pass of a decoder block by hand, for many signals at once: [n positions, C signals, features].

Position comes first: then a linear layer is one GEMM over n·C rows, and so is the product R δ that stands for its
weight gradient, over C·d_out columns. Whatever meets a parameter in scope is handed to a sink.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from otb_analysis.gradients.activations import Attention, BlockPass, FeedForward, NormPass
from otb_analysis.gradients.anatomy import Dense, Layer, Norm
from otb_analysis.gradients.tally import Workspace

Place = tuple[int, str]
"""Which input of which layer a weight is applied to."""


class Sink(Protocol):
    """Takes the signals at the outputs of layers; the same for signals at one position and at many."""

    def dense(self, place: Place, layers: Sequence[Dense], inputs: Tensor, signal: Tensor) -> None:
        """Linear layers that read one input [n, d], with signals [n, C, ΣD] side by side."""
        ...

    def scale(self, norm: Norm, product: Tensor) -> None:
        """A norm's weight, with x̂·δ [n, C, ..., d]."""
        ...


def feed_backward(layer: Layer, index: int, feed: FeedForward, signal: Tensor, tools: tuple[Sink, Workspace]) -> Tensor:
    """Signal at the output of a feed-forward part [n, C, d] → at its input."""
    sink, work = tools
    n, count, width = signal.shape
    inner = feed.act.shape[-1]
    sink.dense((index, "down"), (layer.down,), feed.act, signal)
    at_act = torch.mm(signal.view(-1, width), layer.down.weight, out=work.take("act", n * count, inner))
    both = work.take("gate_up", n, count, 2, inner)
    torch.mul(at_act.view(n, count, 1, inner), feed.slopes[:, None], out=both)
    both = both.view(n, count, 2 * inner)
    sink.dense((index, "feed"), (layer.gate, layer.up), feed.inputs, both)
    return through(both, (layer.gate, layer.up), work)


def attention_backward(
    layer: Layer,
    index: int,
    kept: Attention,
    turns: tuple[Tensor, Tensor],
    signal: Tensor,
    tools: tuple[Sink, Workspace],
) -> Tensor:
    """Signal at the output of attention [b, C, d] → at its input, for a prefix of b positions."""
    sink, work = tools
    b, count, width = signal.shape
    heads, size = len(kept.query), layer.head_dim
    sink.dense((index, "output"), (layer.output,), kept.mixed[:b], signal)
    by_head = layer.output.weight.view(width, heads, size).transpose(0, 1)
    mixed = work.take("mixed", heads, b * count, size)
    torch.bmm(signal.view(1, b * count, width).expand(heads, -1, -1), by_head, out=mixed)
    query, key, value = _scores_backward(kept, mixed, b, count, work)
    groups = heads * size // len(layer.key.weight)
    both = work.take("qkv", b, count, heads * size + 2 * len(layer.key.weight))
    at_query, at_key, at_value = (
        part.unflatten(-1, (-1, size))
        for part in both.split([len(d.weight) for d in (layer.query, layer.key, layer.value)], -1)
    )
    unrotate(query.permute(1, 2, 0, 3), *turns, out=at_query, scaling=layer.scaling)
    unrotate(_grouped(key, groups).permute(2, 1, 0, 3), *turns, out=at_key)
    at_value.copy_(_grouped(value, groups).permute(1, 2, 0, 3))
    if layer.query_norm is not None and kept.query_pass is not None:
        head_norm_backward(layer.query_norm, kept.query_pass.at(slice(b)), at_query, sink)
    if layer.key_norm is not None and kept.key_pass is not None:
        head_norm_backward(layer.key_norm, kept.key_pass.at(slice(b)), at_key, sink)
    layers = (layer.query, layer.key, layer.value)
    sink.dense((index, "attention"), layers, kept.inputs[:b], both)
    return through(both, layers, work)


def _scores_backward(
    kept: Attention, mixed: Tensor, b: int, count: int, work: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """Signals at query [H, b, C, h], key [H, C, b, h] and value [H, b, C, h] from those at the heads' outputs.

    δS = P ∘ (δO Vᵀ − δO·O) row by row.
    """
    heads, _, size = mixed.shape
    outputs = kept.mixed[:b].unflatten(-1, (heads, size)).transpose(0, 1)
    mean = torch.mul(
        mixed.view(heads, b, count, size), outputs[:, :, None], out=work.take("mean", heads, b, count, size)
    ).sum(-1)
    query = work.take("query", heads, b, count, size)
    key = work.take("key", heads, count, b, size)
    scores = work.take("scores", heads, b * count, b)
    torch.bmm(mixed, kept.value[:, :b].transpose(1, 2), out=scores)
    weights = kept.weights[:, :b, :b]
    scores.view(heads, b, count, b).sub_(mean[..., None]).mul_(weights[:, :, None])
    torch.bmm(scores, kept.key[:, :b], out=query.view(heads, b * count, size))
    torch.bmm(scores.view(heads, b, count * b).transpose(1, 2), kept.query[:, :b], out=key.view(heads, count * b, size))
    value = torch.bmm(
        weights.transpose(1, 2), mixed.view(heads, b, count * size), out=work.take("value", heads, b, count * size)
    )
    return query, key, value.view(heads, b, count, size)


def norm_backward(norm: Norm, kept: NormPass, signal: Tensor, onto: Tensor, tools: tuple[Sink, Workspace]) -> None:
    """Add the signal that comes out of a norm's input to the residual stream: r(w∘δ − x̂·mean(x̂∘w∘δ))."""
    sink, work = tools
    product = torch.mul(signal, kept.unit[:, None], out=work.take("product", *signal.shape))
    sink.scale(norm, product)
    mean = torch.mv(product.view(-1, product.shape[-1]), norm.weight).view(*signal.shape[:-1], 1)
    onto.addcmul_(signal, kept.gain[:, None]).addcmul_(mean, kept.pull[:, None], value=-1)


def head_norm_backward(norm: Norm, kept: NormPass, signal: Tensor, sink: Sink) -> None:
    """The same for a norm of heads [n, C, H, h], in place."""
    product = signal * kept.unit[:, None]
    sink.scale(norm, product)
    mean = (product @ norm.weight)[..., None]
    signal.mul_(kept.gain[:, None]).addcmul_(mean, kept.pull[:, None], value=-1)


def unrotate(signal: Tensor, cos: Tensor, sin: Tensor, out: Tensor, scaling: float = 1.0) -> None:
    """Turn the signal at rotated heads [n, C, H, h] back, and scale it."""
    n, half = len(signal), signal.shape[-1] // 2
    cos, sin = cos[:n, None, None] * scaling, sin[:n, None, None] * scaling
    torch.mul(signal, cos, out=out)
    out[..., :half].addcmul_(signal[..., half:], sin[..., half:])
    out[..., half:].addcmul_(signal[..., :half], sin[..., :half], value=-1)


def through(signal: Tensor, layers: Sequence[Dense], work: Workspace) -> Tensor:
    """Signals at linear layers that read one input, side by side [n, C, ΣD] → at that input [n, C, d]."""
    n, count, _ = signal.shape
    out = work.take("input", n * count, layers[0].weight.shape[1])
    rows = signal.view(n * count, -1)
    start = 0
    for dense in layers:
        part = rows[:, start : start + len(dense.weight)]
        if start:
            out.addmm_(part, dense.weight)
        else:
            torch.mm(part, dense.weight, out=out)
        start += len(dense.weight)
    return out.view(n, count, -1)


def block_backward(
    layer: Layer,
    index: int,
    kept: BlockPass,
    turns: tuple[Tensor, Tensor],
    stream: Tensor,
    tools: tuple[Sink, Workspace],
) -> None:
    """Take the signals in the residual stream [b, C, d] through one block, in place."""
    whole = slice(len(stream))
    signal = feed_backward(layer, index, kept.feed.at(whole), stream, tools)
    norm_backward(layer.after, kept.after.at(whole), signal, stream, tools)
    signal = attention_backward(layer, index, kept.attention, turns, stream, tools)
    norm_backward(layer.before, kept.before.at(whole), signal, stream, tools)


def _grouped(signal: Tensor, groups: int) -> Tensor:
    """Sum over the queries that share a key [H, ...] → [H / groups, ...]."""
    return signal if groups == 1 else signal.unflatten(0, (-1, groups)).sum(1)
