"""One forward pass of a rollout by hand, keeping exactly what the hand-written backward pass multiplies by.

Rows are positions. The last block goes on from attention only at the positions that predict a sampled token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from otb_analysis.gradients.batch.inputs import Rollout
from otb_analysis.gradients.exact.attention import query_blocks
from otb_analysis.gradients.manual.layout import Layer, LlamaLayout, Norm

SLICE_BYTES, KEPT_BYTES = 1 << 23, 1 << 19
"""What the attention weights of one slice of queries may occupy, and of a slice that is the whole, to be kept."""


class Rows:
    """Records whose every tensor has positions on its first axis."""

    def at(self, index: Tensor | slice) -> Self:
        """The same record on some positions; a slice makes views."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class NormPass(Rows):
    """What an RMSNorm leaves behind: x̂ = r·x and w·r [n, ..., d], r / d [n, ..., 1], with r = 1 / √(mean x² + ε)."""

    unit: Tensor
    gain: Tensor
    share: Tensor


@dataclass(frozen=True)
class FeedForward(Rows):
    """A feed-forward part: its input [n, d], ∂act/∂(gate, up) [n, 2, f] and act = f(gate)·up [n, f]."""

    inputs: Tensor
    slopes: Tensor
    act: Tensor


@dataclass(frozen=True)
class Attention:
    """Attention of one block: heads first, keys and values repeated for grouped queries, queries scaled.

    `inputs` [n, d] went into query, key and value; `mixed` [n, H·h] went into the output layer; `query_pass` and
    `key_pass` [n, H, h] are there where the model normalises heads. Its weights [H, n, n] are kept of a short
    rollout only; those of a longer one are formed anew for some queries at a time.
    """

    inputs: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mixed: Tensor
    query_pass: NormPass | None
    key_pass: NormPass | None
    position: Tensor
    scaling: float
    window: int | None
    rounded: bool
    kept: Tensor | None = None  # All weights, of a short rollout

    def weights(self, at: Tensor | slice, stop: int) -> Tensor:
        """Softmax weights [H, r, stop] of the queries `at` some positions, which see no key from `stop` on."""
        if self.kept is not None:
            return self.kept[:, at, :stop]
        scores = torch.bmm(self.query[:, at], self.key[:, :stop].transpose(1, 2))
        queries, keys = self.position[at, None], self.position[:stop]
        hidden = keys > queries
        if self.window is not None:
            hidden |= keys <= queries - self.window
        # As eager attention rounds, so that log-probabilities match the model's own.
        dtype = torch.float32 if self.rounded else None
        return scores.masked_fill_(hidden, -torch.inf).softmax(-1, dtype=dtype).to(scores.dtype)

    def slices(self, count: int) -> Iterator[slice]:
        """Ranges of `count` queries whose weights are formed together."""
        heads, length, _ = self.query.shape
        return query_blocks(
            count, self.query.device, max(1, SLICE_BYTES // (heads * length * self.query.element_size()))
        )


@dataclass(frozen=True)
class BlockPass:
    """One block's activations, bottom to top."""

    before: NormPass
    attention: Attention
    after: NormPass
    feed: FeedForward


@dataclass(frozen=True)
class Turns:
    """cos and sin of the rotary embedding [T, h], read backwards, and the positions [T]."""

    cos: Tensor
    sin: Tensor
    position: Tensor

    def at(self, index: Tensor | slice, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        """Those of some positions, times the scaling of attention scores, which queries carry [n, 1, 1, h]."""
        cos, sin = self.cos[index, None, None], self.sin[index, None, None]
        return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


@dataclass(frozen=True)
class Activations:
    """A whole forward pass."""

    blocks: tuple[BlockPass, ...]  # By layer; `after` and `feed` of the last one have one row per sampled token
    final: NormPass  # The last norm at the sampled tokens
    hidden: Tensor  # Its output [K, d]
    turns: Turns  # The rotary embedding


def run(layout: LlamaLayout, rollout: Rollout) -> Activations:
    """Run a rollout up to the position that predicts its last sampled token."""
    at = rollout.targets - 1
    x = layout.embedding[rollout.ids[: rollout.length]]
    position = torch.arange(len(x), device=x.device)
    cos, sin = layout.rotary(x[None], position[None])
    turns = Turns(cos[0], sin[0], position)
    blocks: list[BlockPass] = []
    for layer in layout.layers:
        before, normed = _norm(layer.before, x)
        attention = _attend(layer, normed, turns, layout.round_softmax)
        x = x + layer.output(attention.mixed)
        # Behind the last attention only these positions matter; the widest layers run on K rows instead of T.
        if layer is layout.layers[-1]:
            x = x[at]
        after, normed = _norm(layer.after, x)
        gate, up = layer.gate(normed), layer.up(normed)
        with torch.enable_grad():  # the slope of any activation, entry by entry
            leaf = gate.requires_grad_()
            opened = layer.activation(leaf)
            slope = torch.autograd.grad(opened.sum(), leaf)[0]
        opened = opened.detach()
        feed = FeedForward(normed, torch.stack([slope * up, opened], 1), opened * up)
        x = x + layer.down(feed.act)
        blocks.append(BlockPass(before, attention, after, feed))
    final, hidden = _norm(layout.norm, x)
    return Activations(tuple(blocks), final, hidden, turns)


def _norm(norm: Norm, x: Tensor) -> tuple[NormPass, Tensor]:
    """Normalise in float32, as the models do whatever their dtype."""
    single = x.to(torch.float32)
    rate = torch.rsqrt(single.square().mean(-1, keepdim=True) + norm.eps)
    unit = (single * rate).to(x.dtype)
    return NormPass(unit, norm.weight * rate, (rate / x.shape[-1]).to(x.dtype)), norm.weight * unit


def _attend(layer: Layer, x: Tensor, turns: Turns, round_softmax: bool) -> Attention:
    query, key, value = (
        dense(x).unflatten(-1, (-1, layer.head_dim)) for dense in (layer.query, layer.key, layer.value)
    )
    query_pass = key_pass = None
    if layer.query_norm is not None and layer.key_norm is not None:
        (query_pass, query), (key_pass, key) = _norm(layer.query_norm, query), _norm(layer.key_norm, key)
    groups, half = query.shape[1] // key.shape[1], layer.head_dim // 2
    # Turned by their position.
    query, key = (
        x * turns.cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * turns.sin[:, None]
        for x in (query, key)
    )
    # Scaled here once, on [T, H, h], instead of on the [H, T, T] scores.
    query = query.mul_(layer.scaling).transpose(0, 1).contiguous()
    key = key.transpose(0, 1).repeat_interleave(groups, 0)
    value = value.transpose(0, 1).repeat_interleave(groups, 0)
    made = Attention(
        x, query, key, value, x, query_pass, key_pass, turns.position, layer.scaling, layer.window, round_softmax
    )
    if len(query) * len(x) ** 2 * x.element_size() <= KEPT_BYTES:
        made = replace(made, kept=made.weights(slice(0, len(x)), len(x)))
    parts = [torch.bmm(made.weights(rows, rows.stop), value[:, : rows.stop]) for rows in made.slices(len(x))]
    return replace(made, mixed=torch.cat(parts, 1).transpose(0, 1).flatten(1))
