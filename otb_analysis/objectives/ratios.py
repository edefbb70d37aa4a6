"""Importance ratios of off-policy objectives: the name in `RATIOS` is the name in configurations and on disk.

With ρ_t = π(y_t)/μ(y_t), every entry answers a `Ratio`: the value that stands in the surrogate, where a clip or a mask
stops its gradient, and through which log-probabilities the gradient flows. `Ratio.coefficient` turns advantages into
the exact gradient coefficients. Products and minima run over policy tokens; tool tokens and padding are skipped.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from otb_analysis.arrays import masked, policy_position
from otb_analysis.objectives.importance import (
    FREE,
    LOG_LIMIT,
    BoundOptions,
    ClipOptions,
    GspoOptions,
    Limits,
    MaskOptions,
    PositionOptions,
    Ratio,
    RatioInputs,
    TruncationOptions,
)
from otb_analysis.objectives.registry import Formula, NoOptions, checked_options, lookup
from otb_analysis.types import Bool, Float


@dataclass(frozen=True)
class RatioEntry(Formula):
    """One row of `RATIOS`."""

    needs: tuple[str, ...] = ("logprob", "behavior_logprob")
    # True when a constant baseline leaves the mean of the gradient unchanged off-policy; a test enumerates it, and the
    # catalogue prints by how much the others move it
    keeps_mean: bool = False


def none(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight every token by 1, whoever sampled it.

    r_t = 1: the on-policy gradient; off-policy nothing corrects for the sampler.
    """
    return _ratio(inputs, np.ones(inputs.mask.shape))


def token(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight by the token's own ratio.

    r_t = ρ_t. A constant baseline drops out; the distribution of prefixes stays the sampler's.
    """
    return _ratio(inputs, np.exp(inputs.log_ratio))


def sequence(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight every token by the ratio of the whole completion.

    r = Π_j ρ_j, a constant in the gradient: Σ_t r A_t s_t is unbiased for ∇J with any constant baseline. Proved.
    """
    return _ratio(inputs, _exp(inputs.log_ratio.sum(axis=1, keepdims=True)))


def cumulative(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight by the ratio of everything up to the token.

    r_t = Π_{j≤t} ρ_j, gradient through the current token only. Prefix and token are corrected, what follows stays the
    sampler's: E = Σ_t E_π[s_t Q^μ_t], whatever constant baseline. Proved; arXiv 2605.07331.
    """
    return _ratio(inputs, _exp(_cumulated(inputs)))


def minpro(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight by the token's ratio times the smallest ratio before it.

    r_t = ρ_t · min_{j<t} ρ_j, and ρ_1 at the first token; gradient through the current token only. The product form
    is a guess at MinPRO, arXiv 2601.22718, whose abstract speaks of the smallest ratio of the preceding prefix.
    """
    so_far = np.minimum.accumulate(np.where(inputs.mask, inputs.log_ratio, np.inf), axis=1)
    before = np.concatenate([np.full((len(so_far), 1), np.inf), so_far], axis=1)[:, : so_far.shape[1]]
    return _ratio(inputs, _exp(inputs.log_ratio + np.where(np.isinf(before), 0.0, before)))


def ppo(inputs: RatioInputs, options: ClipOptions) -> Ratio:
    """Clip the token's ratio where the update has already gone far enough.

    Surrogate min(ρ_t u_t, clip(ρ_t, 1 − low, 1 + high) u_t), not below dual·u_t. Public code.
    """
    return _ratio(inputs, np.exp(inputs.log_ratio), _around_one(options))


def gspo(inputs: RatioInputs, options: GspoOptions) -> Ratio:
    """Clip the geometric mean ratio of the completion, with gradient through all its tokens.

    r = (Π_j ρ_j)^{1/L}, ∇r = r (1/L) Σ_k s_k; surrogate as `ppo`, for the whole rollout. Public code.
    """
    return _ratio(inputs, np.exp(_log_mean(inputs)), _around_one(options), through="rollout")


def ctpo(inputs: RatioInputs, options: PositionOptions) -> Ratio:
    """Clip the cumulative ratio in bounds that widen with the position.

    r_t = Π_{j≤t} ρ_j; surrogate min(r_t u_t, clip(r_t, e^{−low √t}, e^{high √t}) u_t), not below dual·u_t; gradient
    through the current token only. Public code of CTPO, arXiv 2605.07331.
    """
    low, high = _bounds(inputs, options)
    return _ratio(inputs, _exp(_cumulated(inputs)), Limits(low, high, np.asarray(options.dual)))


def cumulative_truncated(inputs: RatioInputs, options: BoundOptions) -> Ratio:
    """Hold the cumulative ratio in bounds that widen with the position, and keep every token's gradient.

    r_t = clip(Π_{j≤t} ρ_j, e^{−low √t}, e^{high √t}), a weight whatever the sign of A.
    """
    low, high = _bounds(inputs, options)
    return _truncated(inputs, _exp(_cumulated(inputs)), low, high)


def tis(inputs: RatioInputs, options: TruncationOptions) -> Ratio:
    """Truncate the token's ratio from above, and keep every token's gradient.

    r_t = min(ρ_t, cap), a weight whatever the sign of A. Public code (truncated importance sampling).
    """
    return _truncated(inputs, np.exp(inputs.log_ratio), np.asarray(0.0), np.asarray(options.cap))


def sequence_mask(inputs: RatioInputs, options: MaskOptions) -> Ratio:
    """Weight by the token's ratio, and drop completions that drifted.

    r_t = ρ_t where (Π_j ρ_j)^{1/L} ∈ [1 − low, 1 + high] and every ρ_j ≥ veto; else no gradient for the whole rollout.
    Public code of Dr. Kernel, arXiv 2602.05885.
    """
    ratio, mean = np.exp(inputs.log_ratio), np.exp(_log_mean(inputs))
    vetoed = (inputs.mask & (ratio < options.veto)).any(axis=1, keepdims=True)
    kept = (mean >= 1 - options.low) & (mean <= 1 + options.high) & ~vetoed
    return _ratio(inputs, ratio, kept=inputs.mask & kept)


# fmt: off
RATIOS: dict[str, RatioEntry] = {
    "none": RatioEntry(none, "1", "REINFORCE", "code", needs=()),
    "token": RatioEntry(token, "ρ_t", "PPO without its clip", "code", keeps_mean=True),
    "sequence": RatioEntry(sequence, "Π_j ρ_j", "importance sampling", "proved", keeps_mean=True),
    "cumulative": RatioEntry(cumulative, "Π_{j≤t} ρ_j", "CTPO without its clip", "proved", keeps_mean=True),
    "minpro": RatioEntry(minpro, "ρ_t · min_{j<t} ρ_j", "MinPRO, arXiv 2601.22718", "guess", keeps_mean=True),
    "ppo": RatioEntry(ppo, "ρ_t in min(ρ_t A, clip(ρ_t, 1 − ε, 1 + ε) A)", "PPO", "code", options=ClipOptions),
    "gspo": RatioEntry(gspo, "(Π_j ρ_j)^{1/L}, clipped as ppo", "GSPO, arXiv 2507.18071", "code", options=GspoOptions),
    "ctpo": RatioEntry(
        ctpo, "Π_{j≤t} ρ_j, its log clipped at −.025 √t and .05 √t as ppo clips", "CTPO, arXiv 2605.07331", "code",
        options=PositionOptions,
    ),
    "cumulative_truncated": RatioEntry(
        cumulative_truncated, "clip(Π_{j≤t} ρ_j, e^{−.025 √t}, e^{.05 √t})", "the bounds of CTPO as a truncation",
        "proved", options=BoundOptions,
    ),
    "tis": RatioEntry(tis, "min(ρ_t, cap)", "truncated importance sampling", "code", options=TruncationOptions),
    "sequence_mask": RatioEntry(
        sequence_mask, "ρ_t · 1[(Π_j ρ_j)^{1/L} ∈ 1 ± .001] · 1[min_j ρ_j ≥ 1e-4]", "Dr. Kernel, arXiv 2602.05885",
        "code", options=MaskOptions,
    ),
}
# fmt: on


def importance_ratio(name: str, inputs: RatioInputs, options: Any = None) -> Ratio:
    """Return a ratio with everything its gradient needs.

    Raises:
        InputError: Unknown name or wrong options.
    """
    entry = lookup("ratio", name, RATIOS)
    return entry.function(inputs, checked_options(name, entry.options, options))


def _ratio(
    inputs: RatioInputs,
    value: Float,
    limits: Limits = FREE,
    kept: Bool | None = None,
    through: Literal["token", "rollout"] = "token",
) -> Ratio:
    mask = inputs.mask
    kept = mask if kept is None else kept
    return Ratio(masked(np.broadcast_to(value, mask.shape), mask), mask, limits, kept, mask & ~kept, through)


def _truncated(inputs: RatioInputs, ratio: Float, low: Float, high: Float) -> Ratio:
    outside = inputs.mask & ((ratio < low) | (ratio > high))
    return replace(_ratio(inputs, np.clip(ratio, low, high)), limited=outside)


def _around_one(options: ClipOptions) -> Limits:
    return Limits(*map(np.asarray, (1 - options.low, 1 + options.high, options.dual)))


def _exp(log: Float) -> Float:
    return np.exp(np.clip(log, -LOG_LIMIT, LOG_LIMIT))


def _cumulated(inputs: RatioInputs) -> Float:
    return np.cumsum(inputs.log_ratio, axis=1)


def _log_mean(inputs: RatioInputs) -> Float:
    return inputs.log_ratio.sum(axis=1, keepdims=True) / inputs.length


def _bounds(inputs: RatioInputs, options: BoundOptions) -> tuple[Float, Float]:
    edge = np.sqrt(policy_position(inputs.mask) + 1.0)
    return np.exp(-options.low * edge), np.exp(options.high * edge)
