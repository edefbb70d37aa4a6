"""Scores of all tokens along many rank-one directions by one batched pass: s_t·D_k without forming s_t or D_k.

A direction D = u vᵀ of a linear layer changes its output by (v·x)u, which joins the tangents that come up from the
layers below. They are carried only as far as the cut, the input of the first layer behind the last attention, where
they meet each token's own signal; above it a token's gradient is one outer product and s·D is two dot products.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.directions import Directions
from otb_analysis.gradients.dual import Tape, dual, primal_of, tangent_of
from otb_analysis.gradients.forward import sampled_logprobs
from otb_analysis.gradients.generic import plan_for
from otb_analysis.gradients.inputs import Problem
from otb_analysis.gradients.layers import HEADED_SCALE, SCALE, UnfitError
from otb_analysis.gradients.offsets import OFFSETS, Norm, Signs, norm_of, rms_tangent, sides
from otb_analysis.gradients.passes import Apart
from otb_analysis.gradients.plan import Plan, Use, length, probe
from otb_analysis.gradients.reference import token_alignments
from otb_analysis.gradients.taps import own_rows

ROWS = 2048
"""Positions times directions of one pass: enough for efficient matrix products, few enough for memory."""

SCALES = (SCALE, HEADED_SCALE)

_CHECKED: WeakKeyDictionary[nn.Module, list[Plan]] = WeakKeyDictionary()


def above(apart: Apart, directions: Directions) -> tuple[Tensor, Tensor]:
    """s_t·D_k of the layers above the cut [K tokens, k], and of it what lies in rows also read as input.

    Only the second part can correlate with what lies below: it belongs to a tied matrix.
    """
    modules = dict(apart.problem.model.named_modules())
    total = torch.zeros(len(apart.rollout.columns), directions.count, device=apart.own.device, dtype=torch.float64)
    tied = torch.zeros_like(total)
    for use, (left, right) in apart.outer.items():
        inner, outer = sides(use, directions.signs, modules[use.module])
        total += (left @ inner.to(left).T) * (right @ outer.to(right).T)
    tokens = apart.rollout.ids[: length(apart.rollout)].unique()
    for parameter, (right, left) in apart.shared.items():
        use = apart.plan.tied[parameter]
        inner, outer = sides(use, directions.signs, modules[use.module])
        tied += (left @ inner.to(left).T) * (right @ outer[:, tokens].to(right).T)
    return total + tied, tied


def exact_above(apart: Apart) -> tuple[Tensor, Tensor]:
    """Exact ‖Σ a_j‖² of single tokens [K] and of running sums [K], a_j the gradient of the layers above the cut."""
    single = torch.zeros(len(apart.rollout.columns), device=apart.own.device, dtype=torch.float64)
    path = torch.zeros_like(single)
    for left, right in (*apart.outer.values(), *apart.shared.values()):
        gram = (left @ left.T).double() * (right @ right.T).double()
        single += gram.diagonal()
        path += gram.cumsum(0).cumsum(1).diagonal()
    return single, path


def below(apart: Apart, directions: Directions) -> Tensor:
    """s_t·D_k of the layers below the cut [K tokens, k], a few directions at a time."""
    found = torch.zeros(len(apart.rollout.columns), directions.count, device=apart.own.device, dtype=torch.float64)
    if apart.plan.cut is None:
        return found
    modules = dict(apart.problem.model.named_modules())
    scaled = [u for u in apart.plan.below if u.rule in SCALES]
    norms = {u.module: norm_of(modules[u.module], apart.trace.inputs[u.module].detach()) for u in scaled}
    size, tape = max(1, ROWS // length(apart.rollout)), Tape()
    for start in range(0, directions.count, size):
        some = slice(start, min(start + size, directions.count))
        signs = {name: tuple(a[some] for a in axes) for name, axes in directions.signs.items()}
        with tape.playing(), _moving(apart, signs, norms):
            moved = _at_cut(apart)
        if moved is not None:
            rows = moved[:, own_rows(moved[:1], apart.rollout)]
            found[:, some] = torch.einsum("ct...,t...->tc", rows, apart.own.to(rows))
    return found


def checked_plan(problem: Problem) -> Plan:
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


def _check(problem: Problem, plan: Plan) -> None:
    rollout = probe(problem)
    directions = Directions(problem, 2, 0)
    apart = Apart(problem, plan, rollout)
    got = (above(apart, directions)[0] + below(apart, directions)).cpu()
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
def _at_cut(apart: Apart) -> Tensor | None:
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
def _moving(apart: Apart, signs: Signs, norms: dict[str, Norm]) -> Iterator[None]:
    """Let the directions act on the layers below the cut, and stop at the cut."""
    modules = dict(apart.problem.model.named_modules())
    handles = [modules[str(apart.plan.cut)].register_forward_pre_hook(_stop)]
    for name in dict.fromkeys(u.module for u in apart.plan.below):
        acting = _Acting([u for u in apart.plan.below if u.module == name], signs, norms.get(name))
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

    def __init__(self, uses: list[Use], signs: Signs, norm: Norm | None) -> None:
        self.uses, self.signs, self.norm = uses, signs, norm
        self.come: Tensor | None = None

    def before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the tangents of an RMSNorm's input, for which there is a short formula."""
        if self.norm is None or self.norm.gain is None:
            return None
        self.come = tangent_of(args[0])
        return (primal_of(args[0]), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
        primal, total = primal_of(output), tangent_of(output)
        if self.norm is not None and self.come is not None:
            total = rms_tangent(self.norm, self.come)
        if total is None:
            total = primal.new_zeros(len(self.signs[self.uses[0].parameter][0]), *primal.shape[1:])
        for use in self.uses:
            inputs = self.norm.normal if self.norm is not None and use.rule in SCALES else primal_of(args[0])
            OFFSETS[use.rule](total, module, inputs, sides(use, self.signs, module))
        return dual(primal, total)
