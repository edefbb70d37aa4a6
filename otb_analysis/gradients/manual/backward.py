"""The backward pass of a decoder block by hand, for many signals at once: [n positions, C signals, features].

Position comes first: then a linear layer is one GEMM over n·C rows, and so is the product R δ that stands for its
weight gradient, over C·d_out columns. Whatever meets a parameter in scope is handed to a sink.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otb_analysis.gradients.exact.gram import Group, NormAccumulator, Workspace
from otb_analysis.gradients.manual.forward import (
    Activations,
    Attention,
    BlockPass,
    Dense,
    FeedForward,
    Layer,
    LlamaLayout,
    Norm,
    NormPass,
    Turns,
)

Place = tuple[int, str]
"""Which input of which layer a weight is applied to."""


@dataclass(frozen=True)
class Factor:
    """What is kept of a linear layer's inputs A [T, d]: ‖A_{:b}ᵀδ‖ = ‖M_{:b} δ‖ for every prefix of b positions."""

    matrix: Tensor  # R of Aᵀ = QR where the rollout is short, Aᵀ itself where R would be no smaller for most prefixes
    triangular: bool  # Whether it is R, of which a prefix needs the first b rows only


def factors(layout: LlamaLayout, acts: Activations) -> tuple[dict[Place, Factor], Activations]:
    """Factors of all inputs that a weight in scope below the cut reads, and the pass without those inputs."""
    made, blocks = dict[Place, Factor](), list[BlockPass]()
    for index, (layer, kept) in enumerate(zip(layout.layers, acts.blocks, strict=True)):
        attention, feed = kept.attention, kept.feed
        # Of the last block only key and value lie below the cut: its other signals stay at their own positions.
        reads: list[tuple[str, Tensor, tuple[Dense, ...]]] = [
            ("attention", attention.inputs, (layer.query, layer.key, layer.value)),
            ("output", attention.mixed, (layer.output,)),
            ("feed", feed.inputs, (layer.gate, layer.up)),
            ("down", feed.act, (layer.down,)),
        ]
        if layer is layout.layers[-1]:
            reads = [("attention", attention.inputs, (layer.key, layer.value))]
        for name, inputs, layers in reads:
            if any(dense.weight_name for dense in layers):
                # ‖Aᵀδ‖ = ‖Rδ‖ since Q has orthonormal columns; R of a prefix is the leading square of R.
                triangular = len(inputs) <= 2 * inputs.shape[1]
                matrix = torch.linalg.qr(inputs.T, mode="r").R if triangular else inputs.T.contiguous()
                made[index, name] = Factor(matrix, triangular)
        # A clone, since an empty view would keep the whole input alive.
        none = attention.inputs[:0].clone()
        feed = replace(feed, inputs=none, act=none)
        blocks.append(replace(kept, feed=feed, attention=replace(attention, inputs=none)))
    return made, replace(acts, blocks=tuple(blocks))


@dataclass
class Above:
    """Gradients of tokens that signal at one position each, as outer products left [K, a] ⊗ right [K, b]."""

    outer: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # (parameter, left, right)

    def dense(self, place: Place, layers: Sequence[Dense], inputs: Tensor, signal: Tensor) -> None:
        """Note the gradients of linear layers; signal [K, 1, ΣD]."""
        for dense, part in zip(layers, signal[:, 0].split([len(d.weight) for d in layers], -1), strict=True):
            if dense.weight_name is not None:
                # Only the signal at the logits, the largest, does not lie in memory that is used again.
                self.outer.append((dense.weight_name, part if place[1] == "head" else part.clone(), inputs))
            if dense.bias_name is not None:
                self.outer.append((dense.bias_name, torch.ones_like(part[:, :1]), part.clone()))

    def scale(self, norm: Norm, product: Tensor) -> None:
        """Note the gradients of a norm's weight; product [K, 1, ..., d]."""
        if norm.name is not None:
            gradient = product.flatten(1, -2).sum(1)
            self.outer.append((norm.name, torch.ones_like(gradient[:, :1]), gradient))


@dataclass
class Below:
    """Coordinates of gradients whose signals reach a whole prefix, handed to an accumulator."""

    factors: dict[Place, Factor]
    accumulator: NormAccumulator

    def dense(self, place: Place, layers: Sequence[Dense], inputs: Tensor, signal: Tensor) -> None:
        """Hand on the coordinates of linear layers; signal [b, C, ΣD]."""
        b, count, _ = signal.shape
        widths = [len(dense.weight) for dense in layers]
        for kind in ("weight_name", "bias_name"):
            names: list[str | None] = [getattr(dense, kind) for dense in layers]
            # In one piece where every parameter is in scope, else the slices of those that are.
            parts = zip(names, widths, signal.split(widths, -1), strict=True)
            pieces = [(((name, width),), part) for name, width, part in parts if name is not None]
            if len(pieces) == len(layers):
                pieces = [(tuple(one for group, _ in pieces for one in group), signal)]
            for group, part in pieces:
                if kind == "bias_name":
                    self.vector(group, part.sum(0))
                    continue
                factor = self.factors[place]
                matrix = factor.matrix[: b if factor.triangular else None, :b]
                coordinates = self.accumulator.take(group, len(matrix), count)
                torch.mm(matrix, part.reshape(b, -1), out=coordinates.flatten(1))
                self.accumulator.note(group, coordinates)

    def scale(self, norm: Norm, product: Tensor) -> None:
        """Hand on the gradients of a norm's weight; product [b, C, ..., d]."""
        if norm.name is not None:
            summed = product.sum(0) if product.ndim == 3 else product.sum((0, 2))
            self.vector(((norm.name, summed.shape[-1]),), summed)

    def vector(self, group: Group, gradient: Tensor) -> None:
        """A parameter's own gradients [C, d]."""
        coordinates = self.accumulator.take(group, 1, len(gradient))
        coordinates[0] = gradient
        self.accumulator.note(group, coordinates)


SLICE, SCORE_BYTES = 64, 1 << 24
"""Queries below which an attention slice is not worth its calls, and what the scores of one slice may occupy."""

Tools = tuple[Above | Below, Workspace]
"""Where gradients go, and the memory that signals are written to."""


def feed_backward(layer: Layer, index: int, feed: FeedForward, signal: Tensor, tools: Tools) -> Tensor:
    """Signal at the output of a feed-forward part [n, C, d] → at its input."""
    sink, work = tools
    n, count, width = signal.shape
    inner = len(layer.up.weight)
    sink.dense((index, "down"), (layer.down,), feed.act, signal)
    at_act = torch.mm(signal.view(-1, width), layer.down.weight, out=work.take("act", n * count, inner))
    # One after the other: these are the widest signals, and what is read last is overwritten by its product.
    at_act = at_act.view(n, count, inner)
    at_gate = torch.mul(at_act, feed.slopes[:, None, 0], out=work.take("gate", n, count, inner))
    sink.dense((index, "feed"), (layer.gate,), feed.inputs, at_gate)
    out = through(at_gate, (layer.gate,), work)
    at_up = at_act.mul_(feed.slopes[:, None, 1])
    sink.dense((index, "feed"), (layer.up,), feed.inputs, at_up)
    out.view(n * count, -1).addmm_(at_up.view(n * count, inner), layer.up.weight)
    return out


def attention_backward(layer: Layer, index: int, kept: Attention, turns: Turns, signal: Tensor, tools: Tools) -> Tensor:
    """Signal at the output of attention [b, C, d] → at its input, for a prefix of b positions."""
    sink, work = tools
    b, count, width = signal.shape
    heads, size = len(kept.query), layer.head_dim
    sink.dense((index, "output"), (layer.output,), kept.mixed[:b], signal)
    # Heads first, so that all later products are batched over heads without a copy.
    by_head = layer.output.weight.view(width, heads, size).transpose(0, 1)
    mixed = work.take("act", heads, b * count, size)
    torch.bmm(signal.view(1, b * count, width).expand(heads, -1, -1), by_head, out=mixed)
    layers = (layer.query, layer.key, layer.value)
    # Side by side: the three signals then go through one factor and one product.
    both = work.take("qkv", b, count, sum(len(dense.weight) for dense in layers))
    parts = [p.unflatten(-1, (-1, size)) for p in both.split([len(dense.weight) for dense in layers], -1)]
    scores_backward(kept, mixed.view(heads, b, count, size), turns, parts, work)
    norms = (layer.query_norm, kept.query_pass), (layer.key_norm, kept.key_pass)
    for (norm, passed), part in zip(norms, parts, strict=False):
        if norm is not None and passed is not None:
            norm_backward(norm, passed.take(slice(b)), part, None, tools)
    sink.dense((index, "attention"), layers, kept.inputs[:b], both)
    return through(both, layers, work)


def scores_backward(kept: Attention, mixed: Tensor, turns: Turns, out: Sequence[Tensor], work: Workspace) -> None:
    """Signal at the heads' outputs δO [H, b, C, h] → at query, key and value before rotation, each [b, C, H', h].

    δS = P ∘ (δO Vᵀ − δO·O) row by row, δQ = δS K, δK = δSᵀ Q, δV = Pᵀ δO.
    """
    # Queries go in slices, so that a slice meets only the keys that it sees and its scores stay small.
    heads, b, count, size = mixed.shape
    outputs = kept.mixed[:b].view(b, heads, size).transpose(0, 1)
    # Σ_j P_ij (δO Vᵀ)_ij = δO_i·O_i: the row sums of the softmax's derivative, without a pass over the scores.
    mean = torch.mul(mixed, outputs[:, :, None], out=work.take("product", *mixed.shape)).sum(-1, keepdim=True)
    # Memory of other parts that is idle here: they never run at the same time.
    key = work.take("gate", heads, count, b, size)
    value = work.take("input", heads, b, count * size)
    # All of a short prefix at once, else a quarter, fewer where their scores would be large.
    row_bytes = heads * count * b * mixed.element_size()
    step = max(1, min(max(SLICE, -(-b // 4)), SCORE_BYTES // row_bytes))
    for start in reversed(range(0, b, step)):
        stop = min(start + step, b)
        rows = mixed[:, start:stop].flatten(1, 2)
        scores = work.take("coordinates", heads, stop - start, count, stop)
        flat = scores.view(heads, -1, stop)
        torch.bmm(rows, kept.value[:, :stop].transpose(1, 2), out=flat)
        weights = kept.weights(slice(start, stop), stop)
        scores.sub_(mean[:, start:stop]).mul_(weights[:, :, None])
        query = torch.bmm(flat, kept.key[:, :stop], out=work.take("query", heads, flat.shape[1], size))
        query = query.view(heads, -1, count, size).permute(1, 2, 0, 3)
        unrotate(query, turns.cos_sin(slice(start, stop), kept.scaling), out=out[0][start:stop])
        scores, outer = scores.view(heads, -1, count * stop).transpose(1, 2), rows.view(heads, -1, count * size)
        if stop == b:  # the last slice comes first and sees every key: it writes what the others add to
            torch.bmm(scores, kept.query[:, start:stop], out=key.view(heads, count * b, size))
            torch.bmm(weights.transpose(1, 2), outer, out=value)
        else:
            part = torch.bmm(scores, kept.query[:, start:stop], out=work.take("part", heads, count * stop, size))
            key[:, :, :stop] += part.view(heads, count, stop, size)
            value[:, :stop] += torch.bmm(
                weights.transpose(1, 2), outer, out=work.take("part", heads, stop, count * size)
            )
    # The queries that share a key add up.
    value, groups = value.view(heads, b, count, size), heads // out[1].shape[2]
    summed = key if groups == 1 else key.unflatten(0, (-1, groups)).sum(1)
    unrotate(summed.permute(2, 1, 0, 3), turns.cos_sin(slice(b)), out=out[1])
    del summed  # before another is made
    summed = value if groups == 1 else value.unflatten(0, (-1, groups)).sum(1)
    out[2].copy_(summed.permute(1, 2, 0, 3))


def norm_backward(norm: Norm, kept: NormPass, signal: Tensor, onto: Tensor | None, tools: Tools) -> None:
    """Signal [n, C, ..., d] behind a norm → at its input, r(w∘δ − x̂·mean(x̂∘w∘δ)), added to `onto` or else in place."""
    sink, work = tools
    product = torch.mul(signal, kept.unit[:, None], out=work.take("product", *signal.shape))
    sink.scale(norm, product)
    # A product with w: an array w∘δ is never formed.
    mean = (product @ norm.weight)[..., None] * kept.share[:, None]
    out = signal.mul_(kept.gain[:, None]) if onto is None else onto.addcmul_(signal, kept.gain[:, None])
    out.addcmul_(mean, kept.unit[:, None], value=-1)


def unrotate(signal: Tensor, turn: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Turn the signal at rotated heads [n, C, H, h] back."""
    half = signal.shape[-1] // 2
    cos, sin = turn
    torch.mul(signal, cos, out=out)
    out[..., :half].addcmul_(signal[..., half:], sin[..., half:])
    out[..., half:].addcmul_(signal[..., :half], sin[..., :half], value=-1)


def through(signal: Tensor, layers: Sequence[Dense], work: Workspace) -> Tensor:
    """Signals at linear layers that read one input, side by side [n, C, ΣD] → at that input [n, C, d]."""
    n, count, _ = signal.shape
    out = work.take("input", n * count, layers[0].weight.shape[1])
    rows = signal.view(n * count, -1)
    start = 0
    # One product after the other into the same memory: concatenated weights would be copies.
    for dense in layers:
        part = rows[:, start : start + len(dense.weight)]
        if start:
            out.addmm_(part, dense.weight)
        else:
            torch.mm(part, dense.weight, out=out)
        start += len(dense.weight)
    return out.view(n, count, -1)
