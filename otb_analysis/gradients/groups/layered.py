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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from otb_analysis.gradients.batch.forward import Layout, model_logits, sampled_logprobs
from otb_analysis.gradients.batch.inputs import COPY, Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import Routed, routed
from otb_analysis.gradients.batch.scope import end_of
from otb_analysis.gradients.exact.attention import many_signals, query_blocks
from otb_analysis.gradients.exact.gram import stretches
from otb_analysis.gradients.exact.layers import UnfitError, pull_back
from otb_analysis.gradients.groups.blocks import BlockStructure, Call, Seen
from otb_analysis.gradients.groups.vocabulary import Ends, Extent, Predictions, predictions, vocabulary_gradients
from otb_analysis.phases import advance
from otb_analysis.processes import exchanging

SIGNAL_BYTES, WIDER = 1 << 26, 8
"""What the signals that go through a block together may occupy at its widest place, some 8 times its output's width."""
INPUT_BYTES = 1 << 30
"""What the inputs of all blocks may occupy, for all prompts; beyond, every √blocks-th is kept, for one more pass."""

FEWER = 2
"""How many times more numbers than tokens an expert's row must have for its gradients to be left as coordinates."""

Rollouts = tuple[tuple[Rollout, ...], Layout]
"""Rollouts of one pass, and how they lie in it."""
Gradients = Iterator[tuple[str, list[Tensor]]]
"""The name of a parameter, and (part of) the gradients of all prompts' rows by it, some at a time [r, n], R in all.

Every entry comes once; in place of an expert's matrix that few tokens went to, coordinates with its inner products.
"""


@dataclass
class Pass:
    """Rollouts of a prompt that run together: what went into each block, and the signals that have come back so far."""

    layout: Layout  # How the rollouts lie in the pass
    calls: list[Call]  # Arguments of each block
    signals: Tensor  # Backward signals at the output of the next block to go through [r, *x]


@dataclass
class Part:
    """Gradients of a prompt's rows by (part of) a parameter, some rows at a time."""

    name: str
    rows: list[Tensor]  # [r, n]; of experts whose gradients are not formed the signals at their outputs [r, S, o]
    experts: list[tuple[Tensor, ...]] = field(default_factory=list)  # Those experts' inputs by pass, as `rows` then are

    def add(self, other: "Part") -> None:
        """Add the gradients of another pass."""
        if self.experts:
            self.rows, self.experts = self.rows + other.rows, self.experts + other.experts
            return
        if [len(x) for x in self.rows] != [len(x) for x in other.rows]:  # of another length, so of other rows at once
            self.rows, other = [torch.cat(self.rows)], Part(self.name, [torch.cat(other.rows)])
        for x, y in zip(self.rows, other.rows, strict=True):
            x += y


@dataclass
class PromptPasses:
    """All rollouts of a prompt, in one pass or in several, whose gradients add up."""

    passes: list[Pass]
    ends: Ends  # What the vocabulary's matrices need to know
    outside: list[tuple[Tensor, ...]]  # By row, the gradients so far of the parameters outside of the blocks


def expert_coordinates(prompts: Sequence[Part]) -> Iterator[list[Tensor]]:
    """Coordinates [r, n] with the inner products of all prompts' gradients by one expert's matrix after another.

    ⟨A_pᵀδ, A_qᵀδ'⟩ = ⟨R_p δ, R_q δ'⟩, where Aᵀ = QR are the rows that all prompts give the expert: n = o · min(d, rows)
    numbers instead of o · d.
    """
    for expert in range(len(prompts[0].experts[0])):
        triangle = torch.linalg.qr(torch.cat([x[expert] for part in prompts for x in part.experts]).T, mode="r").R
        start, coordinates = 0, list[Tensor]()
        for part in prompts:
            passes = list[Tensor]()
            for inputs, signals in zip(part.experts, part.rows, strict=True):
                columns = slice(start, start := start + len(inputs[expert]))
                passes.append(triangle[:, columns] @ signals.split([len(x) for x in inputs], dim=1)[expert])
            coordinates.append(torch.stack(passes).sum(0).flatten(1))
        yield coordinates


class Layered:
    """Forward passes of many prompts, then their gradients block by block."""

    def __init__(self, batch: ScoreBatch, structure: BlockStructure, prompts: int = 1) -> None:
        self.batch, self.structure, self.prompts = batch, structure, prompts
        self.named = dict(zip(batch.scope.names, batch.scope.parameters, strict=True))
        head = end_of(batch.model, "output")
        plain = type(head) is nn.Linear and batch.soft is None and batch.scope.head is None
        plain = plain and not any(head.bias is one for one in batch.scope.tensors)
        # Evaluated in slices, where it is linear and has no bias to differentiate by; None where only the model's own
        # logits will do.
        self.head: nn.Linear | None = head if plain else None
        self.added: list[PromptPasses] = []
        self.rows = 0  # Of all prompts that were added
        self.again = False  # Whether some blocks' inputs were not kept

    def add(self, passes: Sequence[Rollouts], rows_of: Callable[[Tensor], Tensor]) -> None:
        """Run a prompt's rollouts forward and bring the signals of its rows back to the last block's output.

        `rows_of` gives the prompt's rows of weights [r, Σ K] from its log-probabilities [Σ K], pass after pass.

        Raises:
            UnfitError: The blocks do not run in order, or the output layer's logits are changed.
        """
        ran = [self._forward(*one) for one in passes]
        if any(predicted is None for _, predicted in ran):  # the model caps or scales its logits
            if self.structure.head is not None:
                raise UnfitError("its logits are not what its output layer returns")
            self.head = None
            ran = [self._forward(*one) for one in passes]
        logprob = torch.cat([predicted.logprob.detach() for _, predicted in ran if predicted])
        # The basis depends on log-probabilities, so rows are known only after the forward passes.
        rows, start = rows_of(logprob).to(logprob), 0
        parameters = [self.named[name] for name in self.structure.outside]
        outside = [tuple(torch.zeros_like(p) for p in parameters) for _ in rows]
        made, hidden = list[Pass](), list[Tensor]()
        for (_, layout), (seen, predicted) in zip(passes, ran, strict=True):
            assert predicted is not None
            span, start = slice(start, start + len(predicted.logprob)), start + len(predicted.logprob)
            # Gradients of Σ_k row_k log π(y_k) at the output.
            slope, some = predicted.slope, rows[:, span]
            above = some if slope is None else (row.to(slope)[:, None] * slope for row in some)
            signals = _pulled(predicted.output, seen.output, parameters, above, outside)
            made.append(Pass(layout, seen.calls, signals))
            if self.head is not None:
                hidden.append(predicted.output.detach())
            elif seen.into_head:
                if len(seen.into_head) != 1 or seen.into_head[0].ndim != 3:
                    raise UnfitError("its output layer does not run once on every position")
                hidden.append(layout.pick(seen.into_head[0]).detach())
        targets = torch.cat([r.ids[r.targets] for rollouts, _ in passes for r in rollouts])
        ends = Ends(rows, targets, torch.cat(hidden) if hidden else None)
        if self.head is None:
            ends.check(self.structure.head, logprob, self.batch.temperature)
        inputs = [call.hidden for one in made for call in one.calls if call.hidden is not None]
        if self.prompts * sum(x.numel() * x.element_size() for x in inputs) > INPUT_BYTES:
            # √L kept inputs, √L blocks run again between two of them: the least memory for one more pass.
            kept = math.isqrt(len(self.structure.blocks))
            for call in (call for one in made for i, call in enumerate(one.calls) if i % kept):
                call.hidden, self.again = None, True
        self.added.append(PromptPasses(made, ends, outside))
        self.rows += len(rows)
        advance()

    def _forward(self, rollouts: tuple[Rollout, ...], layout: Layout) -> tuple[Seen, Predictions | None]:
        """Run some rollouts; no graph below the last block's output, because blocks are run again one at a time."""
        with torch.no_grad(), self.structure.watched() as seen:
            if self.head is not None:
                return seen, predictions(self.batch, rollouts, layout, self.head)
            return seen, Predictions(values := sampled_logprobs(self.batch, rollouts, layout), values, None)

    def gradients(self) -> Gradients:
        """Form every parameter's gradients of all rows, from the last block to the first; use each before the next."""
        yield from self.of_blocks(self.rows)
        yield from self.of_ends(self.extent())

    def of_blocks(self, rows: int, shared: bool = False) -> Gradients:
        """The gradients by all blocks, in slices that hold so many rows; of these this process may have some only.

        Those of experts that few tokens went to may be left as coordinates, which depend on all rows; not where prompts
        are `shared` out. Then FSDP2's weights are gathered for one block at a time.
        """
        blocks, size = self.structure.blocks, math.isqrt(len(self.structure.blocks))
        for index in reversed(range(self.structure.first, len(blocks))):
            lowest, failed = index // size * size, None
            if self.again and index in (len(blocks) - 1, lowest + size - 1):
                for below in range(lowest, index):
                    with held(blocks[below], shared):
                        failed = failed or self._next_inputs(below)
            with held(blocks[index], shared):
                if failed is not None:  # no sooner: the others gather each of these blocks, too
                    raise failed
                yield from self._of_block(index, rows, not shared)

    def _next_inputs(self, index: int) -> Exception | None:
        """Run a block again where the input of the next one was not kept; return what stopped it."""
        try:
            with torch.no_grad():
                for one in (one for prompt in self.added for one in prompt.passes):
                    call, above = one.calls[index : index + 2]
                    if above.hidden is None and call.hidden is not None:
                        above.hidden = call.again(self.structure.blocks[index], call.hidden)
        except Exception as error:
            return error
        return None

    def _of_block(self, index: int, rows: int, coordinates: bool) -> Gradients:
        """The gradients by one block, and the signals brought to its input."""
        named = [(name, self.named[name]) for name in self.structure.inside[index]]
        # Each further part repeats its block alone: too little memory costs passes over a block, not over the model.
        parts = stretches([parameter for _, parameter in named], max(rows, 1))
        for part in parts:
            wanted, by_prompt = [(*named[i], span) for i, span in part], list[list[Part]]()
            for prompt in self.added:
                total = list[Part]()
                for one in prompt.passes:
                    parts_of_pass = self._through(index, one, wanted, coordinates, last=part is parts[-1])
                    for into, more in zip(total, parts_of_pass, strict=False):  # of passes after the first
                        into.add(more)
                    total = total or parts_of_pass
                if len(prompt.ends.rows):
                    by_prompt.append(total)
                if part is parts[-1]:
                    advance()
            for i, (name, parameter, span) in enumerate(wanted):
                same = [spans[i] for spans in by_prompt]
                none = [parameter.new_zeros(0, span.stop - span.start)]
                formed = [[gradients for one in same for gradients in one.rows] or none]
                for gradients in expert_coordinates(same) if same and same[0].experts else formed:
                    yield name, gradients

    def extent(self) -> Extent:
        """Bring the signals to the embedding's output, and say how far the gradients of the model's ends reach."""
        parameters, embedding = [self.named[name] for name in self.structure.outside], self.structure.embedding
        for prompt in self.added if embedding is not None or parameters else ():
            read, signals = list[Tensor](), list[Tensor]()
            for one in prompt.passes:
                with self.structure.stopped() as seen:
                    model_logits(self.batch.model, one.layout)
                at_embedding = _pulled(seen.first, seen.embedded, parameters, one.signals, prompt.outside)
                if embedding is not None:  # what the pass read [n ℓ], and the signals there [r, n ℓ, d]
                    read.append(seen.ids.flatten())
                    signals.append(at_embedding.flatten(1, -2))
            if embedding is not None:
                prompt.ends.ids, prompt.ends.embedded = torch.cat(read), torch.cat(signals, 1)
                if embedding.padding_idx is not None:  # its entry has no gradient
                    prompt.ends.embedded[:, prompt.ends.ids == embedding.padding_idx] = 0
        ends = [prompt.ends for prompt in self.added]
        ids = np.unique(np.concatenate([np.zeros(0, np.int64), *(end.ids.cpu().numpy() for end in ends)]))
        return Extent(self.rows, max((len(end.targets) for end in ends), default=1), ids)

    def of_ends(self, extent: Extent) -> Gradients:
        """The gradients by what stands outside of the blocks, in slices for this extent; after `extent`."""
        for i, name in enumerate(self.structure.outside):
            none = [self.named[name].new_zeros(0, self.named[name].numel())]
            yield name, [row[i].flatten()[None] for prompt in self.added for row in prompt.outside] or none
        ends = [prompt.ends for prompt in self.added]
        for name, gradients in vocabulary_gradients(self.structure, ends, self.batch.temperature, extent):
            yield name, [gradients]

    def _through(
        self, index: int, one: Pass, wanted: Sequence[tuple[str, Tensor, slice]], coordinates: bool, *, last: bool
    ) -> list[Part]:
        """Form the gradients of a pass' rows by spans of parameters; if these are the `last`, move the signals on."""
        hidden = one.calls[index].hidden
        assert hidden is not None
        # A new leaf: the graph spans one block and is freed with it.
        source, block = hidden.detach().requires_grad_(), self.structure.blocks[index]
        with routed(block) as experts, many_signals(one.layout.ids.shape[1]):
            output = one.calls[index].again(block, source)
            tokens = one.layout.ids.numel(), sum(x.layout.ids.numel() for prompt in self.added for x in prompt.passes)
            few = [_few_tokens(experts.get(id(x)), x, span, *tokens) if coordinates else None for _, x, span in wanted]
        targets = [x if call is None else call.outputs for call, (_, x, _) in zip(few, wanted, strict=True)]
        size = sum(x.numel() * x.element_size() for x in targets)
        back, by_target = torch.empty_like(one.signals), [list[Tensor]() for _ in wanted]
        # Few enough rows at once for the block's activations and their gradients.
        widest = one.signals.element_size() * one.signals[:1].numel() * WIDER
        for rows in query_blocks(len(back), back.device, max(1, SIGNAL_BYTES // max(1, size, widest))):
            back[rows], *gradients = pull_back(output, [source, *targets], one.signals[rows])
            for into, gradient, call, (_, x, span) in zip(by_target, gradients, few, wanted, strict=True):
                flat = gradient.flatten(1) if call is None else gradient
                # A copy of a part lets go of the whole gradient; a whole one is kept as it is.
                into.append(flat if span.stop - span.start == x.numel() else flat[:, span].clone())
        if last:  # every part needs the signals at the block's output and its input once more
            one.signals, one.calls[index].hidden = back, None
        return [
            Part(name, pieces) if call is None
            else Part(name, [torch.cat(pieces)] if pieces else [], [call.inputs.split(call.counts)])
            for (name, _, _), pieces, call in zip(wanted, by_target, few, strict=True)
        ]  # fmt: skip


def hold(blocks: Sequence[nn.Module], whole: bool) -> None:
    """Gather the weights of blocks that FSDP2 shards, or let go of the others' parts; every process must call it.

    Not of blocks that hold copies in float32: either would put FSDP2's own weights in their place.

    Raises:
        ExchangeError: Another process ended.
    """
    with exchanging():
        for block in blocks:
            if isinstance(block, FSDPModule) and not any(hasattr(weight, COPY) for weight in block.parameters()):
                block.unshard() if whole else block.reshard()


@contextmanager
def held(block: nn.Module, shared: bool) -> Iterator[None]:
    """Hold the weights of a block where prompts are shared out; whoever stops inside lets go of all blocks itself."""
    hold([block] * shared, whole=True)
    yield
    hold([block] * shared, whole=False)


def _few_tokens(calls: list[Routed] | None, parameter: Tensor, span: slice, n: int, total: int) -> Routed | None:
    """The pass of experts that see fewer tokens than a row has numbers, by FEWER; it has n of all tokens.

    In whole numbers, so that all passes answer alike.
    """
    if not calls or span.stop - span.start < parameter.numel():
        return None
    (call,) = calls
    return call if FEWER * len(call.inputs) * call.outputs.shape[1] * total <= parameter.numel() * n else None


def _pulled(
    output: Tensor,
    leaf: Tensor,
    parameters: Sequence[Tensor],
    signals: Iterable[Tensor],
    outside: Sequence[tuple[Tensor, ...]],
) -> Tensor:
    """Gradients of ⟨output, signal⟩ by a leaf, a row for each signal; those by parameters are added to their sums."""
    rows = list[Tensor]()
    for signal, total in zip(signals, outside, strict=True):
        if output.requires_grad:  # the graph is kept for the next row
            inputs = [leaf, *parameters]
            row, *more = torch.autograd.grad(output, inputs, signal, retain_graph=True, materialize_grads=True)
        else:
            row, more = torch.zeros_like(leaf), []
        rows.append(row)
        for x, y in zip(total, more, strict=False):
            x += y
    # Weights that cancel leave no rows.
    return torch.stack(rows) if rows else leaf.new_zeros(0, *leaf.shape)
