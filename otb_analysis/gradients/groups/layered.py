"""The gradients of many rows of weights, one block of the model at a time, so that one round of passes serves them all.

Every prompt runs forward once and keeps the inputs of the model's blocks. Then one block after the other, from the last
to the first, is run again with its graph, and the backward signals of every row go through it:

    x₀ ─block 0─▶ x₁ ─block 1─▶ … ─▶ x_L ─norm, output layer─▶ log π
        ◀─ signals [R, …] ─┴─ gradients of this block's parameters [R, n] ─▶ products [R, R] ─▶ forgotten

Only one block's gradients are held at a time. The vocabulary's matrices, the largest of all, are formed in slices: the
output layer's gradient Σ_k w_k δ_k ⊗ h_k from its inputs h, an embedding's from the signals at the rows that were read,
and a tied one's as their sum.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otb_analysis.gradients.batch.forward import model_logits, sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.layout import Layout
from otb_analysis.gradients.batch.memory import memory_bytes
from otb_analysis.gradients.exact.attention import many_signals
from otb_analysis.gradients.exact.gram import stretches
from otb_analysis.gradients.exact.hooks import pull_back
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups.blocks import BlockStructure, Call
from otb_analysis.gradients.groups.predictions import Predictions, plain_head, predictions
from otb_analysis.gradients.groups.vocabulary import Ends, vocabulary_gradients
from otb_analysis.phases import advance

SIGNAL_BYTES, WIDER = 1 << 26, 8
"""What the signals that go through a block together may occupy at its widest place, some 8 times its output's width."""
INPUT_BYTES = 1 << 30
"""What the inputs of all blocks may occupy, for all prompts; beyond, every √blocks-th is kept, for one more pass."""

Gradients = Iterator[tuple[str, Tensor]]
"""Names of parameters with (part of) their gradients [R, n], R the rows of all prompts; every entry comes once."""


@dataclass
class Pass:
    """One prompt's rollouts: what went into each block, and the signals that have come back so far."""

    layout: Layout  # How the rollouts lie in the pass
    calls: list[Call]  # Arguments of each block
    ends: Ends  # What the vocabulary's matrices need to know
    signals: Tensor  # Backward signals at the output of the next block to go through [r, *x]
    # By parameter outside of the blocks, the gradients of the rows from above the last block
    outside: list[list[Tensor]] = field(default_factory=list)


class Layered:
    """Forward passes of many prompts, then their gradients block by block."""

    def __init__(self, batch: ScoreBatch, structure: BlockStructure, prompts: int = 1) -> None:
        self.batch, self.structure, self.prompts = batch, structure, prompts
        self.named = dict(zip(batch.scope.names, batch.scope.parameters, strict=True))
        self.head = plain_head(batch)  # Evaluated in slices; None where only the model's own logits will do
        self.passes: list[Pass] = []

    def add(self, rollouts: tuple[Rollout, ...], layout: Layout, rows_of: Callable[[Tensor], Tensor]) -> None:
        """Run a prompt's rollouts forward and bring the signals of its rows back to the last block's output.

        `rows_of` gives the prompt's rows of weights [r, K] from its log-probabilities [K].

        Raises:
            UnfitError: The blocks do not run in order, the output layer's logits are changed, or signals do not fit.
        """
        parameters = [self.named[name] for name in self.structure.outside]
        # No graph below the last block's output: blocks are run again one at a time.
        with torch.no_grad(), self.structure.watched() as seen:
            if self.head is None:
                found = Predictions(values := sampled_logprobs(self.batch, rollouts, layout), values, None)
            else:
                found = predictions(self.batch, rollouts, layout, self.head)
            # The basis depends on log-probabilities, so rows are known only after the forward pass.
            rows = torch.zeros(0) if found is None else rows_of(found.logprob.detach()).to(found.logprob)
            last = seen.last()
            pulled = [_pulled(found.output, [last, *parameters], found.signal(row)) for row in rows] if found else []
        if found is None:  # the model caps or scales its logits
            self.head = None
            return self.add(rollouts, layout, rows_of)
        targets = torch.cat([r.ids[r.targets] for r in rollouts])
        ends = Ends(rows, targets, seen.hidden(layout) if self.head is None else found.output.detach())
        if self.head is None:
            ends.check(self.structure.head, found.logprob.detach(), self.batch.temperature)
        outside = [[gradients[1 + i] for gradients in pulled] for i in range(len(parameters))]
        signals = _stacked([gradients[0] for gradients in pulled], last)
        # Signals of all prompts, as many as this one's, at a block's output and at its input: half the memory at most.
        needed = self.prompts * 2 * signals.numel() * signals.element_size()
        if needed > memory_bytes(signals.device) // 2:
            raise UnfitError(f"the signals of {self.prompts} prompts would take {needed / 2**30:.1f} GiB")
        self._drop(seen.calls)
        self.passes.append(Pass(layout, seen.calls, ends, signals, outside))
        advance()

    def _drop(self, calls: list[Call]) -> None:
        """Keep the inputs of some blocks only, where those of all prompts and blocks are many; others run again."""
        held = sum(call.hidden.numel() * call.hidden.element_size() for call in calls if call.hidden is not None)
        if self.prompts * held > INPUT_BYTES:
            # √L kept inputs, √L blocks run again between two of them: the least memory for one more pass.
            kept = math.isqrt(len(calls))
            for index, call in enumerate(calls):
                if index % kept:
                    call.hidden = None

    def gradients(self) -> Gradients:
        """Form every parameter's gradients of all rows, from the last block to the first."""
        for index in reversed(range(self.structure.first, len(self.structure.blocks))):
            yield from self._block(index)
        if self.structure.embedding is not None or self.structure.outside:
            for prompt in self.passes:
                self._below(prompt)
        for i, name in enumerate(self.structure.outside):
            yield name, torch.stack([row.flatten() for prompt in self.passes for row in prompt.outside[i]])
        yield from vocabulary_gradients(self.structure, [prompt.ends for prompt in self.passes], self.batch.temperature)

    def _block(self, index: int) -> Gradients:
        """Take all signals through a block, once for each part of its gradients that fits in memory."""
        # Each further part repeats this block alone: too little memory costs passes over a block, not over the model.
        names = self.structure.inside[index]
        parameters, count = [self.named[name] for name in names], sum(len(prompt.signals) for prompt in self.passes)
        parts = stretches(parameters, max(count, 1))
        for part in parts:
            held = [parameters[i].new_empty(count, span.stop - span.start) for i, span in part]
            start = 0
            for prompt in self.passes:
                into = [h[start : start + len(prompt.signals)] for h in held]
                start += len(prompt.signals)
                back = self._through(index, prompt, [(parameters[i], span) for i, span in part], into)
                if part is parts[-1]:
                    # Only now: every part needs the signals at the block's output and its input once more.
                    prompt.signals, prompt.calls[index].hidden = back, None
                    advance()
            for into, (i, _) in zip(held, part, strict=True):
                yield names[i], into

    def _through(
        self, index: int, prompt: Pass, wanted: Sequence[tuple[Tensor, slice]], into: Sequence[Tensor]
    ) -> Tensor:
        """Write the gradients of one prompt's rows; return its signals at the block's input."""
        # A new leaf: the graph spans one block and is freed with it.
        source = self._input(index, prompt).detach().requires_grad_()
        with many_signals(prompt.layout.ids.shape[1]):
            output = prompt.calls[index].again(self.structure.blocks[index], source)
        inputs = [source, *(parameter for parameter, _ in wanted)]
        back = torch.empty_like(prompt.signals)
        size = sum(parameter.numel() * parameter.element_size() for parameter, _ in wanted)
        for rows in _some_at_once(prompt.signals, size):
            # Written into memory that is there: stacking would hold everything twice.
            back[rows], *gradients = pull_back(output, inputs, prompt.signals[rows])
            for row, gradient, (_, span) in zip(into, gradients, wanted, strict=True):
                row[rows] = gradient.flatten(1)[:, span]
        return back

    @torch.no_grad()
    def _input(self, index: int, prompt: Pass) -> Tensor:
        """Input of a block, run again from the last block before it whose input was kept."""
        first = next(i for i in range(index, -1, -1) if prompt.calls[i].hidden is not None)
        hidden = prompt.calls[first].hidden
        assert hidden is not None
        for i in range(first, index):
            hidden = prompt.calls[i + 1].hidden = prompt.calls[i].again(self.structure.blocks[i], hidden)
        return hidden

    def _below(self, prompt: Pass) -> None:
        """Bring a prompt's signals from the first block's input to the embedding's output."""
        parameters = [self.named[name] for name in self.structure.outside]
        with self.structure.stopped() as seen:
            model_logits(self.batch.model, prompt.layout)
        leaves = [] if seen.embedded is None else [seen.embedded]
        pulled = [_pulled(seen.first, [*leaves, *parameters], signal) for signal in prompt.signals]
        if seen.embedded is not None:
            prompt.ends.read(
                seen.ids, _stacked([gradients[0] for gradients in pulled], seen.embedded), self.structure.embedding
            )
        for i, rows in enumerate(prompt.outside):
            for k, row in enumerate(rows):
                rows[k] = row + pulled[k][len(leaves) + i]


def _pulled(output: Tensor, inputs: Sequence[Tensor], signal: Tensor) -> tuple[Tensor, ...]:
    """Gradients of ⟨output, signal⟩; zeros where an input has no part in it. The graph is kept for the next row."""
    if not inputs or not output.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(output, inputs, signal, retain_graph=True, materialize_grads=True)


def _some_at_once(signals: Tensor, size: int) -> list[slice]:
    """Rows whose signals go through a block together, few enough for its activations and gradients of `size` bytes."""
    each = max(1, size, signals[0].numel() * signals.element_size() * WIDER) if len(signals) else 1
    most = max(1, SIGNAL_BYTES // each)
    return [slice(start, start + most) for start in range(0, len(signals), most)]


def _stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(parts) if parts else like.new_zeros(0, *like.shape)
