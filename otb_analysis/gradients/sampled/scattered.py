"""Exact norms of single tokens scattered over a batch: a copy of the rollout for each, many copies in one pass.

Where most tokens of a rollout are wanted the generic engine shares one graph among them. Where a few are wanted of
each, it is cheaper to cut a copy of the rollout behind each of them and to run ordinary batches of such copies: a row
that holds one sampled token leaves nothing but its own signals at every layer, and per-row norms follow from the
layers' inputs and signals without a weight gradient. The share of the layers above the last attention comes even
cheaper: one ordinary backward pass gives it for every token of the batch, because there no two tokens mix.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch, microbatches
from otb_analysis.gradients.exact.hooks import Trace
from otb_analysis.gradients.exact.layers import (
    BIAS,
    EMBEDDING,
    HEADED_SCALE,
    MATRIX,
    SCALE,
    Rule,
    UnfitError,
    row_factors,
    wide,
)
from otb_analysis.gradients.exact.norm_accumulators import norm_sq
from otb_analysis.gradients.exact.plan import ParameterUse, Plan
from otb_analysis.phases import advance, count_to
from otb_analysis.types import Float

SUMMED = (BIAS, SCALE, HEADED_SCALE)
"""Rules whose outer product already sums over whatever lies between the first and the last axis."""


def norms_above_cut(problem: ScoreBatch, plan: Plan) -> Float:
    """The part of every token's squared score norm that lies in the layers above the last attention [N, L].

    One forward and one backward pass over the batch. A tied matrix counts with its output use only. It is a lower
    bound of ‖s_t‖² up to that matrix's cross term, and all of ‖s_t‖² where nothing in scope is below.

    Args:
        problem: The checked batch.
        plan: How its model is taken apart.
    """
    found = np.zeros(problem.shape)
    modules = dict(problem.model.named_modules())
    for batch in microbatches(problem.rollouts):
        seen = _Pass(problem, plan.above, batch)
        total = torch.zeros(len(seen.row), dtype=torch.float64, device=seen.row.device)
        for use, inputs, signal in seen.layers():
            left, right = use.rule.outer(modules[use.module], inputs[seen.at(inputs)], signal[seen.at(signal)])
            total += norm_sq(left) * norm_sq(right)
        found[seen.places] = total.cpu().numpy()
    return found


def token_norms(problem: ScoreBatch, plan: Plan) -> Float:
    """Exact squared norm of the score of every token in the mask [N, L], zero elsewhere.

    As `generic.token_score_norms`, which is the faster one where a rollout has many sampled tokens.

    Args:
        problem: The checked batch; its mask holds the tokens to measure.
        plan: How its model is taken apart.
    """
    found = np.zeros(problem.shape)
    copies = [one for rollout in problem.rollouts for one in rollout.blocks(1)]
    count_to(len(copies), "token")
    for batch in microbatches(copies):
        seen = _Pass(problem, (*plan.above, *plan.below), batch)
        found[seen.places] = _row_norms(problem, plan, seen).cpu().numpy()
        advance(len(batch))
    return found


class _Pass:
    """One forward and one backward pass over some rollouts, summed over all their sampled tokens.

    Attributes:
        row: Row of each sampled token within the pass [K].
        places: (rollouts, columns) of the tokens in the padded batch.
    """

    def __init__(self, problem: ScoreBatch, uses: Sequence[ParameterUse], rollouts: tuple[Rollout, ...]) -> None:
        self.uses, self.trace = uses, _traced(problem, uses, rollouts)
        counts = torch.tensor([len(r.columns) for r in rollouts])
        self.position = torch.cat([r.targets for r in rollouts]) - 1
        self.row = torch.repeat_interleave(counts).to(self.position.device)
        self.kept = self.position.unique()
        self.places = (
            np.repeat([r.row for r in rollouts], counts.numpy()),
            np.concatenate([r.columns for r in rollouts]),
        )
        self.names = list(dict.fromkeys(u.module for u in uses))
        outputs = [self.trace.outputs[name] for name in self.names]
        self.signals = torch.autograd.grad(self.trace.logprob.sum(), outputs)

    def layers(self) -> Iterator[tuple[ParameterUse, Tensor, Tensor]]:
        """Every use with its layer's input and the signal at its output, all rows and positions."""
        for use in self.uses:
            yield use, self.trace.inputs[use.module].detach(), self.signals[self.names.index(use.module)]

    def at(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Index of the positions that predict the sampled tokens; the output layer may run on the kept ones only."""
        if tensor.shape[1] == len(self.kept):
            return self.row, torch.searchsorted(self.kept, self.position)
        return self.row, self.position


def _traced(problem: ScoreBatch, uses: Sequence[ParameterUse], rollouts: tuple[Rollout, ...]) -> Trace:
    """Run rollouts as one ordinary batch, with the model's own attention kernels, while watching the layers in use."""
    modules = dict(problem.model.named_modules())
    trace = Trace()
    inner = replace(problem, scope=replace(problem.scope, head=None))
    # The scope's own hook comes first, so that a layer is seen with the leaves it is differentiated by.
    with problem.scope.active(), ExitStack() as hooks:
        for name in dict.fromkeys(u.module for u in uses):
            handle = modules[name].register_forward_hook(_row_by_row(name, len(rollouts), trace))
            hooks.callback(handle.remove)
        trace.logprob = sampled_logprobs(inner, rollouts)
    return trace


def _row_by_row(name: str, rows: int, trace: Trace) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """A hook that remembers a layer's input and output, with one row per rollout.

    A layer that runs once for all rows, as a table of positions does, is spread over them, so that each row's signal
    stays its own.
    """

    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        given = args[0]
        if given.shape[0] not in (1, rows) or output.shape[0] != given.shape[0]:
            raise UnfitError(
                f"layer {name} works on shape {tuple(given.shape)} where {rows} rollouts were expected; "
                'pass engine="reference".'
            )
        if given.shape[0] < rows:
            given, output = (x.expand(rows, *x.shape[1:]) for x in (given, output))
        trace.inputs[name], trace.outputs[name] = given, output
        return output

    return hook


@dataclass(frozen=True)
class _Layer:
    """One use in a pass whose rows hold one token each: the layer's inputs and signals, and their per-row factors."""

    use: ParameterUse
    module: nn.Module
    inputs: Tensor
    signal: Tensor


def _row_norms(problem: ScoreBatch, plan: Plan, seen: _Pass) -> Tensor:
    """‖s‖² of each row's one token [B]."""
    modules = dict(problem.model.named_modules())
    total = torch.zeros(len(seen.row), dtype=torch.float64, device=seen.row.device)
    outer: dict[str, tuple[Tensor, Tensor]] = {}
    above = set(plan.above)
    for use, inputs, signal in seen.layers():
        module = modules[use.module]
        if use in above:
            left, right = use.rule.outer(module, inputs[seen.at(inputs)], signal[seen.at(signal)])
            total += norm_sq(left) * norm_sq(right)
            outer[use.parameter] = left, right
            continue
        total += _below(_Layer(use, module, inputs, signal))
        if use.rule is EMBEDDING and use.parameter in plan.tied:
            total += _tied_cross(_Layer(use, module, inputs, signal), *outer[use.parameter])
    return total


def _below(layer: _Layer) -> Tensor:
    rule: Rule = layer.use.rule
    if rule is MATRIX:
        return _matrix(wide(layer.inputs), wide(layer.signal))
    if rule in SUMMED:
        left, right = rule.outer(layer.module, layer.inputs, layer.signal)
        return norm_sq(left) * norm_sq(right)
    if rule is EMBEDDING:
        return _embedding(layer)
    rows = zip(layer.inputs.split(1), layer.signal.split(1), strict=True)
    return torch.cat([norm_sq(rule.coordinates(rule.prepare(layer.module, a), s)) for a, s in rows])


def _matrix(inputs: Tensor, signal: Tensor) -> Tensor:
    """‖Aᵀδ‖² of each row [B], by Gram matrices of positions or by the gradient itself, whichever is less work."""
    length, (a, b) = inputs.shape[1], (inputs.shape[2], signal.shape[2])
    if length * (a + b) < a * b:
        # The sum over pairs of positions cancels, so it is taken in float64; the products are exact enough.
        pairs = (inputs @ inputs.mT).double() * (signal @ signal.mT).double()
        return pairs.flatten(1).sum(1).clamp(min=0.0)
    return norm_sq(inputs.mT @ signal)


def _embedding(layer: _Layer) -> Tensor:
    """‖gradient‖² of an embedding [B]: signals of positions that read the same token add up."""
    same = layer.inputs[:, :, None] == layer.inputs[:, None, :]
    signal = wide(layer.signal) * row_factors(layer.module, layer.inputs)[..., None]
    return ((signal @ signal.mT).double() * same).flatten(1).sum(1).clamp(min=0.0)


def _tied_cross(layer: _Layer, left: Tensor, right: Tensor) -> Tensor:
    """2⟨input use, output use⟩ of a tied matrix [B]: 2 Σ_t (δ_t·h) · (e_y − π)[x_t]."""
    along = (wide(layer.signal) * left[:, None, :]).sum(-1)
    return 2 * (along.double() * right.gather(1, layer.inputs).double() * row_factors(layer.module, layer.inputs)).sum(
        1
    )
