"""The gradient noise scale: how many prompts an update needs before its signal equals its noise."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.statistics.inference.intervals import Interval, jackknife_interval
from otb_analysis.statistics.moments.gram import Truth, against_reference, deleted_moments
from otb_analysis.statistics.moments.measures import quotient, with_projection
from otb_analysis.statistics.moments.paired import NOTHING
from otb_analysis.types import Gram, Label, Proved


def gradient_noise_scale(grams: Sequence[Gram], label: Label, known: Proved = NOTHING) -> Interval | None:
    """Gradient noise scale of one estimator in *prompts*: B = V/‖m‖², V the variance of one prompt's group gradient.

    At B prompts the noise of an update is as large as its signal; the signal-to-noise ratio of P prompts is P/B. An
    unbiased estimator has efficiency P/(P + B). A constant factor on the estimator does not change B. Multiply by the
    group size for rollouts.

    V = E‖g_p‖² − ‖m‖², with ‖m‖² a mean over pairs of different prompts, so the noise biases neither. Where the
    projection c is proved, ‖m‖² = c²·‖∇J‖², with ‖∇J‖² from all proved unbiased estimators, which is less noisy.
    Source: McCandlish et al. (2018), whose two batch sizes are here one prompt and all prompts.

    Returns:
        The scale with a 95 % jackknife interval over prompts; a point without interval below 16 prompts, or where ‖m‖²
        is not positive without one of the prompts. None where the estimate of ‖m‖² is not positive, since the scale is
        then lost in the noise, and where no step has two prompts.
    """
    measured = {other for gram in grams for other in gram.labels}
    unbiased = known.truth & measured
    c = known.projection.get(label) if unbiased else None
    # Without a proof the estimator stands for its own mean: ‖m‖² is a mean over its own pairs, and needs no ∇J.
    truth: Truth = label if c is None else unbiased
    steps = against_reference(grams, label, truth)
    moments = with_projection(deleted_moments(steps, label, truth), c)
    # Estimated, so a spread near 0 can come out below it.
    noise = np.maximum(moments.power - moments.mean_sq, 0)
    scale = quotient(noise, moments.mean_sq)
    return jackknife_interval(scale[0], scale[1:], "gradient noise scale V/‖m‖² in prompts")
