"""Scores of all tokens along many rank-one directions by one batched pass: s_t·D_k without forming s_t or D_k.

A direction D = u vᵀ of a linear layer changes its output by (v·x)u, which joins the tangents that come up from the
layers below. They are carried only as far as the cut, the input of the first layer behind the last attention, where
they meet each token's own signal; above it a token's gradient is one outer product and s·D is two dot products.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import ScoreBatch
from otb_analysis.gradients.batch.kernels import plain_kernels
from otb_analysis.gradients.exact.generic import DecomposedRollout, plan_for
from otb_analysis.gradients.exact.layers import (
    BIAS,
    EMBEDDING,
    HEADED_SCALE,
    MATRIX,
    SCALE,
    SCALES,
    Rule,
    UnfitError,
    row_factors,
    wide,
)
from otb_analysis.gradients.exact.plan import ParameterUse, Plan, ReachedCut, own_rows
from otb_analysis.gradients.exact.reference import token_alignments
from otb_analysis.gradients.exact.verdicts import Verdicts, probe
from otb_analysis.gradients.sketched.directions import Aligned, Directions
from otb_analysis.gradients.sketched.dual import Tape, dual, primal_of, tangent_of

Signs = dict[str, tuple[Tensor, ...]]
"""By parameter one vector of signs per axis for k directions, ([k, n_0], [k, n_1], …)."""
Sides = tuple[Tensor, Tensor]
"""Signs of k directions on a layer's input side and on its output side, [k, a] and [k, b]."""


@dataclass(frozen=True)
class Norm:
    """What a normalisation does to one text."""

    normal: Tensor  # The normalised input x̂ before scale and bias [1, T, ...]
    # ẏ = gain∘(ẋ − x̂·mean(x̂∘ẋ)) [1, T, ...], for an RMSNorm; None leaves the derivative to the operations
    gain: Tensor | None


def sides(use: ParameterUse, signs: Signs, module: nn.Module) -> Sides:
    """Signs of a use's parameter in the order of its gradient's outer product."""
    axes = signs[use.parameter]
    if len(axes) == 1:
        return torch.ones_like(axes[0][:, :1]), axes[0]
    transposed = use.rule is MATRIX and not isinstance(module, nn.Linear)  # Conv1D keeps [in, out]
    return (axes[0], axes[1]) if transposed else (axes[1], axes[0])


@torch.no_grad()
def norm_of(module: nn.Module, inputs: Tensor) -> Norm:
    """What a layer with a scale makes of a text's inputs [1, T, ...], in the inputs' own layout.

    With x̂ = x·r and y = w∘x̂ the gain is w∘r, r = x̂·x/x·x; whether the layer is of this kind is tried out.
    """
    x, normal = wide(inputs), SCALE.prepare(module, inputs)[None]
    rate = (normal * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    weight = wide(module.get_parameter("weight"))
    simple = torch.allclose(x * rate, normal, rtol=1e-2, atol=1e-4)
    plain = torch.allclose(wide(module(inputs)), weight * normal, rtol=1e-2, atol=1e-4)
    return Norm(normal.to(inputs), (weight * rate).to(inputs) if simple and plain else None)


def _matrix(total: Tensor, _module: nn.Module, inputs: Tensor, along: Sides) -> None:
    inner, outer = along
    total.addcmul_((inner.to(inputs) @ inputs[0].T)[:, :, None], outer.to(inputs)[:, None, :])


def _scale(total: Tensor, _module: nn.Module, normal: Tensor, along: Sides) -> None:
    total.addcmul_(normal, _last(along[1], total))


def _embedding(total: Tensor, module: nn.Module, ids: Tensor, along: Sides) -> None:
    inner, outer = (side.to(total) for side in along)
    rows = outer[:, ids[0]] * row_factors(module, ids[0]).to(outer)
    total.addcmul_(rows[:, :, None], inner[:, None, :])


def _last(signs: Tensor, like: Tensor) -> Tensor:
    return signs.to(like).reshape(len(signs), *[1] * (like.ndim - 2), -1)


TANGENT_RULES: dict[Rule, Callable[[Tensor, nn.Module, Tensor, Sides], object]] = {
    MATRIX: _matrix,
    BIAS: lambda total, _module, _inputs, along: total.add_(_last(along[1], total)),
    SCALE: _scale,
    HEADED_SCALE: _scale,
    EMBEDDING: _embedding,
}
"""By a parameter's rule: (tangents [k, T, ...] to add to, module, input [1, T, ...] or x̂ for a scale, signs)."""


ROWS = 2048
"""Positions times directions of one pass: enough for efficient matrix products, few enough for memory."""

_CHECKED = Verdicts[None]()


def above(decomposed: DecomposedRollout, directions: Directions) -> Tensor:
    """s_t·D_k of the layers above the cut [K tokens, k]."""
    modules = dict(decomposed.batch.model.named_modules())
    total = decomposed.zeros(directions.count)
    tokens = decomposed.rollout.ids[: decomposed.rollout.length].unique()
    tied = decomposed.plan.tied
    shared = ((tied[name], left, right, tokens) for name, (right, left) in decomposed.shared.items())
    for use, left, right, rows in (*((u, left, right, ...) for u, (left, right) in decomposed.outer.items()), *shared):
        inner, outer = sides(use, directions.signs, modules[use.module])
        total += (left @ inner.to(left).T) * (right @ outer[:, rows].to(right).T)
    return total


Moves = tuple[int, Signs, dict[str, Tensor]]
"""Directions that go through the model together: how many, signs along each axis by parameter, of the first of them
(the others move rows alone), and by embedding their entries [k, U, d] in the rows of the U distinct tokens read."""


def _entries(
    decomposed: DecomposedRollout,
    directions: Directions,
    use: ParameterUse,
    some: slice,
    count: int,
    along: Aligned | None,
) -> Tensor:
    """Entries of some directions in an embedding's rows: `count` with independent signs, then those of `along`."""
    shape = len(decomposed.trace.inputs[use.module].unique()), directions.signs[use.parameter][1].shape[1]
    signed = slice(min(some.start, count), min(some.stop, count))
    made = directions.rows(use.parameter, signed, shape).to(decomposed.token_signals.device)
    if along is None or some.stop <= count:
        return made
    tied, last = along.rows.get(use.parameter), slice(max(some.start - count, 0), some.stop - count)
    rest = made.new_zeros(last.stop - last.start, *shape) if tied is None else tied[last]
    return torch.cat([made.to(rest), rest])


def below(
    decomposed: DecomposedRollout,
    directions: Directions,
    count: int,
    along: Aligned | None = None,
    *,
    by_entry: bool = False,
) -> Tensor:
    """s_t·D_k of the layers below the cut [K tokens, k], a few directions at a time.

    The first `count` directions, and those of `along`, which move only tied rows. `by_entry` gives embeddings
    independent signs in all their entries.
    """
    total = decomposed.zeros(count + (0 if along is None else along.known.shape[1]))
    if decomposed.plan.cut is None:
        return total
    modules = dict(decomposed.batch.model.named_modules())
    scaled = dict.fromkeys(u.module for u in decomposed.plan.below if u.rule in SCALES)
    norms = {name: norm_of(modules[name], decomposed.trace.inputs[name].detach()) for name in scaled}
    embeddings = {u.parameter: u for u in decomposed.plan.below if by_entry and u.rule is EMBEDDING}
    axes_of = {name: axes for name, axes in directions.signs.items() if name not in embeddings}
    # The tape holds the activations of the first pass, so later directions cost their tangents only.
    passes, tape = -(-total.shape[1] // max(1, ROWS // decomposed.rollout.length)), Tape()
    size = -(-total.shape[1] // passes)
    for start in range(0, total.shape[1], size):
        some = slice(start, min(start + size, total.shape[1]))
        signs = {name: tuple(a[:count][some] for a in axes) for name, axes in axes_of.items()}
        rows = {n: _entries(decomposed, directions, use, some, count, along) for n, use in embeddings.items()}
        drawn = some.stop - some.start, signs, rows
        moved = None  # tangents [k, ...] of the cut, None where no direction reaches it
        try:
            with torch.no_grad(), tape.playing(), _moving(decomposed, drawn, norms):
                sampled_logprobs(decomposed.batch, (decomposed.rollout,))
            raise UnfitError('the model did not call the layer behind its last attention; pass method="gaussian".')
        except ReachedCut as reached:
            moved = reached.args[0]
        except torch.OutOfMemoryError:  # a RuntimeError too, but no fault of the model's
            raise
        except RuntimeError as error:
            raise UnfitError(
                f'many directions at once do not pass through the model ({error}); pass method="gaussian".'
            ) from error
        if moved is not None:
            # What a direction does to the cut meets each token's own signal there: the product is s_t·D_k.
            rows = moved[:, own_rows(moved[:1], decomposed.rollout)]
            total[:, some] = torch.einsum("ct...,t...->tc", rows, decomposed.token_signals.to(rows))
    return total


def checked_plan(batch: ScoreBatch) -> Plan:
    """Plan of a model and scope whose tangents agree on a probe with the reference engine; raises if they do not."""
    plan = plan_for(batch)
    modules = dict(batch.model.named_modules())
    for use in (*plan.above, *plan.below):
        if use.rule not in TANGENT_RULES or use.module not in modules:
            raise UnfitError(
                f'parameter {use.parameter} has no rule for many directions at once; pass method="gaussian".'
            )

    def check() -> None:
        rollout, directions = probe(batch), Directions(batch, 2, 0)
        decomposed = DecomposedRollout(batch, plan, rollout)
        got = (above(decomposed, directions) + below(decomposed, directions, 2)).cpu()
        one = replace(batch, rollouts=(rollout,), shape=(1, len(rollout.ids)))
        slopes = [token_alignments(one, directions.rank_one(k))[0, rollout.columns] for k in (0, 1)]
        expected = torch.from_numpy(np.stack(slopes, 1))
        if float((got - expected).norm()) > 1e-3 * float(expected.norm()):
            raise UnfitError(
                f"scores along a direction are {got[:, 0].tolist()} on a probe where the reference gives "
                f'{expected[:, 0].tolist()}; pass method="gaussian".'
            )

    if batch.rollouts:
        _CHECKED.get(batch, check)
    return plan


@contextmanager
def _moving(decomposed: DecomposedRollout, moves: Moves, norms: Mapping[str, Norm]) -> Iterator[None]:
    """Let the directions act on the layers below the cut, and stop at the cut."""
    modules = dict(decomposed.batch.model.named_modules())

    def stop(_module: nn.Module, args: tuple[Any, ...]) -> None:
        raise ReachedCut(tangent_of(args[0]))

    with ExitStack() as handles:
        handles.enter_context(plain_kernels(decomposed.batch.model))
        handles.enter_context(modules[str(decomposed.plan.cut)].register_forward_pre_hook(stop))
        for name in dict.fromkeys(u.module for u in decomposed.plan.below):
            uses = [u for u in decomposed.plan.below if u.module == name and u.parameter in {*moves[1], *moves[2]}]
            norm = norms.get(name)
            if uses or norm is not None:
                acting = _Acting(uses, moves, norm)
                handles.enter_context(modules[name].register_forward_pre_hook(acting.before))
                handles.enter_context(modules[name].register_forward_hook(acting.after))
        yield


@dataclass
class _Acting:
    """What the directions of one layer's own parameters do to its output."""

    uses: list[ParameterUse]
    moves: Moves
    norm: Norm | None
    arriving: Tensor | None = None  # Tangents of an RMSNorm's input

    def before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the tangents of an RMSNorm's input, for which there is a short formula."""
        if self.norm is None or self.norm.gain is None:
            return None
        # The formula takes one pass over the tangents; the model's own operations would take one each.
        self.arriving = tangent_of(args[0])
        return (primal_of(args[0]), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        primal, total, (count, signs, entries) = primal_of(output), tangent_of(output), self.moves
        if self.norm is not None and self.norm.gain is not None and self.arriving is not None:
            along = (self.arriving * self.norm.normal).mean(-1, keepdim=True)
            total = torch.addcmul(self.arriving, along, self.norm.normal, value=-1).mul_(self.norm.gain)
        for use in self.uses:
            if use.parameter in entries:
                # Nothing moves below an embedding, so its tangent is set, not added.
                ids = args[0][0]
                moved = entries[use.parameter][:, ids.unique(return_inverse=True)[1]]
                total = moved.to(primal) * row_factors(module, ids).to(primal)[:, None]
                continue
            if total is None:
                total = primal.new_zeros(count, *primal.shape[1:])
            inputs = self.norm.normal if self.norm is not None and use.rule in SCALES else primal_of(args[0])
            along = sides(use, signs, module)
            if len(along[1]):
                TANGENT_RULES[use.rule](total[: len(along[1])], module, inputs, along)
        return output if total is None else dual(primal, total)
