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
    token: dict[str, Any] = {str(k): (None if pd.isna(v) else v) for k, v in here.iloc[0].items()}
    text = visible(str(token.get("token") or ""))
    if token.get("mask") is not None and not token["mask"]:
        tool = ("tool output", "not sampled by the policy: it has no score, no energy and no advantage")
        return TokenDetails(rollout, t, text, (tool,))
    policy = line[line["mask"].fillna(True).astype(bool)]
    lines = [*_probability(token), *_energy(token, policy, t), *_advantage(token, policy, t, estimator)]
    return TokenDetails(rollout, t, text, (*lines, *_share(token, tokens)))


Lines = list[tuple[str, str]]


def _probability(token: dict[str, Any]) -> Lines:
    logprob, behavior, entropy = (token.get(name) for name in ("logprob", "behavior_logprob", "entropy"))
    lines: Lines = []
    if logprob is not None:
        # a soft token was drawn from a normal density, and has no entropy
        soft = str(token.get("token")).startswith("~") and entropy is None
        exp = f"π = exp({number(logprob)}) = {number(np.exp(logprob))}"
        lines.append(("log-density", f"log q = {number(logprob)}") if soft else ("probability", exp))
    if logprob is not None and behavior is not None:
        gap = f"{number(logprob)} − ({number(behavior)}) = {number(logprob - behavior)} nats"
        lines.append(("sampler mismatch", gap))
    return lines if entropy is None else [*lines, ("entropy", f"H = {number(entropy)} nats")]


def _energy(token: dict[str, Any], policy: Any, t: int) -> Lines:
    logprob, proxy, norm_sq = (token.get(name) for name in ("logprob", "energy_proxy", "grad_norm_sq"))
    lines: Lines = []
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
        lines.append(("realized energy", f"W = Σ w over {len(seen)} tokens {sign} {number(float(seen.sum()))}{share}"))
    return lines


def _advantage(token: dict[str, Any], policy: Any, t: int, estimator: str | None) -> Lines:
    baseline, advantage = token.get("baseline"), token.get("advantage")
    ahead = policy.loc[policy["t"] >= t, "reward"]
    if not ahead.notna().all():
        return []
    to_go = float(ahead.sum())
    lines: Lines = [("return", f"G = Σ of rewards from here on = {number(to_go)}")]
    if baseline is None or advantage is None or estimator is None:
        return lines
    plain = f"G − B = {number(to_go)} − {number(baseline)} = {number(to_go - baseline)}"
    if abs(to_go - baseline - advantage) > 1e-4 * max(1.0, abs(advantage)):
        plain += f", rescaled by the estimator to A = {number(advantage)}"
    of = f"baseline of {estimator or 'training estimator'}"
    return [*lines, (of, f"B = {number(baseline)}"), ("advantage", plain)]


def _share(token: dict[str, Any], tokens: Any) -> Lines:
    attribution, signal, noise = (token.get(name) for name in ("attribution", "signal", "noise"))
    if attribution is None:
        return []
    rank = int((tokens["attribution"].abs() > abs(attribution)).sum()) + 1
    text = f"A/N · s·ḡ = {number(attribution)}: number {rank} of {tokens['attribution'].notna().sum()} by size here"
    if signal is None or noise is None:
        return [("share of ‖ḡ‖²", text)]
    parts = f"along other prompts' gradients {number(signal)} + along its own prompt's {number(noise)}"
    return [("share of ‖ḡ‖²", text), ("signal and noise", f"{parts} = {number(signal + noise)}")]
