"""The exact engine for any causal language model whose layers have rules: hooks, batched signals, no weight gradients.

One forward and one ordinary backward pass of a rollout give each token's own signal at and above the *cut*, the input
of the first layer behind the last attention. From there the signals of several tokens go back together, on the prefix
that they see, to the outputs of the layers below, where ‖Aᵀδ‖ = ‖Rδ‖ replaces every weight gradient.
"""

import logging
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.inputs import ScoreBatch
from otb_analysis.gradients.exact import head
from otb_analysis.gradients.exact.hooks import traced_to
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.norm_accumulators import norm_sq, outer_gram
from otb_analysis.gradients.exact.passes import DecomposedRollout, Mix
from otb_analysis.gradients.exact.plan import (
    ParameterUse,
    Plan,
    disagreement,
    find_plan,
    length,
    probe,
    reference_norms,
)
from otb_analysis.phases import counted
from otb_analysis.types import Float, ScoreNorms

NAME = "generic"
BLOCK = 16
"""Tokens whose signals travel together and share one forward graph on their common prefix; more spill the cache."""
FEW, POSITIONS_PER_SIGNAL = 8, 32
"""Up to 8 + positions / 32 signals per rollout the reference engine is no slower (measured with 15 to 256 prompt tokens
on models of width 16 and 128): the whole rollout's own pass and the factors of its inputs must first be earned back."""

_log = logging.getLogger(__name__)
_PLANS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], "Plan | UnfitError"]] = WeakKeyDictionary()


def token_score_norms(problem: ScoreBatch, path: bool) -> ScoreNorms:
    """Squared norm of every token's score, and with `path` of the running sums, without forming a gradient.

    Args:
        problem: The checked batch.
        path: Also accumulate the signals' coordinates from token to token.

    Raises:
        UnfitError: A parameter in scope has no rule; the sentence names it.
    """
    if problem.scope.head is not None:
        return head.token_score_norms(problem, path, NAME)
    plan = plan_for(problem)
    norms, path_norm_sq, logprob = (np.zeros(problem.shape) for _ in range(3))
    for rollout in counted(problem.rollouts, "rollout"):
        where = rollout.row, rollout.columns
        apart = DecomposedRollout(problem, plan, rollout)
        logprob[where] = apart.trace.logprob.detach().double().cpu().numpy()
        single, running = _token_norms(apart, path)
        norms[where], path_norm_sq[where] = single.cpu().numpy(), running.cpu().numpy()
    return ScoreNorms(norms, logprob, NAME, path_norm_sq if path else None)


def weighted_score_norms(problem: ScoreBatch, weights: Float) -> Float:
    """‖Σ_t weights[n,m,t] s_{n,t}‖² with one backward signal per row that is not all zero.

    Raises:
        UnfitError: A parameter in scope has no rule; the sentence names it.
    """
    if problem.scope.head is not None:
        return head.weighted_score_norms(problem, weights)
    plan = plan_for(problem)
    result = np.zeros(weights.shape[:2])
    for rollout in counted(problem.rollouts, "rollout"):
        rows = weights[rollout.row][:, rollout.columns]
        active = np.flatnonzero(rows.any(-1))
        if len(active):
            apart = DecomposedRollout(problem, plan, rollout)
            found = _weighted_norms(apart, torch.from_numpy(rows[active]).to(apart.own.device))
            result[rollout.row, active] = found.cpu().numpy()
    return result


def fits(problem: ScoreBatch, rows: int | None = None) -> bool:
    """Whether "auto" should use this engine; a model that it cannot follow is logged once, with the reason.

    Args:
        problem: The checked batch.
        rows: Weighted sums per rollout; None for every sampled token's own score.
    """
    if problem.scope.head is not None:
        return True
    signals = sum(len(r.columns) if rows is None else rows for r in problem.rollouts)
    if signals <= sum(FEW + length(r) / POSITIONS_PER_SIGNAL for r in problem.rollouts):
        return False
    return has_plan(problem)


def has_plan(problem: ScoreBatch) -> bool:
    """Whether the model can be taken apart; one that cannot is logged once, with the reason."""
    known = model_key(problem) in _PLANS.get(problem.model, {})
    try:
        plan_for(problem)
    except UnfitError as reason:
        if not known:
            _log.warning('%s is measured by engine="reference": %s', type(problem.model).__name__, reason)
        return False
    return True


def plan_for(problem: ScoreBatch) -> Plan:
    """Plan of a model and scope, made and checked against the reference engine at first use.

    Raises:
        UnfitError: The model or the scope does not fit.
    """
    if not problem.rollouts:
        return Plan((), (), None, 0)
    plans, key = _PLANS.setdefault(problem.model, {}), model_key(problem)
    if key not in plans:
        try:
            plan = find_plan(problem)
            _check(problem, plan)
            plans[key] = plan
        except UnfitError as reason:
            plans[key] = UnfitError(str(reason))  # without the traceback, whose frames hold the model
        except NonFiniteError as error:  # says nothing about the model's layers, and the place is the probe's
            raise UnfitError(
                "logits are not finite on a probe of the vocabulary; check the model's weights for NaN or infinity, "
                'or pass engine="reference".'
            ) from error
    found = plans[key]
    if isinstance(found, UnfitError):
        raise UnfitError(str(found))
    return found


def model_key(problem: ScoreBatch) -> tuple[object, ...]:
    """What a plan depends on besides the identity of the model: its layers, attention, dtypes and the scope."""
    layers = tuple((name, type(module), module.training) for name, module in problem.model.named_modules())
    attention = getattr(getattr(problem.model, "config", None), "_attn_implementation", None)
    dtypes = tuple(p.dtype for p in problem.scope.parameters)
    return problem.scope.names, problem.scope.head is None, attention, dtypes, layers


def _check(problem: ScoreBatch, plan: Plan) -> None:
    """Compare the probe's log-probabilities and, parameter by parameter, its norms with the reference computation."""
    rollout = probe(problem)
    apart = DecomposedRollout(problem, plan, rollout)
    expected, norms = reference_norms(problem, rollout)
    coarse = problem.scope.parameters[0].dtype.itemsize < 4
    logprob = apart.trace.logprob.detach().double()
    if not torch.allclose(logprob, expected, rtol=0, atol=0.2 if coarse else 1e-4):
        raise UnfitError('log-probabilities differ with plain attention kernels; pass engine="reference".')
    if found := disagreement(problem, _parts(apart), norms):
        raise UnfitError(f'{found}; pass engine="reference" or leave it out of scope.')


def _parts(apart: DecomposedRollout) -> dict[str, Tensor]:
    """‖s_t‖² parameter by parameter, in one block."""
    parts: dict[str, Tensor] = {}
    for use, (left, right) in apart.outer.items():
        parts[use.parameter] = parts.get(use.parameter, 0.0) + norm_sq(left) * norm_sq(right)
    size = len(apart.rollout.columns)
    mix = Mix(torch.eye(size), slice(0, size))
    for use, found in apart.coordinates(apart.trace, apart.rollout, mix):
        parts[use.parameter] = parts.get(use.parameter, 0.0) + norm_sq(found)
    return parts


def _token_norms(apart: DecomposedRollout, path: bool) -> tuple[Tensor, Tensor]:
    """‖s_t‖² and, if asked for, ‖Σ_{j≤t} s_j‖² of a rollout's K sampled tokens."""
    norms, path_norm_sq = _outer_norms(apart, path)
    running: dict[ParameterUse, Tensor] = {}
    for span, found in _blocks(apart):
        single, sums = [], []
        for use, part in found:
            single.append(_rows(part))
            if path:
                sums.append(_rows(_accumulate(running, use, part)))
        norms[span] += _total(single)
        if path:
            path_norm_sq[span] += _total(sums)
    return norms, path_norm_sq


def _blocks(apart: DecomposedRollout) -> Iterator[tuple[slice, Iterator[tuple[ParameterUse, Tensor]]]]:
    """Coordinates of a rollout's sampled tokens, some at a time: on the prefix they see, the last on the whole pass."""
    start, count = 0, len(apart.rollout.columns)
    for block in apart.rollout.blocks(min(BLOCK, apart.block_size)) if apart.plan.cut else ():
        span = slice(start, start := start + len(block.columns))
        mix = Mix(torch.eye(len(block.columns)), span)
        if start == count:
            yield span, apart.coordinates(apart.trace, apart.rollout, mix)
        else:
            trace = traced_to(apart.plan.cut or "", apart.problem, block, apart.plan.modules)
            yield span, apart.coordinates(trace, block, mix)


def _rows(found: Tensor) -> Tensor:
    """Norms along the last axis of coordinates [C, ...], flat [C, ·]."""
    return torch.linalg.vector_norm(found, dim=-1).view(len(found), -1)


def _total(rows: list[Tensor]) -> Tensor:
    """‖·‖² [C] from the norms of all rows of coordinates, summed in float64."""
    return torch.cat(rows, dim=1).double().square().sum(1)


def _outer_norms(apart: DecomposedRollout, path: bool) -> tuple[Tensor, Tensor]:
    """The share of the layers above the cut; path norms are sums over the leading blocks of a K × K Gram matrix."""
    norms = torch.zeros(len(apart.rollout.columns), dtype=torch.float64, device=apart.own.device)
    path_norm_sq = torch.zeros_like(norms)
    for left, right in apart.outer.values():
        norms += norm_sq(left) * norm_sq(right)
        if path:
            gram = outer_gram(left, right)
            path_norm_sq += (2 * gram.tril().sum(1) - gram.diagonal()).cumsum(0)
    return norms, path_norm_sq


def _weighted_norms(apart: DecomposedRollout, rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] s_k‖² of one rollout [M]."""
    result = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for left, right in apart.outer.values():
        result += (rows @ outer_gram(left, right) * rows).sum(-1)
    size = min(BLOCK, apart.block_size)
    for start in range(0, len(rows), size):
        mix = Mix(rows[start : start + size], slice(None))
        for _, found in apart.coordinates(apart.trace, apart.rollout, mix):
            result[start : start + size] += norm_sq(found)
    return result


def _accumulate(running: dict[ParameterUse, Tensor], use: ParameterUse, found: Tensor) -> Tensor:
    """Running sums of coordinates over the tokens so far; a longer prefix only appends coordinates.

    A product with a triangle of ones: on one thread `cumsum` along the first axis takes up to ten times as long.
    """
    ones = torch.ones(len(found), len(found), dtype=found.dtype, device=found.device).tril()
    total = (ones @ found.flatten(1)).view_as(found)
    if use in running:
        before = running[use]
        total[:, : len(before)] += before
    running[use] = total[-1].clone()
    return total
