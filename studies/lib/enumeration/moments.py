"""Mean and variance of a gradient estimate against the true gradient, and the measures that follow from them."""

from dataclasses import dataclass

import numpy as np

from otb_analysis.statistics.moments import measures
from otb_analysis.types import Float


@dataclass(frozen=True)
class GroupMoments:
    """First two moments of one prompt's group gradient ḡ = (1/N) Σ_i Σ_t A_{i,t} s_{i,t}."""

    mean: Float  # m = E ḡ [D]
    variance: float  # V = tr Cov(ḡ) = E‖ḡ‖² − ‖m‖²
    gradient: Float  # ∇J [D]
    n: int

    @property
    def relative_bias(self) -> float:
        """‖m − ∇J‖ / ‖∇J‖."""
        return float(np.linalg.norm(self.mean - self.gradient) / np.linalg.norm(self.gradient))

    @property
    def projection(self) -> float:
        """C = ⟨m, ∇J⟩ / ‖∇J‖²: the step taken along the gradient, 1 when unbiased."""
        return float(self.mean @ self.gradient / (self.gradient @ self.gradient))

    @property
    def n_variance(self) -> float:
        """N·V, comparable between group sizes."""
        return self.n * self.variance

    @property
    def sf(self) -> float:
        """SF = V / c²: variance at equal progress."""
        return self.variance / self.projection**2

    def measured(self, reference: "GroupMoments") -> measures.Moments:
        """Return what a Gram matrix of infinitely many prompts would give: the ground truth of `statistics`."""
        mean_sq, truth_sq = self.mean @ self.mean, reference.mean @ reference.mean
        along, reference_power = self.mean @ reference.mean, truth_sq + reference.variance
        values = (mean_sq + self.variance, mean_sq, along, truth_sq, reference_power)
        return measures.Moments(*(np.array(float(x)) for x in values))

    def efficiency(self, prompts: float) -> float:
        """Return the share of an update of P prompts that points along ∇J.

        ⟨m, ∇J⟩² / (‖∇J‖² (‖m‖² + V/P)) ∈ [0, 1].
        """
        along = (self.mean @ self.gradient) ** 2 / (self.gradient @ self.gradient)
        return float(along / (self.mean @ self.mean + self.variance / prompts))


def weighted_moments(gradients: Float, prob: Float, gradient: Float, n: int) -> GroupMoments:
    """Return exact moments from all outcomes and their probabilities."""
    mean = prob @ gradients
    return GroupMoments(mean, float(prob @ ((gradients - mean) ** 2).sum(axis=1)), gradient, n)


def sampled_moments(gradients: Float, gradient: Float, n: int) -> GroupMoments:
    """Return moments estimated from independent groups (ddof 1)."""
    return GroupMoments(gradients.mean(axis=0), float(gradients.var(axis=0, ddof=1).sum()), gradient, n)
