"""Group gradients as a Gram matrix, and their moments with one prompt deleted at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otb_analysis.errors import InputError, nearest
from otb_analysis.statistics.measures import Moments
from otb_analysis.types import Float, Int

Label = tuple[str, str]
"""(estimator, energy source), as stored."""

REFERENCE: Label = ("rloo", "none")
"""The unbiased estimator that stands for ∇J unless the caller names another."""


@dataclass(frozen=True)
class Gram:
    """All inner products between the group gradients of one step.

    Attributes:
        inner: ⟨g_{m,p}, g_{m',p'}⟩ [M, M, P, P], g_{m,p} the *mean* gradient of prompt p's group under estimator m.
        labels: (estimator, energy source) of each m.
        n_rollouts: Rollouts behind it.
        prompt: Name of each prompt [P], any hashable; None means that every prompt is a new one. Prompts named alike
            are one cluster, within a step and across steps.
    """

    inner: Float
    labels: tuple[Label, ...]
    n_rollouts: int
    prompt: tuple[object, ...] | None = None

    def __post_init__(self) -> None:
        """Check the shapes."""
        shape, m = np.shape(self.inner), len(self.labels)
        if len(shape) != 4 or shape[:2] != (m, m) or shape[2] != shape[3]:
            raise InputError(f"inner has shape {shape} but there are {m} labels; pass the Gram matrix as [M, M, P, P].")
        if len(set(self.labels)) != m:
            raise InputError(f"labels are {self.labels}; name every (estimator, energy source) once.")
        if self.prompt is not None and len(self.prompt) != shape[2]:
            raise InputError(
                f"prompt has {len(self.prompt)} names but inner has {shape[2]} prompts; pass one per prompt."
            )

    @property
    def n_prompts(self) -> int:
        """Groups P."""
        return self.inner.shape[-1]

    def blocks(self, label: Label, reference: Label) -> Float:
        """Return ⟨m, m⟩, ⟨m, reference⟩ and ⟨reference, reference⟩ as [3, P, P].

        Args:
            label: The estimator m.
            reference: The estimator that stands for ∇J.

        Returns:
            float64 [3, P, P]; NaN for a reference that is not among the labels and where an entry is not finite.

        Raises:
            InputError: `label` is not among the labels.
        """
        if label not in self.labels:
            raise InputError(f"label is {label}; {nearest(str(label), map(str, self.labels))}")
        m = self.labels.index(label)
        block = np.full((3, *self.inner.shape[2:]), np.nan)
        block[0] = self.inner[m, m]
        if reference in self.labels:
            r = self.labels.index(reference)
            block[1], block[2] = self.inner[m, r], self.inner[r, r]
        return np.where(np.isfinite(block), block, np.nan)


def clusters(grams: Sequence[Gram]) -> list[Int]:
    """Number the prompts of several steps: [P] codes per step, equal where the prompt is the same.

    Args:
        grams: One Gram matrix per step.

    Returns:
        One int array [P_s] per step with values 0 … K−1.
    """
    seen: dict[object, int] = {}
    codes = []
    for step, gram in enumerate(grams):
        names = [(step, p) for p in range(gram.n_prompts)] if gram.prompt is None else [(p,) for p in gram.prompt]
        codes.append(np.array([seen.setdefault(name, len(seen)) for name in names], dtype=np.int64))
    return codes


def deleted_moments(grams: Sequence[Gram], label: Label, reference: Label = REFERENCE) -> Moments:
    """Moments of one estimator over all steps, from all clusters and without each cluster in turn.

    E‖g_p‖² is the mean of the diagonal; ‖m‖², ⟨m, ∇J⟩ and ‖∇J‖² are U-statistics, means over pairs of *different*
    prompts, so each is unbiased and no prompt is compared with itself. Numerators and denominators are summed over
    steps before anything is divided.

    Args:
        grams: One Gram matrix per step, all of which have `label`.
        label: The estimator m.
        reference: The unbiased estimator that stands for ∇J.

    Returns:
        Arrays [1 + K]: entry 0 from all K clusters, entry 1 + k without cluster k. NaN where no pair is left.
    """
    codes = clusters(grams)
    size = 1 + max((int(c.max()) for c in codes if c.size), default=-1)
    sums = np.zeros((size, 8))
    # A pair is charged to both of its clusters, so the totals of the pair columns are half their sums.
    halves = np.array([1.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5])
    for gram, code in zip(grams, codes, strict=True):
        block = gram.blocks(label, reference)
        other = code[:, None] != code
        pairs = np.where(other, block, 0.0)
        own = np.einsum("jpp->pj", block)
        touched = (pairs.sum(axis=1) + pairs.sum(axis=2)).T
        ones = np.ones((code.size, 1))
        np.add.at(sums, code, np.hstack([ones, own, 2 * other.sum(axis=1, keepdims=True), touched]))
    total = (sums * halves).sum(axis=0)
    kept = np.vstack([total, total - sums])
    counts = np.where(kept[:, [0, 4]] > 0, kept[:, [0, 4]], np.nan)
    power, mean = kept[:, 1:4] / counts[:, :1], kept[:, 5:] / counts[:, 1:]
    return Moments(power[:, 0], mean[:, 0], mean[:, 1], mean[:, 2], power[:, 2])
