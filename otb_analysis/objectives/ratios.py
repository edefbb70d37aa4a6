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
from scipy.special import expit, rel_entr

from otb_analysis.arrays import masked, policy_position
from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import CheckedInputs, Formula, LimitedOptions, NoOptions, answer
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
class WeightOptions(BoundOptions):
    """Between which a weight is held."""

    low: float = 0.2  # Ratios below 1 − low are replaced by it; 1 sets no lower bound
    high: float = 0.2  # Ratios above 1 + high are replaced by it


@dataclass(frozen=True)
class BandOptions(BoundOptions):
    """Which ratios count."""

    low: float = 0.5  # α: tokens with a smaller ratio have no gradient
    high: float = 5.0  # β: nor have those with a larger one


@dataclass(frozen=True)
class MoveOptions(BoundOptions):
    """How far a token's probability may have moved."""

    low: float = 0.15  # A bad token has no gradient once it is less likely by more than this
    high: float = 0.15  # A good one has none once it is more likely by more than this


@dataclass(frozen=True)
class DivergenceOptions(BoundOptions):
    """How far, in nats, the distribution over a token and all others may have moved."""

    low: float = 0.05  # A bad token that became less likely has no gradient beyond it
    high: float = 0.05  # A good one that became more likely has none beyond it


@dataclass(frozen=True)
class MeanOptions(BoundOptions):
    """Between which each token's log ratio is held before the geometric mean."""

    low: float = 0.4  # Below −low a bad rollout's token has no gradient
    high: float = 0.4  # Above high a good rollout's token has none


@dataclass(frozen=True)
class ThresholdOptions(LimitedOptions):
    """How far a token's probability may have moved, either way."""

    valid = (lambda o: o.threshold >= 0, "threshold is {self.threshold} but must be 0 or more; 0.1 is usual.")
    threshold: float = 0.1  # Tokens with |π − μ| above it have no gradient, whatever the advantage


@dataclass(frozen=True)
class GateOptions(LimitedOptions):
    """How steeply a gate closes."""

    valid = (lambda o: o.positive > 0 and o.negative > 0, "{self} has no gate; positive and negative are above 0.")
    positive: float = 1.0  # τ for a positive advantage
    negative: float = 1.05  # τ for a negative one


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
    # `unclipped`: likewise, but the clip stops tokens of that sum; the sign is that of Σ_t u_t
    through: Literal["token", "rollout", "unclipped"] = "token"
    falling: Float | None = None  # r_t where the advantage is negative, if it is another [N, T]

    def clipped(self, weighted: ArrayLike) -> Bool:
        """Return where the clip stops the gradient of a token whose advantage has this sign."""
        u = self._felt(weighted)
        r, limits = self.value, self.limits
        negative = (u < 0) & ((r < limits.low) | (r > limits.dual))
        return self.mask & (negative | ((u > 0) & (r > limits.high)))

    def coefficient(self, weighted: ArrayLike) -> Float:
        """Return c [N, T], what multiplies each score in the gradient of the surrogate; zero outside the mask.

        ∇ Σ_t f(r_t, u_t) = Σ_t c_t s_t. Through the token c_t = r_t u_t where neither clip nor mask stops it; through
        the rollout c_k = (1/L) Σ_t r u_t over the same tokens, for every k of the rollout; `unclipped` the same over
        all tokens, for those k that the clip does not stop. Exact at the parameters of `value`, in log-probability,
        with no 1/N: whatever averages is in u.
        """
        u = self._felt(weighted)
        flows = self.kept & ~self.clipped(weighted)
        value = self.value if self.falling is None else np.where(u < 0, self.falling, self.value)
        carried = np.where(flows, value, 0.0) * u
        return self._mean(carried) if self.through == "rollout" else carried

    def _felt(self, weighted: ArrayLike) -> Float:
        """Return what stands at each token for its weighted advantage: the rollout's mean where r has one sign."""
        u = masked(weighted, self.mask)
        return self._mean(u) if self.through == "unclipped" else u

    def _mean(self, x: Float) -> Float:
        length = np.maximum(np.count_nonzero(self.mask, axis=1, keepdims=True), 1)
        return np.where(self.mask, x.sum(axis=1, keepdims=True) / length, 0.0)


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


def cispo(inputs: RatioInputs, options: WeightOptions) -> Ratio:
    """Hold the token's ratio in bounds, and keep every token's gradient.

    r_t = clip(ρ_t, 1 − low, 1 + high), a constant in r_t A log π(y_t), whatever the sign of A. Low 1 is `tis` with the
    cap 1 + high, which is the form of TRL. Public code of CISPO (MiniMax-M1), arXiv 2506.13585.
    """
    return _truncated(inputs, inputs.log_ratio, np.asarray(1 - options.low), np.asarray(1 + options.high))


def icepop(inputs: RatioInputs, options: BandOptions) -> Ratio:
    """Weight by the token's ratio, and drop tokens whose ratio leaves a band.

    r_t = ρ_t where α ≤ ρ_t ≤ β, else no gradient, whatever the sign of A. There ρ is that of the trainer to the engine
    that sampled, both at the parameters of sampling, and a clip as of `ppo` follows for later updates; here ρ has both.
    Public code of IcePop, arXiv 2510.18855.
    """
    ratio = np.exp(inputs.log_ratio)
    return _ratio(inputs, inputs.log_ratio, kept=inputs.mask & (ratio >= options.low) & (ratio <= options.high))


def ipo(inputs: RatioInputs, options: ThresholdOptions) -> Ratio:
    """Weight by the token's ratio, and drop tokens whose probability moved far.

    r_t = ρ_t where |π(y_t) − μ(y_t)| ≤ threshold, else no gradient, whatever the sign of A. Public code of prime-rl
    (559b4477, 2026-08-21), whose `ipo_threshold` is .1 by default. Its small penalty log² ρ_t is left out.
    """
    moved = np.abs(np.exp(inputs.logprob) - np.exp(inputs.behavior_logprob))
    return _ratio(inputs, inputs.log_ratio, kept=inputs.mask & (moved <= options.threshold))


def dppo_tv(inputs: RatioInputs, options: MoveOptions) -> Ratio:
    """Weight by the token's ratio, and stop where the token's probability has moved far enough.

    r_t = ρ_t; no gradient where A > 0 and π(y_t) − μ(y_t) > high, or A < 0 and μ(y_t) − π(y_t) > low. Public code of
    DPPO-Binary-TV, arXiv 2602.04879, with bounds of its script; that also caps ρ_t, at 20 or more.
    """
    moved = np.exp(inputs.logprob) - np.exp(inputs.behavior_logprob)
    return _ratio(inputs, inputs.log_ratio, _stops(moved > options.high, moved < -options.low))


def dppo_kl(inputs: RatioInputs, options: DivergenceOptions) -> Ratio:
    """Weight by the token's ratio, and stop where the token's distribution has moved far enough.

    r_t = ρ_t; no gradient where A > 0, π > μ and D > high, or A < 0, π < μ and D > low, with
    D = μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π)) at y_t, the divergence of "y_t or any other token". Public code of
    DPPO-Binary-KL, arXiv 2602.04879, with bounds of its script; that also caps ρ_t, at 20 or more.
    """
    policy, sampler = (np.exp(np.minimum(x, 0.0)) for x in (inputs.logprob, inputs.behavior_logprob))
    divergence = rel_entr(sampler, policy) + rel_entr(1 - sampler, 1 - policy)
    moved = policy - sampler
    return _ratio(
        inputs,
        inputs.log_ratio,
        _stops((divergence > options.high) & (moved > 0), (divergence > options.low) & (moved < 0)),
    )


def sapo(inputs: RatioInputs, options: GateOptions) -> Ratio:
    """Weight by a gate that closes smoothly as the token's ratio leaves 1.

    Surrogate f(ρ_t) u_t with f(ρ) = σ(τ(ρ − 1))·4/τ, so r_t = ρ_t f′(ρ_t) = 4 ρ_t σ(1 − σ); τ depends on the sign of A.
    Public code of SAPO, arXiv 2511.20347.
    """
    ratio = np.exp(inputs.log_ratio)

    def weight(steepness: float) -> Float:
        gate = expit(steepness * (ratio - 1))
        return masked(4 * ratio * gate * (1 - gate), inputs.mask)

    plain = _ratio(inputs, inputs.log_ratio)
    return replace(plain, value=weight(options.positive), falling=weight(options.negative))


def gmpo(inputs: RatioInputs, options: MeanOptions) -> Ratio:
    """Weight by the geometric mean of ratios that are clipped token by token.

    r = exp((1/L) Σ_t l_t), l_t = min(log ρ_t, high) for a good rollout and max(log ρ_t, −low) for a bad one; gradient
    through the tokens that are not clipped, as r (1/L) Σ_k s_k; good is Σ_t u_t > 0. Public code of GMPO, arXiv
    2507.20673, for one advantage per rollout.
    """
    log, mask = inputs.log_ratio, inputs.mask
    length = np.maximum(np.count_nonzero(mask, axis=1, keepdims=True), 1)
    rising, falling = np.minimum(log, options.high), np.maximum(log, -options.low)
    mean = (x.sum(axis=1, keepdims=True) / length for x in (rising, falling))
    good, bad = (masked(np.broadcast_to(np.exp(x), mask.shape), mask) for x in mean)
    stops = _stops(log > options.high, log < -options.low)
    return replace(_ratio(inputs, log, stops, through="unclipped"), value=good, falling=bad)


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
    "cispo": RatioEntry(
        cispo, "clip(ρ_t, 1 − .2, 1 + .2), a constant", "CISPO, arXiv 2506.13585", "code", options=WeightOptions
    ),
    "icepop": RatioEntry(
        icepop, "ρ_t · 1[α ≤ ρ_t ≤ β]", "IcePop, arXiv 2510.18855", "code", options=BandOptions
    ),
    "ipo": RatioEntry(ipo, "ρ_t · 1[|π(y_t) − μ(y_t)| ≤ .1]", "IPO of prime-rl", "code", options=ThresholdOptions),
    "dppo_tv": RatioEntry(
        dppo_tv, "ρ_t, 0 where A > 0 and π − μ > .15, or A < 0 and μ − π > .15", "DPPO-Binary-TV, arXiv 2602.04879",
        "code", options=MoveOptions,
    ),
    "dppo_kl": RatioEntry(
        dppo_kl,
        "ρ_t, 0 where D > .05 and A > 0, π > μ or A < 0, π < μ; D = μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π))",
        "DPPO-Binary-KL, arXiv 2602.04879", "code", options=DivergenceOptions,
    ),
    "sapo": RatioEntry(
        sapo, "4 ρ_t σ(1 − σ), σ = σ(τ(ρ_t − 1)), of σ(τ(ρ_t − 1))·4/τ·A", "SAPO, arXiv 2511.20347", "code",
        options=GateOptions,
    ),
    "gmpo": RatioEntry(
        gmpo, "exp((1/L) Σ_t l_t), l_t = min(log ρ_t, .4) where A > 0, max(log ρ_t, −.4) where A < 0",
        "GMPO, arXiv 2507.20673", "code", options=MeanOptions,
    ),
}
# fmt: on


def importance_ratio(name: str, inputs: RatioInputs, options: Any = None) -> Ratio:
    """Return a ratio with everything its gradient needs.

    Raises:
        InputError: Unknown name or wrong options.
    """
    return answer("ratio", name, RATIOS, inputs, options)


def _ratio(
    inputs: RatioInputs,
    log: Float,
    limits: Limits = FREE,
    kept: Bool | None = None,
    through: Literal["token", "rollout", "unclipped"] = "token",
) -> Ratio:
    """Return the ratio e^log, log any shape that broadcasts to [N, T]."""
    mask, value = inputs.mask, np.exp(np.clip(log, -LOG_LIMIT, LOG_LIMIT))
    kept = mask if kept is None else kept
    return Ratio(masked(np.broadcast_to(value, mask.shape), mask), mask, limits, kept, mask & ~kept, through)


def _stops(rising: Bool, falling: Bool) -> Limits:
    """Return the clip that stops good tokens where they rose too far and bad ones where they fell too far [N, T]."""
    return Limits(np.where(falling, np.inf, 0.0), np.where(rising, 0.0, np.inf), np.asarray(np.inf))


def _truncated(inputs: RatioInputs, log: Float, low: Float, high: Float) -> Ratio:
    whole, mask = _ratio(inputs, log), inputs.mask
    outside = mask & ((whole.value < low) | (whole.value > high))
    return replace(whole, value=masked(np.clip(whole.value, low, high), mask), limited=outside)


def _bounds(inputs: RatioInputs, options: BoundOptions) -> tuple[Float, Float]:
    edge = np.sqrt(policy_position(inputs.mask) + 1.0)
    return np.exp(-options.low * edge), np.exp(options.high * edge)
