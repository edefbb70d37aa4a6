"""What is worth saying of a run's learning beside its numbers: its end, its held-out prompts, why it had no signal."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from otb_analysis.answers.run import RunAnswers
from otb_analysis.figures.numbers import MISSING, bracketed, formatted
from otb_analysis.store.reader import scope_of

NO_SIGNAL = (
    "at every step all rewards within a group were equal, so its gradients say nothing; "
    "start from a policy that sometimes succeeds, or choose an easier task."
)
CUT = (
    "at every step all answers ended at max_new_tokens = {budget}, and all rewards within a group were equal, so its "
    "gradients say nothing; raise --sample.max-new-tokens."
)


def learning_notes(run: RunAnswers) -> list[str]:
    """Return what to say of a run: its status unless complete, its last evaluation, why nothing could be learned."""
    status, reason = run.store.standing
    unfinished = "" if status == "complete" else ": ".join(filter(None, (status, reason)))
    return [line for line in (unfinished, _heldout(run.steps), _no_signal(run)) if line]


def _heldout(steps: pd.DataFrame) -> str:
    """Return the last evaluation with its 95 % intervals over prompts in one line; empty where none has an interval."""
    evaluated: Any = steps.dropna(subset=["heldout_reward"])
    if evaluated.empty:
        return ""
    last = evaluated.iloc[-1]
    shown = {"reward": "heldout_reward"}
    if pd.notna(last["heldout_samples"]) and last["heldout_samples"] > 1:  # older runs answered each prompt once
        shown[f"avg@{last['heldout_samples']:.0f}"] = "heldout_success"
        shown[f"pass@{last['heldout_pass_k']:.0f}"] = "heldout_pass_at_k"
    parts = [
        f"{name} {bracketed(last[column], last[f'{column}_low'], last[f'{column}_high'], '.3f')}"
        for name, column in shown.items()
        if pd.notna(last[f"{column}_low"])
    ]
    return f"held-out prompts at step {last['step']:.0f}: {' · '.join(parts)}" if parts else ""


def _no_signal(run: RunAnswers) -> str:
    """Return why a run had no signal at any step, and what to do; empty where some step had one, or may have had."""
    steps: Any = run.steps
    if not bool((steps["n_zero_variance_groups"] >= steps["n_prompts"]).fillna(False).all()):
        return ""
    if not bool((steps["n_truncated"] >= steps["n_rollouts"]).fillna(False).all()):
        return NO_SIGNAL
    return CUT.format(budget=(run.config.get("sample") or {}).get("max_new_tokens", "its limit"))


def learning_table(runs: Mapping[str, RunAnswers]) -> pd.DataFrame:
    """Return one row per run as it is read: what it learned, how large its gradients were, where its time went."""
    rows = []
    for name, run in runs.items():
        steps: Any = run.steps
        heldout = steps["heldout_reward"].dropna()
        edge = max(1, len(steps) // 10)
        rows.append({
            "run": name,
            "estimator": run.estimator or MISSING,
            "steps": str(len(steps)),
            "held-out reward": f"{heldout.iloc[0]:.3f} → {heldout.iloc[-1]:.3f}" if len(heldout) else MISSING,
            "reward": f"{steps['reward_mean'].head(edge).mean():.3f} → {steps['reward_mean'].tail(edge).mean():.3f}",
            "‖ḡ‖": formatted(_recorded(steps["grad_norm"].median()), ".3g"),
            "clipped": formatted(_recorded(steps["clipped"].mean()), ".0%"),
            "tokens": formatted(_recorded(steps["n_tokens"].sum(min_count=1)), ",.0f"),
            **{
                f"{phase} s": formatted(_recorded(steps[f"seconds_{phase}"].sum(min_count=1)), ".0f")
                for phase in ("sample", "update", "measure")
            },
        })  # fmt: skip
    return pd.DataFrame(rows)


def _recorded(value: Any) -> float | None:
    """Return a number over steps, None where no step recorded it."""
    return None if pd.isna(value) else float(value)


def provenance_table(runs: Mapping[str, RunAnswers]) -> pd.DataFrame:
    """Return what each run was made with, from its run.json."""
    rows = []
    for name, run in runs.items():
        info: Any = run.store.info
        git, packages = info.get("git") or {}, info.get("packages") or {}
        row = {"run": name, "created": info.get("created"), "seed": run.config.get("seed")}
        row |= {"scope": scope_of(run.store), "schema": info.get("schema_version")}
        row |= {"commit": str(git.get("commit") or "–")[:12], "changed files": bool(git.get("diff"))}
        rows.append(row | {"torch": packages.get("torch", "–")})
    return pd.DataFrame(rows)
