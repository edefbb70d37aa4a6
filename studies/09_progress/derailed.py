"""The derailment process, where J is exact: steps of every arm on its table of logits, judged without sampling.

Positions and states have logits of their own, θ [T, 2, 4]. Prompts differ in what they pay: R = 1 with probability q
if on at the end, q one of `PAYS`; so J(θ) = mean q · P(on at the end), by dynamic programming.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import log_softmax

from otb_analysis.types import Float
from studies.lib.enumeration.derailment import ON, Derailment

from .checkpoint import ARMS, arm_advantages

PAYS = (0.3, 0.6, 0.9)
MISTAKES = {"low": 2.0, "middle": 0.7, "high": 0.2}
"""m·T of each checkpoint: P(on at the end) about .2, .5 and .8."""
MULTIPLES = tuple(float(x) for x in np.round(np.geomspace(1 / 8, 8, 19), 4))
"""Lengths that are tried, times the one at which the quadratic through slope and curvature is best."""


def process(band: str, horizon: int) -> Derailment:
    """Return the process of a checkpoint; it pays 1 whenever it is on at the end."""
    return Derailment(horizon=horizon, mistake=MISTAKES[band] / horizon, pay=1.0)


def exact_success(logits: Float, follows: np.ndarray) -> Float:
    """Return P(on at the end) [...] of logits [..., T, 2, 4]."""
    policy = np.exp(log_softmax(logits, axis=-1))
    value = np.zeros((*logits.shape[:-3], 2))
    value[..., ON] = 1.0
    for t in range(logits.shape[-3] - 1, -1, -1):
        value = (policy[..., t, :, :] * value[..., follows]).sum(axis=-1)
    return value[..., ON]


def exact_ess(old: Float, new: Float, follows: np.ndarray) -> Float:
    """Return 1/E ρ² [...], the effective sample size as a share, of rollouts of `old` under `new` [..., T, 2, 4].

    E ρ² = E Π_t (π'_t/π_t)² under π is a sum over paths as J is.
    """
    weight = np.exp(np.minimum(2 * log_softmax(new, axis=-1) - log_softmax(old, axis=-1), 300.0))
    total = np.ones((*new.shape[:-3], 2))
    for t in range(new.shape[-3] - 1, -1, -1):
        total = np.minimum((weight[..., t, :, :] * total[..., follows]).sum(axis=-1), 1e150)
    return 1 / total[..., ON]


def batch_gradients(at: Derailment, prompts: int, group: int, rng: np.random.Generator) -> Float:
    """Return every arm's gradient of one batch [A, T·2·4]."""
    state, token, on = at.sample(prompts * group, rng)
    pay = np.repeat(rng.choice(PAYS, size=prompts), group)
    inputs = at.inputs(state, token, on * (rng.random(len(on)) < pay), group)
    entropy = -(at.policy * np.log(at.policy)).sum(axis=1)
    inputs = replace(inputs, entropy=entropy[state], value=pay[:, None] * at.value[np.arange(at.horizon), state])
    advantages = arm_advantages(inputs, at.horizon)
    return np.stack([at.group_gradients(state, token, advantages[arm], len(on))[0] for arm in ARMS])


def line_gains(at: Derailment, steps: Float, lengths: Float) -> tuple[Float, Float]:
    """Return the exact gains and ESS, both [A, B, L], of steps [A, B, T·2·4] at lengths [A, L]."""
    base = np.log(at.policy) + np.zeros((at.horizon, 1, 1))
    before, shape = exact_success(base, at.follows), (*steps.shape[:2], *base.shape)
    gains, sizes = np.zeros((2, *steps.shape[:2], lengths.shape[1]))
    for k in range(lengths.shape[1]):
        logits = base + (lengths[:, None, k, None] * steps).reshape(shape)
        gains[..., k] = float(np.mean(PAYS)) * (exact_success(logits, at.follows) - before)
        sizes[..., k] = exact_ess(base, logits, at.follows)
    return gains, sizes


def measured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return gains [A, B, L] of many batches along every line, their ESS [A, L], and what efficiency is made of."""
    at = process(settings["band"], settings["horizon"])
    rng, truth = np.random.default_rng(settings["seed"]), float(np.mean(PAYS)) * at.gradient
    make = (settings["prompts"], settings["group"], rng)
    # AdamW's second moment in its usual state: the mean square of gradients at the checkpoint
    state = np.mean([batch_gradients(at, *make)[0] ** 2 for _ in range(settings["moment_batches"])], axis=0)
    scale = 1 / (np.sqrt(state) + 1e-8)
    gradient = np.stack([batch_gradients(at, *make) for _ in range(settings["batches"])], axis=1)
    norm = np.linalg.norm(gradient, axis=2)
    clip = settings["clip"] * float(np.sqrt((norm[0] ** 2).mean()))
    factor = clip / np.maximum(norm, clip)
    lines = {"sgd": gradient, "sgd_clipped": gradient * factor[..., None], "adamw": gradient * scale}
    out: dict[str, Any] = {"success": np.array(float(np.mean(PAYS)) * at.success)}
    for name, steps in lines.items():
        slope = (steps @ truth).mean(axis=1)
        probe = 0.02 / np.sqrt((steps**2).sum(axis=2).mean(axis=1))
        bent = (line_gains(at, steps, probe[:, None])[0][..., 0].mean(axis=1) - probe * slope) / probe**2
        best = np.maximum(slope, slope[0] / 10) / (2 * np.maximum(-bent, 1e-12))
        out[name], ess = line_gains(at, steps, best[:, None] * np.array(MULTIPLES))
        out[f"{name}_ess"] = ess.mean(axis=1)
    for name, root in (("sgd", np.ones_like(scale)), ("adamw", np.sqrt(scale))):
        scaled = gradient * root
        out[f"{name}_power"], out[f"{name}_along"] = (scaled**2).sum(axis=2), scaled @ (truth * root)
        out[f"{name}_truth"] = ((truth * root) ** 2).sum()
    return out
