"""Scores of all tokens along many rank-one directions by one batched pass: s_t·D_k without forming s_t or D_k.

A direction D = u vᵀ of a linear layer changes its output by (v·x)u, which joins the tangents that come up from the
layers below. They are carried only as far as the cut, the input of the first layer behind the last attention, where
they meet each token's own signal; above it a token's gradient is one outer product and s·D is two dot products.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import ScoreBatch
from otb_analysis.gradients.exact.generic import plan_for
from otb_analysis.gradients.exact.hooks import own_rows
from otb_analysis.gradients.exact.layers import EMBEDDING, SCALES, UnfitError
from otb_analysis.gradients.exact.parameter_tangents import OFFSETS, Norm, Signs, embedding_offset, rms_tangent, sides
from otb_analysis.gradients.exact.passes import DecomposedRollout
from otb_analysis.gradients.exact.plan import ParameterUse, Plan, length, probe
from otb_analysis.gradients.exact.reference import token_alignments
from otb_analysis.gradients.sketched.directions import Directions
from otb_analysis.gradients.sketched.dual import Tape, dual, primal_of, tangent_of
from otb_analysis.gradients.sketched.tied import Aligned

ROWS = 2048
"""Positions times directions of one pass: enough for efficient matrix products, few enough for memory."""

_CHECKED: WeakKeyDictionary[nn.Module, list[Plan]] = WeakKeyDictionary()


def above(apart: DecomposedRollout, directions: Directions) -> Tensor:
    """s_t·D_k of the layers above the cut [K tokens, k]."""
    modules = dict(apart.problem.model.named_modules())
    total = torch.zeros(len(apart.rollout.columns), directions.count, device=apart.own.device, dtype=torch.float64)
    for use, (left, right) in apart.outer.items():
        inner, outer = sides(use, directions.signs, modules[use.module])
        total += (left @ inner.to(left).T) * (right @ outer.to(right).T)
    tokens = apart.rollout.ids[: length(apart.rollout)].unique()
    for parameter, (right, left) in apart.shared.items():
        use = apart.plan.tied[parameter]
        inner, outer = sides(use, directions.signs, modules[use.module])
        total += (left @ inner.to(left).T) * (right @ outer[:, tokens].to(right).T)
    return total


def exact_above(apart: DecomposedRollout) -> tuple[Tensor, Tensor]:
    """Exact ‖Σ a_j‖² of single tokens [K] and of running sums [K], a_j the gradient of the layers above the cut."""
    single = torch.zeros(len(apart.rollout.columns), device=apart.own.device, dtype=torch.float64)
    path = torch.zeros_like(single)
    for left, right in (*apart.outer.values(), *apart.shared.values()):
        gram = (left @ left.T).double() * (right @ right.T).double()
        single += gram.diagonal()
        path += gram.cumsum(0).cumsum(1).diagonal()
    return single, path


@dataclass(frozen=True)
class DirectionBatch:
    """What k directions do to the parameters below the cut, for one rollout.

    Attributes:
        count: k.
        signs: By parameter, signs along each axis of rank-one directions, the first of the k; the others move `rows`
            only.
        rows: By embedding, a function from a range of directions to their entries in the rows of the distinct tokens
            read [k, U, d]; it goes before `signs`.
    """

    count: int
    signs: Signs
    rows: Mapping[str, Callable[[slice], Tensor]]

    def some(self, part: slice) -> "Some":
        """Some of the directions."""
        signs = {name: tuple(a[part] for a in axes) for name, axes in self.signs.items() if name not in self.rows}
        return Some(part.stop - part.start, signs, {name: rows(part) for name, rows in self.rows.items()})


@dataclass(frozen=True)
class Some:
    """Those directions of a `DirectionBatch` that go through the model together; fields as there."""

    count: int
    signs: Signs
    rows: dict[str, Tensor]


def hybrid_moves(apart: DecomposedRollout, directions: Directions, count: int, along: Aligned | None) -> DirectionBatch:
    """`count` directions with independent signs in all entries of an embedding, then those that move only tied rows."""
    more = 0 if along is None else along.known.shape[1]
    signs = {name: tuple(a[:count] for a in axes) for name, axes in directions.signs.items()}

    def entries(use: ParameterUse) -> Callable[[slice], Tensor]:
        shape = len(apart.trace.inputs[use.module].unique()), directions.signs[use.parameter][1].shape[1]

        def drawn(part: slice) -> Tensor:
            start, stop = min(part.start, count), min(part.stop, count)
            made = directions.rows(use.parameter, slice(start, stop), shape).to(apart.own.device)
            if along is None or part.stop <= count:
                return made
            tied = along.rows.get(use.parameter)
            last = slice(max(part.start - count, 0), part.stop - count)
            rest = made.new_zeros(last.stop - last.start, *shape) if tied is None else tied[last]
            return torch.cat([made.to(rest), rest])

        return drawn

    uses = [use for use in apart.plan.below if use.rule is EMBEDDING]
    return DirectionBatch(count + more, signs, {use.parameter: entries(use) for use in uses})


def below(apart: DecomposedRollout, moves: DirectionBatch) -> Tensor:
    """s_t·D_k of the layers below the cut [K tokens, k], a few directions at a time."""
    found = torch.zeros(len(apart.rollout.columns), moves.count, device=apart.own.device, dtype=torch.float64)
    if apart.plan.cut is None:
        return found
    passes, tape = -(-moves.count // max(1, ROWS // length(apart.rollout))), Tape()
    size = -(-moves.count // passes)
    for start in range(0, moves.count, size):
        some = slice(start, min(start + size, moves.count))
        with tape.playing(), _moving(apart, moves.some(some)):
            moved = _at_cut(apart)
        if moved is not None:
            rows = moved[:, own_rows(moved[:1], apart.rollout)]
            found[:, some] = torch.einsum("ct...,t...->tc", rows, apart.own.to(rows))
    return found


def checked_plan(problem: ScoreBatch) -> Plan:
    """Plan of a model and scope whose tangents agree on a probe with the reference engine.

    Raises:
        UnfitError: The model does something that has no rule here.
    """
    plan = plan_for(problem)
    known = _CHECKED.setdefault(problem.model, [])
    if problem.rollouts and not any(plan is p for p in known):
        _check(problem, plan)
        known.append(plan)
    return plan


def _check(problem: ScoreBatch, plan: Plan) -> None:
    rollout = probe(problem)
    directions = Directions(problem, 2, 0)
    apart = DecomposedRollout(problem, plan, rollout)
    got = (above(apart, directions) + below(apart, DirectionBatch(2, directions.signs, {}))).cpu()
    one = replace(problem, rollouts=(rollout,), shape=(1, len(rollout.ids)))
    slopes = [token_alignments(one, directions.rank_one(k))[0, rollout.columns] for k in (0, 1)]
    expected = torch.from_numpy(np.stack(slopes, 1))
    coarse = problem.scope.parameters[0].dtype.itemsize < 4
    if float((got - expected).norm()) > (0.2 if coarse else 1e-3) * float(expected.norm()):
        raise UnfitError(
            f"scores along a direction are {got[:, 0].tolist()} on a probe where the reference gives "
            f'{expected[:, 0].tolist()}; pass method="gaussian".'
        )


class _ReachedCut(Exception):
    """The pass has come as far as it must; carries the tangents."""

    def __init__(self, moved: Tensor | None) -> None:
        self.moved = moved


@torch.no_grad()
def _at_cut(apart: DecomposedRollout) -> Tensor | None:
    """Tangents [k, ...] of the cut, or None where no direction reaches it."""
    try:
        sampled_logprobs(apart.problem, (apart.rollout,))
    except _ReachedCut as reached:
        return reached.moved
    except RuntimeError as error:
        raise UnfitError(
            f'many directions at once do not pass through the model ({error}); pass method="gaussian".'
        ) from error
    raise UnfitError('the model did not call the layer behind its last attention; pass method="gaussian".')


@contextmanager
def _moving(apart: DecomposedRollout, some: Some) -> Iterator[None]:
    """Let the directions act on the layers below the cut, and stop at the cut."""
    modules = dict(apart.problem.model.named_modules())
    handles = [modules[str(apart.plan.cut)].register_forward_pre_hook(_stop)]
    moving = {*some.signs, *some.rows}
    for name in dict.fromkeys(u.module for u in apart.plan.below):
        uses = [u for u in apart.plan.below if u.module == name and u.parameter in moving]
        norm = apart.norms.get(name)
        if uses or norm is not None:
            acting = _Acting(uses, some, norm)
            handles.append(modules[name].register_forward_pre_hook(acting.before))
            handles.append(modules[name].register_forward_hook(acting.after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stop(_module: nn.Module, args: tuple[Any, ...]) -> None:
    raise _ReachedCut(tangent_of(args[0]))


class _Acting:
    """What the directions of one layer's own parameters do to its output."""

    def __init__(self, uses: list[ParameterUse], some: Some, norm: Norm | None) -> None:
        self.uses, self.norm = uses, norm
        self.count, self.signs, self.rows = some.count, some.signs, some.rows
        self.come: Tensor | None = None

    def before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the tangents of an RMSNorm's input, for which there is a short formula."""
        if self.norm is None or self.norm.gain is None:
            return None
        self.come = tangent_of(args[0])
        return (primal_of(args[0]), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        primal, total = primal_of(output), tangent_of(output)
        if self.norm is not None and self.come is not None:
            total = rms_tangent(self.norm, self.come)
        for use in self.uses:
            if use.parameter in self.rows:
                total = embedding_offset(module, args[0], self.rows[use.parameter], primal)
                continue
            if total is None:
                total = primal.new_zeros(self.count, *primal.shape[1:])
            inputs = self.norm.normal if self.norm is not None and use.rule in SCALES else primal_of(args[0])
            along = sides(use, self.signs, module)
            if len(along[1]):
                OFFSETS[use.rule](total[: len(along[1])], module, inputs, along)
        return output if total is None else dual(primal, total)
