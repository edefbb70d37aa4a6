"""The levels `sampled` and `attribution`: exact norms of drawn tokens, and every token's share of ‖ḡ‖².

Both are per completion token [N, T]; NaN where nothing is known.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.config import SampledSchedule
from otb_analysis.energies import Calibration, calibrate
from otb_analysis.gradients import gradient_attribution, sampled_score_norms, signal_noise
from otb_analysis.measurement.table import TokenTable
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import Totals, difference_total, horvitz_thompson
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class SampledEnergies:
    """Exact norms of drawn tokens and what follows for all others; made by `draw_energies`, read by the store.

    Tokens of groups that the level `exact` measured count as drawn for certain.

    Attributes:
        grad_norm_sq: w [N, T], NaN where the token was not measured.
        inclusion_prob: π within the measured groups [N, T]; NaN outside them and outside the mask.
        share: Share of the step's groups that were measured; they come in random order.
        calibration: Proxy to exact energy, fitted on the measured tokens.
        calibrated: Its predictions for every policy token [N, T], zero outside the mask.
    """

    grad_norm_sq: Float
    inclusion_prob: Float
    share: float
    calibration: Calibration
    calibrated: Float

    @property
    def population(self) -> Bool:
        """True at the tokens that could be drawn [N, T]."""
        return np.isfinite(self.inclusion_prob)

    @property
    def total(self) -> Totals | None:
        """Horvitz–Thompson total of the step's energy; None where some groups were left out altogether."""
        if self.share < 1:
            return None
        chosen = self.population
        return horvitz_thompson(self.grad_norm_sq[chosen], self.inclusion_prob[chosen])

    def rollout_totals(self) -> tuple[Float, Float]:
        """Realized energy W_T of each rollout and its standard error [N], with the calibrated proxy's help.

        NaN for rollouts of groups that were left out, and an error of NaN where no token of the rollout was drawn.
        """
        chosen, n = self.population, len(self.grad_norm_sq)
        rollout = np.nonzero(chosen)[0]
        found = difference_total(
            self.grad_norm_sq[chosen], self.calibrated[chosen], self.inclusion_prob[chosen], rollout
        )
        energy, stderr = np.full(n, np.nan), np.full(n, np.nan)
        energy[found.labels], stderr[found.labels] = found.estimate, found.stderr
        return energy, stderr


@dataclass(frozen=True)
class TokenShares:
    """Every token's signed share of ‖ḡ‖², ḡ the gradient that the update follows; made by `attribute`.

    Attributes:
        share: (A/N)·s·ḡ [N, T], NaN outside the mask; sums to ‖ḡ‖².
        signal: The part along the other prompts' gradients [N, T], or None when it was not asked for.
        noise: The part along the own prompt's [N, T], or None.
    """

    share: Float
    signal: Float | None
    noise: Float | None


@dataclass(frozen=True)
class MeasuredPolicy:
    """What was measured with which settings: a policy, and the gradient engine's keyword arguments."""

    model: PreTrainedModel
    scope: str
    temperature: float


def draw_energies(
    policy: MeasuredPolicy, plan: SampledSchedule, seed: int, rollouts: Rollouts, table: TokenTable, exact: Float | None
) -> SampledEnergies:
    """Draw tokens, measure them, and calibrate the proxy on all that was measured at this step.

    Args:
        policy: The policy and its scope.
        plan: How many tokens of how many groups, and by what size measure.
        seed: Seed of the draw.
        rollouts: The step's rollouts.
        table: Their token table.
        exact: Norms from the level `exact` [N, T], NaN where it did not measure.

    Raises:
        InputError: The size measure is not available for this model, or too few tokens fix no calibration.
    """
    norm_sq = np.full(table.mask.shape, np.nan) if exact is None else np.where(table.mask, exact, np.nan)
    known = np.isin(table.group, table.group[np.isfinite(norm_sq).any(axis=1)])  # the level measures whole groups
    rows = np.isin(table.group, _groups_to_draw(plan, table.group, known))
    prob = np.where(table.mask & known[:, None], 1.0, np.nan)
    if table.mask[rows].any():
        norm_sq[rows], prob[rows] = _draw(policy, plan, seed, rollouts, table, rows)
    measured = len(np.unique(table.group[rows | known])) / len(np.unique(table.group))
    proxy = np.where(table.mask, table.stats.energy, 0.0)
    fit = calibrate(norm_sq, proxy, prob)
    return SampledEnergies(norm_sq, prob, measured, fit, fit.predict(proxy))


def _groups_to_draw(plan: SampledSchedule, group: Int, known: Bool) -> Int:
    """The first groups that are not measured exactly anyway: prompts come in random order."""
    left = np.setdiff1d(np.unique(group), group[known])
    return left[: plan.prompts or len(left)]


def _draw(
    policy: MeasuredPolicy, plan: SampledSchedule, seed: int, rollouts: Rollouts, table: TokenTable, rows: Bool
) -> tuple[Float, Float]:
    """Norms and inclusion probabilities [n, T] of some rollouts, NaN where not drawn and where not policy tokens."""
    ids, mask, attention = batch_of(rollouts, rows, policy.model.device)
    inside, columns = table.mask[rows], rollouts.completion_columns()[rows]
    tokens = max(1, round(plan.share * int(inside.sum())))
    proxy = by_column(table.stats.energy[None, rows], rollouts, rows)[:, 0]
    found = sampled_score_norms(
        policy.model, ids, mask, attention, tokens=tokens, by=plan.by, proxy=proxy, seed=seed,
        scope=policy.scope, temperature=policy.temperature,
    )  # fmt: skip

    def by_token(x: Float) -> Float:
        return np.where(inside, np.take_along_axis(x, columns, axis=1), np.nan)

    return by_token(found.norm_sq), by_token(found.inclusion_prob)


def attribute(policy: MeasuredPolicy, rollouts: Rollouts, weights: Float, *, method: str, split: bool) -> TokenShares:
    """Attribute ‖Σ weights·s‖² to tokens.

    Args:
        policy: The policy and its scope.
        rollouts: All of the step's rollouts.
        weights: Weight of each token's score [N, T], zero outside the mask: A/N for the gradient of the update.
        method: `jvp` or `difference`.
        split: Also tell each share's signal from its noise, for one more pass.
    """
    every = np.ones(len(weights), bool)
    ids, mask, attention = batch_of(rollouts, every, policy.model.device)
    row, columns = by_column(weights[None], rollouts, every)[:, 0], rollouts.completion_columns()
    inside = np.take_along_axis(rollouts.mask, columns, axis=1) & rollouts.present()

    def by_token(x: Float) -> Float:
        return np.where(inside, np.take_along_axis(x, columns, axis=1), np.nan)

    settings = {"method": method, "scope": policy.scope, "temperature": policy.temperature}
    if split:
        parts = signal_noise(policy.model, ids, mask, row, rollouts.group, attention, **settings)
        return TokenShares(by_token(parts.signal + parts.noise), by_token(parts.signal), by_token(parts.noise))
    return TokenShares(
        by_token(gradient_attribution(policy.model, ids, mask, row, attention, **settings).share), None, None
    )


def batch_of(rollouts: Rollouts, rows: Bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, policy mask and attention mask [n, L] of some rollouts, as the gradient engine takes them."""
    arrays = (rollouts.input_ids[rows], rollouts.mask[rows], rollouts.attention_mask[rows])
    ids, mask, attention = (torch.as_tensor(x, device=device) for x in arrays)
    return ids, mask, attention.long()


def by_column(weights: Float, rollouts: Rollouts, rows: Bool) -> Float:
    """Turn numbers by completion token [M, n, T] into numbers by column [n, M, L]."""
    columns, present = rollouts.completion_columns()[rows], rollouts.present()[rows]
    out = np.zeros((weights.shape[1], weights.shape[0], rollouts.input_ids.shape[1]))
    n, t = np.nonzero(present)
    out[n, :, columns[n, t]] = weights[:, n, t].T
    return out


def level_columns(table: TokenTable, sampled: SampledEnergies | None, shares: TokenShares | None) -> dict[str, object]:
    """Columns of `tokens` that the two levels fill; masked entries were not measured.

    Args:
        table: The step.
        sampled: From the level `sampled`, if it ran.
        shares: From the level `attribution`, if it ran.
    """
    n, t = np.nonzero(table.present)

    def known(x: Float) -> np.ma.MaskedArray:
        return np.ma.masked_invalid(x[n, t])

    columns: dict[str, object] = {}
    if sampled is not None:
        measured = ~np.isnan(sampled.grad_norm_sq)
        columns |= {
            "grad_norm_sq": known(sampled.grad_norm_sq),
            "measured_by": np.where(measured[n, t], "exact", "none"),
            "inclusion_prob": known(np.where(sampled.population, sampled.share * sampled.inclusion_prob, np.nan)),
            "energy_calibrated": known(np.where(table.mask, sampled.calibrated, np.nan)),
        }
    if shares is not None:
        columns["attribution"] = known(shares.share)
        if shares.signal is not None and shares.noise is not None:
            columns |= {"signal": known(shares.signal), "noise": known(shares.noise)}
    return columns


def energy_columns(sampled: SampledEnergies | None) -> dict[str, object]:
    """Columns of `rollouts` that the level `sampled` fills; masked entries were not measured."""
    if sampled is None:
        return {}
    energy, stderr = sampled.rollout_totals()
    return {"energy_total": np.ma.masked_invalid(energy), "energy_total_stderr": np.ma.masked_invalid(stderr)}
