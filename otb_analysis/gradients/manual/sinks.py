"""Where signals become gradients: outer products above the last attention, ghost coordinates below it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otb_analysis.gradients.exact.norm_accumulators import Group, NormAccumulator
from otb_analysis.gradients.manual.activations import Activations
from otb_analysis.gradients.manual.llama_layout import Dense, LlamaLayout, Norm

Place = tuple[int, str]
"""Which input of which layer a weight is applied to."""


@dataclass(frozen=True)
class Factor:
    """What is kept of a linear layer's inputs A [T, d]: ‖A_{:b}ᵀδ‖ = ‖M_b δ‖ for every prefix of b positions."""

    matrix: Tensor  # R of Aᵀ = QR where the rollout is short, Aᵀ itself where R would be no smaller for most prefixes
    triangular: bool  # Whether it is R, of which a prefix needs the first b rows only

    def prefix(self, b: int) -> Tensor:
        """M_b."""
        return self.matrix[:b, :b] if self.triangular else self.matrix[:, :b]


def factor(inputs: Tensor) -> Factor:
    """Factor of a layer's inputs [T, d]."""
    if len(inputs) > 2 * inputs.shape[1]:
        return Factor(inputs.T.contiguous(), False)
    # ‖Aᵀδ‖ = ‖Rδ‖ since Q has orthonormal columns; R of a prefix is the leading square of R.
    return Factor(torch.linalg.qr(inputs.T, mode="r").R, True)


def factors(layout: LlamaLayout, acts: Activations) -> dict[Place, Factor]:
    """Factors of all inputs that a weight in scope below the cut reads."""
    made: dict[Place, Factor] = {}
    for index, (layer, kept) in enumerate(zip(layout.layers, acts.blocks, strict=True)):
        attention, feed = kept.attention, kept.feed
        # Of the last block only key and value lie below the cut: its other signals stay at their own positions.
        reads: list[tuple[str, Tensor, tuple[Dense, ...]]] = [
            ("attention", attention.inputs, (layer.query, layer.key, layer.value)),
            ("output", attention.mixed, (layer.output,)),
            ("feed", feed.inputs, (layer.gate, layer.up)),
            ("down", feed.act, (layer.down,)),
        ]
        if layer is layout.layers[-1]:
            reads = [("attention", attention.inputs, (layer.key, layer.value))]
        for name, inputs, layers in reads:
            if any(dense.weight_name for dense in layers):
                made[index, name] = factor(inputs)
    return made


class Above:
    """Gradients of tokens that signal at one position each, as outer products left [K, a] ⊗ right [K, b]."""

    def __init__(self) -> None:
        self.outer: list[tuple[str, Tensor, Tensor]] = []

    def dense(self, place: Place, layers: Sequence[Dense], inputs: Tensor, signal: Tensor) -> None:
        """Note the gradients of linear layers; signal [K, 1, ΣD]."""
        for (name, _), part in _each([d.weight_name for d in layers], layers, signal):
            # Only the signal at the logits, the largest, does not lie in memory that is used again.
            self.outer.append((name, part[:, 0] if place[1] == "head" else part[:, 0].clone(), inputs))
        for (name, _), part in _each([d.bias_name for d in layers], layers, signal):
            self.add_vector(name, part[:, 0].clone())

    def scale(self, norm: Norm, product: Tensor) -> None:
        """Note the gradients of a norm's weight; product [K, 1, ..., d]."""
        if norm.name is not None:
            self.add_vector(norm.name, product.flatten(1, -2).sum(1))

    def add_vector(self, name: str, gradient: Tensor) -> None:
        """A parameter's own gradients [K, d]."""
        self.outer.append((name, torch.ones_like(gradient[:, :1]), gradient))


class Below:
    """Coordinates of gradients whose signals reach a whole prefix, handed to an accumulator."""

    def __init__(self, known: dict[Place, Factor], accumulator: NormAccumulator) -> None:
        self._factors, self._accumulator = known, accumulator

    def dense(self, place: Place, layers: Sequence[Dense], inputs: Tensor, signal: Tensor) -> None:
        """Hand on the coordinates of linear layers; signal [b, C, ΣD]."""
        b, count, _ = signal.shape
        for group, part in _together([d.weight_name for d in layers], layers, signal):
            matrix = self._factors[place].prefix(b)
            coordinates = self._accumulator.take(group, len(matrix), count)
            torch.mm(matrix, part.reshape(b, -1), out=coordinates.flatten(1))
            self._accumulator.note(group, coordinates)
        for group, part in _together([d.bias_name for d in layers], layers, signal):
            self.vector(group, part.sum(0))

    def scale(self, norm: Norm, product: Tensor) -> None:
        """Hand on the gradients of a norm's weight; product [b, C, ..., d]."""
        if norm.name is not None:
            summed = product.sum(0) if product.ndim == 3 else product.sum((0, 2))
            self.vector(((norm.name, summed.shape[-1]),), summed)

    def vector(self, group: Group, gradient: Tensor) -> None:
        """A parameter's own gradients [C, d]."""
        coordinates = self._accumulator.take(group, 1, len(gradient))
        coordinates[0] = gradient
        self._accumulator.note(group, coordinates)


def _each(
    names: Sequence[str | None], layers: Sequence[Dense], signal: Tensor
) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """The slices of a signal whose parameter is in scope."""
    widths = [len(d.weight) for d in layers]
    for name, width, part in zip(names, widths, signal.split(widths, -1), strict=True):
        if name is not None:
            yield (name, width), part


def _together(names: Sequence[str | None], layers: Sequence[Dense], signal: Tensor) -> Iterator[tuple[Group, Tensor]]:
    """The same, in one piece where every parameter is in scope."""
    if None in names:
        yield from (((named,), part) for named, part in _each(names, layers, signal))
    else:
        yield tuple((name, len(d.weight)) for name, d in zip(names, layers, strict=True) if name), signal
