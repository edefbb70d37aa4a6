"""Exact norms of single tokens scattered over a batch: a copy of the rollout for each, many copies in one pass.

The signals in a row that holds one sampled token are that token's alone, and norms by row follow from the layers'
inputs and signals without a weight gradient. For a few tokens of each rollout that is cheaper than the generic engine.
Above the last attention no two tokens mix, so one ordinary backward pass gives that share for every token of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.devices import GRAPH, working_set
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch, microbatches
from otb_analysis.gradients.batch.kernels import layers_of
from otb_analysis.gradients.exact.hooks import traced
from otb_analysis.gradients.exact.layers import (
    BIAS,
    EMBEDDING,
    HEADED_SCALE,
    INNER_VECTOR,
    MATRIX,
    SCALE,
    row_factors,
    wide,
)
from otb_analysis.gradients.exact.norm_accumulators import norm_sq
from otb_analysis.gradients.exact.plan import ParameterUse, Plan
from otb_analysis.phases import advance, count_to
from otb_analysis.types import Float

Layer = tuple[ParameterUse, nn.Module, Tensor, Tensor]
"""One use in a pass: the parameter, its module, the module's input and the signal at its output, rows first."""

POSITIONS = 512
"""Padded positions of one pass over copies, whose graph reaches through all layers."""


def norms_above_cut(batch: ScoreBatch, plan: Plan) -> Float:
    """The part of every token's squared score norm that lies in the layers above the last attention [N, L].

    One forward and one backward pass over the batch. A tied matrix counts with its output use only. It is a lower
    bound of ‖s_t‖² up to that matrix's cross term, and all of ‖s_t‖² where nothing in scope is below.
    """
    result = np.zeros(batch.shape)
    for micro in microbatches(batch.rollouts):
        one = _Pass(batch, plan.above, micro)

        def take(layer: Layer, one: _Pass = one) -> None:
            left, right = one.outer(layer)
            result[one.places] += (norm_sq(left) * norm_sq(right)).cpu().numpy()

        with _graph_from(batch.model, plan.above):
            one.run(take)
    return result


def token_norms(batch: ScoreBatch, plan: Plan) -> Float:
    """Exact squared norm of the score of every token in the mask [N, L], zero elsewhere."""
    result = np.zeros(batch.shape)
    # Each copy ends at its token: what comes after has no part in its score.
    copies = [one for rollout in batch.rollouts for one in rollout.blocks(1)]
    count_to(len(copies), "token")
    # The rows of a pass share a vector that is read as a whole, such as attention sinks: there each has a pass.
    shared = any(use.rule is INNER_VECTOR for use in plan.below)
    positions = working_set(batch.scope.parameters[0].device, POSITIONS, GRAPH)
    for micro in microbatches(copies, 1 if shared else positions):
        one = _Pass(batch, (*plan.above, *plan.below), micro)
        result[one.places] = _row_norms(plan, one).cpu().numpy()
        advance(len(micro))
    return result


@contextmanager
def _graph_from(model: nn.Module, uses: Sequence[ParameterUse]) -> Iterator[None]:
    """Let forward passes in the block keep no graph until they come to one of some layers."""
    modules = layers_of(model)

    def enable(_module: nn.Module, _args: tuple[object, ...]) -> None:
        torch.set_grad_enabled(True)

    with torch.no_grad(), ExitStack() as handles:
        for name in {use.module for use in uses}:
            handles.enter_context(modules[name].register_forward_pre_hook(enable))
        yield


class _Pass:
    """One forward and one backward pass over some rollouts, summed over all their sampled tokens."""

    def __init__(self, batch: ScoreBatch, uses: Sequence[ParameterUse], rollouts: tuple[Rollout, ...]) -> None:
        self.batch, self.uses, self.rollouts = batch, uses, rollouts
        counts = [len(r.columns) for r in rollouts]
        self.position = torch.cat([r.targets for r in rollouts]) - 1
        # Row of each sampled token within the pass [K].
        self.row = torch.as_tensor(np.repeat(np.arange(len(counts)), counts), device=self.position.device)
        self.kept = self.position.unique()
        # Rollouts and columns of the tokens in the padded batch.
        self.places = np.repeat([r.row for r in rollouts], counts), np.concatenate([r.columns for r in rollouts])

    def run(self, take: Callable[[Layer], None]) -> None:
        """Hand over every use with its layer's input and the signal at its output, the last layer first.

        Signals are let go one by one: all layers' together take as much memory as the graph.
        """
        modules = layers_of(self.batch.model)
        # A zero on which every layer's output depends: its gradient needs all their signals, and none is kept.
        zero = torch.zeros((), device=self.position.device, requires_grad=True)

        def tap(name: str, inputs: Tensor, output: Tensor) -> Tensor:
            inputs, tapped = inputs.detach(), output + zero.to(output.dtype)

            def arrived(signal: Tensor) -> None:
                for use in self.uses:
                    if use.module == name:
                        take((use, modules[name], inputs, signal))

            tapped.register_hook(arrived)
            return tapped

        trace = traced(self.batch, self.rollouts, (use.module for use in self.uses), tap=tap)
        # Rows do not mix, so the signals of the sum are those of each row's own tokens.
        torch.autograd.grad(trace.logprob.sum(), zero)

    def outer(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Gradients of the sampled tokens, which signal at one position each, as outer products [K, a] ⊗ [K, b]."""
        use, module, inputs, signal = layer
        return use.rule.outer(module, inputs[self._at(inputs)], signal[self._at(signal)])

    def _at(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Index of the positions that predict the sampled tokens; the output layer may run on the kept ones only."""
        if tensor.shape[1] == len(self.kept):
            return self.row, torch.searchsorted(self.kept, self.position)
        return self.row, self.position


def _row_norms(plan: Plan, one: _Pass) -> Tensor:
    """‖s‖² [B] of the one token that each row of a pass holds."""
    total = torch.zeros(len(one.row), dtype=torch.float64, device=one.row.device)
    outer: dict[str, tuple[Tensor, Tensor]] = {}
    above, tied = set(plan.above), plan.tied

    def take(layer: Layer) -> None:
        use = layer[0]
        if use in above:
            left, right = one.outer(layer)
            total.add_(norm_sq(left) * norm_sq(right))
            if use.parameter in tied:
                outer[use.parameter] = left, right
            return
        total.add_(_below(layer))
        if use.rule is EMBEDDING and use.parameter in tied:
            total.add_(_tied_cross(layer, *outer[use.parameter]))

    one.run(take)
    return total


def _below(layer: Layer) -> Tensor:
    """‖gradient‖² of each row [B]."""
    use, module, inputs, signal = layer
    if use.rule is MATRIX:
        return _matrix(wide(inputs), wide(signal))
    if use.rule in (BIAS, SCALE, HEADED_SCALE):  # their outer product sums over all axes between the first and the last
        left, right = use.rule.outer(module, inputs, signal)
        return norm_sq(left) * norm_sq(right)
    if use.rule is not EMBEDDING:
        kept = (use.rule.prepare(module, inputs[row : row + 1]) for row in range(len(signal)))
        return torch.cat([norm_sq(use.rule.coordinates(k, row[None])) for k, row in zip(kept, signal, strict=True)])
    # An embedding: signals of positions that read the same token add up before they are squared.
    same = inputs[:, :, None] == inputs[:, None, :]
    scaled = wide(signal) * row_factors(module, inputs)[..., None]
    return ((scaled @ scaled.mT).double() * same).flatten(1).sum(1).clamp(min=0.0)


def _matrix(inputs: Tensor, signal: Tensor) -> Tensor:
    """‖Aᵀδ‖² of each row [B], by Gram matrices of positions or by the gradient itself, whichever is less work."""
    length, (a, b) = inputs.shape[1], (inputs.shape[2], signal.shape[2])
    if length * (a + b) < a * b:
        # The sum over pairs of positions cancels, so it is taken in float64; the products are exact enough.
        pairs = (inputs @ inputs.mT).double() * (signal @ signal.mT).double()
        return pairs.flatten(1).sum(1).clamp(min=0.0)
    return norm_sq(inputs.mT @ signal)


def _tied_cross(layer: Layer, left: Tensor, right: Tensor) -> Tensor:
    """2⟨input use, output use⟩ of a tied matrix [B]: 2 Σ_t (δ_t·h) · (e_y − π)[x_t]."""
    _, module, ids, signal = layer
    along = (wide(signal) * left[:, None, :]).sum(-1)
    return 2 * (along.double() * right.gather(1, ids).double() * row_factors(module, ids)).sum(1)
