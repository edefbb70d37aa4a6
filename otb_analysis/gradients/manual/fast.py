"""The exact engine for Llama, Mistral, Qwen2 and Qwen3 models: forward and backward pass written by hand.

One forward pass of a rollout is kept; nothing is recomputed and no autograd graph is built. Blocks of tokens go back
together on the prefix that they see, as in the generic engine, but every layer is a few matrix products into memory
that is used again.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from otb_analysis.gradients.batch.forward import policy_logits
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.exact.gram import NormAccumulator, Workspace, norm_sq, outer_norms, outer_row_norms
from otb_analysis.gradients.exact.reference import Asked, Mix, Norms, norms_of
from otb_analysis.gradients.exact.verdicts import Verdicts, fits_or_told, refuse_difference
from otb_analysis.gradients.manual.backward import (
    SCORE_BYTES,
    Above,
    Below,
    attention_backward,
    factors,
    feed_backward,
    norm_backward,
    through,
    unrotate,
)
from otb_analysis.gradients.manual.forward import FAMILIES, SLICE_BYTES, LlamaLayout, class_of, read, run


class ManualBackward:
    """A rollout's forward pass and everything that its K sampled tokens signal at one position only."""

    def __init__(self, layout: LlamaLayout, rollout: Rollout, temperature: float) -> None:
        self.layout, self.rollout = layout, rollout
        self.reaches_below = layout.lowest < len(layout.layers)  # Whether anything below the last attention is in scope
        self.acts = run(layout, rollout)
        # Signals that go back together: fewer are slower to call, more waste the tail of their prefix.
        each = (
            rollout.length * max(2 * len(layer.up.weight) for layer in layout.layers) * self.acts.hidden.element_size()
        )
        self.block_size = max(1, min(BLOCK if each * 2 * BLOCK > CACHE_BYTES else 2 * BLOCK, SIGNAL_BYTES // each))
        self.work = Workspace(self.acts.hidden)
        log_probabilities = policy_logits(layout.head(self.acts.hidden), (rollout,), temperature).log_softmax(-1)
        sampled = rollout.ids[rollout.targets][:, None]
        self.logprob = log_probabilities.gather(-1, sampled)[:, 0]
        # ∂ log π_y/∂z = (e_y − π)/τ, written over the log-probabilities: the largest tensor of the pass.
        signal = log_probabilities.exp_().neg_()
        signal.scatter_add_(-1, sampled, torch.ones_like(signal[:, :1])).div_(temperature)
        above = Above()
        # Each token's own signal in the residual stream behind the last attention [K, d].
        tools = above, self.work
        above.dense((-1, "head"), (layout.head,), self.acts.hidden, signal[:, None])
        stream = torch.zeros_like(self.acts.hidden)[:, None]
        norm_backward(layout.norm, self.acts.final, (signal @ layout.head.weight)[:, None], stream, tools)
        layer, kept = layout.layers[-1], self.acts.blocks[-1]
        norm_backward(layer.after, kept.after, feed_backward(layer, -1, kept.feed, stream, tools), stream, tools)
        self.token_signals = stream[:, 0]
        self.at_input = self._through_last_attention(tools)
        self.tokens, self.index = rollout.ids[: len(self.acts.turns.cos)].unique(return_inverse=True)
        # (parameter, left, right) of gradients above the cut; of a tied matrix only the rows that the rollout does not
        # read as input. The others are in `shared`: (right [K, U], left [K, d]) for the U distinct tokens read.
        self.outer = above.outer
        self.shared: tuple[Tensor, Tensor] | None = None
        if layout.embedding_name is not None and layout.embedding_name == layout.head.weight_name:
            # A tied matrix: in the rows that are also read as input both uses add before they are squared.
            place = next(i for i, (name, _, _) in enumerate(self.outer) if name == layout.embedding_name)
            name, signal, hidden = self.outer[place]
            self.shared = signal[:, self.tokens], hidden
            self.outer[place] = name, signal.index_fill_(1, self.tokens, 0.0), hidden
        # Made once for all blocks of tokens. Afterwards the inputs themselves are no longer needed.
        self.factors, self.acts = factors(layout, self.acts)

    def _through_last_attention(self, tools: tuple[Above, Workspace]) -> Tensor:
        above, _ = tools
        layer, kept, at = self.layout.layers[-1], self.acts.blocks[-1].attention, self.rollout.targets - 1
        above.dense((-1, "output"), (layer.output,), kept.mixed[at], self.token_signals[:, None])
        heads = len(kept.query)
        mixed = (self.token_signals @ layer.output.weight).unflatten(-1, (heads, -1)).transpose(0, 1).contiguous()
        # Each sampled token has one query, so this is the softmax's derivative at K rows instead of T.
        outputs = kept.mixed[at].unflatten(-1, (heads, -1)).transpose(0, 1)
        # Signals at the heads' outputs [H, K, h], and the row sums of the softmax's derivative [H, K, 1].
        self.at_heads, self.mean = mixed, (mixed * outputs).sum(-1, keepdim=True)
        turned = [torch.bmm(self._last_rows(span, kept.key.shape[1])[0], kept.key) for span in kept.slices(len(at))]
        signal = torch.empty_like(outputs.transpose(0, 1))[:, None]
        unrotate(torch.cat(turned, 1).transpose(0, 1)[:, None], self.acts.turns.cos_sin(at, layer.scaling), out=signal)
        if layer.query_norm is not None and kept.query_pass is not None:
            norm_backward(layer.query_norm, kept.query_pass.take(at), signal, None, tools)
        signal = signal.flatten(2)
        above.dense((-1, "query"), (layer.query,), kept.inputs[at], signal)
        return signal[:, 0] @ layer.query.weight

    def _last_rows(self, span: slice, stop: int) -> tuple[Tensor, Tensor]:
        """Signals at the last attention's scores, and its weights, of some tokens' queries and keys [H, r, stop].

        Each token signals from one query only: its key signal is scores ⊗ query, its value signal weights ⊗ `at_heads`.
        """
        kept = self.acts.blocks[-1].attention
        weights = kept.weights(self.rollout.targets[span] - 1, stop)
        scores = torch.bmm(self.at_heads[:, span], kept.value[:, :stop].transpose(1, 2))
        return scores.sub_(self.mean[:, span]).mul_(weights), weights

    def below(self, mix: Mix, accumulator: NormAccumulator) -> None:
        """Take weighted scores through everything below the cut, on the prefix that their tokens see."""
        layout, acts, tools = self.layout, self.acts, (Below(self.factors, accumulator), self.work)
        b = int(self.rollout.targets[mix.span][-1])
        if not self.reaches_below:
            return
        stream, prefix = self._seed(mix, b, tools), slice(b)
        for index in range(len(layout.layers) - 2, layout.lowest - 1, -1):  # each in place
            layer, kept = layout.layers[index], acts.blocks[index]
            signal = feed_backward(layer, index, kept.feed.take(prefix), stream, tools)
            norm_backward(layer.after, kept.after.take(prefix), signal, stream, tools)
            signal = attention_backward(layer, index, kept.attention, acts.turns, stream, tools)
            norm_backward(layer.before, kept.before.take(prefix), signal, stream, tools)
        if layout.embedding_name is None:
            return
        # One row for each distinct token of the rollout, shared by all its prefixes and by a tied output layer.
        group = ((layout.embedding_name, stream.shape[-1]),)
        rows = accumulator.take(group, len(self.tokens), stream.shape[1]).zero_()
        if layout.ignored is not None:
            # The padding token's row takes no gradient, also where a text holds that token.
            stream.masked_fill_((self.rollout.ids[:b] == layout.ignored)[:, None, None], 0)
        rows.index_add_(0, self.index[:b], stream)
        if self.shared is not None:
            right, left = (part[mix.span] for part in self.shared)
            if mix.weights is None:
                rows.addcmul_(right.T[:, :, None], left[None])
            else:
                rows += torch.einsum("ck,ku,kd->ucd", mix.weights.to(right), right, left)
        accumulator.note(group, rows)

    def _seed(self, mix: Mix, b: int, tools: tuple[Below, Workspace]) -> Tensor:
        """Signals in the residual stream below the last attention [b, C, d]."""
        layer, kept = self.layout.layers[-1], self.acts.blocks[-1]
        at, size = self.rollout.targets[mix.span] - 1, layer.head_dim
        weights = mix.matrix(self.token_signals)
        count, heads = len(weights), len(kept.attention.query)
        groups = heads * size // len(layer.key.weight)
        sums = torch.zeros(2, heads, b, count * size, dtype=weights.dtype, device=weights.device)
        first = range(len(self.rollout.targets))[mix.span].start
        for some in kept.attention.slices(len(at)):
            # Σ_k rows[h, k, j] weights[c, k] source[h, k, :] of signals at key and at value.
            span = slice(first + some.start, first + some.stop)
            sources = kept.attention.query[:, at[some]], self.at_heads[:, span]
            for total, rows, source in zip(sums, self._last_rows(span, b), sources, strict=True):
                mixed = weights[:, some].T[None, :, :, None] * source[:, :, None]
                total.baddbmm_(rows.transpose(1, 2), mixed.flatten(2))
        # A key that several heads share collects from all of them.
        spread = sums.view(2, -1, groups, b, count, size).sum(2).permute(0, 2, 3, 1, 4)
        both = self.work.take("qkv", b, count, 2 * len(layer.key.weight))
        at_key, at_value = (part.unflatten(-1, (-1, size)) for part in both.chunk(2, -1))
        unrotate(spread[0], self.acts.turns.cos_sin(slice(b)), out=at_key)
        at_value.copy_(spread[1])
        if layer.key_norm is not None and kept.attention.key_pass is not None:
            norm_backward(layer.key_norm, kept.attention.key_pass.take(slice(b)), at_key, None, tools)
        place = len(self.layout.layers) - 1, "attention"
        tools[0].dense(place, (layer.key, layer.value), kept.attention.inputs[:b], both)
        signal = through(both, (layer.key, layer.value), self.work)
        stream = self.work.take("stream", b, count, self.token_signals.shape[-1]).zero_()
        # A query signals at its own position only; keys and values above have reached the whole prefix.
        by_query = weights.T[:, :, None]
        signal.index_add_(0, at, by_query * self.at_input[mix.span][:, None])
        stream.index_add_(0, at, by_query * self.token_signals[mix.span][:, None])
        norm_backward(layer.before, kept.before.take(slice(b)), signal, stream, tools)
        return stream


NAME = "fast"
BLOCK, CACHE_BYTES, SIGNAL_BYTES = 8, 1 << 21, 1 << 27
"""Tokens in a block, twice as many while their widest signal stays in cache, and what that signal may occupy."""

_CHECKED = Verdicts[None]()


@torch.no_grad()
def norms(batch: ScoreBatch, asked: Asked) -> Norms:
    """Squared norms of scores, of running sums and of weighted sums, without forming a gradient."""
    take_apart = partial(ManualBackward, checked_layout(batch), temperature=batch.temperature)
    return norms_of(batch, asked, partial(_rollout_norms, take_apart, asked.path))


def checked_layout(batch: ScoreBatch) -> LlamaLayout:
    """The model in parts, which at first use is checked against the model's own passes; raises if it does not fit."""
    layout = read(batch)

    @torch.no_grad()
    def measure(rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        manual = ManualBackward(layout, rollout, batch.temperature)
        parts = dict[str, Tensor]()
        for name, left, right in manual.outer:
            parts[name] = parts.get(name, 0.0) + norm_sq(left) * norm_sq(right)
        manual.below(Mix(None, slice(None)), NormAccumulator(manual.work, by_name=parts))
        return manual.logprob, parts

    if batch.rollouts:
        _CHECKED.get(batch, lambda: refuse_difference(batch, "by hand", 'pass engine="generic"', measure))
    return layout


def fits(batch: ScoreBatch, _asked: Asked | None = None) -> bool:
    """Whether "auto" should use this engine; a model that it does not support is logged once, with the reason."""
    return fits_or_told(batch, checked_layout, 'not measured by engine="fast"', logging.INFO)


def needed_bytes(batch: ScoreBatch, path: bool) -> int:
    """What measuring the longest rollout takes at most, about: activations, factors, the signals of a block, logits."""
    if not batch.rollouts or class_of(batch.model) not in FAMILIES:
        return 0  # nothing to measure, or refused by the engine in its own words
    longest: Rollout = max(batch.rollouts, key=lambda r: r.length)
    config: Any = batch.model.config
    length, width, inner, depth = longest.length, config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or width // config.num_attention_heads)
    size = max(4, batch.scope.parameters[0].element_size())
    # Two norms, four projections, three parts of the feed-forward layer, and the factors of its inputs.
    kept = 6 * width + 4 * heads + 3 * inner
    inputs = 2 * min(width, length) + min(heads, length) + min(inner, length)
    count = max(1, min(2 * BLOCK, SIGNAL_BYTES // (2 * length * inner * size)))
    signals = count * (length * (2 * inner + 4 * width + 4 * heads) + min(width, length) * max(inner, 3 * heads))
    numbers = depth * length * (kept + inputs) + signals + 3 * len(longest.columns) * config.vocab_size
    sums = min(width, length) * (3 * inner + 4 * heads) * depth if path else 0
    return size * (numbers + sums) + SCORE_BYTES + SLICE_BYTES


def _rollout_norms(
    take_apart: Callable[[Rollout], ManualBackward], path: bool, rollout: Rollout, first: int, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, ‖s_t‖² and, with `path`, ‖Σ_{j≤t} s_j‖² of the tokens from `first` on, ‖Σ_k rows[m,k] s_k‖²."""
    manual = take_apart(rollout)
    outer, size = [(left, right) for _, left, right in manual.outer], manual.block_size
    some = outer if first < len(rollout.columns) else ()
    norms, path_norms = outer_norms(some, manual.token_signals, path)
    accumulator = NormAccumulator(manual.work, path)
    for start in range(first, len(norms), size) if manual.reaches_below else ():
        span = slice(start, start + size)
        manual.below(Mix(None, span), accumulator)
        single, running = accumulator.total()
        norms[span] += single
        if running is not None:
            path_norms[span] += running
    rows = rows.to(manual.token_signals.device)
    of_rows, accumulator = outer_row_norms(outer, rows), NormAccumulator(manual.work)
    for start in range(0, len(rows), size) if manual.reaches_below else ():
        manual.below(Mix(rows[start : start + size], slice(None)), accumulator)
        of_rows[start : start + size] += accumulator.total()[0]
    return manual.logprob[first:], norms[first:], path_norms[first:], of_rows
