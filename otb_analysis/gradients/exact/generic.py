"""The exact engine for any causal language model whose layers have rules: hooks, batched signals, no weight gradients.

One forward and one ordinary backward pass of a rollout give each token's own signal at and above the *cut*, the input
of the first layer behind the last attention. From there the signals of several tokens go back together, on the prefix
that they see, to the outputs of the layers below, where ‖Aᵀδ‖ = ‖Rδ‖ replaces every weight gradient.
"""

import logging
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import plain_kernels
from otb_analysis.gradients.batch.per_rollout import Asked, Norms, norms_of
from otb_analysis.gradients.exact import head
from otb_analysis.gradients.exact.layers import MATRIX
from otb_analysis.gradients.exact.norm_accumulators import RowLengths, norm_sq, outer_norms, outer_row_norms
from otb_analysis.gradients.exact.passes import SIGNAL_BYTES, DecomposedRollout, Mix
from otb_analysis.gradients.exact.plan import ELSEWHERE, ParameterUse, Plan, find_plan
from otb_analysis.gradients.exact.reference import pass_bytes
from otb_analysis.gradients.exact.verdicts import Verdicts, fits_or_told, graph_bytes, refuse_difference

NAME = "generic"
BLOCK = 16
"""Tokens whose signals travel together and share one forward graph on their common prefix; more spill the cache."""
FEW, POSITIONS_PER_SIGNAL = 8, 32
"""Up to 8 + positions / 32 signals per rollout the reference engine is no slower (measured with 15 to 256 prompt tokens
on models of width 16 and 128): the whole rollout's own pass and the factors of its inputs must first be earned back."""

SIGNAL_COPIES = 16
"""Tensors as large as the signals at the widest layer that are alive at once on the way through a block (measured)."""

_PLANS = Verdicts[Plan]()


def norms(batch: ScoreBatch, asked: Asked) -> Norms:
    """Squared norms of scores, of running sums and of weighted sums, without forming a gradient.

    Every token and every row of weights that is not all zero takes one backward signal.

    Raises:
        UnfitError: A parameter in scope has no rule; the sentence names it.
    """
    if batch.scope.head is not None:
        return head.norms(batch, asked)
    take_apart = partial(DecomposedRollout, batch, plan_for(batch))
    with plain_kernels(batch.model):  # once for all passes
        return norms_of(batch, asked, take_apart, _token_norms, _row_norms)


def fits(batch: ScoreBatch, asked: Asked) -> bool:
    """Whether "auto" should use this engine; a model that has no plan is logged once, with the reason."""
    if batch.scope.head is not None:
        return True
    signals = asked.tokens.sum() + len(batch.rollouts) * asked.weights.shape[1]
    if signals <= sum(FEW + r.length / POSITIONS_PER_SIGNAL for r in batch.rollouts):
        return False
    return has_plan(batch)


def has_plan(batch: ScoreBatch) -> bool:
    """Whether there is a plan for the model; one without is logged once, with the reason."""
    return fits_or_told(batch, plan_for, 'measured by engine="reference"', logging.WARNING)


def plan_for(batch: ScoreBatch) -> Plan:
    """Plan of a model and scope, made and checked against the reference engine at first use; raises if none fits."""
    return _PLANS.get(batch, lambda: _checked_plan(batch)) if batch.rollouts else Plan((), (), None, 0)


def needed_bytes(batch: ScoreBatch, path: bool) -> int:
    """What measuring the longest rollout takes at most, about: two graphs, signals, factors of inputs and logits."""
    if batch.scope.head is not None or not batch.rollouts:
        return 0
    plan, length, item = (
        plan_for(batch),
        max(r.length for r in batch.rollouts),
        batch.scope.parameters[0].element_size(),
    )
    tensors = dict(zip(batch.scope.names, batch.scope.parameters, strict=True))
    shapes = [tensors[u.parameter].shape[-2:] for u in plan.below if u.rule is MATRIX]
    signals = max(min(BLOCK * length * plan.width * item, SIGNAL_BYTES), length * plan.width * item)
    factors = item * length * sum(min(columns, length) for _, columns in shapes)
    # With `path` the running sums of all coordinates.
    sums = item * sum(rows * min(columns, length) for rows, columns in shapes) if path else 0
    return 2 * pass_bytes(batch, plan.graph) + SIGNAL_COPIES * signals + factors + sums


def _checked_plan(batch: ScoreBatch) -> Plan:
    plan = replace(find_plan(batch), graph=graph_bytes(batch))

    def measure(rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        decomposed = DecomposedRollout(batch, plan, rollout)
        return decomposed.trace.logprob, _parts(decomposed)

    refuse_difference(batch, "with plain attention kernels", ELSEWHERE.removesuffix("."), measure)
    return plan


def _parts(decomposed: DecomposedRollout) -> dict[str, Tensor]:
    """‖s_t‖² parameter by parameter, in one block."""
    parts: dict[str, Tensor] = {}
    for use, (left, right) in decomposed.outer.items():
        parts[use.parameter] = parts.get(use.parameter, 0.0) + norm_sq(left) * norm_sq(right)

    def take(use: ParameterUse, coordinates: Tensor) -> None:
        parts[use.parameter] = parts.get(use.parameter, 0.0) + norm_sq(coordinates)

    decomposed.below(decomposed.rollout, Mix(None, slice(None)), take)
    return parts


def _token_norms(decomposed: DecomposedRollout, first: int, path: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, ‖s_t‖² and, if wanted, ‖Σ_{j≤t} s_j‖² of the sampled tokens from `first` on."""
    norms, path_norm_sq = outer_norms(decomposed.outer.values(), decomposed.token_signals, path)
    # Coordinates of blocks are nested in the prefix, so running sums go on from block to block.
    running: dict[ParameterUse, Tensor] = {}
    start = first
    # Each block of tokens goes back on the prefix that it sees.
    for block in decomposed.rollout.blocks(min(BLOCK, decomposed.block_size), first) if decomposed.plan.cut else ():
        span = slice(start, start := start + len(block.columns))
        single, summed = RowLengths(), RowLengths()

        def take(
            use: ParameterUse, coordinates: Tensor, single: RowLengths = single, summed: RowLengths = summed
        ) -> None:
            single.note(coordinates)
            if path:
                summed.note(_accumulate(running, use, coordinates))

        decomposed.below(block, Mix(None, span), take)
        norms[span] += single.norm_sq
        if path:
            path_norm_sq[span] += summed.norm_sq
    return decomposed.trace.logprob[first:], norms[first:], path_norm_sq[first:]


def _row_norms(decomposed: DecomposedRollout, rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] s_k‖² of one rollout [M]."""
    rows = rows.to(decomposed.token_signals.device)
    result = outer_row_norms(decomposed.outer.values(), rows)
    size = min(BLOCK, decomposed.block_size)
    # Rows of weights reach over all tokens, so every block goes through the whole rollout's pass.
    for start in range(0, len(rows), size):
        some = slice(start, start + size)

        lengths = RowLengths()
        decomposed.below(decomposed.rollout, Mix(rows[some], slice(None)), lambda _use, x, to=lengths: to.note(x))
        result[some] += lengths.norm_sq
    return result


def _accumulate(running: dict[ParameterUse, Tensor], use: ParameterUse, coordinates: Tensor) -> Tensor:
    """Running sums of coordinates over the tokens so far; a longer prefix only appends coordinates."""
    # A product with a triangle of ones: on one thread `cumsum` along the first axis takes up to ten times as long.
    ones = torch.ones(len(coordinates), len(coordinates), dtype=coordinates.dtype, device=coordinates.device).tril()
    total = (ones @ coordinates.flatten(1)).view_as(coordinates)
    if use in running:
        before = running[use]
        total[:, : len(before)] += before
    running[use] = total[-1].clone()
    return total
