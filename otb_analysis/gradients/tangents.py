"""Scores of all tokens along many rank-one directions by one batched pass: s_t·D_k without forming s_t or D_k.

A direction D = u vᵀ of a linear layer changes its output by (v·x)u, which joins the tangents that come up from the
layers below. They are carried only as far as the cut, the input of the first layer behind the last attention, where
they meet each token's own signal; above it a token's gradient is one outer product and s·D is two dot products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.directional import jvp
from otb_analysis.gradients.directions import Directions
from otb_analysis.gradients.dual import dual, primal_of, tangent_of
from otb_analysis.gradients.forward import sampled_logprobs
from otb_analysis.gradients.functional import functional
from otb_analysis.gradients.generic import plan_for
from otb_analysis.gradients.inputs import Problem, Rollout
from otb_analysis.gradients.layers import BIAS, EMBEDDING, MATRIX, SCALE, Rule, UnfitError
from otb_analysis.gradients.passes import Apart
from otb_analysis.gradients.plan import Plan, Use, length, probe
from otb_analysis.gradients.taps import own_rows

ROWS = 1024
"""Positions times directions of one pass: enough for efficient matrix products, few enough to stay in cache."""

Sides = tuple[Tensor, Tensor]
"""Signs of k directions on a layer's input side and on its output side, [k, a] and [k, b]."""
_CHECKED: WeakKeyDictionary[nn.Module, list[Plan]] = WeakKeyDictionary()


def sides(use: Use, signs: dict[str, tuple[Tensor, ...]], module: nn.Module) -> Sides:
    """Signs of a use's parameter in the order of its gradient's outer product."""
    axes = signs[use.parameter]
    if len(axes) == 1:
        return torch.ones_like(axes[0][:, :1]), axes[0]
    transposed = use.rule is MATRIX and not isinstance(module, nn.Linear)  # Conv1D keeps [in, out]
    return (axes[0], axes[1]) if transposed else (axes[1], axes[0])


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
    scaled = [u for u in apart.plan.below if u.rule is SCALE]
    normal = {u: u.rule.prepare(modules[u.module], apart.trace.inputs[u.module].detach()) for u in scaled}
    size = max(1, ROWS // length(apart.rollout))
    for start in range(0, directions.count, size):
        some = slice(start, min(start + size, directions.count))
        signs = {name: tuple(a[some] for a in axes) for name, axes in directions.signs.items()}
        moved = _at_cut(apart, signs, normal)
        if moved is not None:
            rows = moved[:, own_rows(moved[:1], apart.rollout)]
            found[:, some] = torch.einsum("ct...,t...->tc", rows, apart.own.to(rows))
    return found


def checked_plan(problem: Problem) -> Plan:
    """Plan of a model and scope whose tangents agree on a probe with ordinary forward mode.

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
    function = functional(replace(problem, rollouts=(rollout,), shape=(1, len(rollout.ids))))
    slopes = [jvp(function, (rollout,), directions.rank_one(k)).value[0, rollout.columns] for k in (0, 1)]
    expected = torch.from_numpy(np.stack(slopes, 1))
    coarse = problem.scope.parameters[0].dtype.itemsize < 4
    if float((got - expected).norm()) > (0.2 if coarse else 1e-3) * float(expected.norm()):
        raise UnfitError(
            f"scores along a direction are {got[:, 0].tolist()} on a probe where forward mode gives "
            f'{expected[:, 0].tolist()}; pass method="gaussian".'
        )


class _ReachedCut(Exception):
    """The pass has come as far as it must; carries the tangents."""

    def __init__(self, moved: Tensor | None) -> None:
        self.moved = moved


@torch.no_grad()
def _at_cut(apart: Apart, signs: dict[str, tuple[Tensor, ...]], normal: dict[Use, Tensor]) -> Tensor | None:
    """Tangents [k, ...] of the cut, or None where no direction reaches it."""
    with _moving(apart, signs, normal):
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
def _moving(apart: Apart, signs: dict[str, tuple[Tensor, ...]], normal: dict[Use, Tensor]) -> Iterator[None]:
    """Let the directions act on the layers below the cut, and stop at the cut."""
    modules = dict(apart.problem.model.named_modules())
    uses: dict[str, list[Use]] = {}
    for use in apart.plan.below:
        uses.setdefault(use.module, []).append(use)

    def moving(own: list[Use]) -> Callable[[nn.Module, tuple[Any, ...], Any], Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
            total = tangent_of(output)
            for use in own:
                inputs = normal[use][None] if use in normal else primal_of(args[0])
                offset = OFFSETS[use.rule](module, inputs, sides(use, signs, module))
                total = offset if total is None else total + offset
            primal = primal_of(output)
            assert total is not None
            return dual(primal, total.to(primal.dtype).expand(len(total), *primal.shape[1:]))

        return hook

    def stop(_module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _ReachedCut(tangent_of(args[0]))

    handles = [modules[name].register_forward_hook(moving(own)) for name, own in uses.items()]
    handles.append(modules[str(apart.plan.cut)].register_forward_pre_hook(stop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _matrix(_module: nn.Module, inputs: Tensor, along: Sides) -> Tensor:
    inner, outer = along
    return (inputs[0] @ inner.to(inputs).T).T[:, :, None] * outer.to(inputs)[:, None, :]


def _bias(_module: nn.Module, inputs: Tensor, along: Sides) -> Tensor:
    return along[1].reshape(len(along[1]), *[1] * (inputs.ndim - 2), -1)


def _scale(module: nn.Module, normal: Tensor, along: Sides) -> Tensor:
    return normal * _bias(module, normal, along)


def _embedding(module: nn.Module, ids: Tensor, along: Sides) -> Tensor:
    inner, outer = along
    ignored = getattr(module, "padding_idx", None)
    rows = outer[:, ids[0]] if ignored is None else outer[:, ids[0]] * (ids[0] != ignored)
    return rows[:, :, None] * inner[:, None, :]


OFFSETS: dict[Rule, Callable[[nn.Module, Tensor, Sides], Tensor]] = {
    MATRIX: _matrix,
    BIAS: _bias,
    SCALE: _scale,
    EMBEDDING: _embedding,
}
"""How a layer's output moves along directions of one parameter, broadcastable to [k, T, ...], by the parameter's rule:
(module, input [1, T, ...] or, for a norm's scale, its normalised input, signs)."""
