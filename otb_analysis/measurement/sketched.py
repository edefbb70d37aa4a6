"""The level `sketch`: estimated norms, each with a standard error, of whole groups that nothing measured exactly."""

import numpy as np

from otb_analysis.config import SketchSchedule
from otb_analysis.gradients import sketch_score_norms
from otb_analysis.measurement.levels import MeasuredPolicy
from otb_analysis.measurement.table import TokenTable
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Float, Int


def groups_to_sketch(plan: SketchSchedule, table: TokenTable, measured: TokenMeasurements) -> Int:
    """Return the first groups of which no token was measured or could be drawn: prompts come in random order."""
    known = np.isfinite(measured.norm_sq)
    if measured.drawn is not None:
        known |= measured.drawn.population
    left = np.setdiff1d(np.unique(table.group), table.group[known.any(axis=1)])
    return left[: plan.prompts or len(left)]


def sketch_groups(
    policy: MeasuredPolicy,
    plan: SketchSchedule,
    seed: int,
    rollouts: Rollouts,
    groups: Int,
    measured: TokenMeasurements,
) -> TokenMeasurements:
    """Estimate the norm of every token's score in some groups, each with its standard error.

    Estimates are unbiased, and by the method `hybrid` now and then below 0. The seed draws the directions.

    Raises:
        InputError: The model cannot be sketched by that method, or so many directions do not fit in memory.
    """
    rows = np.isin(rollouts.group, groups)
    ids, mask, attention = rollouts.tensors(policy.model.device, rows)
    norms = sketch_score_norms(
        policy.model, ids, mask, attention, directions=plan.directions, method=plan.method, seed=seed,
        scope=policy.scope, temperature=policy.temperature,
    )  # fmt: skip
    inside = rollouts.policy_tokens()[rows]

    def by_token(x: Float | None) -> Float:
        out = np.full(measured.norm_sq.shape, np.nan)
        if x is not None:
            out[rows] = np.where(inside, rollouts.by_token(x, rows), np.nan)
        return out

    share = len(groups) / len(rollouts.prompts)
    return measured.with_sketched(by_token(norms.norm_sq), by_token(norms.norm_sq_stderr), len(groups), share)
