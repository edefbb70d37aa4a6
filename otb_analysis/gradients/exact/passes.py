"""One rollout decomposed by a plan: outer products above the cut, coordinates below it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.exact.hooks import Trace, own_rows, pull_back, traced
from otb_analysis.gradients.exact.layers import EMBEDDING, MATRIX
from otb_analysis.gradients.exact.plan import ParameterUse, Plan

SIGNAL_BYTES = 1 << 27
"""What the signals of one block may occupy in all layers below the cut; longer rollouts get smaller blocks."""


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


class DecomposedRollout:
    """Everything that one forward and one ordinary backward pass of a rollout with K sampled tokens give."""

    def __init__(self, batch: ScoreBatch, plan: Plan, rollout: Rollout) -> None:
        self.batch, self.plan, self.rollout = batch, plan, rollout
        self.trace = traced(batch, (rollout,), plan.modules)  # its graph is kept
        # By use above the cut, the tokens' gradients as outer products (left [K, a], right [K, b]); of a tied matrix
        # only those rows that the rollout does not read as input.
        self.outer: dict[ParameterUse, tuple[Tensor, Tensor]] = {}
        # By tied parameter, the other rows: (right [K, U], left [K, d]) for the U distinct tokens read.
        self.shared: dict[str, tuple[Tensor, Tensor]] = {}
        modules = dict(batch.model.named_modules())
        names = list(dict.fromkeys(u.module for u in plan.above))
        signals = self._signals([self.trace.outputs[n] for n in names])
        for use in plan.above:
            inputs, signal = self.trace.inputs[use.module].detach(), signals[names.index(use.module)]
            at = own_rows(inputs, rollout)
            self.outer[use] = use.rule.outer(modules[use.module], inputs[0, at], signal[0, own_rows(signal, rollout)])
        self._separate_tied()

    @cached_property
    def kept(self) -> dict[ParameterUse, Tensor]:
        """By use below the cut, what its rule keeps of the layer's inputs; made when first asked for."""
        modules = dict(self.batch.model.named_modules())
        # Query, key and value read one tensor; what is kept of it is made once.
        made: dict[tuple[object, ...], Tensor] = {}
        kept = {}
        for use in self.plan.below:
            inputs = self.trace.inputs[use.module].detach()
            same = (inputs.data_ptr(), inputs.shape, inputs.stride()) if use.rule is MATRIX else (use,)
            if same not in made:
                made[same] = use.rule.prepare(modules[use.module], inputs)
            kept[use] = made[same]
        return kept

    def _signals(self, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        cut = [] if self.plan.cut is None else [self.trace.inputs[self.plan.cut]]
        # One pass for all tokens: nothing at or above the cut mixes positions, so what the sum of all log-probabilities
        # sends to a position there is the signal of the one token that it predicts.
        total = self.trace.logprob.sum()
        *signals, last = torch.autograd.grad(total, [*outputs, *(cut or outputs[:1])], retain_graph=True)
        self.token_signals = last[0, own_rows(last, self.rollout)]  # each token's own signal at the cut [K, ...]
        return tuple(signals)

    def _separate_tied(self) -> None:
        """Split a tied matrix: in the rows that are also read as input both uses add before they are squared."""
        tokens = self.rollout.ids[: self.rollout.length].unique()
        for parameter, use in self.plan.tied.items():
            left, right = self.outer[use]
            self.shared[parameter] = right[:, tokens], left
            self.outer[use] = left, right.index_fill(1, tokens, 0.0)

    def zeros(self, *shape: int) -> Tensor:
        """Float64 zeros [K, *shape], to add up numbers of the sampled tokens."""
        return torch.zeros(len(self.rollout.columns), *shape, dtype=torch.float64, device=self.token_signals.device)

    @property
    def block_size(self) -> int:
        """Signals that the memory allowed holds at once."""
        each = self.rollout.length * self.plan.width * self.token_signals.element_size()
        return max(1, SIGNAL_BYTES // max(each, 1))

    def coordinates(self, trace: Trace, rollout: Rollout, mix: Mix) -> Iterator[tuple[ParameterUse, Tensor]]:
        """Coordinates [C, ...] below the cut of several weighted scores.

        `rollout` is the rollout, or a prefix of it that ends with the tokens of the mix; `trace` is a pass over it.
        """
        if self.plan.cut is None:
            return
        source = trace.inputs[self.plan.cut]
        signals, weights = self.token_signals[mix.span], mix.matrix(self.token_signals)
        seeds = source.new_zeros(len(weights), *source.shape)
        at = own_rows(source, rollout)[-len(signals) :]  # the last block shares the whole rollout's pass
        seeds[:, 0, at] = torch.einsum("ck,k...->ck...", weights, signals)
        names = list(dict.fromkeys(u.module for u in self.plan.below))
        at_outputs = pull_back(source, [trace.outputs[n] for n in names], seeds)
        for use in self.plan.below:
            coordinates = use.rule.coordinates(self.kept[use], at_outputs[names.index(use.module)][:, 0])
            if use.rule is EMBEDDING and use.parameter in self.shared:
                right, left = (part[mix.span] for part in self.shared[use.parameter])
                for total, row in zip(coordinates, weights.to(right), strict=True):
                    total += (row[:, None] * right).T @ left
            yield use, coordinates
