"""One token's numbers, each line a formula with this token's values in it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.figures.fidelity import exact_norms
from otb_analysis.figures.numbers import number
from otb_analysis.figures.token_formula import TokenFormula
from otb_analysis.figures.tokens import visible


@dataclass(frozen=True)
class TokenDetails:
    """What a click on a token shows."""

    rollout: int
    t: int
    text: str
    formulas: tuple[tuple[str, str], ...]


def details_beside(
    formula: TokenFormula | None, tokens: pd.DataFrame, rollout: int, t: int, estimator: str
) -> TokenDetails | None:
    """Write out a token as `token_details`, without the stored baseline where a formula beside it shows the same.

    Args:
        formula: That of the estimator that trained, where it is shown.
        estimator: The name of that estimator.
    """
    here: Any = tokens.loc[(tokens["rollout"] == rollout) & (tokens["t"] == t), "baseline"]
    stored = None if here.isna().all() else float(here.iloc[0])
    same = formula is not None and formula.is_close_to(stored)
    return token_details(tokens, rollout, t, None if same else estimator)


def token_details(tokens: pd.DataFrame, rollout: int, t: int, estimator: str | None) -> TokenDetails | None:
    """Write out a token's probability, energy and return; None where there is no such token.

    With the name of the estimator that trained, its stored baseline and advantage too.
    """
    rows: Any = tokens[tokens["rollout"] == rollout]
    line = rows.sort_values("t")
    here = line[line["t"] == t]
    if here.empty:
        return None
    token: dict[str, object] = {str(k): (None if pd.isna(v) else v) for k, v in here.iloc[0].items()}
    text = visible(str(token.get("token") or ""))
    if token.get("mask") is False or token.get("mask") == np.False_:
        tool = ("tool output", "not sampled by the policy: it has no score, no energy and no advantage")
        return TokenDetails(rollout, t, text, (tool,))
    policy = line[line["mask"].fillna(True).astype(bool)]
    lines = _probability(token) + _energy(token, policy, t) + _advantage(token, policy, t, estimator)
    return TokenDetails(rollout, t, text, (*lines, *_share(token, tokens)))


def _probability(token: dict[str, object]) -> list[tuple[str, str]]:
    lines = []
    logprob, behavior = _get(token, "logprob"), _get(token, "behavior_logprob")
    if logprob is not None and str(token.get("token")).startswith("~") and _get(token, "entropy") is None:
        # a soft token: it was drawn from a normal density, and has no entropy
        lines.append(("log-density", f"log q = {number(logprob)}"))
    elif logprob is not None:
        lines.append(("probability", f"π = exp({number(logprob)}) = {number(np.exp(logprob))}"))
    if logprob is not None and behavior is not None:
        gap = logprob - behavior
        lines.append(("sampler mismatch", f"{number(logprob)} − ({number(behavior)}) = {number(gap)} nats"))
    entropy = _get(token, "entropy")
    if entropy is not None:
        lines.append(("entropy", f"H = {number(entropy)} nats"))
    return lines


def _energy(token: dict[str, object], policy: Any, t: int) -> list[tuple[str, str]]:
    lines = []
    logprob, proxy, norm_sq = (_get(token, n) for n in ("logprob", "energy_proxy", "grad_norm_sq"))
    if proxy is not None and logprob is not None:
        chosen = (1 - np.exp(logprob)) ** 2
        text = f"(1 − π)² + Σ_v≠y π_v² = {number(chosen)} + {number(max(proxy - chosen, 0.0))} = {number(proxy)}"
        lines.append(("proxy energy", text))
    how = str(token.get("measured_by") or "exact")
    if norm_sq is not None:
        error = _get(token, "grad_norm_sq_stderr")
        spread = f" ± {number(error)} (standard error)" if error is not None else ""
        name = "exact energy" if how == "exact" else f"energy by {how}"
        lines.append((name, f"w = ‖∇ log π‖² {'=' if how == 'exact' else '≈'} {number(norm_sq)}{spread}, {how}"))
    column = "grad_norm_sq" if norm_sq is not None else "energy_proxy"
    seen = policy.loc[policy["t"] <= t, column]
    if len(seen) and seen.notna().all():
        total = policy[column].sum(min_count=len(policy))
        share = "" if not 0 < total < np.inf else f", {seen.sum() / total:.0%} of this rollout's {number(float(total))}"
        exact: Any = exact_norms(policy).loc[seen.index]
        sign = "=" if column == "energy_proxy" or exact.notna().all() else "≈"
        lines.append(("realized energy", f"W = Σ w over {len(seen)} tokens {sign} {number(float(seen.sum()))}{share}"))
    return lines


def _advantage(token: dict[str, object], policy: Any, t: int, estimator: str | None) -> list[tuple[str, str]]:
    baseline, advantage = _get(token, "baseline"), _get(token, "advantage")
    ahead = policy.loc[policy["t"] >= t, "reward"]
    if not ahead.notna().all():
        return []
    to_go = float(ahead.sum())
    lines = [("return", f"G = Σ of rewards from here on = {number(to_go)}")]
    if baseline is None or advantage is None or estimator is None:
        return lines
    name = estimator or "training estimator"
    lines.append((f"baseline of {name}", f"B = {number(baseline)}"))
    plain = f"G − B = {number(to_go)} − {number(baseline)} = {number(to_go - baseline)}"
    same = abs(to_go - baseline - advantage) <= 1e-4 * max(1.0, abs(advantage))
    lines.append(("advantage", plain if same else f"{plain}, rescaled by the estimator to A = {number(advantage)}"))
    return lines


def _share(token: dict[str, object], tokens: Any) -> list[tuple[str, str]]:
    attribution = _get(token, "attribution")
    if attribution is None:
        return []
    rank = int((tokens["attribution"].abs() > abs(attribution)).sum()) + 1
    text = f"A/N · s·ḡ = {number(attribution)}: number {rank} of {tokens['attribution'].notna().sum()} by size here"
    lines = [("share of ‖ḡ‖²", text)]
    signal, noise = _get(token, "signal"), _get(token, "noise")
    if signal is not None and noise is not None:
        parts = f"along other prompts' gradients {number(signal)} + along its own prompt's {number(noise)}"
        lines.append(("signal and noise", f"{parts} = {number(signal + noise)}"))
    return lines


def _get(token: dict[str, object], name: str) -> float | None:
    value = token.get(name)
    return None if value is None else float(str(value))
