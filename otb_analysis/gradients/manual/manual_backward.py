"""One rollout's signals: at and above the last attention in one pass of single rows, below it block after block."""

import torch
from torch import Tensor

from otb_analysis.gradients.batch.forward import policy_logits
from otb_analysis.gradients.batch.inputs import Rollout
from otb_analysis.gradients.exact.norm_accumulators import NormAccumulator, Workspace
from otb_analysis.gradients.exact.passes import Mix
from otb_analysis.gradients.manual.activations import run, without_inputs
from otb_analysis.gradients.manual.backward import (
    block_backward,
    feed_backward,
    head_norm_backward,
    norm_backward,
    through,
    unrotate,
)
from otb_analysis.gradients.manual.llama_layout import LlamaLayout
from otb_analysis.gradients.manual.sinks import Above, Below, factors


class ManualBackward:
    """A rollout's forward pass and everything that its K sampled tokens signal at one position only."""

    def __init__(self, layout: LlamaLayout, rollout: Rollout, temperature: float) -> None:
        self.layout, self.rollout = layout, rollout
        self.acts = run(layout, rollout)
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
        self.at_input = self._through_last_attention(above)
        self.tokens, self.index = rollout.ids[: len(self.acts.turns.cos)].unique(return_inverse=True)
        # (parameter, left, right) of gradients above the cut; of a tied matrix only the rows that the rollout does not
        # read as input. The others are in `shared`: (right [K, U], left [K, d]) for the U distinct tokens read.
        self.outer = above.outer
        self.shared = self._separate_tied() if layout.tied else None
        # Made once for all blocks of tokens. Afterwards the inputs themselves are no longer needed.
        self.factors = factors(layout, self.acts)
        self.acts = without_inputs(self.acts)

    def _through_last_attention(self, above: Above) -> Tensor:
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
        unrotate(torch.cat(turned, 1).transpose(0, 1)[:, None], self.acts.turns.at(at, layer.scaling), out=signal)
        if layer.query_norm is not None and kept.query_pass is not None:
            head_norm_backward(layer.query_norm, kept.query_pass.at(at), signal, above)
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

    def _separate_tied(self) -> tuple[Tensor, Tensor]:
        """Split a tied matrix: in the rows that are also read as input both uses add before they are squared."""
        place = next(i for i, (name, _, _) in enumerate(self.outer) if name == self.layout.embedding_name)
        name, signal, hidden = self.outer[place]
        shared = signal[:, self.tokens]
        self.outer[place] = name, signal.index_fill_(1, self.tokens, 0.0), hidden
        return shared, hidden

    def below(self, mix: Mix, accumulator: NormAccumulator) -> None:
        """Take weighted scores through everything below the cut, on the prefix that their tokens see."""
        sink, tools = (made := Below(self.factors, accumulator)), (made, self.work)
        b = int(self.rollout.targets[mix.span][-1])
        if not self.layout.reaches_below:
            return
        stream = self._seed(mix, b, tools)
        for index in range(len(self.layout.layers) - 2, self.layout.lowest - 1, -1):
            block_backward(self.layout.layers[index], index, self.acts.blocks[index], self.acts.turns, stream, tools)
        if self.layout.embedding_name is not None:
            self._embedding(mix, stream, sink, accumulator)

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
        unrotate(spread[0], self.acts.turns.at(slice(b)), out=at_key)
        at_value.copy_(spread[1])
        if layer.key_norm is not None and kept.attention.key_pass is not None:
            head_norm_backward(layer.key_norm, kept.attention.key_pass.at(slice(b)), at_key, tools[0])
        place = len(self.layout.layers) - 1, "attention"
        tools[0].dense(place, (layer.key, layer.value), kept.attention.inputs[:b], both)
        signal = through(both, (layer.key, layer.value), self.work)
        stream = self.work.take("stream", b, count, self.token_signals.shape[-1]).zero_()
        # A query signals at its own position only; keys and values above have reached the whole prefix.
        signal.index_add_(0, at, self._placed(mix, self.at_input))
        stream.index_add_(0, at, self._placed(mix, self.token_signals))
        norm_backward(layer.before, kept.before.at(slice(b)), signal, stream, tools)
        return stream

    def _placed(self, mix: Mix, rows: Tensor) -> Tensor:
        """Each token's own row [K, d] times its weight in each mix [|span|, C, d]."""
        return mix.matrix(rows).T[:, :, None] * rows[mix.span][:, None]

    def _embedding(self, mix: Mix, stream: Tensor, sink: Below, accumulator: NormAccumulator) -> None:
        """One row for each distinct token of the rollout, shared by all its prefixes and by a tied output layer."""
        b, count, width = stream.shape
        group = ((str(self.layout.embedding_name), width),)
        rows = accumulator.take(group, len(self.tokens), count).zero_()
        if self.layout.ignored is not None:
            # The padding token's row takes no gradient, also where a text holds that token.
            stream.masked_fill_((self.rollout.ids[:b] == self.layout.ignored)[:, None, None], 0)
        rows.index_add_(0, self.index[:b], stream)
        if self.shared is not None:
            right, left = (part[mix.span] for part in self.shared)
            if mix.weights is None:
                rows.addcmul_(right.T[:, :, None], left[None])
            else:
                rows += torch.einsum("ck,ku,kd->ucd", mix.weights.to(right), right, left)
        accumulator.note(group, rows)
