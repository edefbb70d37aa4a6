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
from otb_analysis.figures.fidelity import exact_norms
from otb_analysis.figures.styles import number
from otb_analysis.figures.texts import visible
from otb_analysis.types import Float, Int

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
        terms = []
        counting: Any = self.terms[self.terms["weight"].abs() > RELATIVE]
        if self.is_sum and len(counting):
            order = counting["weight"].abs().sort_values(ascending=False, kind="stable").index
            largest: Any = counting.loc[order[:TERMS]]
            terms = [f"{number(w)}·{_bracketed(x)}" for w, x in zip(largest["weight"], largest["return"], strict=True)]
            terms += [f"… ({len(counting) - TERMS} more)"] if len(counting) > TERMS else []
            terms += [f"{number(self.others)} from other prompts"] if abs(self.others) > RELATIVE else []
        numbers = f"B = {' + '.join(terms)}{' = ' * bool(terms)}{number(self.baseline)}"
        numbers += " (undefined here: fallback)" if self.fallback else ""
        plain = f"A = G − B = {number(self.to_go)} − {_bracketed(self.baseline)} = {number(self.to_go - self.baseline)}"
        if not _close(self.to_go - self.baseline, self.advantage):
            plain += f", rescaled to {number(self.advantage)}"
        return ("formula", f"B = {self.formula}"), ("with numbers", numbers), ("advantage", plain)


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
        columns = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "state"}
        inputs = replace(inputs, **{name: x[group] for name, x in columns.items() if x is not None})
        rollouts, group = rollouts[group], group[group]
    i = int(np.flatnonzero(rollouts == rollout)[0])
    estimated = estimate(name, inputs, options)
    peers = np.flatnonzero(group & inputs.mask.any(axis=1))
    last = inputs.mask.shape[1] - 1 - inputs.mask[:, ::-1].argmax(axis=1)

    def with_rewards(paid: Float) -> float:
        """Return B where the prompt's rollouts are paid these amounts at their ends."""
        reward = np.where(group[:, None], 0.0, inputs.reward)
        reward[peers, last[peers]] = paid
        return float(estimate(name, replace(inputs, reward=reward), options).baseline[i, t])

    others = with_rewards(np.zeros(len(peers)))
    weight = np.array([with_rewards(one) for one in np.eye(len(peers))]) - others
    probe = np.random.default_rng(0).normal(size=len(peers))
    baseline = float(estimated.baseline[i, t])
    k = int(inputs.mask[i, :t].sum())  # the position, counted in policy tokens
    returns = squeeze(returns_to_go(inputs.reward, inputs.mask), inputs.mask)
    to_go, total = returns[peers, k], returns[peers, 0]
    by_position = _close(others + float(weight @ to_go), baseline)
    linear = _close(others + float(weight @ probe), with_rewards(probe))
    fits = linear and (by_position or _close(others + float(weight @ total), baseline))
    values = to_go if by_position else total
    terms = {"rollout": rollouts[peers], "weight": weight if fits else np.full(len(peers), np.nan), "return": values}
    if inputs.energy is not None:
        energy = squeeze(inputs.energy, inputs.mask)
        terms |= {"w": np.where(squeezed_mask(inputs.mask)[peers, k], energy[peers, k], np.nan)}
        terms |= {"W": energy[peers, : k + 1].sum(axis=1)}
    return TokenFormula(
        name, entry.formula if entry is not None else name, float(to_go[peers == i][0]), baseline,
        float(estimated.advantage[i, t]), bool(estimated.fallback[i, t]), others if fits else 0.0, pd.DataFrame(terms),
        by_position,
    )  # fmt: skip


def _close(one: float, other: float) -> bool:
    return bool(abs(one - other) <= RELATIVE * max(1.0, abs(one), abs(other)))


def _bracketed(value: float) -> str:
    return f"({number(value)})" if value < 0 else number(value)


@dataclass(frozen=True)
class TokenDetails:
    """What a click on a token shows."""

    rollout: int
    t: int
    text: str
    formulas: tuple[tuple[str, str], ...]


def token_details(
    tokens: pd.DataFrame, rollout: int, t: int, estimator: str | None, formula: TokenFormula | None = None
) -> TokenDetails | None:
    """Write out a token's probability, energy and return; None where there is no such token.

    Args:
        estimator: The estimator that trained, for its stored baseline and advantage; None leaves them out.
        formula: Its formula where that stands beside; what is stored is then left out if it is the same.
    """
    rows: Any = tokens[tokens["rollout"] == rollout]
    line = rows.sort_values("t")
    here = line[line["t"] == t]
    if here.empty:
        return None
    token: dict[str, Any] = {str(k): (None if pd.isna(v) else v) for k, v in here.iloc[0].items()}
    text = visible(str(token.get("token") or ""))
    if token.get("mask") is not None and not token["mask"]:
        tool = (
            "not the policy's",
            "something else wrote it, such as a tool: it has no score, no energy and no advantage",
        )
        return TokenDetails(rollout, t, text, (tool,))
    policy, stored = line[line["mask"].fillna(True).astype(bool)], token.get("baseline")
    if formula is not None and stored is not None:
        same = abs(stored - formula.baseline) <= 1e-4 * max(1.0, abs(formula.baseline))  # stored in single precision
        estimator = None if same else estimator
    lines = [*_measured(token, policy, t), *_moved(token, policy, t, estimator, tokens)]
    return TokenDetails(rollout, t, text, tuple(lines))


Lines = list[tuple[str, str]]


def _measured(token: dict[str, Any], policy: Any, t: int) -> Lines:
    """What the forward pass and the gradient say of it: probability, entropy, energies."""
    logprob, behavior, entropy = (token.get(name) for name in ("logprob", "behavior_logprob", "entropy"))
    proxy, norm_sq = token.get("energy_proxy"), token.get("grad_norm_sq")
    lines: Lines = []
    if logprob is not None:
        # a soft token was drawn from a normal density, and has no entropy
        soft = str(token.get("token")).startswith("~") and entropy is None
        exp = f"π = exp({number(logprob)}) = {number(np.exp(logprob))}"
        lines.append(("log-density", f"log q = {number(logprob)}") if soft else ("probability", exp))
    if logprob is not None and behavior is not None:
        gap = f"{number(logprob)} − ({number(behavior)}) = {number(logprob - behavior)} nats"
        lines.append(("sampler mismatch", gap))
    if entropy is not None:
        lines.append(("entropy", f"H = {number(entropy)} nats"))
    if proxy is not None and logprob is not None:
        chosen = (1 - np.exp(logprob)) ** 2
        text = f"(1 − π)² + Σ_v≠y π_v² = {number(chosen)} + {number(max(proxy - chosen, 0.0))} = {number(proxy)}"
        lines.append(("proxy energy", text))
    if norm_sq is not None:
        how, error = str(token.get("measured_by") or "exact"), token.get("grad_norm_sq_stderr")
        spread = "" if error is None else f" ± {number(error)} (standard error)"
        name, sign = ("exact energy", "=") if how == "exact" else (f"energy by {how}", "≈")
        lines.append((name, f"w = ‖∇ log π‖² {sign} {number(norm_sq)}{spread}, {how}"))
    column = "grad_norm_sq" if norm_sq is not None else "energy_proxy"
    seen = policy.loc[policy["t"] <= t, column]
    if len(seen) and seen.notna().all():
        total = policy[column].sum(min_count=len(policy))
        share = "" if not 0 < total < np.inf else f", {seen.sum() / total:.0%} of this rollout's {number(float(total))}"
        exact: Any = exact_norms(policy).loc[seen.index]
        sign = "=" if column == "energy_proxy" or exact.notna().all() else "≈"
        summed = f"W = Σ {'w' if norm_sq is not None else 'proxy'} over {len(seen)} tokens"
        lines.append(("realized energy", f"{summed} {sign} {number(float(seen.sum()))}{share}"))
    return lines


def _moved(token: dict[str, Any], policy: Any, t: int, estimator: str | None, tokens: Any) -> Lines:
    """What it does to the update: its return, baseline and advantage, its share of the gradient."""
    baseline, advantage, attribution, signal, noise = (
        token.get(name) for name in ("baseline", "advantage", "attribution", "signal", "noise")
    )
    lines: Lines = []
    ahead = policy.loc[policy["t"] >= t, "reward"]
    if ahead.notna().all():
        to_go = float(ahead.sum())
        lines.append(("return", f"G = Σ of rewards from here on = {number(to_go)}"))
        if baseline is not None and advantage is not None and estimator is not None:
            plain = f"G − B = {number(to_go)} − {number(baseline)} = {number(to_go - baseline)}"
            if abs(to_go - baseline - advantage) > 1e-4 * max(1.0, abs(advantage)):
                plain += f", rescaled by the estimator to A = {number(advantage)}"
            lines.append((f"baseline of {estimator or 'training estimator'}", f"B = {number(baseline)}"))
            lines.append(("advantage", plain))
    if attribution is not None:
        rank = int((tokens["attribution"].abs() > abs(attribution)).sum()) + 1
        of = tokens["attribution"].notna().sum()
        lines.append(("its part of ‖ḡ‖²", f"A/N · s·ḡ = {number(attribution)}: number {rank} of {of} by size here"))
        if signal is not None and noise is not None:
            parts = f"along other prompts' gradients {number(signal)} + along its own prompt's {number(noise)}"
            lines.append(("signal and noise", f"{parts} = {number(signal + noise)}"))
    return lines
