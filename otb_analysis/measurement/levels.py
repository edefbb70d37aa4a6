"""The levels of measuring beyond exact norms. See `level.Level`.

`sampled` gives exact norms of drawn tokens, `sketch` estimated norms of whole groups, `attribution` every token's share
of ‖ḡ‖². All are per completion token [N, T]; NaN where nothing is known.
"""

import numpy as np

from otb_analysis.config import AttributionSchedule, SampledSchedule, SketchSchedule
from otb_analysis.custom import import_attribute, is_custom
from otb_analysis.energies import calibrate
from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients import (
    gradient_attribution,
    sampled_score_norms,
    signal_noise,
    sketch_score_norms,
    token_score_norms,
)
from otb_analysis.measurement.contrast import Contrast
from otb_analysis.measurement.level import (
    Level,
    MeasuredPolicy,
    MeasuredStep,
    by_policy_token,
    first_groups,
    read_once,
    seen,
)
from otb_analysis.measurement.tokens import DrawnTokens, TokenMeasurements
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float

# Measured like the costs in `training/budget.py`, beside a pass of the same rollouts: the small model (0.4 M
# parameters, 26 tokens a rollout), a Llama of 42 M (28 tokens), SmolLM2-135M (78 tokens).
#
#                                    0.4 M     42 M    135 M
#   drawn tokens, a tenth              2–3      3.5        –
#   sketched norms, a direction     0.4–.7     0.25    .15–.3
#   attribution with its split        5–10      2.5    > 2.4
SHARED, FOUND = 0.5, 2.0
"""The pass that the drawn tokens of a rollout share; and the one that draws them by their norm above the cut."""
NORM = {"auto": 0.35, "fast": 0.35, "generic": 0.6, "reference": 1.0}
"""Exact norm of one token, by engine, times the share of its rollout that comes before it. A backward pass without
weight gradients is a third of a forward and backward pass."""
DIRECTION, ATTRIBUTION, SPLIT = 0.32, 2.4, 1.0
"""One direction of sketched norms; attribution; its split into signal and noise.

Exact norms and K directions cost the same where NORM·seen = DIRECTION·K. On SmolLM2-135M, after prompts of 1 and 46
tokens, that was at seen = .85 to 1.03 K for K = 16 and .8 to .92 K for K = 32.
"""


DRAWN_OF_PROMPT = 32
"""Tokens that are drawn from a prompt's long answers."""


def drawn_share(rollouts: Rollouts) -> float:
    """Return the share of the tokens that is drawn: 32 of a prompt's, a tenth at most, but 16 where there are."""
    tokens = max(float(rollouts.mask.sum()) / len(rollouts.prompts), 1.0)
    return float(np.clip(DRAWN_OF_PROMPT / tokens, 0.01, min(1.0, max(0.1, 16 / tokens))))


class Sampled(Level):
    """Exact norms of drawn tokens, and the proxy calibrated on all that was measured at this step."""

    phase = "drawn tokens"

    def measure(self, step: MeasuredStep, plan: SampledSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Draw tokens of the groups that are not measured whole.

        Raises:
            InputError: The size measure is not available for this model, or too few tokens fix no calibration.
        """
        table = step.table
        norm_sq = np.where(table.mask, known.norm_sq, np.nan)
        whole = np.isin(table.group, table.group[np.isfinite(norm_sq).any(axis=1)])  # `exact` measures whole groups
        rows = first_groups(table.group, ~whole, plan.prompts)
        prob = np.where(table.mask & whole[:, None], 1.0, np.nan)
        if table.mask[rows].any():
            norm_sq[rows], prob[rows] = _draw(step, plan, rows)
        share = len(np.unique(table.group[rows | whole])) / len(np.unique(table.group))
        proxy = np.where(table.mask, table.stats.energy, 0.0)
        fit = calibrate(norm_sq, proxy, prob)
        return known.with_drawn(norm_sq, DrawnTokens(prob, share, fit, fit.predict(proxy)))

    def passes(self, plan: SampledSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of the draw and of the drawn tokens, whose signals share a rollout's pass."""
        draw = FOUND if plan.by == "above_cut" else 0.0
        return draw + SHARED + NORM["auto"] * plan.share * seen(rollouts, rows)

    def words(self, plan: SampledSchedule) -> str:
        """Return how many tokens are drawn."""
        return f"{plan.share:.0%} of the tokens"


def _draw(step: MeasuredStep, plan: SampledSchedule, rows: Bool) -> tuple[Float, Float]:
    """Norms and inclusion probabilities [n, T] of some rollouts, NaN where not drawn and where not policy tokens."""
    policy, rollouts, table = step.policy, step.rollouts, step.table
    ids, mask, attention = rollouts.tensors(policy.model.device, rows)
    tokens = max(1, round(plan.share * int(table.mask[rows].sum())))
    proxy = rollouts.by_column(table.stats.energy[None, rows], rows)[:, 0]
    norms = sampled_score_norms(
        policy.model, ids, mask, attention, tokens=tokens, by=plan.by, proxy=proxy, seed=step.step, **policy.settings
    )
    norm_sq, prob = (by_policy_token(rollouts, x, rows)[rows] for x in (norms.norm_sq, norms.inclusion_prob))
    return norm_sq, prob


class Sketch(Level):
    """Estimated norms, with standard errors, of every token of groups that no other level measured.

    The method `auto` takes exact norms where they cost no more.
    """

    phase = "sketched norms"

    def measure(self, step: MeasuredStep, plan: SketchSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Project scores on random directions, which the step draws.

        Estimates are unbiased, and by the method `hybrid` now and then below 0.

        Raises:
            InputError: The model cannot be sketched by that method, or so many directions do not fit in memory.
        """
        policy, rollouts, group = step.policy, step.rollouts, step.table.group
        measured = np.isfinite(known.norm_sq) | (False if known.drawn is None else known.drawn.population)
        rows = first_groups(group, ~np.isin(group, group[measured.any(axis=1)]), plan.prompts)
        if not rows.any():
            return known
        ids, mask, attention = rollouts.tensors(policy.model.device, rows)
        count = len(np.unique(group[rows]))
        share = count / len(rollouts.prompts)
        if _exact_is_cheaper(plan, rollouts, rows, policy.engine):
            exact = token_score_norms(policy.model, ids, mask, attention, engine=policy.engine, **policy.settings)
            return known.with_groups(by_policy_token(rollouts, exact.norm_sq, rows), share)
        method = "hybrid" if plan.method == "auto" else plan.method
        norms = sketch_score_norms(
            policy.model, ids, mask, attention, directions=plan.directions, method=method, seed=step.step,
            **policy.settings,
        )  # fmt: skip
        assert norms.norm_sq_stderr is not None
        norm_sq, stderr = (by_policy_token(rollouts, x, rows) for x in (norms.norm_sq, norms.norm_sq_stderr))
        return known.with_sketched(norm_sq, stderr, count, share)

    def passes(self, plan: SketchSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of all directions, or of exact norms in their place by the engine that `auto` takes."""
        exact = _exact_is_cheaper(plan, rollouts, rows)
        return NORM["auto"] * seen(rollouts, rows) if exact else DIRECTION * plan.directions


def _exact_is_cheaper(plan: SketchSchedule, rollouts: Rollouts, rows: Bool, engine: str = "auto") -> bool:
    """Exact norms grow with the length of a rollout, a sketch with its directions: they meet at about K tokens."""
    return plan.method == "auto" and NORM[engine] * seen(rollouts, rows) <= DIRECTION * plan.directions


class Attribution(Level):
    """Every token's share of ‖ḡ‖², ḡ = Σ weights·s the gradient that the first update follows."""

    phase = "attribution"

    def measure(self, step: MeasuredStep, plan: AttributionSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Attribute by forward mode where the model's attention has one, else by differences."""
        policy, weights = step.policy, step.weights()
        try:
            return known.with_columns(shares(policy, step.rollouts, weights, plan.split))
        except NotImplementedError:  # how torch says that an operation has no forward mode
            if policy.slopes == "difference":
                raise
            policy.slopes = "difference"
            return known.with_columns(shares(policy, step.rollouts, weights, plan.split))

    def passes(self, plan: AttributionSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost with or without the split."""
        return (ATTRIBUTION + SPLIT * plan.split) * read_once(rollouts, rows)


def shares(policy: MeasuredPolicy, rollouts: Rollouts, weights: Float, split: bool) -> dict[str, Float]:
    """Return every token's signed share of ‖Σ weights·s‖² [N, T], to which the shares sum.

    `weights` [N, T] is zero outside the mask. `split` also tells the part of each share along the other prompts'
    gradients (`signal`) from that along its own prompt's (`noise`), for one more pass.
    """
    ids, mask, attention = rollouts.tensors(policy.model.device)
    row, settings = rollouts.by_column(weights[None])[:, 0], {"method": policy.slopes, **policy.settings}
    if split:
        parts = signal_noise(policy.model, ids, mask, row, rollouts.group, attention, **settings)
        columns = {"attribution": parts.signal + parts.noise, "signal": parts.signal, "noise": parts.noise}
    else:
        columns = {"attribution": gradient_attribution(policy.model, ids, mask, row, attention, **settings).share}
    return {name: by_policy_token(rollouts, x) for name, x in columns.items()}


LEVELS: dict[str, Level] = {
    "sampled": Sampled(), "sketch": Sketch(), "attribution": Attribution(), "contrast": Contrast(),
}  # fmt: skip
"""Every level but `forward` and `exact`."""


def level_of(name: str) -> Level:
    """Return a level by its name, or import it as module:attribute.

    Raises:
        InputError: There is none of that name.
    """
    level = LEVELS.get(name) or (import_attribute("level", name) if is_custom("level", name) else None)
    if not isinstance(level, Level):
        raise InputError(f"measure.further has {name!r}, which is no Level; {nearest(name, LEVELS)}")
    return level
