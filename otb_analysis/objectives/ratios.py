"""Importance ratios of off-policy objectives: the name in `RATIOS` is the name in configurations and on disk.

A surrogate objective is Σ_t f(r_t, u_t), r the ratio that one entry defines from ρ_t = π(y_t)/μ(y_t), and u_t = a_t A_t
the advantage times its aggregation weight. Its gradient is Σ_t c_t s_t with s_t = ∇ log π(y_t) and coefficients c that
are plain numbers, so a trainer needs no ratio in its graph: c = ratio.coefficient(advantage * weights), and the loss
−Σ_t c_t log π(y_t), c held constant, has exactly the surrogate's gradient at the parameters that gave the ratio.
Products and minima run over policy tokens; tool tokens and padding are skipped.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.arrays import masked, policy_position
from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import CheckedInputs, Formula, LimitedOptions, NoOptions, checked_options, lookup
from otb_analysis.types import Bool, Float

LOG_2 = np.log(2.0)  # Beyond it a raw ratio counts as far from 1
LOG_LIMIT = 700.0  # A sum of log ratios is held in ±700, so that no weight is infinite (e^709 is the largest float64)


def mismatch_scalars(log_ratio: ArrayLike) -> dict[str, float | None]:
    """Return the columns `mismatch_…` of `steps`: how far the trainer's π is from the sampler's μ, raw, without a clip.

    With d = log π(y) − log μ(y) and r = e^d of the policy tokens y, which μ drew: mean d, max |d|, rms = √mean d²,
    k3 = mean(r − 1 − log r) ≥ 0, whose expectation under μ is KL(μ‖π), from sampler to trainer, where μ > 0 wherever
    π is; ratio_share, the share with r > 2 or r < ½. All are 0 where π = μ. k3 as in Schulman (2020).

    Args:
        log_ratio: d [K] in nats; NaN, where either log-probability is missing, is left out.

    Returns:
        Nats, the last one a share; None without a token. An r beyond float64 makes k3 infinite, which the store writes
        as null and names in `not_finite`.
    """
    d = np.asarray(log_ratio, np.float64)
    d = d[~np.isnan(d)]
    names = ("mean", "max", "rms", "k3", "ratio_share")
    if not d.size:
        return {f"mismatch_{name}": None for name in names}
    with np.errstate(over="ignore", invalid="ignore"):
        values = d.mean(), np.abs(d).max(), np.sqrt((d**2).mean()), (np.expm1(d) - d).mean(), (np.abs(d) > LOG_2).mean()
    return {f"mismatch_{name}": float(value) for name, value in zip(names, values, strict=True)}


@dataclass(frozen=True)
class ClipOptions(LimitedOptions):
    """A clip around 1."""

    valid = (
        lambda o: o.low >= 0 and o.high >= 0 and o.dual > 1,
        "{self} does not clip; low and high are 0 or more, and dual is above 1.",
    )
    low: float = 0.2  # Below 1 − low a negative advantage has no gradient
    high: float = 0.2  # Above 1 + high a positive advantage has none (DAPO takes .28)
    dual: float = float("inf")  # Above it a negative advantage has none (dual clip, usually 3); infinite turns it off


@dataclass(frozen=True)
class GspoOptions(ClipOptions):
    """The clip of a geometric mean, whose spread is that of a token's ratio over √L."""

    low: float = 3e-4
    high: float = 4e-4


@dataclass(frozen=True)
class BoundOptions(LimitedOptions):
    """Bounds of a logarithm that widen with the square root of the position."""

    valid = (lambda o: o.low >= 0 and o.high >= 0, "{self} has no room for a ratio of 1; low and high are 0 or more.")
    low: float = 0.025  # The log ratio is held at −low·√t or above, t counting policy tokens from 1
    high: float = 0.05  # And at high·√t or below


@dataclass(frozen=True)
class PositionOptions(BoundOptions):
    """A clip at the same bounds."""

    valid = (lambda o: o.dual > 1, "dual is {self.dual} but must be above 1; 3 is usual and infinity turns it off.")
    dual: float = 3.0  # Above it a negative advantage has no gradient (dual clip); infinite turns it off


@dataclass(frozen=True)
class TruncationOptions(LimitedOptions):
    """A cap."""

    valid = (lambda o: o.cap > 0, "cap is {self.cap} but must be above 0; 2 is usual.")
    cap: float = 2.0  # Ratios above it are replaced by it


@dataclass(frozen=True)
class MaskOptions(LimitedOptions):
    """Which rollouts count."""

    valid = (
        lambda o: o.low >= 0 and o.high >= 0 and o.veto >= 0,
        "{self} is no mask; low, high and veto are 0 or more.",
    )
    low: float = 0.001  # Rollouts whose geometric mean ratio is below 1 − low are dropped
    high: float = 0.001  # And those above 1 + high
    veto: float = 1e-4  # And those with any token ratio below it


@dataclass(frozen=True)
class Limits:
    """Where a clip stops the gradient, each a number or one per token [N, T]."""

    low: Float  # Below it, for a negative advantage
    high: Float  # Above it, for a positive one
    dual: Float  # Above it, for a negative one (dual clip)


FREE = Limits(np.array(0.0), np.array(np.inf), np.array(np.inf))  # No clip


@dataclass(frozen=True)
class RatioInputs(CheckedInputs):
    """What an importance ratio may look at; made by `training`."""

    columns = ("logprob", "behavior_logprob")
    logprob: Float  # log π(y_t) in nats under the parameters being updated [N, T]
    behavior_logprob: Float  # log μ(y_t) under the policy that sampled [N, T]
    mask: Bool  # True at policy tokens [N, T]; entries outside are never read

    @cached_property
    def log_ratio(self) -> Float:
        """Log-ratio log ρ_t = log π(y_t) − log μ(y_t) [N, T], zero outside the mask."""
        return np.clip(self.logprob - self.behavior_logprob, -LOG_LIMIT, LOG_LIMIT)

    @cached_property
    def log_mean(self) -> Float:
        """Logarithm of the geometric mean ratio of each rollout [N, 1]."""
        length = np.maximum(np.count_nonzero(self.mask, axis=1, keepdims=True), 1)
        return self.log_ratio.sum(axis=1, keepdims=True) / length

    @cached_property
    def log_cumulative(self) -> Float:
        """Logarithm of Π_{j≤t} ρ_j [N, T]."""
        return np.cumsum(self.log_ratio, axis=1)


@dataclass(frozen=True)
class Ratio:
    """The ratio of one surrogate and where its gradient flows; made by `importance_ratio`.

    The surrogate of a token with weighted advantage u is, inside `kept`,
    min(r u, clip(r, low, high) u) and, for u < 0, not below dual·u.
    """

    value: Float  # r_t [N, T], after truncation, zero outside the mask
    mask: Bool  # True at policy tokens [N, T]
    limits: Limits  # low, high and dual of the clip
    kept: Bool  # False where a mask removes the token whatever its advantage [N, T]
    limited: Bool  # True where a truncation replaced the ratio, or a mask removed it, whatever the advantage [N, T]
    # `token`: the gradient of r_t flows through log π(y_t) alone, as r_t s_t; what else r_t holds is a constant.
    # `rollout`: through every token of the rollout, as r (1/L) Σ_k s_k.
    through: Literal["token", "rollout"] = "token"

    def clipped(self, weighted: ArrayLike) -> Bool:
        """Return where the clip stops the gradient of a token whose advantage has this sign."""
        u = masked(weighted, self.mask)
        r, limits = self.value, self.limits
        negative = (u < 0) & ((r < limits.low) | (r > limits.dual))
        return self.mask & (negative | ((u > 0) & (r > limits.high)))

    def coefficient(self, weighted: ArrayLike) -> Float:
        """Return c [N, T], what multiplies each score in the gradient of the surrogate; zero outside the mask.

        ∇ Σ_t f(r_t, u_t) = Σ_t c_t s_t. Through the token c_t = r_t u_t where neither clip nor mask stops it; through
        the rollout c_k = (1/L) Σ_t r u_t over the same tokens, for every k of the rollout. Exact at the parameters of
        `value`, in log-probability, with no 1/N: whatever averages is in u.
        """
        u = masked(weighted, self.mask)
        flows = self.kept & ~self.clipped(u)
        carried = np.where(flows, self.value, 0.0) * u
        if self.through == "token":
            return carried
        length = np.maximum(np.count_nonzero(self.mask, axis=1, keepdims=True), 1)
        return np.where(self.mask, carried.sum(axis=1, keepdims=True) / length, 0.0)


def learning_rate_factor(weight: ArrayLike) -> float:
    """Return by what `opob` scales the learning rate off-policy.

    √(ESS/B) of the sequence ratios w = Π_t ρ_t [B], ESS = (Σ w)²/Σ w² the number of equally weighted samples that carry
    as much information: 1 on-policy, less the more unequal the weights, 0 where all are 0. Public code of VCPO,
    arXiv 2602.17616.

    Raises:
        InputError: There is no weight, or one is negative, NaN or infinite.
    """
    w = np.asarray(weight, np.float64).ravel()
    if not w.size:
        raise InputError("weight is empty; pass the sequence ratio of every rollout, shape [B].")
    if not (np.isfinite(w).all() and (w >= 0).all()):
        raise InputError(f"weight has a value of {w[~(w >= 0) | ~np.isfinite(w)][0]}; pass finite weights, 0 or more.")
    if w.max() == 0:
        return 0.0
    part = w / w.max()
    return float(np.sqrt(part.sum() ** 2 / (part**2).sum() / w.size))


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
    return _ratio(inputs, np.zeros(inputs.mask.shape))


def token(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight by the token's own ratio.

    r_t = ρ_t. A constant baseline drops out; the distribution of prefixes stays the sampler's.
    """
    return _ratio(inputs, inputs.log_ratio)


def sequence(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight every token by the ratio of the whole completion.

    r = Π_j ρ_j, a constant in the gradient: Σ_t r A_t s_t is unbiased for ∇J with any constant baseline. Proved.
    """
    return _ratio(inputs, inputs.log_ratio.sum(axis=1, keepdims=True))


def cumulative(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight by the ratio of everything up to the token.

    r_t = Π_{j≤t} ρ_j, gradient through the current token only. Prefix and token are corrected, what follows stays the
    sampler's: E = Σ_t E_π[s_t Q^μ_t], whatever constant baseline. Proved; arXiv 2605.07331.
    """
    return _ratio(inputs, inputs.log_cumulative)


def minpro(inputs: RatioInputs, options: NoOptions) -> Ratio:
    """Weight by the token's ratio times the smallest ratio before it.

    r_t = ρ_t · min_{j<t} ρ_j, and ρ_1 at the first token; gradient through the current token only. The product form
    is a guess at MinPRO, arXiv 2601.22718, whose abstract speaks of the smallest ratio of the preceding prefix.
    """
    so_far = np.minimum.accumulate(np.where(inputs.mask, inputs.log_ratio, np.inf), axis=1)
    before = np.concatenate([np.full((len(so_far), 1), np.inf), so_far], axis=1)[:, : so_far.shape[1]]
    return _ratio(inputs, inputs.log_ratio + np.where(np.isinf(before), 0.0, before))


def ppo(inputs: RatioInputs, options: ClipOptions) -> Ratio:
    """Clip the token's ratio where the update has already gone far enough.

    Surrogate min(ρ_t u_t, clip(ρ_t, 1 − low, 1 + high) u_t), not below dual·u_t. Public code.
    """
    limits = Limits(*map(np.asarray, (1 - options.low, 1 + options.high, options.dual)))
    return _ratio(inputs, inputs.log_ratio, limits)


def gspo(inputs: RatioInputs, options: GspoOptions) -> Ratio:
    """Clip the geometric mean ratio of the completion, with gradient through all its tokens.

    r = (Π_j ρ_j)^{1/L}, ∇r = r (1/L) Σ_k s_k; surrogate as `ppo`, for the whole rollout. Public code.
    """
    limits = Limits(*map(np.asarray, (1 - options.low, 1 + options.high, options.dual)))
    return _ratio(inputs, inputs.log_mean, limits, through="rollout")


def ctpo(inputs: RatioInputs, options: PositionOptions) -> Ratio:
    """Clip the cumulative ratio in bounds that widen with the position.

    r_t = Π_{j≤t} ρ_j; surrogate min(r_t u_t, clip(r_t, e^{−low √t}, e^{high √t}) u_t), not below dual·u_t; gradient
    through the current token only. Public code of CTPO, arXiv 2605.07331.
    """
    low, high = _bounds(inputs, options)
    return _ratio(inputs, inputs.log_cumulative, Limits(low, high, np.asarray(options.dual)))


def cumulative_truncated(inputs: RatioInputs, options: BoundOptions) -> Ratio:
    """Hold the cumulative ratio in bounds that widen with the position, and keep every token's gradient.

    r_t = clip(Π_{j≤t} ρ_j, e^{−low √t}, e^{high √t}), a weight whatever the sign of A.
    """
    low, high = _bounds(inputs, options)
    return _truncated(inputs, inputs.log_cumulative, low, high)


def tis(inputs: RatioInputs, options: TruncationOptions) -> Ratio:
    """Truncate the token's ratio from above, and keep every token's gradient.

    r_t = min(ρ_t, cap), a weight whatever the sign of A. Public code (truncated importance sampling).
    """
    return _truncated(inputs, inputs.log_ratio, np.asarray(0.0), np.asarray(options.cap))


def sequence_mask(inputs: RatioInputs, options: MaskOptions) -> Ratio:
    """Weight by the token's ratio, and drop completions that drifted.

    r_t = ρ_t where (Π_j ρ_j)^{1/L} ∈ [1 − low, 1 + high] and every ρ_j ≥ veto; else no gradient for the whole rollout.
    Public code of Dr. Kernel, arXiv 2602.05885.
    """
    mean = np.exp(inputs.log_mean)
    vetoed = (inputs.mask & (np.exp(inputs.log_ratio) < options.veto)).any(axis=1, keepdims=True)
    kept = (mean >= 1 - options.low) & (mean <= 1 + options.high) & ~vetoed
    return _ratio(inputs, inputs.log_ratio, kept=inputs.mask & kept)


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
    log: Float,
    limits: Limits = FREE,
    kept: Bool | None = None,
    through: Literal["token", "rollout"] = "token",
) -> Ratio:
    """Return the ratio e^log, log any shape that broadcasts to [N, T]."""
    mask, value = inputs.mask, np.exp(np.clip(log, -LOG_LIMIT, LOG_LIMIT))
    kept = mask if kept is None else kept
    return Ratio(masked(np.broadcast_to(value, mask.shape), mask), mask, limits, kept, mask & ~kept, through)


def _truncated(inputs: RatioInputs, log: Float, low: Float, high: Float) -> Ratio:
    whole, mask = _ratio(inputs, log), inputs.mask
    outside = mask & ((whole.value < low) | (whole.value > high))
    return replace(whole, value=masked(np.clip(whole.value, low, high), mask), limited=outside)


def _bounds(inputs: RatioInputs, options: BoundOptions) -> tuple[Float, Float]:
    edge = np.sqrt(policy_position(inputs.mask) + 1.0)
    return np.exp(-options.low * edge), np.exp(options.high * edge)
