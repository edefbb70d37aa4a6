"""One rollout decomposed by a plan: outer products above the cut, coordinates below it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import layers_of, replaced
from otb_analysis.gradients.exact.hooks import Trace, own_rows, pull_back, traced
from otb_analysis.gradients.exact.layers import EMBEDDING, MATRIX
from otb_analysis.gradients.exact.plan import ParameterUse, Plan

SIGNAL_BYTES = 1 << 27
"""What the signals of one block may occupy at the widest layer below the cut; longer rollouts get smaller blocks."""
TOGETHER_BYTES = 1 << 20
"""What one signal may occupy at all layers together, for those of a block to be taken off the pass at its end: watching
every layer takes a tenth longer on short texts."""

Take = Callable[[ParameterUse, Tensor], None]
"""Is handed a use below the cut and the coordinates [C, ...] of C gradients in it."""


@dataclass(frozen=True)
class Mix:
    """C weighted scores Σ_k weights[c, k] s_k of the sampled tokens `span`; weights None for the tokens' own scores."""

    weights: Tensor | None
    span: slice

    def matrix(self, token_signals: Tensor) -> Tensor:
        """Weights [C, |span|], like the signals of all tokens."""
        if self.weights is None:
            return torch.eye(len(token_signals[self.span]), device=token_signals.device).to(token_signals)
        return self.weights.to(token_signals)


class _Arrivals:
    """Who is handed the signals that come back to the layers of one forward pass; nobody outside of a backward pass."""

    # An object of its own: a graph that held the pass, whose tensors hold the graph, would never be freed.
    take: Callable[[str, Tensor], None] | None = None


class _Tap(torch.autograd.Function):
    """The identity, with a zero on which it formally depends: to form the zero's gradient all signals come by."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _zero: Tensor, name: str, arrivals: _Arrivals) -> Tensor:
        ctx.name, ctx.arrivals = name, arrivals
        return output.clone()  # a view could not be changed in place, as Falcon does

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor | None, ...]:
        # Under vmap a signal stands for those of many tokens. A function with a `vmap` rule would be handed all of them
        # too, but takes half as long again on short texts.
        if ctx.arrivals.take is not None and is_batchedtensor(signals[0]):
            ctx.arrivals.take(ctx.name, get_unwrapped(signals[0]).movedim(maybe_get_bdim(signals[0]), 0))
        return signals[0], None, None, None


class DecomposedRollout:
    """Everything that one forward and one ordinary backward pass of a rollout with K sampled tokens give."""

    def __init__(self, batch: ScoreBatch, plan: Plan, rollout: Rollout) -> None:
        self.batch, self.plan, self.rollout = batch, plan, rollout
        each = rollout.length * plan.widths * batch.scope.parameters[0].element_size()
        self._together = each <= TOGETHER_BYTES
        self._uses: dict[str, list[ParameterUse]] = {}  # By module below the cut
        for use in plan.below:
            self._uses.setdefault(use.module, []).append(use)
        self.trace, self._zero, self._arrivals = self._traced(rollout, None)  # its graph is kept
        # By use above the cut, the tokens' gradients as outer products (left [K, a], right [K, b]); of a tied matrix
        # only those rows that the rollout does not read as input.
        self.outer: dict[ParameterUse, tuple[Tensor, Tensor]] = {}
        # By tied parameter, the other rows: (right [K, U], left [K, d]) for the U distinct tokens read.
        self.shared: dict[str, tuple[Tensor, Tensor]] = {}
        self._modules = modules = layers_of(batch.model)
        names = list(dict.fromkeys(u.module for u in plan.above))
        outputs = [self.trace.outputs[n] for n in names]
        cut = outputs[0] if plan.cut is None else self.trace.inputs[plan.cut]
        # One pass for all tokens: nothing at or above the cut mixes positions, so what the sum of all log-probabilities
        # sends to a position there is the signal of the one token that it predicts.
        *signals, last = torch.autograd.grad(self.trace.logprob.sum(), [*outputs, cut], retain_graph=True)
        self.token_signals = last[0, own_rows(last, rollout)]  # each token's own signal at the cut [K, ...]
        for use in plan.above:
            inputs, signal = self.trace.inputs[use.module].detach(), signals[names.index(use.module)]
            at = own_rows(inputs, rollout)
            self.outer[use] = use.rule.outer(modules[use.module], inputs[0, at], signal[0, own_rows(signal, rollout)])
        # In the rows that are also read as input both uses add before they are squared.
        tokens = rollout.ids[: rollout.length].unique()
        for parameter, use in plan.tied.items():
            left, right = self.outer[use]
            self.shared[parameter] = right[:, tokens], left
            self.outer[use] = left, right.index_fill(1, tokens, 0.0)

    def _traced(self, rollout: Rollout, cut: str | None) -> tuple[Trace, Tensor, _Arrivals]:
        """A pass over the rollout or a prefix, as far as `cut`, whose layers below the cut hand over their signals."""
        zero, arrivals, seen = self.batch.scope.parameters[0].new_zeros((), requires_grad=True), _Arrivals(), Trace()
        versions: list[tuple[Tensor, int]] = []

        def tap(name: str, inputs: Tensor, output: Tensor) -> Tensor:
            seen.inputs[name], seen.outputs[name] = inputs, output
            versions.append((output, output._version))
            tapped = name in self._uses and not self._together
            return _Tap.apply(output, zero, name, arrivals) if tapped else output  # pyright: ignore[reportReturnType]

        trace = traced(self.batch, (rollout,), self.plan.modules, cut, tap)
        if self._together and any(output._version != before for output, before in versions):
            self._together = False  # the model changes outputs in place: a tap returns a copy
            return self._traced(rollout, cut)
        trace.inputs |= seen.inputs
        trace.outputs |= seen.outputs
        return trace, zero, arrivals

    @cached_property
    def kept(self) -> dict[ParameterUse, Tensor]:
        """By use below the cut, what its rule keeps of the layer's inputs; made when first asked for."""
        # Query, key and value read one tensor; what is kept of it is made once.
        made: dict[tuple[object, ...], Tensor] = {}
        kept = {}
        for use in self.plan.below:
            inputs = self.trace.inputs[use.module].detach()
            same = (inputs.data_ptr(), inputs.shape, inputs.stride()) if use.rule is MATRIX else (use,)
            if same not in made:
                made[same] = use.rule.prepare(self._modules[use.module], inputs)
            kept[use] = made[same]
        return kept

    def zeros(self, *shape: int) -> Tensor:
        """Float64 zeros [K, *shape], to add up numbers of the sampled tokens."""
        return torch.zeros(len(self.rollout.columns), *shape, dtype=torch.float64, device=self.token_signals.device)

    @property
    def block_size(self) -> int:
        """Signals that the memory allowed holds at once."""
        each = self.rollout.length * self.plan.width * self.token_signals.element_size()
        return max(1, SIGNAL_BYTES // max(each, 1))

    def below(self, rollout: Rollout, mix: Mix, take: Take) -> None:
        """Hand over the coordinates [C, ...] below the cut of several weighted scores, the last layer's first.

        `rollout` is this one, or a prefix of it that ends with the tokens of the mix, over which there is a pass of its
        own. Signals are let go layer by layer: all layers' together would take many times as much memory.
        """
        if self.plan.cut is None:
            return
        trace, zero, arrivals = self.trace, self._zero, self._arrivals
        if rollout.length < self.rollout.length:
            trace, zero, arrivals = self._traced(rollout, self.plan.cut)
        source, signals = trace.inputs[self.plan.cut], self.token_signals[mix.span]
        weights = mix.matrix(self.token_signals)
        seeds = source.new_zeros(len(weights), *source.shape)
        at = own_rows(source, rollout)[-len(signals) :]  # the last block shares the whole rollout's pass
        seeds[:, 0, at] = torch.einsum("ck,k...->ck...", weights, signals)

        kept = self.kept  # made here: inside of the batched backward pass a layer's own kernel may not run

        def arrived(name: str, at_output: Tensor) -> None:
            for use in self._uses[name]:
                take(use, self._coordinates(use, kept[use], at_output[:, 0], mix, weights))

        if self._together:
            signals = pull_back(source, [trace.outputs[name] for name in self._uses], seeds)
            for name, at_output in zip(self._uses, signals, strict=True):
                arrived(name, at_output)
            return
        with replaced(vars(arrivals), "take", arrived):
            pull_back(source, [zero], seeds)

    def _coordinates(self, use: ParameterUse, kept: Any, signals: Tensor, mix: Mix, weights: Tensor) -> Tensor:
        coordinates = use.rule.coordinates(kept, signals)
        if use.rule is EMBEDDING and use.parameter in self.shared:
            right, left = (part[mix.span] for part in self.shared[use.parameter])
            for total, row in zip(coordinates, weights.to(right), strict=True):
                total += (row[:, None] * right).T @ left
        return coordinates
