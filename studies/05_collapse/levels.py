"""Baselines that tell the level of B from its shape: `rloo` moved to the mean of `otb`, and `otb` to that of `rloo`.

Both are moved by one constant a step: the mean over the policy tokens of the batch of B of the one minus that of the
other. What varies between tokens, rollouts and prompts stays as it was, and so does the variance but for its level.
"""

import numpy as np

from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.types import Float


def lowered(inputs: EstimatorInputs) -> Float:
    """A = G − B_rloo − d, d = mean over the batch's policy tokens of B_otb − B_rloo [N, T]."""
    return _moved("rloo", "otb", inputs)


def raised(inputs: EstimatorInputs) -> Float:
    """A = G − B_otb − d, d = mean over the batch's policy tokens of B_rloo − B_otb [N, T]."""
    return _moved("otb", "rloo", inputs)


def _moved(name: str, to: str, inputs: EstimatorInputs) -> Float:
    shape, level = estimate(name, inputs), estimate(to, inputs)
    distance = (level.baseline - shape.baseline)[inputs.mask].mean()
    return np.where(inputs.mask, shape.advantage - distance, 0.0)
