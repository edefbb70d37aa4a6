"""The four measures of gradient estimators, in words.

An estimator that takes smaller steps has a smaller variance whether or not it is better. So the four measures always
stand together: batch variance, projection c = ⟨m, ∇J⟩/‖∇J‖², SF = variance/c², and efficiency.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """One way to compare gradient estimators: a column, how its panel is titled, what it is in one line."""

    column: str
    title: str
    line: str
    formula: str
    log: bool = False


MEASURES = (
    Measure(
        "efficiency", "Efficiency", "share of the update along the true gradient",
        "⟨m, ∇J⟩² / (‖∇J‖² · (‖m‖² + variance)): share of an update of P prompts along ∇J, the true gradient.",
    ),
    Measure(
        "sf", "Variance at equal progress", "variance ÷ c², norm²; lower is better",
        "SF = batch variance ÷ projection²; the variance itself where c is 1.", log=True,
    ),
    Measure(
        "variance", "Batch variance", "norm², smaller for shorter steps, too",
        "Σ_p ‖ḡ_p − ḡ‖² / (P(P − 1)) over the P measured prompts, ḡ_p the mean gradient of prompt p's group.", log=True,
    ),
    Measure(
        "projection", "Step length c", "along the true gradient; 1 is as long as it",
        "⟨m, ∇J⟩ / ‖∇J‖², m the estimator's mean gradient, ∇J from unbiased ones on other prompts; 1 where proved.",
    ),
)  # fmt: skip


NOISE_SCALE = (
    "Noise scale",
    "V / ‖m‖² in prompts, V the variance of one prompt's group gradient: at this many prompts the noise of an update "
    "is as large as its signal. An unbiased estimator with P prompts has efficiency P / (P + noise scale). It is not "
    "shown by itself where fewer prompts were measured than a third of the noise scale.",
)
"""Name of the noise scale, and what it is in one line."""
