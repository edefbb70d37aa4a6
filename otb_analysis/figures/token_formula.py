"""One estimator's baseline at one token, written out: which return counts how much, and what is left as advantage.

Baselines are weighted sums of returns: B_{i,t} = b + Σ_j ω_j X_j over the rollouts j of the prompt. The weights are
found by asking the estimator itself, with a reward of 1 for one rollout at a time; so they are right for every
estimator of that form, and an estimator of another form (a median) is recognised and gets no weights.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.arrays import returns_to_go, squeeze, squeezed_mask
from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.estimators.registry import registered
from otb_analysis.figures.numbers import number
from otb_analysis.types import Bool, Float, Int

TERMS = 8
"""Most terms of a sum that are written out; the table has all."""
RELATIVE = 1e-6


@dataclass(frozen=True)
class TokenFormula:
    """A baseline with one token's numbers in it."""

    estimator: str
    formula: str  # B_{i,t} as the catalogue has it
    to_go: float  # G_{i,t}
    baseline: float  # B_{i,t}
    advantage: float  # A_{i,t}
    fallback: bool  # True where the formula was undefined
    others: float  # b: what does not come from this prompt's rewards
    # The prompt's rollouts: rollout, weight ω_j, return X_j, and w and W where there are energies; the weight is NaN
    # for a baseline that is no weighted sum
    terms: pd.DataFrame
    by_position: bool  # True where X_j is the return from this position on, False where it is the total return

    @property
    def is_sum(self) -> bool:
        """True where the baseline is a weighted sum of returns."""
        return bool(self.terms["weight"].notna().all())

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """The formula, the same with numbers, and the advantage."""
        lines = [("formula", f"B = {self.formula}")]
        numbers = f"B = {self._sum()}{number(self.baseline)}"
        lines.append(("with numbers", numbers + (" (undefined here: fallback)" if self.fallback else "")))
        plain = f"A = G − B = {number(self.to_go)} − {_bracketed(self.baseline)} = {number(self.to_go - self.baseline)}"
        if not _close(self.to_go - self.baseline, self.advantage):
            plain += f", rescaled to {number(self.advantage)}"
        return (*lines, ("advantage", plain))

    def is_close_to(self, baseline: float | None) -> bool:
        """Return whether a stored baseline, in single precision, is this one."""
        return baseline is not None and abs(baseline - self.baseline) <= 1e-4 * max(1.0, abs(self.baseline))

    def _sum(self) -> str:
        if not self.is_sum:
            return ""
        counting: Any = self.terms[self.terms["weight"].abs() > RELATIVE]
        if counting.empty:
            return ""
        largest: Any = counting.loc[counting["weight"].abs().sort_values(ascending=False, kind="stable").index[:TERMS]]
        pairs = zip(largest["weight"], largest["return"], strict=True)
        terms = [f"{number(w)}·{_bracketed(x)}" for w, x in pairs]
        if len(counting) > TERMS:
            terms.append(f"… ({len(counting) - TERMS} more)")
        if abs(self.others) > RELATIVE:
            terms.append(f"{number(self.others)} from other prompts")
        return " + ".join(terms) + " = "


def token_formula(
    name: str, inputs: EstimatorInputs, rollouts: Int, rollout: int, t: int, options: Any = None
) -> TokenFormula | None:
    """Write out an estimator's baseline at token t of a rollout; None where there is no policy token.

    Args:
        rollouts: Index of each row's rollout [N].
        options: As for `estimate`.

    Raises:
        InputError: The estimator does not exist, or lacks an input.
    """
    rows = np.flatnonzero(rollouts == rollout)
    if not len(rows) or not 0 <= t < inputs.mask.shape[1] or not inputs.mask[rows[0], t]:
        return None
    group = inputs.group == inputs.group[rows[0]]
    entry = registered(name)
    if entry is not None and not entry.batch_coupled:
        inputs, rollouts, group = _rows(inputs, group), rollouts[group], group[group]
    i = int(np.flatnonzero(rollouts == rollout)[0])
    found = estimate(name, inputs, options)
    own = np.flatnonzero(group & inputs.mask.any(axis=1))
    last = inputs.mask.shape[1] - 1 - inputs.mask[:, ::-1].argmax(axis=1)

    def with_rewards(paid: Float) -> float:
        """Return B where the prompt's rollouts are paid these amounts at their ends."""
        reward = np.where(group[:, None], 0.0, inputs.reward)
        reward[own, last[own]] = paid
        return float(estimate(name, replace(inputs, reward=reward), options).baseline[i, t])

    others = with_rewards(np.zeros(len(own)))
    weight = np.array([with_rewards(one) for one in np.eye(len(own))]) - others
    probe = np.random.default_rng(0).normal(size=len(own))
    baseline = float(found.baseline[i, t])
    to_go, total = _at_position(returns_to_go(inputs.reward, inputs.mask), inputs.mask, own, i, t)
    by_position = _close(others + float(weight @ to_go), baseline)
    linear = _close(others + float(weight @ probe), with_rewards(probe))
    fits = linear and (by_position or _close(others + float(weight @ total), baseline))
    values = to_go if by_position else total
    terms = {"rollout": rollouts[own], "weight": weight if fits else np.full(len(own), np.nan), "return": values}
    if inputs.energy is not None:
        energy = squeeze(inputs.energy, inputs.mask)
        k = int(inputs.mask[i, :t].sum())
        terms |= {"w": np.where(squeezed_mask(inputs.mask)[own, k], energy[own, k], np.nan)}
        terms |= {"W": energy[own, : k + 1].sum(axis=1)}
    return TokenFormula(
        name, entry.formula if entry is not None else name, float(to_go[own == i][0]), baseline,
        float(found.advantage[i, t]), bool(found.fallback[i, t]), others if fits else 0.0, pd.DataFrame(terms),
        by_position,
    )  # fmt: skip


def _at_position(returns: Float, mask: Bool, own: Int, i: int, t: int) -> tuple[Float, Float]:
    """Return G of some rollouts where rollout i has token t, counted in policy tokens, and their total returns."""
    k = int(mask[i, :t].sum())
    squeezed = squeeze(returns, mask)
    return squeezed[own, k], squeezed[own, 0]


def _rows(inputs: EstimatorInputs, rows: Bool) -> EstimatorInputs:
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "state"}
    return replace(inputs, **{name: x[rows] for name, x in columns.items() if x is not None})


def _close(one: float, other: float) -> bool:
    return bool(abs(one - other) <= RELATIVE * max(1.0, abs(one), abs(other)))


def _bracketed(value: float) -> str:
    return f"({number(value)})" if value < 0 else number(value)
