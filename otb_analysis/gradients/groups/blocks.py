"""Where a model is cut into blocks, found in its modules and checked on every pass."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.inputs import ScoreBatch
from otb_analysis.gradients.batch.kernels import plain_kernels
from otb_analysis.gradients.batch.scope import end_of, layer_input
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.plan import ReachedCut

HIDDEN = object()
"""Placeholder for a block's input among its stored arguments, so that the input itself can be dropped."""


@dataclass
class Call:
    """How one block was called: its input, until that is dropped to save memory, and its other arguments."""

    model: nn.Module
    hidden: Tensor | None
    args: list[Any]  # With HIDDEN in place of the input
    kwargs: dict[str, Any]

    def again(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run the block on an input and return its output."""
        args = [hidden if x is HIDDEN else x for x in self.args]
        with plain_kernels(self.model):
            output = block(*args, **{name: hidden if x is HIDDEN else x for name, x in self.kwargs.items()})
        return output if isinstance(output, Tensor) else output[0]


@dataclass
class Seen:
    """What a pass over a watched model left."""

    calls: list[Call] = field(default_factory=list)
    # Of the last block, from which the graph begins
    output: Tensor = field(default_factory=lambda: torch.zeros(0))
    into_head: list[Tensor] = field(default_factory=list)  # Inputs of the output layer, where it was watched


@dataclass
class Below:
    """What stands before the first block: ids that the embedding read, its output, a leaf, and the block's input.

    The first two are empty where the embedding is not in scope.
    """

    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    embedded: Tensor = field(default_factory=lambda: torch.zeros(0, requires_grad=True))
    first: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class BlockStructure:
    """A model in blocks, for one scope."""

    model: nn.Module
    blocks: tuple[nn.Module, ...]  # The blocks in the order in which they run, each fed by the one before
    inside: tuple[tuple[str, ...], ...]  # By block, the names of its parameters in scope
    embedding: nn.Embedding | None  # The input embedding, if its weight is in scope
    head: nn.Linear | None  # The output layer, if its weight is in scope
    ends: tuple[str | None, str | None]  # Names of the weights of `embedding` and `head`, the same where they are tied
    outside: tuple[str, ...]  # Names of all other parameters in scope, used above the last block or below the first

    @property
    def first(self) -> int:
        """The lowest block that signals must go through."""
        if self.embedding is not None or self.outside:
            return 0
        return next((i for i, names in enumerate(self.inside) if names), len(self.blocks))

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Remember what goes into the blocks, and begin the graph at the output of the last: below it needs none.

        Raises at the end where the blocks did not run in their order.
        """
        seen = Seen()
        fed: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            at = len(seen.calls)
            hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            next_one = at < len(self.blocks) and module is self.blocks[at]
            # By identity: a block whose input was changed on the way would be fed something else when run again.
            if next_one and hidden is not None and (not fed or hidden is fed[-1]):
                others = {name: HIDDEN if x is hidden else x for name, x in kwargs.items()}
                seen.calls.append(Call(self.model, hidden, [HIDDEN if x is hidden else x for x in args], others))

        def after(module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            fed.append(output if isinstance(output, Tensor) else output[0])
            if module is not self.blocks[-1]:
                return output
            # Detached: signals at this output are all that is wanted, and no graph of the blocks is held.
            seen.output = fed[-1].detach().requires_grad_()
            torch.set_grad_enabled(True)  # until the caller's `no_grad` ends
            return seen.output if isinstance(output, Tensor) else (seen.output, *output[1:])

        with ExitStack() as handles:
            handles.enter_context(plain_kernels(self.model))
            for block in self.blocks:
                handles.enter_context(block.register_forward_pre_hook(before, with_kwargs=True))
                handles.enter_context(block.register_forward_hook(after))
            if self.head is not None:
                hook = self.head.register_forward_hook(
                    lambda _, args, kwargs, out: seen.into_head.append(layer_input(args, kwargs)), with_kwargs=True
                )
                handles.enter_context(hook)
            yield seen
        if len(seen.calls) != len(self.blocks) or not seen.output.requires_grad:
            raise UnfitError("its blocks do not run one after the other")

    @contextmanager
    def stopped(self) -> Iterator[Below]:
        """Run a model as far as its first block, with a graph from the embedding's output."""
        seen = Below()

        def after(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen.ids, seen.embedded = args[0], output.detach().requires_grad_()
            return seen.embedded

        def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            raise ReachedCut

        with ExitStack() as handles, suppress(ReachedCut):
            handles.enter_context(plain_kernels(self.model))
            handles.enter_context(self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True))
            if self.embedding is not None:
                handles.enter_context(self.embedding.register_forward_hook(after))
            yield seen


def structure_of(batch: ScoreBatch) -> BlockStructure:
    """Sort the parameters in scope by where in the model they act.

    Raises:
        UnfitError: There are no blocks, or one parameter acts in several of these places, a tied embedding excepted.
    """
    model = batch.model
    names = {id(p): name for name, p in zip(batch.scope.names, batch.scope.tensors, strict=True)}
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise UnfitError("it has no list of blocks")
    # A model may have other lists, such as experts; the blocks hold most parameters.
    blocks = tuple(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))
    inside = tuple(tuple(names[id(p)] for p in block.parameters() if id(p) in names) for block in blocks)
    embedding, head = end_of(model, "input"), end_of(model, "output")
    first, last = (names.get(id(getattr(layer, "weight", None))) for layer in (embedding, head))
    # In scope "lm_head" a tied matrix counts as output only.
    first = first if batch.scope.head is None else None
    # Only a plain layer's gradient can be taken in slices.
    for name, layer, kind in ((first, embedding, nn.Embedding), (last, head, nn.Linear)):
        if name is not None and type(layer) is not kind:
            raise UnfitError(f"its {'input' if layer is embedding else 'output'} embedding is a {type(layer).__name__}")
    if first is not None and (embedding.max_norm is not None or embedding.scale_grad_by_freq):
        raise UnfitError("its embedding changes what is read or scales its gradient")
    members, ends = [name for block in inside for name in block], {first, last}
    if len({*members, *ends}) < len(members) + len(ends):
        raise UnfitError("its blocks share parameters")
    outside = tuple(name for name in batch.scope.names if name not in {*members, *ends})
    embedding, head = embedding if first else None, head if last else None
    return BlockStructure(model, blocks, inside, embedding, head, (first, last), outside)
