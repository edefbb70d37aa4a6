"""What a step gains, by importance weights and by sampling anew, and what cells measure of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters
from transformers import PreTrainedModel

from otb_analysis.devices import random_forked
from otb_analysis.measurement.forward import completion_logprobs
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Float, Int
from studies.lib import Rows, Tables, rounded, select
from studies.lib.policies import with_values, write

from .checkpoint import ARMS, UNBIASED, Checkpoint, batch_gradients, flattened

POOL_SEED, SAMPLE_SEED = 7, 8
AT_ONCE = 1024
"""Rollouts that one pass scores: more leave the processor's cache."""


@dataclass(frozen=True)
class HeldOut:
    """Rollouts of held-out prompts at a checkpoint, cut into blocks; made by `held_out`, or by a test."""

    rollouts: Rollouts
    logprob: Float  # log π of each completion at the checkpoint, in nats [n]
    paid: Float  # R minus a number that depends on the prompt only [n]
    blocks: tuple[Int, ...]  # Rows of each block; steps are judged on one of them
    slopes: Tensor  # ∇J as each block estimates it [K, D]
    first: Int  # Row of the first copy of each rollout [n]: copies are scored once
    success: float = 0.0  # Mean reward of the whole pool


def held_out(at: Checkpoint, prompts: int, rollouts: int, blocks: int) -> HeldOut:
    """Draw the pool: `rollouts` of each of the first held-out prompts, centred by the critic's V(prompt)."""
    chosen = draw_prompts(at.policy.task, "heldout", 0, prompts)
    config = replace(at.sample, prompts=prompts, group_size=rollouts)
    written = with_values(at.policy, at.critic, write(at.policy, chosen, config, seed=POOL_SEED, at_once=AT_ONCE))
    value = written.table.value
    assert value is not None
    reward = written.table.total_reward
    rows = tuple(np.flatnonzero(written.rollouts.group % blocks == k) for k in range(blocks))
    pool = pool_of(at.policy.model, written.rollouts, reward - value[:, 0], rows)
    return replace(pool, success=float(reward.mean()))


def pool_of(model: PreTrainedModel, rollouts: Rollouts, paid: Float, blocks: Sequence[Int]) -> HeldOut:
    """Return a pool with the gradient of each block, (1/n) Σ paid·∇log π."""
    key = np.concatenate([rollouts.input_ids, rollouts.mask, rollouts.attention_mask], axis=1)
    _, row, back = np.unique(key, axis=0, return_index=True, return_inverse=True)
    first = row[back.reshape(-1)]
    distinct, place = np.unique(first, return_inverse=True)
    old = sequence_logprob(model, rollouts.take(distinct))[place]
    slopes = torch.zeros(len(blocks), model.num_parameters(), device=model.device)
    for slope, block in zip(slopes, blocks, strict=True):
        weight = np.bincount(first[block], paid[block], len(old)) / len(block)
        rows = np.flatnonzero(weight)
        for start in range(0, len(rows), AT_ONCE // 4):
            some = rows[start : start + AT_ONCE // 4]
            logprob = completion_logprobs(model, rollouts.take(some), 1.0).logprob.sum(dim=1)
            loss = (logprob * torch.as_tensor(weight[some]).to(logprob)).sum()
            slope += flattened(torch.autograd.grad(loss, list(model.parameters())))
    return HeldOut(rollouts, old, paid, tuple(blocks), slopes, first)


def weighted_gain(old: Float, new: Float, paid: Float) -> tuple[float, float]:
    """Return J(θ') − J(θ) from rollouts of θ, and the effective sample size as a share.

    J(θ') − J(θ) = E_θ[(ρ − 1)(R − b)], ρ = exp(new − old) of the whole completion, b a number known before sampling:
    E ρ = 1, so b changes nothing on average. ESS/n = (Σρ)²/(n Σρ²).
    """
    ratio = np.exp(new - old)
    return float(np.mean((ratio - 1) * paid)), float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))


def pool_gain(at_base: Tensor, step: Tensor, model: PreTrainedModel, pool: HeldOut, block: int) -> tuple[float, float]:
    """Return what a step [D] gains and the ESS: slope by the whole pool, the rest by a block.

    Gain = ⟨step, ∇J⟩ + (weighted gain of the block − ⟨step, ∇J of the block⟩).
    """
    rows = pool.blocks[block]
    distinct, place = np.unique(pool.first[rows], return_inverse=True)
    with parameters_moved(model, at_base, step):
        new = sequence_logprob(model, pool.rollouts.take(distinct))[place]
    gain, ess = weighted_gain(pool.logprob[rows], new, pool.paid[rows])
    return gain + slope_of(pool, step) - float(step.double() @ pool.slopes[block].double()), ess


def slope_of(pool: HeldOut, step: Tensor) -> float:
    """Return ⟨step, ∇J⟩ with ∇J of the whole pool."""
    return float(step.double() @ pool.slopes.double().mean(dim=0))


def sampled_success(at: Checkpoint, prompts: Sequence[Prompt], step: Tensor | None = None) -> Float:
    """Return the reward of one answer to each prompt [P] after a step, with the same random numbers for every step."""
    model, config = at.policy.model, replace(at.sample, prompts=len(prompts), group_size=1)
    generator = TransformersGenerator(model, at.policy.tokenizer)
    delta = torch.zeros_like(at.base) if step is None else step
    with parameters_moved(model, at.base, delta), random_forked(model.device):
        torch.manual_seed(SAMPLE_SEED)
        rollouts = sample(generator, at.policy.tokenizer, at.policy.task, prompts, config)
    return compute_rewards(at.policy.task, rollouts).rewards().sum(axis=1)


@torch.no_grad()
def sequence_logprob(model: PreTrainedModel, rollouts: Rollouts) -> Float:
    """Return log π of each completion in nats [n]."""
    some = (rollouts.take(slice(start, start + AT_ONCE)) for start in range(0, len(rollouts.group), AT_ONCE))
    return torch.cat([completion_logprobs(model, x, 1.0).logprob.double().sum(dim=1) for x in some]).cpu().numpy()


@contextmanager
def parameters_moved(model: PreTrainedModel, base: Tensor, step: Tensor) -> Iterator[None]:
    """Run the model at base + step [D] inside the block."""
    vector_to_parameters(base + step, model.parameters())
    try:
        yield
    finally:
        vector_to_parameters(base, model.parameters())


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
    slope, bent, ess = np.zeros((3, len(LINES), len(ARMS), judging.pilot))
    candidates = (batch_gradients(at, PILOT_FROM + k)[0] for k in range(1000))
    first = next(gradient for gradient in candidates if gradient.norm() > 0)
    probe = [_probe_length(at, pool, step) for step in (first, first * at.scale)]
    for k in range(judging.pilot):
        gradient = batch_gradients(at, PILOT_FROM + k)
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
            # √K times the jackknife's standard error of the best gain over that of `rloo`, from K batches
            without = [x[m][[0, a]].sum(axis=1, keepdims=True) - x[m][[0, a]] for x in (slope, bent)]
            gain = without[0] ** 2 / np.maximum(-without[1], 1e-30)
            ratio, count = gain[1] / gain[0], judging.pilot
            error = float(np.sqrt(count) * np.sqrt((count - 1) / count * ((ratio - ratio.mean()) ** 2).sum()))
            known = bool(a) and np.isfinite(error)
            wanted = min(int(np.ceil((error / 0.1) ** 2)), 10**6) if known else None
            row = {"line": line, "arm": arm, "slope": along, "curvature": -float(bent[m, a].mean()), "length": best}
            row |= {"gain": rounded(along * best / 2), "error": rounded(error) if a else None, "wanted": wanted}
            rows.append({**key, **row, "ess": rounded(float(ess[m, a].mean())), "batches": judging.pilot})
    return {"pilot": rows, "pools": [dict(key) | {"success": pool.success, "rollouts": len(pool.paid)}]}, pool


def _probe_length(at: Checkpoint, pool: HeldOut, step: Tensor) -> float:
    """Return the length at which log ρ of a step has a standard deviation of .06: ESS 99.6 %."""
    short, rows = 0.01 / float(step.norm()), pool.blocks[0]
    with parameters_moved(at.policy.model, at.base, short * step):
        new = sequence_logprob(at.policy.model, pool.rollouts.take(rows))
    return short * 0.06 / float((new - pool.logprob[rows]).std())


def inner_products(at: Checkpoint, judging: Judging, bar: Bar) -> dict[str, Float]:
    """Return ⟨ĝ, ĝ'⟩ of all arms and batches, plain and in Adam's metric ⟨ĝ, ĝ'/(√v + ε)⟩, both [A, A, B, B]."""
    made, shape = list[Tensor](), (len(ARMS), judging.batches)
    for k in range(judging.batches):
        made.append(batch_gradients(at, k))
        bar(k + 1, judging.batches, "gradients")
    flat = torch.stack(made, dim=1).reshape(len(ARMS) * judging.batches, -1)
    products = {line: x @ x.T for line, x in (("sgd", flat), ("adamw", flat * at.scale.sqrt()))}
    return {k: x.double().cpu().numpy().reshape(*shape, *shape).transpose(0, 2, 1, 3) for k, x in products.items()}


def gains(at: Checkpoint, pool: HeldOut, judging: Judging, part: int, lengths: Rows, bar: Bar) -> dict[str, Float]:
    """Return what the steps of some batches gain: slopes, gains and ESS along every line, AdamW's steps, samples."""
    model = at.policy.model
    prompts = draw_prompts(at.policy.task, "heldout", 0, judging.sampled_prompts)
    numbers, count = range(part * judging.part, (part + 1) * judging.part), len(ARMS)
    best = {line: best_lengths(lengths, line) for line in LINES}
    names = [f"{line}_{name}" for line in LINES for name in ("slope", "gain", "ess")] + ["norm"]
    names += [f"{name}{more}" for name in STEPS for more in ("", "_ess")]
    out: dict[str, Any] = {name: np.zeros((count, judging.part)) for name in names}
    out |= {f"{name}_alone": np.zeros(judging.part) for name in STEPS}
    out["sampled"] = np.zeros((2, count, judging.sampled, len(prompts)))
    start = sampled_success(at, prompts) if judging.sampled else np.zeros(len(prompts))
    for k, number in enumerate(numbers):
        gradient, block = batch_gradients(at, number), number % judging.blocks
        alone = {name: at.adamw_step(torch.zeros_like(at.base), name == STEPS[0]) for name in STEPS}
        out["norm"][:, k] = gradient.norm(dim=1).double().cpu().numpy()
        for line, steps in zip(LINES, (gradient, gradient * at.scale), strict=True):
            for a, step in enumerate(steps):
                out[f"{line}_slope"][a, k] = slope_of(pool, step)
                moved = best[line][a] * step
                out[f"{line}_gain"][a, k], out[f"{line}_ess"][a, k] = pool_gain(at.base, moved, model, pool, block)
        for name in STEPS:
            out[f"{name}_alone"][k] = pool_gain(at.base, alone[name], model, pool, block)[0]
            for a, step in enumerate(gradient):
                moved = at.adamw_step(step, name == STEPS[0])
                out[name][a, k], out[f"{name}_ess"][a, k] = pool_gain(at.base, moved, model, pool, block)
        for a, step in enumerate(gradient if k < judging.sampled else ()):
            for i, moved_by in enumerate((best["sgd"][a] * step, at.adamw_step(step, True))):
                out["sampled"][i, a, k] = sampled_success(at, prompts, moved_by) - start
        bar(k + 1, judging.part, "gains")
    change = out.pop("sampled").mean(axis=(1, 2)) if judging.sampled else np.zeros((2, len(prompts)))
    return out | {"sampled": change, "n_sampled": np.array(judging.sampled)}


def best_lengths(lengths: Rows, line: str) -> Sequence[float]:
    """Return the pilot's best length of every arm along a line."""
    return [select(lengths, line=line, arm=arm)[0]["length"] for arm in ARMS]
