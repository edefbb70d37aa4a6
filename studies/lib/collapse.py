"""When a run has collapsed, and baselines that tell the level of B from its shape.

`lowered` is `rloo` moved to the mean of `otb`, `raised` is `otb` moved to the mean of `rloo`. Both are moved by one
constant a step: the mean over the policy tokens of the batch of B of the one minus that of the other. What varies
between tokens, rollouts and prompts stays as it was, and so does the variance but for its level.
"""

import numpy as np

from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.types import Float

WINDOW, DROP, LASTING = 6, 0.5, 6
"""Collapsed: mean reward over 6 steps at most half of the highest such mean so far, and so for 6 steps on end."""


def lowered(inputs: EstimatorInputs) -> Float:
    """A = G − B_rloo − d, d = mean over the batch's policy tokens of B_otb − B_rloo [N, T]."""
    return _moved("rloo", "otb", inputs)


def raised(inputs: EstimatorInputs) -> Float:
    """A = G − B_otb − d, d = mean over the batch's policy tokens of B_rloo − B_otb [N, T]."""
    return _moved("otb", "rloo", inputs)


def _moved(name: str, to: str, inputs: EstimatorInputs) -> Float:
    shape, level = estimate(name, inputs), estimate(to, inputs)
    return np.where(inputs.mask, shape.advantage - (level.baseline - shape.baseline)[inputs.mask].mean(), 0.0)


def trailing_mean(reward: Float) -> Float:
    """Return the mean over the last steps, of those there are at the beginning."""
    total = np.concatenate([[0.0], np.cumsum(reward)])
    ends = np.arange(1, len(reward) + 1)
    begins = np.maximum(ends - WINDOW, 0)
    return (total[ends] - total[begins]) / (ends - begins)


def collapse_step(reward: Float) -> int | None:
    """Return the first step of a lasting loss of half of the best trailing reward; None where there is none."""
    mean = trailing_mean(reward)
    low = mean <= DROP * np.maximum.accumulate(mean)
    low[: WINDOW - 1] = False
    run = 0
    for step, is_low in enumerate(low):
        run = run + 1 if is_low else 0
        if run == LASTING:
            return step - LASTING + 1
    return None
