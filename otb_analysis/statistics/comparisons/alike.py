"""Estimators whose gradients were the same, or a multiple of one another, on all measured rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otb_analysis.types import Float, Gram, Label

ROUNDING = 1e-8
"""Largest share of ‖g‖² off the other's direction that counts as rounding: gradients are float32."""


@dataclass(frozen=True)
class Alike:
    """One estimator as a multiple of another: g = factor·g_of on every prompt of every step."""

    of: Label  # The other one; itself where no earlier one is alike
    factor: float  # 1 where the two are identical, as `otb` and `otb_turn` in one turn

    @property
    def identical(self) -> bool:
        """True where the two gradients are the same."""
        return abs(self.factor - 1) < 1e-6


def alike(grams: Sequence[Gram], first: Sequence[Label] = ()) -> dict[Label, Alike]:
    """Return for every estimator which one it is a multiple of, by Cauchy and Schwarz over all measured prompts.

    With ⟨a, b⟩ summed over prompts and steps, b = f·a exactly where ⟨a, b⟩² = ‖a‖²‖b‖², and then f = ⟨a, b⟩/‖a‖².
    Only those of the same steps are compared, and a zero gradient is like no other. Others are named after those of
    `first`, in its order.
    """
    # First come, first named: a later label is named after an earlier one.
    labels = list(dict.fromkeys((*first, *(label for gram in grams for label in gram.labels))))
    labels = [label for label in labels if any(label in gram.labels for gram in grams)]
    steps = {label: tuple(k for k, gram in enumerate(grams) if label in gram.labels) for label in labels}
    products = _products(grams, labels)
    same_as: dict[Label, Alike] = {}
    for j, label in enumerate(labels):
        same_as[label] = Alike(label, 1.0)
        for i, other in enumerate(labels[:j]):
            # Sums over other steps hold other prompts. Only the first of a family gives its name: no chains of names.
            if same_as[other].of == other and steps[other] == steps[label] and _parallel(products, i, j):
                same_as[label] = Alike(other, float(products[i, j] / products[i, i]))
                break
    return same_as


def _parallel(products: Float, i: int, j: int) -> bool:
    a, b, both = products[i, i], products[j, j], products[i, j]
    # Equality in Cauchy and Schwarz, up to what float32 gradients lose; a negative product is an opposite direction.
    return bool(both > 0 and a * b - both**2 <= ROUNDING * a * b)


def _products(grams: Sequence[Gram], labels: Sequence[Label]) -> Float:
    """Return Σ_{steps, p} ⟨g_{m,p}, g_{m',p}⟩ [M, M]."""
    total = np.zeros((len(labels), len(labels)))
    for gram in grams:
        rows = [labels.index(label) for label in gram.labels]
        total[np.ix_(rows, rows)] += gram.products
    return total
