"""The exact engine for any causal language model whose layers have rules: hooks, batched signals, no weight gradients.

One forward and one ordinary backward pass of a rollout give each token's own signal at and above the *cut*, the input
of the first layer behind the last attention. From there the signals of several tokens go back together, on the prefix
that they see, to the outputs of the layers below, where ‖Aᵀδ‖ = ‖Rδ‖ replaces every weight gradient.
"""

import logging
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.per_rollout import norms_of_rows, norms_of_tokens
from otb_analysis.gradients.exact import head
from otb_analysis.gradients.exact.hooks import traced_to
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.norm_accumulators import leading_sums, norm_sq, outer_gram
from otb_analysis.gradients.exact.passes import DecomposedRollout, Mix
from otb_analysis.gradients.exact.plan import (
    ParameterUse,
    Plan,
    disagreement,
    find_plan,
    probe,
    reference_norms,
)
from otb_analysis.types import Float, ScoreNorms

NAME = "generic"
BLOCK = 16
"""Tokens whose signals travel together and share one forward graph on their common prefix; more spill the cache."""
FEW, POSITIONS_PER_SIGNAL = 8, 32
"""Up to 8 + positions / 32 signals per rollout the reference engine is no slower (measured with 15 to 256 prompt tokens
on models of width 16 and 128): the whole rollout's own pass and the factors of its inputs must first be earned back."""

_log = logging.getLogger(__name__)
_PLANS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], "Plan | UnfitError"]] = WeakKeyDictionary()


def token_score_norms(batch: ScoreBatch, path: bool) -> ScoreNorms:
    """Squared norm of every token's score, and with `path` of the running sums, without forming a gradient.

    Raises:
        UnfitError: A parameter in scope has no rule; the sentence names it.
    """
    if batch.scope.head is not None:
        return head.token_score_norms(batch, path, NAME)
    plan = plan_for(batch)

    def measure(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        decomposed = DecomposedRollout(batch, plan, rollout)
        return decomposed.trace.logprob, *_token_norms(decomposed, path)

    return norms_of_tokens(batch, NAME, path, measure)


def weighted_score_norms(batch: ScoreBatch, weights: Float) -> Float:
    """‖Σ_t weights[n,m,t] s_{n,t}‖² with one backward signal per row that is not all zero.

    Raises:
        UnfitError: A parameter in scope has no rule; the sentence names it.
    """
    if batch.scope.head is not None:
        return head.weighted_score_norms(batch, weights)
    plan = plan_for(batch)
    return norms_of_rows(
        batch, weights, lambda rollout, rows: _row_norms(DecomposedRollout(batch, plan, rollout), rows)
    )


def fits(batch: ScoreBatch, rows: int | None = None) -> bool:
    """Whether "auto" should use this engine, for `rows` weighted sums per rollout (None: for every token's own score).

    A model that has no plan is logged once, with the reason.
    """
    if batch.scope.head is not None:
        return True
    signals = sum(len(r.columns) if rows is None else rows for r in batch.rollouts)
    if signals <= sum(FEW + r.length / POSITIONS_PER_SIGNAL for r in batch.rollouts):
        return False
    return has_plan(batch)


def has_plan(batch: ScoreBatch) -> bool:
    """Whether there is a plan for the model; one without is logged once, with the reason."""
    known = model_key(batch) in _PLANS.get(batch.model, {})
    try:
        plan_for(batch)
    except UnfitError as reason:
        if not known:
            _log.warning('%s is measured by engine="reference": %s', type(batch.model).__name__, reason)
        return False
    return True


def plan_for(batch: ScoreBatch) -> Plan:
    """Plan of a model and scope, made and checked against the reference engine at first use; raises if none fits."""
    if not batch.rollouts:
        return Plan((), (), None, 0)
    plans, key = _PLANS.setdefault(batch.model, {}), model_key(batch)
    if key not in plans:
        try:
            plan = find_plan(batch)
            _check(batch, plan)
            plans[key] = plan
        except UnfitError as reason:
            plans[key] = UnfitError(str(reason))  # without the traceback, whose frames hold the model
        except NonFiniteError as error:  # says nothing about the model's layers, and the place is the probe's
            raise UnfitError(
                "logits are not finite on a probe of the vocabulary; check the model's weights for NaN or infinity, "
                'or pass engine="reference".'
            ) from error
    known = plans[key]
    if isinstance(known, UnfitError):
        raise UnfitError(str(known))
    return known


def model_key(batch: ScoreBatch) -> tuple[object, ...]:
    """What a plan depends on besides the identity of the model: its layers, attention, dtypes and the scope."""
    layers = tuple((name, type(module), module.training) for name, module in batch.model.named_modules())
    attention = getattr(getattr(batch.model, "config", None), "_attn_implementation", None)
    dtypes = tuple(p.dtype for p in batch.scope.parameters)
    return batch.scope.names, batch.scope.head is None, attention, dtypes, layers


def _check(batch: ScoreBatch, plan: Plan) -> None:
    """Compare the probe's log-probabilities and, parameter by parameter, its norms with the reference computation."""
    rollout = probe(batch)
    decomposed = DecomposedRollout(batch, plan, rollout)
    expected, norms = reference_norms(batch, rollout)
    coarse = batch.scope.parameters[0].dtype.itemsize < 4
    logprob = decomposed.trace.logprob.detach().double()
    if not torch.allclose(logprob, expected, rtol=0, atol=0.2 if coarse else 1e-4):
        raise UnfitError('log-probabilities differ with plain attention kernels; pass engine="reference".')
    if reason := disagreement(batch, _parts(decomposed), norms):
        raise UnfitError(f'{reason}; pass engine="reference" or leave it out of scope.')


def _parts(decomposed: DecomposedRollout) -> dict[str, Tensor]:
    """‖s_t‖² parameter by parameter, in one block."""
    parts: dict[str, Tensor] = {}
    for use, (left, right) in decomposed.outer.items():
        parts[use.parameter] = parts.get(use.parameter, 0.0) + norm_sq(left) * norm_sq(right)
    size = len(decomposed.rollout.columns)
    mix = Mix(torch.eye(size), slice(0, size))
    for use, coordinates in decomposed.coordinates(decomposed.trace, decomposed.rollout, mix):
        parts[use.parameter] = parts.get(use.parameter, 0.0) + norm_sq(coordinates)
    return parts


def _token_norms(decomposed: DecomposedRollout, path: bool) -> tuple[Tensor, Tensor]:
    """‖s_t‖² and, if asked for, ‖Σ_{j≤t} s_j‖² of a rollout's K sampled tokens."""
    norms, path_norm_sq = _outer_norms(decomposed, path)
    running: dict[ParameterUse, Tensor] = {}
    for span, coordinates_by_use in _blocks(decomposed):
        single, sums = [], []
        for use, coordinates in coordinates_by_use:
            single.append(_row_lengths(coordinates))
            if path:
                sums.append(_row_lengths(_accumulate(running, use, coordinates)))
        norms[span] += _total(single)
        if path:
            path_norm_sq[span] += _total(sums)
    return norms, path_norm_sq


def _blocks(decomposed: DecomposedRollout) -> Iterator[tuple[slice, Iterator[tuple[ParameterUse, Tensor]]]]:
    """Coordinates of a rollout's sampled tokens, some at a time: on the prefix they see, the last on the whole pass."""
    start, count = 0, len(decomposed.rollout.columns)
    for block in decomposed.rollout.blocks(min(BLOCK, decomposed.block_size)) if decomposed.plan.cut else ():
        span = slice(start, start := start + len(block.columns))
        mix = Mix(torch.eye(len(block.columns)), span)
        if start == count:  # the last block sees the whole rollout, whose pass is there already
            yield span, decomposed.coordinates(decomposed.trace, decomposed.rollout, mix)
        else:
            trace = traced_to(decomposed.plan.cut or "", decomposed.batch, block, decomposed.plan.modules)
            yield span, decomposed.coordinates(trace, block, mix)


def _row_lengths(coordinates: Tensor) -> Tensor:
    """Norms along the last axis of coordinates [C, ...], flat [C, ·]."""
    return torch.linalg.vector_norm(coordinates, dim=-1).view(len(coordinates), -1)


def _total(rows: list[Tensor]) -> Tensor:
    """‖·‖² [C] from the norms of all rows of coordinates, summed in float64."""
    return torch.cat(rows, dim=1).double().square().sum(1)


def _outer_norms(decomposed: DecomposedRollout, path: bool) -> tuple[Tensor, Tensor]:
    """The share of the layers above the cut; path norms are sums over the leading blocks of a K × K Gram matrix."""
    norms = decomposed.zeros()
    path_norm_sq = torch.zeros_like(norms)
    for left, right in decomposed.outer.values():
        norms += norm_sq(left) * norm_sq(right)
        if path:
            path_norm_sq += leading_sums(outer_gram(left, right))
    return norms, path_norm_sq


def _row_norms(decomposed: DecomposedRollout, rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] s_k‖² of one rollout [M]."""
    rows = rows.to(decomposed.token_signals.device)
    result = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for left, right in decomposed.outer.values():
        result += (rows @ outer_gram(left, right) * rows).sum(-1)
    size = min(BLOCK, decomposed.block_size)
    for start in range(0, len(rows), size):
        mix = Mix(rows[start : start + size], slice(None))
        for _, coordinates in decomposed.coordinates(decomposed.trace, decomposed.rollout, mix):
            result[start : start + size] += norm_sq(coordinates)
    return result


def _accumulate(running: dict[ParameterUse, Tensor], use: ParameterUse, coordinates: Tensor) -> Tensor:
    """Running sums of coordinates over the tokens so far; a longer prefix only appends coordinates.

    A product with a triangle of ones: on one thread `cumsum` along the first axis takes up to ten times as long.
    """
    ones = torch.ones(len(coordinates), len(coordinates), dtype=coordinates.dtype, device=coordinates.device).tril()
    total = (ones @ coordinates.flatten(1)).view_as(coordinates)
    if use in running:
        before = running[use]
        total[:, : len(before)] += before
    running[use] = total[-1].clone()
    return total
