"""Log-probabilities as a function of the scope's tensors: the model is evaluated at other weights, never written to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from otb_analysis.errors import InputError, NonFiniteError, nearest
from otb_analysis.gradients.batch.forward import sampled_logprobs, sharp_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch, microbatches
from otb_analysis.gradients.batch.kernels import plain_kernels
from otb_analysis.gradients.batch.layout import Layout
from otb_analysis.gradients.batch.packing import layout_of
from otb_analysis.types import Float

Direction = Mapping[str, Tensor]
"""One tensor per parameter name; parameters in scope that are left out do not move."""
Forward = Callable[[ScoreBatch, tuple[Rollout, ...]], Tensor]


@dataclass(frozen=True)
class Functional:
    """log π of sampled tokens as a function of the tensors in scope."""

    batch: ScoreBatch

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The scope's tensors at the model's own weights."""
        return tuple(p.detach() for p in self.batch.scope.parameters)

    def logprobs(
        self, parameters: Sequence[Tensor], rollouts: tuple[Rollout, ...], layout: Layout | None = None
    ) -> Tensor:
        """Log-probabilities [Σ K] of the rollouts' sampled tokens with `parameters` in place of the scope's."""
        return self._call(partial(sampled_logprobs, layout=layout), parameters, rollouts)

    def microbatches(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[tuple[Rollout, ...], Layout]]:
        """Rollouts that run together and how they lie in the pass; what they have in common is read once."""
        for micro in microbatches(rollouts):
            yield micro, layout_of(self.batch, micro)

    @torch.no_grad()
    def evaluate(self, parameters: Sequence[Tensor], rollouts: tuple[Rollout, ...]) -> Float:
        """The same without a graph and with as little rounding as is cheap, as float64 [N, L]; zero elsewhere."""
        result = np.zeros(self.batch.shape)
        for micro in microbatches(rollouts):
            scatter(result, micro, self._call(sharp_logprobs, parameters, micro))
        return result

    def _call(self, forward: Forward, parameters: Sequence[Tensor], rollouts: tuple[Rollout, ...]) -> Tensor:
        scope, named = self.batch.scope, dict[str, Tensor]()
        if scope.head is None:
            named = {f"model.{name}": tensor for name, tensor in zip(scope.names, parameters, strict=True)}
        else:
            scope = replace(scope, parameters=tuple(parameters))
        call = _Call(replace(self.batch, scope=scope), forward)
        with plain_kernels(self.batch.model), _padding_rows_held(self.batch.model):
            # Tied names must move together, though only one of them is in `named`.
            return functional_call(call, named, (rollouts,), tie_weights=True)

    def gradient(self, weights: Float, rollouts: tuple[Rollout, ...]) -> tuple[Tensor, ...]:
        """Σ weights[n, t] s_{n,t} over some rollouts by one ordinary backward pass; weights [N, L]."""
        leaves = [p.detach().requires_grad_() for p in self.parameters]
        total: list[Tensor | None] = [None] * len(leaves)
        for micro, layout in self.microbatches([r for r in rollouts if weights[r.row, r.columns].any()]):
            row = np.concatenate([weights[r.row, r.columns] for r in micro])
            values = self.logprobs(leaves, micro, layout)
            # Fresh leaves, so that nothing is written to the model's own `.grad`. A parameter may have no part in these
            # tokens.
            grads = torch.autograd.grad(values, leaves, torch.from_numpy(row).to(values), allow_unused=True)
            # The first gradient is the sum so far: another copy would take as much memory as the weights.
            total = [g if t is None else t if g is None else t.add_(g) for t, g in zip(total, grads, strict=True)]
            del grads
        return tuple(torch.zeros_like(p) if t is None else t for t, p in zip(total, self.parameters, strict=True))


class _Call(nn.Module):
    """A forward pass as a module, so that `functional_call` can swap the weights under it."""

    def __init__(self, batch: ScoreBatch, run: Forward) -> None:
        super().__init__()
        self.model, self.batch, self.run = batch.model, batch, run

    def forward(self, rollouts: tuple[Rollout, ...]) -> Tensor:
        return self.run(self.batch, rollouts)


def check_direction(direction: Direction, function: Functional) -> tuple[Tensor, ...]:
    """Turn tensors by name (of a tied parameter, any) into one tensor per tensor in scope, zeros by default.

    Raises:
        InputError: A name is not in scope, a shape does not fit, a tied parameter would move in two ways, or there is
            no tensor at all.
        NonFiniteError: A tensor holds NaN or infinity.
    """
    moves: dict[int, Tensor] = {}
    scope, named = function.batch.scope, function.batch.model.named_parameters(remove_duplicate=False)
    place = {id(p): i for i, p in enumerate(scope.parameters)}
    # Every name of a tied parameter counts.
    index = dict(zip(scope.names, range(len(place)), strict=True)) | {
        n: place[id(p)] for n, p in named if id(p) in place
    }
    for name, tensor in direction.items():
        if name not in index:
            raise InputError(f"direction names {name!r}, which is not in scope; {nearest(name, index)}")
        i = index[name]
        like = function.parameters[i]
        if tensor.shape != like.shape:
            raise InputError(
                f"direction[{name!r}] has shape {tuple(tensor.shape)} but the parameter has shape {tuple(like.shape)}; "
                "pass one entry per parameter entry."
            )
        moved = tensor.detach().to(like)
        # A finite norm has finite entries, and reads a tensor ten times as fast; finite entries may still overflow.
        if not (torch.linalg.vector_norm(moved).isfinite() or moved.isfinite().all()):
            raise NonFiniteError(f"direction[{name!r}] is not finite; pass finite tensors.")
        if i in moves and not torch.equal(moves[i], moved):
            raise InputError(
                f"direction moves the tied parameter {function.batch.scope.names[i]!r} differently under another name, "
                f"{name!r}; pass it once."
            )
        moves[i] = moved
    if not moves:
        raise InputError("direction is empty; pass one tensor per parameter name.")
    return tuple(moves[i] if i in moves else torch.zeros_like(p) for i, p in enumerate(function.parameters))


def scatter(into: Float, rollouts: Sequence[Rollout], values: Tensor) -> None:
    """Write one value per sampled token [Σ K] of some rollouts to their places in `into` [N, L]."""
    ends = np.cumsum([len(r.columns) for r in rollouts])[:-1]
    for rollout, part in zip(rollouts, np.split(values.detach().double().cpu().numpy(), ends), strict=True):
        into[rollout.row, rollout.columns] = part


@contextmanager
def _padding_rows_held(model: nn.Module) -> Iterator[None]:
    """Keep the padding token's embedding where it is: a text may hold that token, and no gradient reaches its row."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None)
    rows = {table: table.weight[table.padding_idx].detach() for table in tables}

    def hold(table: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # `where`, not an assignment: it has a derivative in both modes, zero for the padding row.
        return torch.where((args[0] == table.padding_idx)[..., None], rows[table].to(output), output)  # pyright: ignore

    # The reverse pass gives the row no gradient; without this the other methods would disagree with it.
    with ExitStack() as handles:
        for table in rows:
            handles.enter_context(table.register_forward_hook(hold))
        yield
