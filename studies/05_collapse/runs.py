"""What is kept of a run: when it collapsed, how its signals went, what detectors said, who held a gradient."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import StepAttribution, diagnose
from otb_analysis.statistics import top_share
from otb_analysis.store import RunStore, attributed_steps, step_attribution, step_series
from otb_analysis.types import Float
from studies.lib import Tables, or_nan
from studies.lib.results import Gathered

WINDOW, DROP, LASTING = 6, 0.5, 6
"""Collapsed: mean reward over 6 steps at most half of the highest such mean so far, and so for 6 steps on end."""
ATTRIBUTED = 6
"""The fatal step is the one with the largest gradient among the last so many attributed ones up to the collapse."""
SPAN = 10
"""Steps over which a signal is averaged."""
EARLY = 25
"""First steps over which the level of B is averaged: before any run has collapsed."""
RULE = {"window": WINDOW, "drop": DROP, "lasting": LASTING, "attributed": ATTRIBUTED, "span": SPAN, "early": EARLY}
MEAN_BASELINE = "SELECT avg(baseline) AS baseline FROM tokens WHERE mask AND step < ?"
SIGNALS = {"entropy": "entropy_mean", "grad_norm": "grad_norm", "length": "length_mean"}


def run_tables(key: dict[str, Any], rate: float, store: RunStore) -> Tables:
    """Return a run's collapse, its curve, its signals, its detectors' first calls, and its fatal and control steps."""
    steps = store.steps_df().sort_values("step")
    reward = steps["reward_mean"].to_numpy(np.float64)
    end, mean = collapse_step(reward), trailing_mean(reward)
    lived = len(reward) if end is None else end + 1
    facts = {
        "rate": rate,
        "steps": len(reward),
        "collapse": end,
        "best": float(mean.max()),
        "last": float(mean[-1]),
        "clip_fraction": float(np.mean(steps["clipped"].to_numpy(np.float64)[:lived])),
        "baseline": float(store.sql(MEAN_BASELINE, [EARLY])["baseline"].to_numpy(np.float64)[0]),
        "reward": float(reward[:EARLY].mean()),
    }
    fired = [
        {"detector": found.detector, "level": found.level, "watch": found.watch_step, "alarm": found.alarm_step}
        for found in diagnose(step_series(steps))
    ]
    curve = [{"step": int(step), "reward": float(value)} for step, value in zip(steps["step"], mean, strict=True)]
    tables, shown = Gathered(), curve[:: max(1, len(curve) // 25)]
    tables.add(key, runs=[facts], signals=[signal_means(steps, end)], detectors=fired, curves=shown)
    if end is not None:
        tables.add(key, attribution=attribution_rows(store, steps, end))
    return tables


def trailing_mean(reward: Float) -> Float:
    """Return the mean over the last steps, of those there are at the beginning."""
    total = np.concatenate([[0.0], np.cumsum(reward)])
    ends = np.arange(1, len(reward) + 1)
    begins = np.maximum(ends - WINDOW, 0)
    return (total[ends] - total[begins]) / (ends - begins)


def collapse_step(reward: Float) -> int | None:
    """Return the first step of a lasting loss of half of the best trailing reward; None where there is none."""
    mean = trailing_mean(reward)
    low = mean <= DROP * np.maximum.accumulate(mean)
    low[: WINDOW - 1] = False
    run = 0
    for step, is_low in enumerate(low):
        run = run + 1 if is_low else 0
        if run == LASTING:
            return step - LASTING + 1
    return None


def signal_means(steps: pd.DataFrame, end: int | None) -> dict[str, float | None]:
    """Return entropy, ‖ḡ‖ and length over the first steps, those up to the collapse, and the last ones."""
    means: dict[str, float | None] = {}
    for name, column in SIGNALS.items():
        values = steps[column].to_numpy(np.float64)
        means[f"{name}_first"] = float(values[:SPAN].mean())
        means[f"{name}_before"] = None if end is None else float(values[max(0, end + 1 - SPAN) : end + 1].mean())
        means[f"{name}_last"] = float(values[-SPAN:].mean())
    return means


def windows(attributed: Sequence[int], end: int) -> dict[str, list[int]]:
    """Return the last attributed steps up to a collapse, and as many up to half of the way where they do not meet."""
    fatal = [step for step in attributed if step <= end][-ATTRIBUTED:]
    control = [step for step in attributed if step <= end // 2][-ATTRIBUTED:]
    apart = bool(fatal) and len(control) == ATTRIBUTED and control[-1] < fatal[0]
    return {"fatal": fatal} | ({"control": control} if apart else {})


def attribution_rows(store: RunStore, steps: pd.DataFrame, end: int) -> list[dict[str, Any]]:
    """Return who held the largest attributed gradient before the collapse, and who the largest of a usual stretch."""
    norm = steps["grad_norm"].to_numpy(np.float64)
    found = windows(attributed_steps(store), end)
    first = found["fatal"][0] if found["fatal"] else 0
    usual = float(np.median(norm[:first])) if first else None
    rows = []
    for name, tried in found.items():
        tried_steps = [step_attribution(store, step) for step in tried]
        if tried_steps:
            step = max(tried_steps, key=lambda one: one.norm_sq)
            rows.append({"window": name, "collapse": end, "usual_norm": usual} | gradient_shares(store, step))
    return rows


def gradient_shares(store: RunStore, step: StepAttribution) -> dict[str, Any]:
    """Return one step's shares: of the largest tokens, the largest prompt, unpaid rollouts, and noise."""
    tokens, prompts = np.abs(step.tokens.share), np.abs(step.prompts.share)
    paid = store.sql("SELECT rollout FROM rollouts WHERE step = ? AND reward >= 0.5", [step.step])["rollout"]
    failed = ~np.isin(step.tokens.rollout, paid.to_numpy(np.int64))
    return {
        "step": step.step,
        "grad_norm": step.norm_sq**0.5,
        "top_tokens": top_share(tokens),
        "top_prompt": float(prompts.max() / prompts.sum()),
        "failed": float(tokens[failed].sum() / tokens.sum()),
        "failed_tokens": float(failed.mean()),
        "noise": or_nan(step.noise_total) / step.norm_sq,
    }
