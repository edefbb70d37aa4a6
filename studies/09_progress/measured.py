"""What cells measure of a checkpoint: a pilot, inner products of gradients, and gains of steps, a few batches each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Float
from studies.lib import Rows, Tables, rounded, select

from .gains import HeldOut, held_out, parameters_moved, pool_gain, sampled_success, sequence_logprob, slope_of
from .setup import Checkpoint
from .updates import ARMS, UNBIASED, batch_gradients

LINES = ("sgd", "adamw")
"""Directions that are measured along a line: ĝ, and ĝ/(√v + ε)."""
STEPS = ("adamw_step", "adamw_step_unclipped")
"""AdamW's next step at its usual rate, clipped and not."""
FARTHEST = 8.0
"""A pilot's length stays within this factor of the one at which log ρ has a standard deviation of .06."""
PILOT_FROM = 100_000
"""Number of the first batch of the pilot: no other cell uses those."""


@dataclass(frozen=True)
class Judging:
    """How steps are judged."""

    prompts: int = 2048  # Held-out prompts of the pool
    rollouts: int = 4  # Of each
    blocks: int = 32  # Parts of the pool; all steps of a batch are judged on one
    pilot: int = 16  # Batches of the pilot
    batches: int = 192
    part: int = 16  # Batches of a cell
    sampled: int = 1  # Batches of a cell whose steps are also judged by sampling anew
    sampled_prompts: int = 2048


def pilot(at: Checkpoint, judging: Judging, key: Mapping[str, Any], bar: Bar) -> tuple[Tables, HeldOut]:
    """Return slope and curvature of every arm along every line, the lengths to judge at, and the batches needed.

    The best gain a²/4b of an arm over that of `rloo` has, from K batches, a standard error of s/√K; the table gives s
    by the jackknife, and K for a standard error of a tenth. The pool comes with it.
    """
    pool = held_out(at, judging.prompts, judging.rollouts, judging.blocks)
    slope, bent, ess = (np.zeros((len(LINES), len(ARMS), judging.pilot)) for _ in range(3))
    candidates = (batch_gradients(at, PILOT_FROM + k).gradient[0] for k in range(1000))
    first = next(gradient for gradient in candidates if gradient.norm() > 0)
    probe = [_probe_length(at, pool, step) for step in (first, first * at.scale)]
    for k in range(judging.pilot):
        gradient = batch_gradients(at, PILOT_FROM + k).gradient
        for m, steps in enumerate((gradient, gradient * at.scale)):
            for a, step in enumerate(steps):
                gain, ess[m, a, k] = pool_gain(at.base, probe[m] * step, at.policy.model, pool, k % judging.blocks)
                slope[m, a, k] = slope_of(pool, step)
                bent[m, a, k] = (gain - probe[m] * slope[m, a, k]) / probe[m] ** 2
        bar(k + 1, judging.pilot, "pilot")
    rows = []
    for m, line in enumerate(LINES):
        shared = float(np.mean([slope[m, ARMS.index(name)].mean() for name in UNBIASED]))
        for a, arm in enumerate(ARMS):
            along = shared if arm in UNBIASED else float(slope[m, a].mean())
            best = max(along, shared / 10) / (2 * max(-float(bent[m, a].mean()), 1e-12))
            best = float(np.clip(best, probe[m] / FARTHEST, probe[m] * FARTHEST))
            error = _ratio_error(slope[m], bent[m], a)
            rows.append(
                dict(key)
                | {"line": line, "arm": arm, "slope": along, "curvature": -float(bent[m, a].mean()), "length": best}
                | {"gain": rounded(along * best / 2), "error": rounded(error), "wanted": _wanted(error)}
                | {"ess": rounded(float(ess[m, a].mean())), "batches": judging.pilot}
            )  # fmt: skip
    return {"pilot": rows, "pools": [dict(key) | {"success": pool.success, "rollouts": len(pool.paid)}]}, pool


def _probe_length(at: Checkpoint, pool: HeldOut, step: Tensor) -> float:
    """Return the length at which log ρ of a step has a standard deviation of .06: ESS 99.6 %."""
    short, rows = 0.01 / float(step.norm()), pool.blocks[0]
    with parameters_moved(at.policy.model, at.base, short * step):
        new = sequence_logprob(at.policy.model, pool.rollouts.take(rows))
    return short * 0.06 / float((new - pool.logprob[rows]).std())


def _ratio_error(slope: Float, bent: Float, arm: int) -> float | None:
    """Return √K times the jackknife's standard error of an arm's best gain over that of `rloo`, from K batches."""
    count = slope.shape[1]
    total = [x[[0, arm]].sum(axis=1, keepdims=True) - x[[0, arm]] for x in (slope, bent)]
    gain = total[0] ** 2 / np.maximum(-total[1], 1e-30)
    ratio = gain[1] / gain[0]
    return float(np.sqrt(count) * np.sqrt((count - 1) / count * ((ratio - ratio.mean()) ** 2).sum())) if arm else None


def _wanted(error: float | None) -> int | None:
    return None if error is None or not np.isfinite(error) else min(int(np.ceil((error / 0.1) ** 2)), 10**6)


def inner_products(at: Checkpoint, judging: Judging, bar: Bar) -> dict[str, Float]:
    """Return ⟨ĝ, ĝ'⟩ of all arms and batches, plain and in Adam's metric ⟨ĝ, ĝ'/(√v + ε)⟩, both [A, A, B, B]."""
    gradients, mixed = [], []
    for k in range(judging.batches):
        batch = batch_gradients(at, k)
        gradients.append(batch.gradient)
        mixed.append(batch.mixed)
        bar(k + 1, judging.batches, "gradients")
    stacked = torch.stack(gradients, dim=1)
    count, flat = len(ARMS), stacked.reshape(len(ARMS) * judging.batches, -1)
    out = {}
    for line, scaled in (("sgd", flat), ("adamw", flat * at.scale.sqrt())):
        inner = (scaled @ scaled.T).double().cpu().numpy().reshape(count, judging.batches, count, judging.batches)
        out[line] = inner.transpose(0, 2, 1, 3)
    return out | {"norm": stacked.norm(dim=2).double().cpu().numpy(), "mixed": np.array(mixed)}


def gains(at: Checkpoint, pool: HeldOut, judging: Judging, part: int, lengths: Rows, bar: Bar) -> dict[str, Float]:
    """Return what the steps of some batches gain: slopes, gains and ESS along every line, AdamW's steps, samples."""
    model = at.policy.model
    prompts = draw_prompts(at.policy.task, "heldout", 0, judging.sampled_prompts)
    numbers, count = range(part * judging.part, (part + 1) * judging.part), len(ARMS)
    best = {line: best_lengths(lengths, line) for line in LINES}
    out: dict[str, Any] = {f"{line}_slope": np.zeros((count, judging.part)) for line in LINES}
    out |= {f"{line}_{name}": np.zeros((count, judging.part)) for line in LINES for name in ("gain", "ess")}
    out |= {f"{name}{more}": np.zeros((count, judging.part)) for name in STEPS for more in ("", "_ess")}
    out |= {f"{name}_alone": np.zeros(judging.part) for name in STEPS} | {"norm": np.zeros((count, judging.part))}
    out["sampled"] = np.zeros((2, count, judging.sampled, len(prompts)))
    start = sampled_success(at, prompts) if judging.sampled else np.zeros(len(prompts))
    for k, number in enumerate(numbers):
        gradient, block = batch_gradients(at, number).gradient, number % judging.blocks
        alone = {name: at.adamw_step(torch.zeros_like(at.base), name == STEPS[0]) for name in STEPS}
        out["norm"][:, k] = gradient.norm(dim=1).double().cpu().numpy()
        for line, steps in zip(LINES, (gradient, gradient * at.scale), strict=True):
            for a, step in enumerate(steps):
                out[f"{line}_slope"][a, k] = slope_of(pool, step)
                found = pool_gain(at.base, best[line][a] * step, model, pool, block)
                out[f"{line}_gain"][a, k], out[f"{line}_ess"][a, k] = found
        for name in STEPS:
            out[f"{name}_alone"][k] = pool_gain(at.base, alone[name], model, pool, block)[0]
            for a, step in enumerate(gradient):
                found = pool_gain(at.base, at.adamw_step(step, name == STEPS[0]), model, pool, block)
                out[name][a, k], out[f"{name}_ess"][a, k] = found
        for a, step in enumerate(gradient if k < judging.sampled else ()):
            for i, moved_by in enumerate((best["sgd"][a] * step, at.adamw_step(step, True))):
                out["sampled"][i, a, k] = sampled_success(at, prompts, moved_by) - start
        bar(k + 1, judging.part, "gains")
    change = out.pop("sampled").mean(axis=(1, 2)) if judging.sampled else np.zeros((2, len(prompts)))
    return out | {"sampled": change, "n_sampled": np.array(judging.sampled)}


def best_lengths(lengths: Rows, line: str) -> Sequence[float]:
    """Return the pilot's best length of every arm along a line."""
    return [select(lengths, line=line, arm=arm)[0]["length"] for arm in ARMS]
