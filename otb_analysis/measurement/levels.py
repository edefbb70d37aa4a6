"""The levels `sampled`, `sketch` and `attribution`.

They give exact norms of drawn tokens, estimated norms of whole groups, and every token's share of ‖ḡ‖².
All are per completion token [N, T]; NaN where nothing is known.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from otb_analysis.config import SampledSchedule, SketchSchedule
from otb_analysis.energies import calibrate
from otb_analysis.gradients import gradient_attribution, sampled_score_norms, signal_noise, sketch_score_norms
from otb_analysis.measurement.table import TokenTable
from otb_analysis.measurement.tokens import DrawnTokens, TokenMeasurements, TokenShares
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class MeasuredPolicy:
    """What was measured with which settings: a policy, and the gradient engine's keyword arguments."""

    model: PreTrainedModel
    scope: str
    temperature: float


def draw_energies(
    policy: MeasuredPolicy,
    plan: SampledSchedule,
    seed: int,
    rollouts: Rollouts,
    table: TokenTable,
    measured: TokenMeasurements,
) -> TokenMeasurements:
    """Draw tokens, measure them, and calibrate the proxy on all that was measured at this step.

    `measured` comes from the level `exact`.

    Raises:
        InputError: The size measure is not available for this model, or too few tokens fix no calibration.
    """
    norm_sq = np.where(table.mask, measured.norm_sq, np.nan)
    known = np.isin(table.group, table.group[np.isfinite(norm_sq).any(axis=1)])  # the level measures whole groups
    rows = np.isin(table.group, _groups_to_draw(plan, table.group, known))
    prob = np.where(table.mask & known[:, None], 1.0, np.nan)
    if table.mask[rows].any():
        norm_sq[rows], prob[rows] = _draw(policy, plan, seed, rollouts, table, rows)
    share = len(np.unique(table.group[rows | known])) / len(np.unique(table.group))
    proxy = np.where(table.mask, table.stats.energy, 0.0)
    fit = calibrate(norm_sq, proxy, prob)
    return measured.with_drawn(norm_sq, DrawnTokens(prob, share, fit, fit.predict(proxy)))


def _groups_to_draw(plan: SampledSchedule, group: Int, known: Bool) -> Int:
    """The first groups that are not measured exactly anyway: prompts come in random order."""
    left = np.setdiff1d(np.unique(group), group[known])
    return left[: plan.prompts or len(left)]


def _draw(
    policy: MeasuredPolicy, plan: SampledSchedule, seed: int, rollouts: Rollouts, table: TokenTable, rows: Bool
) -> tuple[Float, Float]:
    """Norms and inclusion probabilities [n, T] of some rollouts, NaN where not drawn and where not policy tokens."""
    ids, mask, attention = rollouts.tensors(policy.model.device, rows)
    inside = table.mask[rows]
    tokens = max(1, round(plan.share * int(inside.sum())))
    proxy = rollouts.by_column(table.stats.energy[None, rows], rows)[:, 0]
    norms = sampled_score_norms(
        policy.model, ids, mask, attention, tokens=tokens, by=plan.by, proxy=proxy, seed=seed,
        scope=policy.scope, temperature=policy.temperature,
    )  # fmt: skip

    def by_token(x: Float) -> Float:
        return np.where(inside, rollouts.by_token(x, rows), np.nan)

    return by_token(norms.norm_sq), by_token(norms.inclusion_prob)


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


def attribute(policy: MeasuredPolicy, rollouts: Rollouts, weights: Float, *, method: str, split: bool) -> TokenShares:
    """Attribute ‖Σ weights·s‖² to tokens, by `method` "jvp" or "difference".

    `weights` [N, T] is zero outside the mask: A/N for the gradient of the update. `split` also tells each share's
    signal from its noise, for one more pass.
    """
    ids, mask, attention = rollouts.tensors(policy.model.device)
    row, inside = rollouts.by_column(weights[None])[:, 0], rollouts.policy_tokens()

    def by_token(x: Float) -> Float:
        return np.where(inside, rollouts.by_token(x), np.nan)

    settings = {"method": method, "scope": policy.scope, "temperature": policy.temperature}
    if split:
        parts = signal_noise(policy.model, ids, mask, row, rollouts.group, attention, **settings)
        return TokenShares(by_token(parts.signal + parts.noise), by_token(parts.signal), by_token(parts.noise))
    return TokenShares(
        by_token(gradient_attribution(policy.model, ids, mask, row, attention, **settings).share), None, None
    )
