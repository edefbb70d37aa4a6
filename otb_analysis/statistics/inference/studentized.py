"""Quantiles of a studentized estimate whose clusters may be skewed and heavy-tailed.

Where a few prompts hold most of a variance, a sample without them gives too small a value *and* too small a standard
error, so Student's interval fails on one side. Two closed-form corrections, both estimated from the clusters'
influences, mend most of it; neither ever shortens the interval.
"""

from dataclasses import dataclass

import numpy as np
from scipy import special

from otb_analysis.types import Float


@dataclass(frozen=True)
class Studentized:
    """The law of (θ̂ − θ)/se, estimated from the clusters; Student's for symmetric light-tailed ones.

    With a = skewness/√K, Hall's g(T) = T + a·T²/3 + a²·T³/27 + a/6 is symmetric to second order; its inverse
    g⁻¹(q) = (3/a)·((1 + a·(q − a/6))^{1/3} − 1) corrects the quantiles for skewness. The variance of se² depends on the
    kurtosis, and with it the degrees of freedom: 2/(κ/K + 2/(K − 1)), κ the excess kurtosis, at least 0. On each side
    the wider of the plain and the corrected quantile counts. Sources: Hall (1992), On the removal of skewness by
    transformation; Satterthwaite (1946). The combination is ours; docs/coverage.md has what it covers.
    """

    skew: float
    degrees: float

    @classmethod
    def from_influence(cls, influence: Float) -> "Studentized":
        """Estimate the law from the clusters.

        Args:
            influence: One value per cluster, up to a shift and a positive factor [K], K > 3; a cluster that pulls the
                estimate up has a large one.
        """
        k = influence.size
        # Clusters that are alike up to rounding have no shape to correct for.
        if np.ptp(influence) <= 1e-12 * np.abs(influence).max(initial=0.0):
            return cls(0.0, k - 1.0)
        z = (influence - influence.mean()) / influence.std()
        # Sample skewness and excess kurtosis with the usual small-sample corrections (G₁ and G₂).
        skewness = np.mean(z**3) * np.sqrt(k * (k - 1)) / (k - 2)
        kurtosis = ((k + 1) * (np.mean(z**4) - 3) + 6) * (k - 1) / ((k - 2) * (k - 3))
        # Negative excess kurtosis would shorten the interval; of few clusters that is not to be trusted.
        return cls(float(skewness / np.sqrt(k)), float(2 / (max(kurtosis, 0.0) / k + 2 / (k - 1))))

    def quantiles(self, level: float) -> tuple[float, float]:
        """Return how many standard errors the interval reaches down and up from the estimate."""
        t = float(special.stdtrit(self.degrees, (1 + level) / 2))
        # The wider of the two on each side: skewness of few clusters is too noisy to shorten an interval by.
        return max(t, self._corrected(t)), max(t, -self._corrected(-t))

    def p_value(self, distance: float) -> float:
        """Return one minus the level at which the interval just reaches a hypothesis."""
        # The interval reaches a hypothesis by the wider of two quantiles, so the p-value is the larger of two.
        symmetric = np.sign(distance) * self._symmetric(distance)
        return float(min(2 * special.stdtr(self.degrees, -max(min(abs(distance), symmetric), 0.0)), 1.0))

    def _corrected(self, q: float) -> float:
        a = self.skew
        # At skewness 0 the correction vanishes but 3/a does not exist. cbrt has a real root below 0, a power has none.
        return q if abs(a) < 1e-6 else float(3 / a * (np.cbrt(1 + a * (q - a / 6)) - 1))

    def _symmetric(self, t: float) -> float:
        a = self.skew
        return t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6
