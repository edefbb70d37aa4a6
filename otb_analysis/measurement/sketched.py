"""The level `sketch`: estimated norms, each with a standard error, of whole groups that nothing measured exactly."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from otb_analysis.config import SketchSchedule
from otb_analysis.gradients import sketch_score_norms
from otb_analysis.measurement.levels import MeasuredPolicy, SampledEnergies, batch_of
from otb_analysis.measurement.table import TokenTable
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Float, Int


@dataclass(frozen=True)
class SketchedNorms:
    """Estimates of ‖s_{n,t}‖², NaN outside the sketched groups; made by `sketch_groups`, read by the store.

    Attributes:
        norm_sq: ŵ [N, T]: unbiased, and by the method `hybrid` now and then below 0.
        stderr: Its standard error [N, T]; errors of one step share their directions and do not average out.
        share: Share of the step's groups that were sketched; they come in random order.
        n_groups: How many these are.
    """

    norm_sq: Float
    stderr: Float
    share: float
    n_groups: int


def groups_to_sketch(
    plan: SketchSchedule, table: TokenTable, exact: Float | None, sampled: SampledEnergies | None
) -> Int:
    """Return the first groups of which no token was measured exactly: prompts come in random order.

    Args:
        plan: How many.
        table: The step.
        exact: Norms from the level `exact` [N, T], NaN where it did not measure; None when it did not run.
        sampled: From the level `sampled`, if it ran.
    """
    known = np.zeros(table.mask.shape, bool) if exact is None else np.isfinite(exact)
    if sampled is not None:
        known |= sampled.population
    left = np.setdiff1d(np.unique(table.group), table.group[known.any(axis=1)])
    return left[: plan.prompts or len(left)]


def sketch_groups(
    policy: MeasuredPolicy, plan: SketchSchedule, seed: int, rollouts: Rollouts, groups: Int
) -> SketchedNorms:
    """Estimate the norm of every token's score in some groups.

    Args:
        policy: The policy and its scope.
        plan: Directions and method.
        seed: Seed of the directions.
        rollouts: The step's rollouts.
        groups: Which groups to sketch.

    Raises:
        InputError: The model cannot be sketched by that method, or so many directions do not fit in memory.
    """
    rows = np.isin(rollouts.group, groups)
    columns = rollouts.completion_columns()[rows]
    ids, mask, attention = batch_of(rollouts, rows, policy.model.device)
    found = sketch_score_norms(
        policy.model, ids, mask, attention, directions=plan.directions, method=plan.method, seed=seed,
        scope=policy.scope, temperature=policy.temperature,
    )  # fmt: skip
    inside = np.take_along_axis(rollouts.mask[rows], columns, axis=1) & rollouts.present()[rows]

    def by_token(x: Float | None) -> Float:
        out = np.full((len(rows), columns.shape[1]), np.nan)
        if x is not None:
            out[rows] = np.where(inside, np.take_along_axis(x, columns, axis=1), np.nan)
        return out

    share = len(groups) / len(rollouts.prompts)
    return SketchedNorms(by_token(found.norm_sq), by_token(found.norm_sq_stderr), share, len(groups))


def sketch_columns(
    table: TokenTable, sketched: SketchedNorms | None, columns: Mapping[str, object]
) -> dict[str, object]:
    """Return the columns of `tokens` in which sketched groups have values beside what was measured exactly.

    Args:
        table: The step.
        sketched: From the level `sketch`, if it ran.
        columns: What the other levels have filled: `measured_by`, and where they ran `grad_norm_sq`, `inclusion_prob`.
    """
    if sketched is None:
        return {}
    n, t = np.nonzero(table.present)
    norm_sq, stderr = sketched.norm_sq[n, t], sketched.stderr[n, t]
    here = np.isfinite(norm_sq)

    def beside(name: str, values: Float | float) -> np.ma.MaskedArray:
        others = np.ma.filled(np.ma.asarray(columns.get(name, np.full(len(n), np.nan)), np.float64), np.nan)
        return np.ma.masked_invalid(np.where(here, values, others))

    return {
        "grad_norm_sq": beside("grad_norm_sq", norm_sq),
        "grad_norm_sq_stderr": np.ma.masked_invalid(stderr),
        "measured_by": np.where(here, "sketch", np.asarray(columns["measured_by"])),
        "inclusion_prob": beside("inclusion_prob", sketched.share),
    }
